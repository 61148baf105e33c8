"""What `prepare` tells of what it wrote: lengths, statistics.json, data_card.md and their picture."""

import json
import random

import numpy as np
import pytest
from pydantic import TypeAdapter
from tokenizers import Tokenizer, models, pre_tokenizers

from pretrain.preparation.part_record import LengthHistogram, bins_of
from pretrain.preparation.prepare import prepare
from pretrain.shards.index import load_index
from pretrain.shards.reader import ShardReader
from tests.helpers.corpus import write_corpus
from tests.helpers.prepare_config import prepare_config
from tests.unit.preparation.test_prepare_kinds import columns, write_rows

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
        "undecodable": 0, "not_a_page": 0, "empty": 1, "no_assistant_turn": 0, "empty_answer": 0, "too_short": 0,
        "too_long": 0, "not_required": 0, "duplicate": 0, "near_duplicate": 0,
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


def write_tokenizer(path, model):
    """A T5-style Unigram or BERT's WordPiece over the letters a to z, without bytes to fall back on."""
    letters = [chr(number) for number in range(ord("a"), ord("z") + 1)]
    if model == "unigram":
        pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *((one, -3.0) for one in letters)]
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        names = ["<pad>", "</s>", "<unk>"]
    else:
        names = ["[PAD]", "[SEP]", "[UNK]"]
        pieces = [*names, *letters, *(f"##{one}" for one in letters)]
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(names)
    tokenizer.save(str(path))
    return str(path), names[2], 2


def read_ids(folder, split):
    """Returns all tokens of a split, the sources of pairs too."""
    index = load_index(folder)
    found = []
    for shard in index.split(split).shards:
        reader = ShardReader(folder, shard, index.dtype)
        for number in range(shard.num_members):
            found.append(reader.member(number)[0])
            if index.kind == "pairs":
                found.append(reader.source(number)[0])
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("kind", "model", "lost"),
    [
        ("text", "unigram", ["\xeb", "\U0001f642\U0001f642"]),
        ("pairs", "wordpiece", ["zo\xeb", "\U0001f642\U0001f642"]),
        ("tags", "unigram", ["\xeb", "\U0001f642\U0001f642"]),
    ],
)
def test_text_that_the_tokenizer_lacks_is_counted_and_named(tmp_path, caplog, kind, model, lost):
    tokenizer, name, unknown = write_tokenizer(tmp_path / "tokenizer.json", model)
    odd = ["zoo \U0001f642\U0001f642", "zo\xeb"]
    texts = [f"plain words {odd[number % 2]} and more {'x' * number}" for number in range(40)]
    words = [{"tokens": text.split(), "tags": ["O"] * len(text.split())} for text in texts]
    rows = [{"text": text, "source": text, "target": text} | word for text, word in zip(texts, words, strict=True)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    folders = [tmp_path / "out", tmp_path / "again"]
    for folder, processes in zip(folders, (1, 2 if kind == "text" else 1), strict=True):
        config = prepare_config(
            folder, [path], kind=kind, tokenizer=tokenizer, split="hash:0.3", part_bytes=path.stat().st_size // 3
        )
        prepare(config, processes=processes)
    facts, again = (json.loads((folder / "statistics.json").read_text()) for folder in folders)
    assert facts == again
    num_found = num_tokens = 0
    for split in facts["splits"]:
        ids = read_ids(tmp_path / "out", split)
        found = int((ids == unknown).sum())
        assert facts["splits"][split]["num_unknown_tokens"] == found > 0
        num_found += found
        num_tokens += len(ids)
    assert num_found == (80 if kind == "pairs" else 40)
    assert sorted(facts["unknown"].pop("of")) == sorted(lost)
    share = num_found / num_tokens
    assert facts["unknown"] == {"token": name, "num_tokens": num_found, "share": round(share, 8)}
    said = f"{100 * share:.3g}% of the tokens are {name}, of: "
    assert f"text is lost: {said}" in caplog.text
    card = (tmp_path / "out/data_card.md").read_text()
    assert f"| train | {facts['splits']['train']['num_unknown_tokens']} |" in card and said in card


def test_parts_of_a_version_that_did_not_count_unknown_tokens_are_kept(tmp_path):
    tokenizer, _, _ = write_tokenizer(tmp_path / "tokenizer.json", "unigram")
    path = write_rows(tmp_path / "a.jsonl", [{"text": "zo\xeb"}] * 3)
    config = prepare_config(tmp_path / "out", [path], tokenizer=tokenizer, split="hash:0")
    prepare(config, processes=1)
    (record,) = (tmp_path / "out/parts").iterdir()
    before = json.loads(record.read_text())
    del before["lost"]
    for split in before["splits"].values():
        del split["num_unknown"]
    record.write_text(json.dumps(before))
    (tmp_path / "out/index.json").unlink()
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/train").iterdir()}
    prepare(config, processes=1)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out/train").iterdir()} == shards
    facts = json.loads((tmp_path / "out/statistics.json").read_text())
    assert "unknown" not in facts and "num_unknown_tokens" not in facts["splits"]["train"]


def test_no_text_is_lost_to_bytes(tmp_path, caplog):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "zo\xeb \U0001f642"}] * 3)
    prepare(prepare_config(tmp_path / "out", [path], vocab_size=300, split="hash:0"), processes=1)
    assert "unknown" not in json.loads((tmp_path / "out/statistics.json").read_text())
    assert "lost" not in caplog.text


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
