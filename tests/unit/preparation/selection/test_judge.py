"""Languages, evaluation sets and rules together, and the card of what left and why."""

import json
import random

import pytest

from pretrain.errors import ConfigError, DataError, LaunchError
from pretrain.preparation.filters import Document
from pretrain.preparation.prepare import prepare
from pretrain.preparation.selection import judge
from pretrain.preparation.selection.judge import EvaluationTexts, read_tested
from pretrain.preparation.selection.sketches import ngram_hashes
from tests.helpers.prepare_config import prepare_config
from tests.unit.preparation.selection.test_quality import GOOD

GERMAN = "Der Fluss liegt im Norden der Stadt, und die Leute gehen am Abend gern an seinem Ufer entlang."
ENGLISH = "The river is in the north of the city, and people like to walk along its banks in the evening."


def write(path, *texts, field="text"):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def run(tmp_path, filters, name="out", **changes):
    """Prepares the texts of a folder; returns what its statistics say."""
    config = prepare_config(
        tmp_path / name, [tmp_path / "in"], vocab_size=300, split="hash:0", filter=filters, **changes
    )
    prepare(config, processes=1)
    return json.loads((tmp_path / name / "statistics.json").read_text())


def words(rng, count):
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(count))


def test_every_planted_text_of_an_evaluation_set_is_found_and_nothing_else(tmp_path):
    rng = random.Random(0)
    long = [words(rng, 40) for _ in range(200)]
    short = [words(rng, count) for count in range(8, 13)]
    tests = tmp_path / "tests"
    write(tests / "a.jsonl", *long, field="question")
    write(tests / "b.jsonl", *short, "too short to find", field="answer")
    # A run of 13 words of it, in other marks and case; short texts as a whole.
    found = []
    for text in long:
        start = rng.randrange(27)
        found.append(text.split()[start : start + 13])
    found += [text.split() for text in short]
    planted = [f"{words(rng, 50)} {', '.join(one).upper()}! {words(rng, 50)}" for one in found]
    almost = [f"{words(rng, 50)} {' '.join(text.split()[:12])} {words(rng, 50)}" for text in long]
    clean = [words(rng, 100) for _ in range(200)]
    write(tmp_path / "in/a.jsonl", *rng.sample(planted + almost + clean, len(planted + almost + clean)))
    inputs = [
        {"path": str(tests / "a.jsonl"), "text_field": "question"},
        {"path": str(tests / "b.jsonl"), "text_field": "answer"},
    ]
    facts = run(tmp_path, {"decontaminate": {"inputs": inputs}})
    assert facts["left_out"]["contaminated"] == len(planted) == 205
    assert facts["left_out_bytes"]["contaminated"] == sum(map(len, planted))
    assert facts["splits"]["train"]["num_documents"] == len(almost + clean)


def test_a_folder_is_continued_with_the_same_evaluation_texts_only(tmp_path):
    write(tmp_path / "in/a.jsonl", "a b c d e f g h i j", "another text")
    tests = write(tmp_path / "tests/a.jsonl", "a b c d e f g h")
    filters = {"decontaminate": {"inputs": [{"path": str(tests)}]}}
    assert run(tmp_path, filters)["left_out"]["contaminated"] == 1
    write(tests, "A, b c d e f g h!")  # the same words
    run(tmp_path, filters)
    write(tests, "b c d e f g h i")
    with pytest.raises(ConfigError, match=r"begun with other options: filter\.decontaminate\.sha256 was"):
        run(tmp_path, filters)


def test_evaluation_sets_without_a_text_to_look_for_are_refused(tmp_path, caplog):
    write(tmp_path / "in/a.jsonl", "a text")
    filters = {"decontaminate": {"inputs": [{"path": str(write(tmp_path / "t/a.jsonl", "a b c"))}]}}
    with pytest.raises(DataError, match=r"a\.jsonl: the evaluation sets have no text of 8 words; choose its field"):
        run(tmp_path, filters)
    write(tmp_path / "t/a.jsonl", "a b c", "a b c d e f g h")
    run(tmp_path, filters)
    assert "1 text of the evaluation sets of fewer than 8 words cannot be looked for" in caplog.text


def test_an_ngram_is_found_wherever_its_hash_is_among_those_of_the_evaluation_sets():
    texts = [" ".join(f"{letter}{number}" for number in range(13)) for letter in "abcdefghij"]
    hashes = {text: int(ngram_hashes(text.split(), 13)[0]) for text in texts}
    for known in (texts[:5], texts[5:], sorted(texts, key=hashes.__getitem__)[3:6], [min(texts, key=hashes.get)]):
        tested = read_tested([Document(text, text.encode(), 0) for text in known], 13)
        assert [text for text in texts if tested.occur_in(f"x {text} y")] == sorted(known)


def test_texts_are_looked_for_by_their_own_length():
    documents = [Document(text, text.encode(), 0) for text in ("a b c d e f g h", "1 2 3 4 5 6 7 8 9 10 11 12 13 14")]
    tested = read_tested(documents, 13)
    assert sorted(tested.hashes) == [8, 13]
    assert tested.occur_in("x a b c d e f g h x") and tested.occur_in("0 2 3 4 5 6 7 8 9 10 11 12 13 14")
    assert (
        not tested.occur_in("a b c d e f g x h") and not tested.occur_in("a b") and not EvaluationTexts().occur_in("a")
    )


def test_without_evaluation_sets_no_words_are_looked_for(monkeypatch):
    monkeypatch.setattr(judge, "words_of", None)
    assert not EvaluationTexts().occur_in("a b c d e f g h")


def test_languages_that_are_not_kept_are_left_out(tmp_path):
    write(tmp_path / "in/a.jsonl", ENGLISH, GERMAN, ENGLISH + " Again.")
    facts = run(tmp_path, {"language": {"keep": ["en"]}})
    assert facts["left_out"]["language"] == 1
    assert facts["left_out_bytes"] == {"language": len(GERMAN)}
    with pytest.raises(DataError, match=r"no text to train on.*language 3"):
        run(tmp_path, {"language": {"keep": ["en", "de"], "min_score": 1.0}}, "none")
    with pytest.raises(
        ConfigError, match=r"filter\.language\.keep: 'english' is no language of py3langid; use one of af"
    ):
        run(tmp_path, {"language": {"keep": ["english"]}}, "wrong")


def test_languages_need_their_package(tmp_path, monkeypatch):
    write(tmp_path / "in/a.jsonl", ENGLISH)
    monkeypatch.setattr("pretrain.preparation.selection.judge.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"filter\.language needs py3langid, .*; run .* -e '\.\[web\]'"):
        run(tmp_path, {"language": {"keep": ["en"]}})


def test_the_card_has_what_left_by_each_rule_that_is_on(tmp_path):
    menu = "Home\nAbout us\n"
    texts = [
        GOOD,
        GOOD + menu,
        "Too few words.",
        GOOD + "Lorem ipsum is here.\n",
        GOOD.replace(".", ".\n\n") + "..." * 30,
    ]
    write(tmp_path / "in/a.jsonl", *texts)
    facts = run(tmp_path, {"c4": {}, "gopher_quality": {}, "gopher_repetition": {"ngrams": {}, "top_ngrams": {}}})
    left = {reason: count for reason, count in facts["left_out"].items() if count}
    assert left == {"c4_lorem_ipsum": 1, "c4_too_few_sentences": 1}
    assert facts["left_out"]["gopher_short_doc"] == 0 and "fineweb_list_ratio" not in facts["left_out"]
    assert facts["left_out_bytes"] == {"c4_lorem_ipsum": len(texts[3]), "c4_too_few_sentences": len(texts[2])}
    assert facts["lines_dropped"]["documents"] == 3  # of the first, the end of its last line
    card = (tmp_path / "out/data_card.md").read_text()
    assert f"| c4 lorem ipsum | 1 | {len(texts[3])} |" in card
    assert "| gopher short doc | 0 | 0 |" in card
    assert f"| lines of documents that stay | 3 | {facts['lines_dropped']['bytes']:,} |" in card
    off = run(tmp_path, {"c4": {"lorem_ipsum": False}}, "off")
    assert off["left_out"]["c4_lorem_ipsum"] == 0


def test_rules_of_texts_are_refused_where_there_are_none(tmp_path):
    with pytest.raises(ValueError, match=r"filter\.c4 goes with kind=text, not records; leave it out"):
        prepare_config(tmp_path, ["a.jsonl"], kind="records", filter={"c4": {}})
    with pytest.raises(ValueError, match=r"filter\.fineweb goes with kind=text or records, not pairs"):
        prepare_config(tmp_path, ["a.jsonl"], kind="pairs", filter={"fineweb": {}})
