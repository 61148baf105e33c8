"""What is counted, against counting by hand; the tables and the picture of it."""

import json
import re

import numpy as np
import pytest

from pretrain.data.bin_stream import BinStream
from pretrain.datacheck.stats import PERCENTILES, count_data
from pretrain.datacheck.stats_text import draw_stats, print_stats
from pretrain.errors import ConfigError, DataError
from pretrain.shards.index import load_index
from pretrain.shards.reader import ShardSet
from pretrain.tokenizer.file import load_tokenizer
from tests.helpers.shards import read_split
from tests.unit.report.data_folders import make_folder, make_texts

TEXTS = make_texts(90)
ROWS = (16, 48, 300)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    make_folder(path / "text", TEXTS, validation=make_texts(20, 3))
    make_folder(path / "pairs", list(zip(TEXTS, make_texts(90, 1), strict=True)), kind="pairs")
    make_folder(path / "records", [[(text, False), (text[::-1], True)] for text in TEXTS], kind="records")
    return path


def test_totals_lengths_and_tokens_are_those_of_the_shards(root):
    train = count_data(str(root / "text"), row_lengths=ROWS)["splits"]["train"]
    split = load_index(root / "text").split("train")
    tokens, starts = read_split(root / "text", load_index(root / "text"))
    lengths = np.array([len(text) + 1 for text in TEXTS])
    assert np.array_equal(np.diff(np.append(starts, len(tokens))), lengths)
    assert (train["documents"], train["tokens"], train["shards"]) == (90, len(tokens), 9)
    assert train["bytes"] == sum(shard.num_bytes for shard in split.shards)
    assert train["members"] == sum(shard.num_members for shard in split.shards)
    found = train["lengths"]["tokens"]
    assert (found["min"], found["mean"], found["max"]) == (lengths.min(), lengths.mean(), lengths.max())
    for percent in PERCENTILES:
        expected = np.percentile(lengths, percent, method="inverted_cdf")
        assert found["percentiles"][str(percent)] == expected
    counts = np.bincount(tokens)
    assert train["distinct_tokens"] == (counts > 0).sum() and "learned" not in train
    for token in train["most_frequent"]:
        assert token["share"] == counts[token["id"]] / len(tokens)


def test_the_histogram_holds_every_document_and_token_in_its_power_of_two(root):
    train = count_data(str(root / "text"), row_lengths=ROWS)["splits"]["train"]
    lengths = np.array([len(text) + 1 for text in TEXTS])
    bins = train["lengths"]["tokens"]["histogram"]
    for one in bins:
        mine = lengths[(lengths >= one["from"]) & (lengths <= one["to"])]
        expected = (2 * one["from"] - 1, len(mine), mine.sum())
        assert (one["to"], one["documents"], one["tokens"]) == expected
    assert sum(one["documents"] for one in bins) == 90


@pytest.mark.parametrize("kind", ["text", "pairs", "records"])
def test_how_full_rows_are_is_what_a_stream_gives(root, kind):
    folder = root / kind
    index = load_index(folder)
    for packing in count_data(str(folder), row_lengths=ROWS)["splits"]["train"]["packing"]:
        length, bins = packing["seq_len"], packing["bins"]
        stream = BinStream(
            ShardSet(folder, index, "train"), seq_len=length, source_len=length if kind == "pairs" else None
        )
        rows = stream.read(range(stream.order.num_tokens))
        filled = np.minimum(rows.num_tokens_B, length).sum()
        assert bins["too_long"] == stream.num_too_long / 90
        assert bins["full"] == filled / (length * stream.order.num_tokens)
        if kind == "pairs":
            assert bins["source_full"] == rows.source.num_tokens_B.sum() / (length * stream.order.num_tokens)
        assert (packing["concat"] is None) == (kind != "text")


def test_documents_that_concat_cuts_are_counted(root):
    """In the fixed order of one shard after another, each cut anew where a shard begins."""
    index = load_index(root / "text")
    lengths = iter([len(text) + 1 for text in TEXTS])
    cut = dict.fromkeys(ROWS, 0)
    for shard in index.split("train").shards:
        at = 0
        for size in (next(lengths) for _ in range(shard.num_documents)):
            for row in ROWS:
                cut[row] += any(place % row == 0 for place in range(at + 1, at + size))
            at += size
    packing = count_data(str(root / "text"), row_lengths=ROWS)["splits"]["train"]["packing"]
    assert {row["seq_len"]: row["concat"]["cut"] for row in packing} == {row: count / 90 for row, count in cut.items()}


def test_both_sides_of_pairs_and_what_is_learned_of_records_are_counted(root):
    pairs = count_data(str(root / "pairs"), row_lengths=ROWS)["splits"]["train"]
    num_sources = sum(len(text) + 1 for text in TEXTS)
    assert sum(one["tokens"] for one in pairs["lengths"]["source"]["histogram"]) == num_sources
    both = "".join([*TEXTS, *make_texts(90, 1)])
    for token in pairs["most_frequent"]:
        assert token["share"] == both.count(token["text"]) / (pairs["tokens"] + num_sources)
    records = count_data(str(root / "records"), row_lengths=ROWS)["splits"]["train"]
    assert records["learned"] == sum(len(text) + 1 for text in TEXTS)


def test_the_most_frequent_tokens_come_first(root):
    facts = count_data(str(root / "text"), row_lengths=ROWS)["splits"]["train"]
    counts = np.bincount(read_split(root / "text", load_index(root / "text"))[0])
    tokenizer = load_tokenizer(root / "text/tokenizer.json")
    top = facts["most_frequent"]
    assert [counts[token["id"]] for token in top] == sorted(counts)[::-1][:10]
    assert all(token["text"] == tokenizer.id_to_token(token["id"]) for token in top)
    assert facts["share_of_most_frequent"]["100"] == 1.0
    assert 1.0 > facts["share_of_most_frequent"]["10"] > 10 / 28


def test_what_is_printed_is_what_is_in_the_facts(root, capsys):
    stats = count_data(str(root / "text"))
    print_stats(stats)
    printed, facts = capsys.readouterr().out, json.loads(json.dumps(stats))
    train = facts["splits"]["train"]
    assert (
        f"\ntrain: 90 documents, {train['tokens']:,} tokens, {train['bytes_per_token']:.2f} bytes per token" in printed
    )
    assert re.search(rf"\n +{train['lengths']['tokens']['min']} .* {train['lengths']['tokens']['max']} ", printed)
    for row in train["packing"]:
        cells = rf"{row['seq_len']:,} +100\.00% +{row['concat']['cut']:.2%} +{row['bins']['full']:.2%} +0\.00%\n"
        assert re.search(cells, printed)
    longest = max(row["documents"] for row in train["lengths"]["tokens"]["histogram"])
    assert re.search(rf" {longest} +{'#' * 40} ", printed)
    assert f"{train['distinct_tokens']} of {facts['vocab_size']} tokens occur" in printed
    assert '" "' in printed and "\nvalidation: 20 documents" in printed


def test_shards_beyond_the_limit_are_counted_and_not_packed(root, monkeypatch, capsys):
    monkeypatch.setattr("pretrain.datacheck.stats.MAX_PACKED_DOCUMENTS", 25)
    stats = count_data(str(root / "text"), row_lengths=ROWS)
    train = stats["splits"]["train"]
    assert (train["packing_measured_on"], train["documents"]) == (30, 90)
    print_stats(stats)
    assert "how full rows are, measured on the first 30 documents\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "suffix", "magic"),
    [("text", ".png", b"\x89PNG"), ("pairs", ".svg", b"<?xml"), ("pairs", ".pdf", b"%PDF")],
)
def test_the_picture_is_of_its_format(root, tmp_path, kind, suffix, magic):
    stats = count_data(str(root / kind))
    draw_stats(stats, tmp_path / f"new/a{suffix}")
    assert (tmp_path / f"new/a{suffix}").read_bytes().startswith(magic)


def test_the_picture_names_what_it_shows(root, tmp_path):
    """Text of an SVG is drawn; matplotlib leaves what it says in comments."""
    draw_stats(count_data(str(root / "pairs")), tmp_path / "a.svg")
    content = (tmp_path / "a.svg").read_text()
    for words in ("train: length of targets", "train: length of sources", "train: how full rows are", "pairs left out"):
        assert words in content


def test_another_format_and_an_empty_folder_are_refused(root, tmp_path):
    with pytest.raises(ConfigError, match=r"--output a\.gif: no picture format is called '\.gif'"):
        draw_stats(count_data(str(root / "text")), tmp_path / "a.gif")
    make_folder(tmp_path / "empty", [])
    with pytest.raises(DataError, match="empty: holds no tokens; give `pretrain prepare` more text"):
        count_data(str(tmp_path / "empty"))


def test_a_damaged_member_is_an_error(root, tmp_path):
    make_folder(tmp_path / "data", TEXTS)
    path = tmp_path / "data/train/part-00003-0000.tar"
    content = bytearray(path.read_bytes())
    content[640] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"part-00003-0000\.tar: 00000000\.tokens\.npy is damaged"):
        count_data(str(tmp_path / "data"))
