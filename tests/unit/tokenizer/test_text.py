"""What tokenizers promise of any text: it comes back, it never becomes a special token, and it may be cut."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from pretrain.tokenizer.encoder import display_tokens
from pretrain.tokenizer.file import dump_tokenizer
from pretrain.tokenizer.words import cut_text, is_cut_safe
from tests.unit.tokenizer.test_kinds import KINDS, LICENSE, TEXTS, encode, train

CORPUS = [*LICENSE, *TEXTS, "<extra_id_0> <|endoftext|> </s> <0x41> [MASK] <unused_0> <UNK>\n" * 20]
TRAINED = {
    (kind, roles): train(kind, CORPUS, roles=roles, sentinels=5, vocab_multiple=16, special_tokens=["<|user|>"])
    for kind in KINDS
    for roles in ("document", "bert", "t5")
}
EVERY = pytest.mark.parametrize("tokenizer", TRAINED.values(), ids=["-".join(key) for key in TRAINED])
SPELLINGS = [
    *("<|endoftext|>", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<pad>", "</s>", "<unk>", "<extra_id_0>"),
    *("<extra_id_4>", "<unused_0>", "<|user|>", "<0x41>", "<0x0A>", "<UNK>", "##", "\u0120", "<", "|", ">", "\u2581"),
    *("\n", " ", "the", "License"),
]
TEXT = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(SPELLINGS)), max_size=12).map("".join)


def special_ids(tokenizer):
    return {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}


@given(TEXT)
def test_byte_level_bpe_round_trips_any_text(text):
    for roles in ("document", "bert", "t5"):
        tokenizer = TRAINED["bpe", roles]
        assert tokenizer.decode(encode(tokenizer, text)) == text


@given(TEXT)
def test_unigram_round_trips_any_text_but_reads_one_character_as_a_space(text):
    for roles in ("document", "bert", "t5"):
        tokenizer = TRAINED["unigram", roles]
        assert tokenizer.decode(encode(tokenizer, text)) == text.replace("\u2581", " ")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_every_character_round_trips(kind):
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and code != 0x2581]
    text = "".join(characters)
    tokenizer = TRAINED[kind, "document"]
    assert tokenizer.decode(encode(tokenizer, text)) == text


NORMALIZED = {kind: train(kind, CORPUS, normalizer="nfkc", split_digits=True) for kind in ("bpe", "unigram")}


@given(TEXT)
def test_a_normalized_text_round_trips_as_normalized(text):
    expected = normalizers.NFKC().normalize_str(text)
    bpe, unigram = NORMALIZED["bpe"], NORMALIZED["unigram"]
    assert bpe.decode(encode(bpe, text)) == expected
    assert unigram.decode(encode(unigram, text)) == expected.replace("\u2581", " ")


@EVERY
@settings(max_examples=50)
@given(text=TEXT)
def test_no_text_becomes_a_special_token(tokenizer, text):
    unknown = {tokenizer.token_to_id("<unk>"), tokenizer.token_to_id("[UNK]")}
    assert not (special_ids(tokenizer) - unknown) & set(encode(tokenizer, text))


@EVERY
@pytest.mark.parametrize("around", ["{}", "a{}b", " {} ", "{0}{0}", "##{}", "<{}", "\n{}\t"])
def test_no_spelling_of_a_special_token_becomes_it(tokenizer, around):
    special = special_ids(tokenizer)
    for number in special:
        content = tokenizer.id_to_token(number)
        if content not in ("<unk>", "[UNK]"):
            assert number not in encode(tokenizer, around.format(content)), content


@pytest.mark.parametrize("roles", ["document", "t5"])
def test_unigram_spells_even_the_unknown_token_and_bytes(roles):
    tokenizer = TRAINED["unigram", roles]
    assert not special_ids(tokenizer) & set(encode(tokenizer, "<unk> a<unk>"))
    assert display_tokens(tokenizer, encode(tokenizer, "<0x41>")) == list("<0x41>")


# Characters that normalizers change, and that differ in what they are to Python and to `tokenizers`.
ODD = [
    *("a", "b", "1", "2", ".", "'", "s", " ", "  ", "\n", "\t", "\r", "\x0b", "\x1c", "\x85", "\xa0", "\u2003"),
    *("\u2028", "\u3000", "\u0301", "\u0323", "\u00e9", "\u1e9b", "\u00a8", "\ufdfa", "\ufc5e", "\u1100", "\u1161"),
    *("\u11a8", "\u0130", "\u03a3", "\u4e2d", "\u2581", "\x00", "\ufb01", "\u00bd", "\u200b", "\U0001f600", "##"),
]
CUT = [
    train(kind, CORPUS, **options)
    for kind in KINDS
    for options in (
        {},
        {"normalizer": "nfc", "lowercase": True},
        {"normalizer": "nfkc", "split_digits": True, "roles": "t5"},
    )
]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(ODD), max_size=60).map("".join), st.integers(1, 9))
def test_the_tokens_of_the_pieces_are_those_of_the_text(text, piece_chars):
    pieces = list(cut_text(text, piece_chars))
    for tokenizer in CUT:
        assert [number for piece in pieces for number in encode(tokenizer, piece)] == encode(tokenizer, text)


@pytest.mark.long
@pytest.mark.parametrize("tokenizer", CUT)
def test_no_character_that_normalizers_change_matters_across_a_cut(tokenizer):
    """All of them, and all that are not letters: before and after each of the places where a text is cut."""
    changed = [
        chr(code)
        for code in range(0x30000)
        if not 0xD800 <= code < 0xE000
        and (unicodedata.normalize("NFKD", chr(code)) != chr(code) or unicodedata.category(chr(code))[0] in "MZC")
        and unicodedata.category(chr(code)) not in ("Cn", "Co", "Lo")
    ]
    assert len(changed) > 5000
    for space in " \t\n":
        # Cut into as many pieces as there are places: each ends with one of them, and begins with the last before.
        text = "".join(f"{character}{space}{character}" for character in changed)
        pieces = list(cut_text(text, 1))
        assert len(pieces) > len(changed) * 0.9
        parts = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        assert [number for part in parts for number in part.ids] == encode(tokenizer, text)


@EVERY
def test_every_trained_kind_may_be_cut(tokenizer):
    assert is_cut_safe(tokenizer)
    assert is_cut_safe(Tokenizer.from_buffer(dump_tokenizer(tokenizer)))


@pytest.mark.parametrize("tokenizer", [*CUT, *NORMALIZED.values()])
def test_every_option_of_a_trained_kind_may_be_cut(tokenizer):
    assert is_cut_safe(tokenizer)


def bpe_with(**parts):
    tokenizer = train("bpe")
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def bpe_with_added(token):
    tokenizer = train("bpe")
    tokenizer.add_tokens([token])
    return tokenizer


def test_a_given_tokenizer_that_tears_texts_as_a_trained_one_may_be_cut():
    gpt2 = bpe_with(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False))
    assert is_cut_safe(gpt2)
    assert is_cut_safe(bpe_with_added(AddedToken("<user>", special=False)))


@pytest.mark.parametrize(
    "tokenizer",
    [
        # A space is put before each piece.
        bpe_with(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        # The whole text is one word.
        bpe_with(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        Tokenizer(models.BPE()),
        # Something is put before each piece, taken away at its ends, or seen across a cut.
        bpe_with(normalizer=normalizers.Prepend("_")),
        bpe_with(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        bpe_with_added(AddedToken("two words", special=False)),
        bpe_with_added(AddedToken("word", special=False, lstrip=True)),
        # Drawn anew for each piece.
        bpe_with(model=models.BPE(dropout=0.1)),
    ],
)
def test_what_is_not_known_to_be_safe_is_not_cut(tokenizer):
    assert not is_cut_safe(tokenizer)


def test_tokens_are_displayed_as_text_and_parts_of_characters_as_bytes():
    bpe, unigram = TRAINED["bpe", "document"], TRAINED["unigram", "t5"]
    assert display_tokens(bpe, [0, *encode(bpe, "or\n\u0416")]) == ["<|endoftext|>", "or", "\n", "\\xd0", "\\x96"]
    assert display_tokens(unigram, [1, *encode(unigram, "a\u0416")]) == ["</s>", "a", "\\xd0", "\\x96"]
    wordpiece = TRAINED["wordpiece", "bert"]
    assert display_tokens(wordpiece, [2, *encode(wordpiece, "Licensed")]) == ["[CLS]", "License", "##d"]
    assert display_tokens(TRAINED["char", "document"], encode(TRAINED["char", "document"], "a b")) == ["a", " ", "b"]
    assert display_tokens(bpe, [10**6]) == [""]


@given(st.text(alphabet="\ufffd\u0416a ", max_size=8))
def test_a_real_replacement_character_is_displayed_as_its_bytes_or_itself(text):
    shown = "".join(display_tokens(TRAINED["bpe", "document"], encode(TRAINED["bpe", "document"], text)))
    assert shown.count("a") == text.count("a")
    escaped = text.replace("\ufffd", "\\xef\\xbf\\xbd").replace("\u0416", "\\xd0\\x96")
    assert shown == escaped
