"""Near duplicates: planted ones on both sides of the threshold, and the same bytes for any number of processes."""

import json
import random

import numpy as np
import pytest

from pretrain.config.prepare import NearDuplicatesConfig
from pretrain.errors import LaunchError
from pretrain.preparation.prepare import prepare
from pretrain.preparation.selection.sketches import ngram_hashes, plan_bands, words_of
from tests.helpers.prepare_config import prepare_config

NUM_WORDS = 400


def ngrams(text, size=5):
    """The n-grams of a text, without hashes."""
    words = words_of(text)
    return {tuple(words[at : at + size]) for at in range(max(1, len(words) - size + 1))}


def similarity(left, right):
    """The Jaccard similarity of two texts."""
    one, other = ngrams(left), ngrams(right)
    return len(one & other) / len(one | other)


def planted(rng, wanted):
    """Two texts whose similarity is about `wanted`: the end of one is replaced."""
    words = [f"w{rng.randrange(10**6)}" for _ in range(NUM_WORDS)]
    num_kept = round(NUM_WORDS * 2 * wanted / (1 + wanted))
    return " ".join(words), " ".join([*words[:num_kept], *(f"v{rng.randrange(10**6)}" for _ in words[num_kept:])])


def write(folder, texts, num_files=3):
    """Writes texts into files of JSON lines, in order."""
    folder.mkdir()
    size = -(-len(texts) // num_files)
    for number in range(num_files):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[number * size :][:size]]
        (folder / f"{number}.jsonl").write_text("".join(lines))


def config_of(tmp_path, name, deduplicate=True):
    filters = {"near_duplicates": {}, "deduplicate": deduplicate}
    inputs = [tmp_path / "in"]
    return prepare_config(tmp_path / name, inputs, vocab_size=300, split="hash:0.1", part_bytes=40_000, filter=filters)


def left_out(folder):
    return json.loads((folder / "statistics.json").read_text())["left_out"]


def removed(folder, num_documents):
    """A mask of the documents that are left out as near duplicates."""
    masks = []
    for path in sorted((folder / "duplicates").glob("*.near")):
        content = np.fromfile(path, np.uint8)
        count = int(content[:8].view("<u8")[0])
        masks.append(np.unpackbits(content[8:], count=count, bitorder="little"))
    found = np.concatenate(masks) == 0
    assert len(found) == num_documents
    return found


@pytest.mark.parametrize("count", [150, pytest.param(400, marks=pytest.mark.long)])
def test_planted_duplicates_are_found_and_others_stay(tmp_path, count):
    rng = random.Random(0)
    # As many closely above the threshold as below, from 0.7 to 0.9.
    pairs = [planted(rng, 0.7 + 0.2 * number / count) for number in range(count)]
    firsts, seconds = zip(*pairs, strict=True)
    shuffled = rng.sample(seconds, len(seconds))
    write(tmp_path / "in", [*firsts, *shuffled])
    prepare(config_of(tmp_path, "out"), processes=1)
    found = removed(tmp_path / "out", 2 * count)[count:]
    partner = dict(zip(seconds, firsts, strict=True))
    truth = np.array([similarity(partner[text], text) >= 0.8 for text in shuffled])
    assert 0.375 * count < truth.sum() < 0.625 * count
    assert not removed(tmp_path / "out", 2 * count)[:count].any()
    recall = (found & truth).sum() / truth.sum()
    precision = (found & truth).sum() / found.sum()
    assert recall >= 0.98 and precision >= 0.98
    assert left_out(tmp_path / "out")["near_duplicate"] == found.sum()
    assert f"| near duplicate | {found.sum():,} | " in (tmp_path / "out/data_card.md").read_text()


def test_a_chain_of_similar_documents_does_not_fall_to_its_first(tmp_path):
    words = [f"w{number}" for number in range(500)]
    chain = [" ".join(words[start : start + 300]) for start in (0, 30, 60, 90)]
    assert similarity(chain[0], chain[1]) > 0.8 > similarity(chain[0], chain[2])
    write(tmp_path / "in", chain, num_files=2)
    prepare(config_of(tmp_path, "out"), processes=1)
    assert removed(tmp_path / "out", 4).tolist() == [False, True, False, True]


@pytest.mark.parametrize("deduplicate", [True, False])
def test_equal_documents_are_counted_once(tmp_path, deduplicate):
    write(tmp_path / "in", ["one two three four five six", "One, two; three four five six!"] * 2 + ["other words"])
    prepare(config_of(tmp_path, "out", deduplicate), processes=1)
    counts = left_out(tmp_path / "out")
    assert (counts["duplicate"], counts["near_duplicate"]) == ((2, 1) if deduplicate else (0, 3))
    assert not [path.name for path in (tmp_path / "out/duplicates").iterdir() if path.suffix not in (".first", ".near")]


def test_texts_without_words_are_no_duplicates(tmp_path):
    write(tmp_path / "in", ["!!!", "???", "a few words here"])
    prepare(config_of(tmp_path, "out"), processes=1)
    assert left_out(tmp_path / "out")["near_duplicate"] == 0


def test_hashes_of_ngrams_are_those_of_their_words():
    words = words_of("The cat, the CAT the cat sat")
    assert words == ["the", "cat", "the", "cat", "the", "cat", "sat"]
    hashes = ngram_hashes(words, 2)
    assert len(hashes) == 6 and len(set(hashes.tolist())) == 3
    assert hashes[0] == hashes[2] == hashes[4] != hashes[1]
    assert len(ngram_hashes(words, 9)) == 1 and len(ngram_hashes([], 2)) == 0


@pytest.mark.parametrize(("threshold", "expected"), [(0.8, (21, 6)), (0.5, (42, 3)), (0.95, (9, 14))])
def test_bands_find_pairs_at_the_threshold(threshold, expected):
    bands, rows = plan_bands(NearDuplicatesConfig(threshold=threshold))
    assert (bands, rows) == expected
    assert 1 - (1 - threshold**rows) ** bands >= 0.995


def test_near_duplicates_need_their_package(tmp_path, monkeypatch):
    write(tmp_path / "in", ["a text"])
    monkeypatch.setattr("pretrain.preparation.selection.judge.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"filter.near_duplicates needs rensa, .*; run .* -e '\.\[web\]'"):
        prepare(config_of(tmp_path, "out"))


def test_kinds_without_one_text_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"filter\.near_duplicates goes with kind=text or records, not pairs; leave it out"
    ):
        prepare_config(tmp_path, ["a.jsonl"], kind="pairs", filter={"near_duplicates": {}})
