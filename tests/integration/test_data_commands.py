"""`pretrain data` as a process, and runs over damaged shards: on any number of ranks the same rows are skipped, every
other row comes when it would have come."""

import json
import re
from pathlib import Path

import pytest

from pretrain.shards.index import load_index
from pretrain.shards.reader import ShardReader
from tests.helpers.cli import Result, run_cli
from tests.helpers.refused import error_line, fill_folder
from tests.helpers.servers import serve_folder
from tests.unit.report.data_folders import make_folder, make_texts

CONFIG = """
seed: 7
run: {name: run}
data: {path: data, lanes: 2, block_samples: 16}
model: {preset: llama-tiny, max_seq_len: 32, decoder: {width: 32, heads: 4, kv_heads: 2, ff_width: 48}}
batch: {global_tokens: 256, seq_len: 32, micro: 2}
optim: {lr: 1e-3}
train: {steps: 12}
eval: {every_steps: 0}
engine: {kind: single, zero_stage: 0, precision: fp32, device: cpu}
checkpoint: {every_steps: 6}
tracking: {wandb: off, log_every_steps: 1}
"""
STEPS = 12


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Shards of one epoch and a half of twelve steps."""
    folder = tmp_path_factory.mktemp("shards") / "data"
    make_folder(folder, make_texts(60), validation=make_texts(20, 1))
    return folder


@pytest.fixture
def folder(tmp_path, prepared) -> Path:
    """A working folder with a config and shards."""
    return fill_folder(tmp_path, CONFIG, prepared)


def damage(folder: Path, shard: int, member: int) -> str:
    """Flips a bit of the tokens of a member; returns the name of its shard."""
    index = load_index(folder / "data")
    entry = index.split("train").shards[shard]
    offset = ShardReader(folder / "data", entry, index.dtype)._rows[member][0]
    path = folder / "data" / entry.name
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    return entry.name


def refused(result: Result, code: int, words: str) -> None:
    """The command ended with `code` and one error line that matches."""
    line = error_line(result, code)
    assert re.search(words, line), line


# --- looking -----------------------------------------------------------------------------------------------------


def test_verify_prints_the_proof_and_the_verdict_last(folder, warm):
    result = warm("data", "verify", "data", "--seq-len", "32", "--lanes", "3", cwd=folder)
    assert (result.code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("data: 8 shards, ") and lines[-1] == "exactly once: yes"
    hashes = re.findall(r"^ [\d, ]+?  .* (\w{16})   (\w{16})  ", result.stdout, re.MULTILINE)
    assert len(hashes) == 10 and len(set(hashes)) == 2, "two courses of five readings"
    facts = json.loads(warm("data", "verify", "data", "--seq-len", "32", "--json", cwd=folder).stdout)
    assert facts["exactly_once"] and facts["whole"]


def test_verify_names_damage_by_shard_and_member(folder, warm):
    name = damage(folder, shard=2, member=1)
    refused(warm("data", "verify", "data", cwd=folder), 65, rf"^{name}: 00000001\.tokens\.npy is damaged: CRC32 of")
    (folder / "data" / name).unlink()
    refused(warm("data", "verify", "data", cwd=folder), 65, rf"data: {name} is missing; copy these files again")


def test_verify_of_a_part_says_that_it_was_one(folder, warm):
    options = ["--seq-len", "32", "--world-sizes", "2", "--max-samples", "9"]
    result = warm("data", "verify", "data", *options, cwd=folder)
    assert result.stdout.endswith("exactly once: yes, of the samples that were read\n")


@pytest.mark.long
def test_an_address_is_looked_at_as_the_folder_behind_it(folder, warm, tmp_path):
    with serve_folder(folder) as server:
        for words in (["verify", "--seq-len", "32"], ["show"], ["stats"]):
            command = ["data", words[0], "--json", *words[1:]]
            near = warm(*command, "data", cwd=folder)
            far = warm(*command, f"{server.url}/data", cwd=folder, HOME=str(tmp_path / "home"))
            assert (near.code, far.code) == (0, 0), far.stderr
            facts = [json.loads(re.sub(r'"seconds": [\d.]+', '"seconds": 0', result.stdout)) for result in (near, far)]
            assert [fact.pop("path") for fact in facts] == ["data", f"{server.url}/data"]
            assert facts[0] == facts[1]


def test_show_prints_rows_of_a_folder_and_of_a_config(folder, warm):
    result = warm("data", "show", "data", "--rows", "2", "--seq-len", "80", "--packing", "bins", cwd=folder)
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith("position 0   sample ") and "<|endoftext|>" in result.stdout
    assert "\x1b" not in result.stdout, "no colour in a pipe"
    facts = json.loads(warm("data", "show", "a.yaml", "--json", "seed=8", cwd=folder).stdout)
    assert [row["num_tokens"] for row in facts["rows"]] == [32, 32]
    prefix = warm("data", "show", "data", "--objective", "prefix", "--rows", "1", cwd=folder)
    assert (prefix.code, prefix.stderr) == (0, "")
    assert "   prefix   512 tokens: " in prefix.stdout and "\n      learned | " in prefix.stdout


def test_stats_prints_counts_and_writes_a_picture(folder, warm):
    result = warm("data", "stats", "data", "--output", "a.png", cwd=folder)
    assert (result.code, result.stderr) == (0, "")
    assert "train: 60 documents" in result.stdout and "how full rows are" in result.stdout
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    facts = json.loads(warm("data", "stats", "data", "--json", cwd=folder).stdout)
    assert facts["splits"]["train"]["documents"] == 60


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["verify", "nope"], 65, "nope: no such shard folder"),
        (["verify", "no pe"], 65, "with --output 'no pe' .a recipe's"),
        (["verify", "data", "--world-sizes", "0"], 64, "--world-sizes 0: not numbers of ranks"),
        (["verify", "data", "--packing", "x"], 64, "there is no packing 'x'; use concat, bins, padded"),
        (["verify", "data", "--seq-len", "0"], 64, "'--seq-len'.*see `pretrain data verify --help`"),
        (["show", "nope.yaml"], 64, "nope.yaml: no such config file"),
        (["show", "."], 65, "holds no index.json"),
        (["show", "data", "--split", "test"], 64, "--split: there is no split 'test'"),
        (["show", "data", "--objective", "masked"], 64, "objective.kind=masked needs a mask token, which"),
        (["stats", "data", "--output", "a.gif"], 64, "no picture format is called '.gif'"),
        (["stats", "nope"], 65, "nope: no such shard folder"),
    ],
)
def test_what_cannot_be_looked_at_is_refused_in_one_line(folder, warm, arguments, code, words):
    refused(warm("data", *arguments, cwd=folder), code, words)


# --- training over damage ----------------------------------------------------------------------------------------


def ledger(folder: Path, name: str = "run") -> list[dict]:
    """The rows of a run's ledger."""
    return [json.loads(line) for line in (folder / "runs" / name / "audit.jsonl").read_text().splitlines()]


def skipping(limit: int) -> list[str]:
    return ["data.on_error=skip", f"data.max_skipped_rows={limit}"]


@pytest.mark.long
def test_a_run_over_damage_has_the_order_of_the_undamaged_run_on_one_rank_and_on_two(folder, warm):
    whole = warm("train", "a.yaml", "run.name=whole", cwd=folder)
    assert whole.code == 0, whole.stderr
    name = damage(folder, shard=2, member=1)
    refused(warm("train", "a.yaml", "run.name=stops", cwd=folder), 65, rf"^{name}: 00000001\.tokens\.npy is damaged")

    one = warm("train", "a.yaml", "run.name=one", *skipping(40), cwd=folder)
    assert one.code == 0, one.stderr
    assert len(re.findall(rf"WARNING rows are skipped in data: {name}: 00000001\.tokens\.npy", one.stderr)) == 1
    two = warm("train", "a.yaml", "run.name=two", "engine.kind=ddp", *skipping(40), cwd=folder, ranks=2)
    assert two.code == 0, two.stderr

    rows, alone, both = (ledger(folder, run) for run in ("whole", "one", "two"))
    assert [row["digest"] for row in alone] == [row["digest"] for row in both] == [row["digest"] for row in rows]
    assert len(rows) == STEPS
    lost = [before["tokens"] - after["tokens"] for before, after in zip(rows, alone, strict=True)]
    assert sum(count > 0 for count in lost) >= 1 and min(lost) == 0, "only steps with a damaged row have fewer targets"
    assert [row["tokens"] for row in both] == [row["tokens"] for row in alone]
    told = sum(
        (folder / f"runs/two/logs/rank-0000{rank}.log").read_text().count("rows are skipped in") for rank in (0, 1)
    )
    assert 1 <= told <= 2, "once for each rank that met the member"


@pytest.mark.long
def test_a_stopped_run_can_go_on_over_damage_and_the_limit_ends_it_on_all_ranks(folder, warm):
    damage(folder, shard=2, member=1)
    stopped = warm("train", "a.yaml", cwd=folder)
    assert stopped.code == 65, stopped.stderr
    limited = run_cli("launch", "local", "a.yaml", "--ranks", "2", "engine.kind=ddp", *skipping(1), cwd=folder)
    assert limited.code == 65, limited.stderr
    assert re.search(r"\d rows cannot be read, more than data\.max_skipped_rows=1", limited.stderr)
    went_on = warm("train", "a.yaml", *skipping(40), cwd=folder)
    assert went_on.code == 0, went_on.stderr
    assert [row["step"] for row in ledger(folder)] == list(range(1, STEPS + 1))


@pytest.mark.long
def test_the_limit_is_of_all_ranks_together(folder, warm):
    damage(folder, shard=2, member=1)
    damage(folder, shard=5, member=0)
    launch = ["launch", "local", "a.yaml", "--ranks", "2", "engine.kind=ddp"]
    assert run_cli(*launch, "run.name=counts", *skipping(80), cwd=folder).code == 0
    rows = [json.loads(line) for line in (folder / "runs/counts/metrics.jsonl").read_text().splitlines()]
    whole = int(max(row.get("skipped_rows", 0) for row in rows))
    alone = [
        (folder / f"runs/counts/logs/rank-0000{rank}.log").read_text().count("rows are skipped in") for rank in (0, 1)
    ]
    assert min(alone) >= 1, "both ranks met damage"
    result = run_cli(*launch, "run.name=ends", *skipping(whole - 1), cwd=folder)
    assert result.code == 65, result.stderr
    assert f"error: {whole} rows cannot be read, more than data.max_skipped_rows={whole - 1}; see the" in result.stderr


def test_skipped_rows_are_a_metric(folder, warm):
    damage(folder, shard=2, member=1)
    assert warm("train", "a.yaml", *skipping(40), cwd=folder).code == 0
    metrics = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    counts = [row.get("skipped_rows", 0) for row in metrics if "loss" in row]
    assert counts == sorted(counts) and 0 < counts[-1] <= 40


def test_a_skip_without_a_limit_is_refused(folder, warm):
    result = warm("train", "a.yaml", "data.on_error=skip", cwd=folder)
    refused(result, 64, "on_error=skip and max_skipped_rows=0 contradict each other; give skip with a limit above 0")
