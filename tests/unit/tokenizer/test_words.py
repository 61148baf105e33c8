"""Words and characters that trainers see: counted once, chosen the same way on every run."""

from collections import Counter

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from pretrain.tokenizer.words import choose_alphabet, count_words, most_frequent, repeat_words, split_words


def test_words_are_those_of_the_tokenizer_over_long_texts_too():
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    assert count_words(["a B, a", "b"], tokenizer) == {"a": 2, "B": 1, ",": 1, "b": 1}
    tokenizer.normalizer = normalizers.Lowercase()
    assert count_words(["a B, a", "b"], tokenizer) == {"a": 2, ",": 1, "b": 2}
    assert count_words(["aa b " * 20_000], tokenizer) == {"aa": 20_000, "b": 20_000}


def test_the_alphabet_is_the_most_frequent_characters_lower_code_points_first():
    words = Counter({"ca": 3, "b": 3, "d": 1, "\0": 9})
    assert choose_alphabet(words, 10) == ["a", "b", "c", "d"]
    assert choose_alphabet(words, 2) == ["a", "b"]
    assert choose_alphabet(words, 0) == []
    assert choose_alphabet(words, 10, coverage=0.9) == ["a", "b", "c"]
    assert choose_alphabet(Counter(dict(reversed(words.items()))), 3) == ["a", "b", "c"]


def test_the_most_frequent_words_do_not_depend_on_the_order_of_equals():
    words = Counter({f"w{number}": 1 + number % 2 for number in range(100)})
    chosen = most_frequent(words, 60)
    assert len(chosen) == 60
    assert {word for word, count in words.items() if count == 2} <= chosen.keys()
    assert most_frequent(Counter(dict(reversed(words.items()))), 60) == chosen
    # Equals are taken from everywhere, not from the beginning of the alphabet.
    assert {word for word in chosen if words[word] == 1} != set(sorted(w for w in words if words[w] == 1)[:10])
    assert most_frequent(words, 100) == words


@pytest.mark.parametrize("words", [{}, {"a": 1}, {"a": 200_000, "bc": 3, "d" * 70_000: 2, "": 4}])
def test_a_trainer_sees_each_word_as_often_as_it_was_counted(words):
    seen: Counter[str] = Counter()
    for text in repeat_words(Counter(words)):
        assert len(text) < 140_000 + 1
        seen.update(word for word, _ in split_words().pre_tokenize_str(text))
    assert seen == {word: count for word, count in words.items() if word}
