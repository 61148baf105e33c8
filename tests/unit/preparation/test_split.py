from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.errors import ConfigError
from pretrain.preparation.split import TRAIN, VALIDATION, parse_split

TINY_SHAKESPEARE_CHARS = 1_115_394


def divide(split, text, seed=0):
    return dict(parse_split(split, seed).divide(text, text.encode()))


def test_tail_split_of_tinyshakespeare_is_that_of_nanogpt():
    sides = divide("tail:0.1", "x" * TINY_SHAKESPEARE_CHARS)
    assert (len(sides[TRAIN]), len(sides[VALIDATION])) == (1_003_854, 111_540)


@given(st.integers(0, 10**6), st.integers(0, 999))
def test_tail_split_is_exact_where_binary_fractions_are_not(num_chars, thousandths):
    sides = divide(f"tail:{thousandths / 1000}", "x" * num_chars)
    assert len(sides.get(TRAIN, "")) == num_chars * (1000 - thousandths) // 1000
    assert len(sides.get(VALIDATION, "")) == num_chars - len(sides.get(TRAIN, ""))


def test_hash_split_holds_out_about_its_share_and_depends_on_the_seed():
    texts = [f"document {number}" for number in range(2000)]
    held_out = [{text for text in texts if VALIDATION in divide("hash:0.1", text, seed)} for seed in (0, 0, 1)]
    assert 150 < len(held_out[0]) < 250
    assert held_out[0] == held_out[1] != held_out[2]


def test_hash_split_gives_a_document_whole_to_one_side():
    assert divide("hash:0", "abc") == {TRAIN: "abc"}
    assert divide("hash:0.999999", "abc") == {VALIDATION: "abc"}
    assert divide("hash:0.5", "") == {}


def test_fraction_is_kept_as_written():
    assert parse_split("tail:0.1", 0).fraction == Fraction(1, 10)


@pytest.mark.parametrize(
    "text", ["hash", "hash:", "tail:1", "tail:-0.1", "hash:x", "hash:nan", "hash:1/0", "head:0.1", ""]
)
def test_split_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"split='.*' is not a split; use hash:F or tail:F"):
        parse_split(text, 0)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_outside_64_bits_is_refused(seed):
    with pytest.raises(ConfigError, match="is not a seed"):
        parse_split("hash:0.1", seed)


def test_a_larger_split_holds_out_more_than_the_given_one():
    found = [parse_split(split, 0).larger for split in ("hash:0", "hash:0.01", "hash:0.2", "hash:0.9")]
    assert found == ["hash:0.1", "hash:0.1", "hash:0.4", "hash:0.95"]
