"""The proof of a whole folder, of every kind and packing."""

import io
import json
import re
from dataclasses import replace
from inspect import signature

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pretrain.cli.data import verify_command
from pretrain.config.data import BLOCK_SAMPLES, LANES
from pretrain.datacheck import verify as data_verify
from pretrain.datacheck.hash import RowHashes
from pretrain.datacheck.reading import Order
from pretrain.datacheck.verify import parse_world_sizes, print_proof, verify
from pretrain.errors import ConfigError, DataError
from pretrain.shards.index import load_index
from tests.unit.report.data_folders import make_folder, make_texts

TEXTS = make_texts(80)
PAIRS = list(zip(TEXTS, make_texts(80, 1), strict=True))
RECORDS = [[(text, False), (text[::-1], True)] for text in TEXTS]
ORDER = Order(seq_len=48, lanes=3, block_samples=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for kind, documents in {"text": TEXTS, "pairs": PAIRS, "records": RECORDS}.items():
        make_folder(root / kind, documents, kind=kind, validation=documents[:9])
    return root


@settings(max_examples=15)
@given(
    kind=st.sampled_from([("text", "concat"), ("text", "bins"), ("text", "padded"), ("pairs", "bins"),
                          ("pairs", "padded"), ("records", "bins"), ("records", "padded")]),
    seq_len=st.integers(30, 200),
    source_len=st.one_of(st.none(), st.integers(30, 90)),
    lanes=st.integers(1, 5),
    block_samples=st.integers(1, 40),
    seed=st.integers(0, 99),
    world_sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    restarts=st.integers(0, 4),
)  # fmt: skip
@pytest.mark.long
def test_every_order_of_every_kind_is_exactly_once(
    folders, kind, seq_len, source_len, lanes, block_samples, seed, world_sizes, restarts
):
    kind, packing = kind
    order = Order(seq_len, source_len, packing, lanes, block_samples, seed)
    proof = verify(str(folders / kind), order, world_sizes=world_sizes, restarts=restarts)
    assert proof["whole"]
    split = load_index(folders / kind).split("train")
    course, _ = proof["courses"]
    fitting = [pair for pair in PAIRS if len(pair[1]) < seq_len and len(pair[0]) < (source_len or seq_len)]
    expected = sum(len(target) + 1 for _, target in fitting) if kind == "pairs" else split.num_tokens
    assert course["left_out"] == (len(PAIRS) - len(fitting) if kind == "pairs" else 0)
    assert {reading["tokens"] for reading in course["readings"]} == {expected}


def test_another_seed_reads_the_same_tokens_in_other_rows(folders):
    one, other = (verify(str(folders / "text"), Order(seq_len=48, seed=seed), world_sizes=[2]) for seed in (1, 2))
    (train, held), (other_train, other_held) = one["courses"], other["courses"]
    assert train["tokens"] == other_train["tokens"]
    (mine,), (theirs,) = train["readings"], other_train["readings"]
    assert mine["sample_hash"] == theirs["sample_hash"] and mine["content_hash"] != theirs["content_hash"]
    hashes = [(reading["sample_hash"], reading["content_hash"]) for reading in held["readings"]]
    (fixed,) = other_held["readings"]
    assert hashes == [(fixed["sample_hash"], fixed["content_hash"])], "validation has one order"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_phases_have_bars_on_a_terminal_only(folders, monkeypatch, is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    monkeypatch.setattr("pretrain.utils.status_line.stderr_console", lambda: console)
    verify(str(folders / "text"), ORDER, world_sizes=[1])
    drawn = console.file.getvalue()
    for phase in ("files", "train, concat", "validation, fixed", "100%"):
        assert (phase in drawn) == is_terminal
    assert bool(drawn) == is_terminal


def test_a_folder_without_validation_is_verified(tmp_path):
    make_folder(tmp_path / "data", TEXTS)
    assert len(verify(str(tmp_path / "data"), ORDER)["courses"]) == 1


def test_a_part_can_be_verified_and_says_so(folders, capsys):
    proof = verify(str(folders / "text"), ORDER, max_samples=20)
    assert not proof["whole"]
    readings = [reading for course in proof["courses"] for reading in course["readings"]]
    assert {reading["samples"] for reading in readings} <= set(range(1, 21))
    print_proof(proof)
    printed = capsys.readouterr().out
    assert "only the first 20 rows: tokens were not compared with the index" in printed
    assert printed.endswith("\nexactly once: yes, of the samples that were read\n")


def test_what_is_printed_is_what_is_in_the_facts(folders, capsys):
    proof = verify(str(folders / "pairs"), ORDER)
    print_proof(proof)
    printed, facts = capsys.readouterr().out, json.loads(json.dumps(proof))
    assert printed.splitlines()[-1] == "exactly once: yes"
    assert (facts["exactly_once"], facts["whole"]) == (True, True)
    shards = [shard for split in load_index(folders / "pairs").splits.values() for shard in split.shards]
    assert facts["shards"] == len(shards) and facts["members"] == sum(shard.num_members for shard in shards)
    assert facts["bytes"] == sum(shard.num_bytes for shard in shards)
    assert re.search(rf"{facts['shards']} shards, {facts['members']} members, {facts['bytes']:,} bytes", printed)
    for course in facts["courses"]:
        assert f"\n{course['name']}: {course['samples']} samples of 48 tokens\n" in printed
        assert [reading["world_sizes"] for reading in course["readings"]] == [[1], [2], [3], [4], [1, 2, 3, 4]]
        for reading in course["readings"]:
            assert re.search(rf"{reading['sample_hash']} +{reading['content_hash']} ", printed)
    assert facts["courses"][0]["left_out"] > 0
    assert f"{facts['courses'][0]['left_out']} documents are longer than a row, and in none" in printed


def distort(monkeypatch, change):
    """Has each reading changed before it is compared."""
    real = data_verify.read_course

    def read(course, world_sizes, **options):
        reading = real(course, world_sizes, **options)
        return replace(reading, **change(reading))

    monkeypatch.setattr(data_verify, "read_course", read)


def test_readings_that_differ_are_refused(folders, monkeypatch):
    distort(monkeypatch, lambda reading: {"hashes": RowHashes()} if reading.world_sizes == (3,) else {})
    words = r"train, concat, world size 3: not exactly once: rows are not those of world size 1; verify again"
    with pytest.raises(DataError, match=words):
        verify(str(folders / "text"), ORDER)


@pytest.mark.parametrize(
    ("field", "words"),
    [("token_sum", "the tokens of its rows are not those of the shards"), ("num_tokens", r"own \d+ tokens, the index")],
)
def test_tokens_that_are_not_those_of_the_files_are_refused(folders, monkeypatch, field, words):
    distort(monkeypatch, lambda reading: {field: getattr(reading, field) + 1})
    with pytest.raises(DataError, match=words):
        verify(str(folders / "text"), ORDER)


@pytest.mark.parametrize("text", ["", "0", "1,x", "1,,2", "-1"])
def test_world_sizes_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match=r"--world-sizes .*: not numbers of ranks; write for example 1,2,3,4"):
        parse_world_sizes(text)


def test_world_sizes_without_a_common_batch_are_refused():
    assert parse_world_sizes("1, 2,7") == (1, 2, 7)
    with pytest.raises(ConfigError, match="no batch of 65536 rows can be cut by all; give fewer"):
        parse_world_sizes("251,257,263")


def test_a_packing_that_there_is_not_is_refused(folders):
    with pytest.raises(ConfigError, match="there is no packing 'tight'; use concat, bins, padded"):
        verify(str(folders / "text"), Order(packing="tight"))
    with pytest.raises(ConfigError, match=r"concat cuts documents, which pairs must not be"):
        verify(str(folders / "pairs"), Order(packing="concat"))


def test_a_folder_is_verified_in_the_order_that_a_run_has_unless_told_otherwise():
    defaults = {name: value.default for name, value in signature(verify_command).parameters.items()}
    assert (defaults["lanes"], defaults["block_samples"]) == (LANES, BLOCK_SAMPLES)
