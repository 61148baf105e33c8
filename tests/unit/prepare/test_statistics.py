"""What `prepare` tells of what it wrote: lengths, statistics.json, data_card.md and their picture."""

import json
import random

import numpy as np
import pytest
from pydantic import TypeAdapter

from pretrain.prepare.part_record import LengthHistogram, bins_of
from pretrain.prepare.prepare import prepare
from pretrain.shards.index import load_index
from tests.helpers.corpus import write_corpus
from tests.helpers.prepare_config import prepare_config
from tests.unit.prepare.test_prepare_kinds import columns, write_rows

PICTURE = b"\x89PNG\r\n\x1a\n"
pytestmark = pytest.mark.usefixtures("pictures")


def test_bins_are_exact_below_64_and_a_32nd_wide_beyond():
    starts = bins_of(np.arange(1, 100_000)).tolist()
    assert starts[:63] == list(range(1, 64))
    assert all(length - length // 32 <= start <= length for length, start in enumerate(starts, 1))
    assert starts == sorted(starts)
    assert bins_of(np.array(starts)).tolist() == starts
    assert bins_of(np.array([2**30 - 1, 2**30])).tolist() == [63 * 2**24, 2**30]


@pytest.mark.parametrize("longest", [60, 5000])
def test_lengths_of_parts_add_up_to_those_of_the_whole(longest):
    rng = random.Random(0)
    values = [rng.randint(1, longest) for _ in range(999)]
    parts = [LengthHistogram() for _ in range(4)]
    for number in range(3):
        parts[number].add(np.array(values[number::3]))
    total = LengthHistogram()
    stored = TypeAdapter(LengthHistogram)
    for part in parts:
        total.merge(stored.validate_json(stored.dump_json(part)))
    assert (total.bins.total(), total.total) == (len(values), sum(values))
    assert (total.shortest, total.longest) == (min(values), max(values))
    for percent in (1, 50, 99):
        exact = int(np.percentile(values, percent, method="inverted_cdf"))
        assert total.percentile(percent) == bins_of(np.array([exact]))[0]


def test_statistics_count_what_the_shards_hold(tmp_path):
    write_corpus(tmp_path / "in")
    config = prepare_config(tmp_path / "out", [tmp_path / "in"], vocab_size=300, split="hash:0.2", part_bytes=1500)
    index = prepare(config, processes=1)
    facts = json.loads((tmp_path / "out/statistics.json").read_text())
    for name, split in index.splits.items():
        found = facts["splits"][name]
        assert (found["num_documents"], found["num_tokens"]) == (split.num_documents, split.num_tokens)
        assert found["bytes_per_token"] == round(split.num_bytes_text / split.num_tokens, 4)
        assert sum(count for _, count in found["lengths"]["histogram"]) == split.num_documents
    assert facts["left_out"] == {
        "undecodable": 0, "empty": 1, "no_assistant_turn": 0, "empty_answer": 0, "too_short": 0, "too_long": 0,
        "not_required": 0, "duplicate": 0,
    }  # fmt: skip
    assert facts["tokenizer"]["sha256"] == index.tokenizer_sha256
    assert facts["input"]["num_bytes"] == sum(path.stat().st_size for path in (tmp_path / "in").iterdir())
    card = (tmp_path / "out/data_card.md").read_text()
    assert f"| train | {index.split('train').num_documents:,} | {index.split('train').num_tokens:,} |" in card
    assert "| empty | 1 |" in card
    assert (tmp_path / "out/lengths.png").read_bytes().startswith(PICTURE)


def test_sources_and_learned_tokens_are_counted(tmp_path):
    rows = [{"source": "abc", "target": "de", "prompt": "abc", "response": "de"}] * 3
    path = write_rows(tmp_path / "a.jsonl", rows)
    for kind in ("pairs", "records"):
        prepare(prepare_config(tmp_path / kind, [path], kind=kind, tokenizer="char", split="hash:0"), processes=1)
        facts = json.loads((tmp_path / kind / "statistics.json").read_text())["splits"]["train"]
        others = [other for _, other in columns(tmp_path / kind)]
        if kind == "pairs":
            assert facts["num_source_tokens"] == sum(map(len, others)) == 12
            assert facts["source_lengths"]["longest"] == 4
        else:
            assert facts["num_learned_tokens"] == sum(int(other.sum()) for other in others) == 9


def test_a_folder_without_its_index_gets_the_same_statistics_again(tmp_path):
    write_corpus(tmp_path / "in")
    config = prepare_config(tmp_path / "out", [tmp_path / "in"], vocab_size=300)
    prepare(config, processes=1)
    names = ("statistics.json", "data_card.md", "lengths.png")
    before = [(tmp_path / "out" / name).read_bytes() for name in names]
    for name in (*names, "index.json"):
        (tmp_path / "out" / name).unlink()
    assert prepare(config, processes=1) == load_index(tmp_path / "out")
    assert [(tmp_path / "out" / name).read_bytes() for name in names] == before
