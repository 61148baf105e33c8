"""Rules of Gopher, C4 and FineWeb: each by an example on both sides, and those of datatrove on many documents."""

import random
import re

import pytest

from pretrain.config.texts.quality import C4Config, FineWebConfig, GopherQualityConfig, GopherRepetitionConfig
from pretrain.preparation.selection.quality import (
    clean_c4,
    count_sentences,
    fineweb,
    gopher_quality,
    gopher_repetition,
    split_words,
)

GOOD = "".join(
    f"The {noun} of a house is one that people have to be near, and with it they see {noun}s in the {place}.\n"
    for noun, place in zip(
        ["river", "garden", "window", "table", "bridge"], ["north", "south", "west", "sea", "hills"], strict=True
    )
)


def judged(rule, text, config):
    return rule(text, split_words(text), config)


@pytest.mark.parametrize(
    ("text", "changes", "reason"),
    [
        (GOOD, {}, None),
        ("the be to of. " * 12, {}, "gopher_short_doc"),  # 48 words
        ("the be to of. " * 13, {"min_word_chars": None}, None),
        ("the be to of. " * 13, {"min_words": None}, "gopher_below_avg_threshold"),
        (GOOD, {"max_words": 20}, "gopher_long_doc"),
        ("be incomprehensibilities the " * 20, {"max_word_chars": 8.0}, "gopher_above_avg_threshold"),
        (GOOD + "#" * 20, {}, "gopher_too_many_hashes"),
        (GOOD + "#" * 20, {"max_symbols": None, "min_alphabetic": None}, None),
        (GOOD + "... " * 20, {}, "gopher_too_many_ellipsis"),
        ("\n".join("- " + line for line in GOOD.splitlines()), {}, "gopher_too_many_bullets"),
        ("\n".join("\u2022 " + line for line in GOOD.splitlines()), {"max_bullet_lines": 1.0}, None),
        (GOOD.replace("north.", "north...").replace("west.", "west\u2026"), {}, "gopher_too_many_end_ellipsis"),
        (GOOD + " 1234" * 60, {}, "gopher_below_alpha_threshold"),
        ("river garden window table bridge " * 12, {}, "gopher_enough_stop_words"),
        ("river garden window table bridge " * 12, {"stop_words": ["river", "table"]}, None),
    ],
)
def test_gopher_quality(text, changes, reason):
    assert judged(gopher_quality, text, GopherQualityConfig(**changes)) == reason


def lines(*counts):
    """Different lines, each so many times."""
    return "\n".join(
        f"line {number} of {chr(97 + number) * 5}" for number, count in enumerate(counts) for _ in range(count)
    )


@pytest.mark.parametrize(
    ("text", "changes", "reason"),
    [
        (
            " ".join(f"word{number}" for number in range(60)),
            {},
            None,
        ),
        ("a b c\n\n" * 2 + "d e f\n\n" * 2, {}, "gopher_dup_para_frac"),
        ("x" * 100 + "\n\n" + "x" * 100 + "\n\na\n\nb\n\nc\n\nd", {}, "gopher_dup_para_char_frac"),
        (lines(4, 1, 1, 1, 1), {}, "gopher_dup_line_frac"),
        (lines(3, 1, 1, 1, 1, 1), {"lines": 0.5}, "gopher_dup_line_char_frac"),
        ("to be " * 10 + "or not in a box with the other words of the world", {}, "gopher_top_2_gram"),
        ("to be " * 10 + "or not", {"top_ngrams": {}, "ngrams": {}}, None),
        ("one two three four five six. " * 3 + GOOD[:60], {"top_ngrams": {}}, "gopher_duplicated_5_n_grams"),
        ("one two three four five six. " * 3 + GOOD[:60], {"top_ngrams": {}, "ngrams": {"5": 0.9}}, None),
    ],
)
def test_gopher_repetition(text, changes, reason):
    assert judged(gopher_repetition, text, GopherRepetitionConfig(**changes)) == reason


@pytest.mark.parametrize(
    ("text", "changes", "kept", "reason"),
    [
        (GOOD, {}, GOOD.strip(), None),
        (GOOD + "a menu without a mark\n", {}, GOOD.strip(), None),
        (GOOD + "A line that fades out...\n", {}, GOOD.strip(), None),
        (GOOD + "Too short.\n", {}, GOOD.strip(), None),
        (GOOD + "Please enable JavaScript to read.\n", {}, GOOD.strip(), None),
        (GOOD + "We use cookies on this site.\n", {}, GOOD.strip(), None),
        (GOOD + f"A word of {'x' * 1001} is long.\n", {}, GOOD.strip(), None),
        (GOOD + "It was so.[12][citation needed]\n", {}, GOOD + "It was so.", None),
        (GOOD + "It says Lorem ipsum dolor.\n", {}, None, "c4_lorem_ipsum"),
        (GOOD + "if (a) { return it. }.\n", {}, None, "c4_curly_bracket"),
        (GOOD + "if (a) { return it. }.\n", {"curly_bracket": False}, GOOD + "if (a) { return it. }.", None),
        ("One sentence is not enough.\n", {}, None, "c4_too_few_sentences"),
        ("One sentence is not enough.\n", {"min_sentences": 1}, "One sentence is not enough.", None),
    ],
)
def test_c4(text, changes, kept, reason):
    found = clean_c4(text, C4Config(**changes))
    assert found == (text if kept is None else kept, reason)


@pytest.mark.parametrize(
    ("text", "changes", "reason"),
    [
        (GOOD, {}, None),
        (GOOD.replace(".", ""), {}, "fineweb_line_punct_ratio"),
        (GOOD.replace(".", ""), {"min_terminal_lines": None}, None),
        (GOOD.replace(".", "\u3002"), {}, None),
        ("A short line.\n" + GOOD[:103] + "Another one.\nAnd a third.\n", {}, "fineweb_short_line_ratio"),
        (GOOD + GOOD[:103], {}, "fineweb_char_dup_ratio"),
        (GOOD + "\n" * 40, {}, "fineweb_list_ratio"),
        (" \n\n", {}, "fineweb_empty"),
    ],
)
def test_fineweb(text, changes, reason):
    assert judged(fineweb, text, FineWebConfig(**changes)) == reason


def test_words_and_sentences():
    assert split_words("It's 3.5 km, isn\u2019t it?") == ["It's", "3", ".", "5", "km", ",", "isn\u2019t", "it", "?"]
    assert [count_sentences(text) for text in ("One. Two! Three?", 'He said "no." Then', "none", "3.5 km.")] == [
        3,
        1,
        1,
        1,
    ]


def test_ends_of_sentences_are_those_of_a_pattern_that_tries_each_place():
    chance = random.Random(1)
    each_place = re.compile(r"""[.!?]+["'\u201d\u2019)\]]*(?=\s|$)""")
    for _ in range(2000):
        text = "".join(chance.choices(".!?\"')] a\n", k=chance.randint(0, 12)))
        assert count_sentences(text) == max(1, len(each_place.findall(text))), text


def page(rng):
    """A text of the web: sentences, menus, lists and repetitions."""
    words = ["the", "be", "to", "of", "and", "that", "have", "with", "river", "house", "people", "see", "one"]
    rare = ["Javascript", "lorem ipsum", "#", "...", "-", "42", "{", "incomprehensibilities", "use cookies"]
    weights = [8] * len(words) + [0.1, 0.1, 0.5, 0.5, 0.5, 2, 0.1, 1, 0.1]
    pool = []
    for _ in range(rng.randrange(1, 25)):
        text = " ".join(rng.choices(words + rare, weights, k=rng.randrange(1, 30)))
        pool.append(
            rng.choice(["", "", "", "\u2022 ", "- "]) + text + rng.choice([".", ".", ".", "!", "...", "", "\u3002"])
        )
    picked = rng.choices(pool, k=rng.randrange(1, 30)) if rng.random() < 0.4 else pool
    return "".join(line + rng.choice(["\n", "\n", "\n\n"]) for line in picked) or "a"


@pytest.mark.long
def test_decisions_are_those_of_datatrove(monkeypatch):
    filters = pytest.importorskip("datatrove.pipeline.filters")
    from datatrove.data import Document
    from datatrove.pipeline.filters import (
        c4_filters,
        fineweb_quality_filter,
        gopher_quality_filter,
        gopher_repetition_filter,
    )

    # Its words are those of spaCy; the rules are compared by the same words.
    for module in (fineweb_quality_filter, gopher_quality_filter, gopher_repetition_filter):
        monkeypatch.setattr(module, "split_into_words", lambda text, language: split_words(text))
    monkeypatch.setattr(c4_filters, "split_into_sentences", lambda text, language: ["x"] * count_sentences(text))
    theirs = [
        (gopher_repetition, GopherRepetitionConfig(), filters.GopherRepetitionFilter(), "gopher_"),
        (gopher_quality, GopherQualityConfig(), filters.GopherQualityFilter(), ""),
        (fineweb, FineWebConfig(), filters.FineWebQualityFilter(), "fineweb_"),
    ]
    c4 = filters.C4QualityFilter()
    rng = random.Random(0)
    seen = set()
    for number in range(1000):
        text = page(rng)
        for rule, config, other, prefix in theirs:
            found = other.filter(Document(text, str(number)))
            expected = None if found is True else prefix + found[1]
            assert judged(rule, text, config) == expected, text
            seen.add(expected)
        document = Document(text, str(number))
        found = c4.filter(document)
        expected = (document.text, None) if found is True else (text, "c4_" + found[1])
        assert clean_c4(text, C4Config()) == expected
        seen.add(expected[1])
    assert len(seen) > 12
