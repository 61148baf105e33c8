"""The codec of a run: plain text, and masks where a text names them."""

import pytest

from pretrain.artifact.codec import PlainCodec
from tests.unit.data.test_tokenizer_kinds import KINDS, LICENSE, train


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_names_masks_and_no_other_special_token(kind):
    tokenizer = train(kind, LICENSE, roles="bert")
    codec = PlainCodec(tokenizer)
    assert (codec.mask_id, codec.eos_ids) == (4, (3,))
    ids = codec.encode("the terms [MASK] this License[MASK] [SEP]")
    assert [number for number in ids if number < 5 and number != 1] == [4, 4]
    first, second, third = "the terms", " this License", " [SEP]"
    if kind == "char":
        first = "the terms "
    assert ids == [*codec.encode(first), 4, *codec.encode(second), 4, *codec.encode(third)]


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_mask_token_its_name_is_text(kind):
    tokenizer = train(kind, LICENSE)
    codec = PlainCodec(tokenizer)
    assert codec.mask_id is None
    assert codec.encode("a [MASK]") == tokenizer.encode("a [MASK]", add_special_tokens=False).ids


def test_what_fills_a_mask_reads_as_a_word():
    codec = PlainCodec(train("bpe", LICENSE, roles="bert"))
    (word,) = codec.encode(" of")
    ids = [word if number == codec.mask_id else number for number in codec.encode("terms [MASK] this")]
    assert codec.decode(ids) == "terms of this"
