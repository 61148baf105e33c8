"""The codec of a run: plain text, and the masks, sentinels and modes that a text names."""

import pytest

from pretrain.artifact.plain_codec import PlainCodec
from tests.unit.tokenizer.test_kinds import KINDS, LICENSE, train


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_names_masks_and_nothing_that_begins_or_ends_one(kind):
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


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_text_names_sentinels_and_modes_and_its_words_stay_as_they_are(kind):
    tokenizer = train(kind, LICENSE, roles="t5", sentinels=12, special_tokens=["[S2S]"])
    codec = PlainCodec(tokenizer)
    first, other, mode = (tokenizer.token_to_id(name) for name in ("<extra_id_1>", "<extra_id_11>", "[S2S]"))
    ids = codec.encode("[S2S]the terms <extra_id_1> this License<extra_id_11> </s>")
    parts = [codec.encode(text) for text in ("the terms", " this License", " </s>")]
    assert ids == [mode, *parts[0], first, *parts[1], other, *parts[2]]
    assert tokenizer.token_to_id("</s>") not in ids
    assert codec.decode([first, *parts[0]]) == "the terms"


def test_what_an_encoder_reads_for_a_decoder_ends_as_in_training():
    tokenizer = train("bpe", LICENSE, roles="t5", sentinels=2)
    codec, plain = PlainCodec(tokenizer, ends_sources=True), PlainCodec(tokenizer)
    assert codec.encode("the terms") == [*plain.encode("the terms"), tokenizer.token_to_id("</s>")]
    assert codec.encode_target("the terms") == codec.encode("the terms")
