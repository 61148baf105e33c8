import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from pretrain.errors import ConfigError, DataError
from pretrain.tokenizer.encoder import build_encoder
from pretrain.tokenizer.file import dump_tokenizer, load_tokenizer, tokenizer_hash
from pretrain.tokenizer.roles import eos_id, token_dtype, vocabulary_size
from pretrain.tokenizer.special_tokens import EOS, UNK
from pretrain.tokenizer.words import cut_text
from tests.helpers.tokenizers import train_bpe, train_char

TEXTS = [
    "def walk(top):\n    for name in top:\n        yield name\n\n" * 5,
    "The quick brown fox; it's the 2nd of \u00e9t\u00e9, \u65e5\u672c\u8a9e \U0001f600.\r\n\ttabs  and   runs\n" * 5,
]
BPE = train_bpe(TEXTS, 400)
CHAR = train_char(TEXTS)


def encode(tokenizer, text):
    return build_encoder(tokenizer).encode([text]).values.tolist()


@given(st.text(max_size=200))
def test_bpe_round_trips_any_text(text):
    assert BPE.decode(encode(BPE, text), skip_special_tokens=False) == text


def test_bpe_learns_pairs_and_keeps_to_its_size():
    assert vocabulary_size(train_bpe(TEXTS, 300)) == 300
    assert vocabulary_size(train_bpe(["no pair twice"], 300)) < 300
    assert len(encode(BPE, TEXTS[0])) < len(TEXTS[0]) / 3


@pytest.mark.parametrize("train", [lambda: train_bpe(iter(TEXTS), 400), lambda: train_char(iter(TEXTS))])
def test_training_twice_gives_the_same_bytes(train):
    assert dump_tokenizer(train()) == dump_tokenizer(train())


def test_bpe_smaller_than_the_bytes_is_refused():
    with pytest.raises(ConfigError, match=r"vocab_size=256 has no room for the 256 bytes.*use 257 or more"):
        train_bpe(TEXTS, 256)
    assert vocabulary_size(train_bpe(TEXTS, 257)) == 257


def test_char_ids_are_ranks_of_characters_with_the_specials_last():
    tokenizer = train_char(["b\na", "c"])
    assert tokenizer.get_vocab() == {"\n": 0, "a": 1, "b": 2, "c": 3, UNK: 4, EOS: 5}
    assert encode(tokenizer, "abc\n") == [1, 2, 3, 0]
    assert eos_id(tokenizer) == 5


def test_char_round_trips_what_it_has_seen():
    for text in TEXTS:
        ids = encode(CHAR, text)
        assert len(ids) == len(text)
        assert CHAR.decode(ids, skip_special_tokens=False) == text


def test_char_gives_unk_for_a_character_never_seen():
    assert encode(CHAR, "a\u2603b") == [*encode(CHAR, "a"), CHAR.token_to_id(UNK), *encode(CHAR, "b")]


@pytest.mark.parametrize("tokenizer", [BPE, train_char([*TEXTS, EOS])])
def test_text_that_spells_a_special_token_does_not_become_it(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(dump_tokenizer(tokenizer))
    for one in (tokenizer, load_tokenizer(path)):
        ids = encode(one, f"a{EOS}b")
        assert eos_id(one) not in ids
        assert one.decode(ids, skip_special_tokens=True) == f"a{EOS}b"


def test_saved_tokenizer_loads_as_it_was_and_its_hash_is_of_the_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(dump_tokenizer(BPE))
    assert encode(load_tokenizer(path), TEXTS[1]) == encode(BPE, TEXTS[1])
    assert tokenizer_hash(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_truncation_and_padding_of_a_given_tokenizer_are_switched_off(tmp_path):
    tokenizer = train_bpe(TEXTS, 400)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    assert encode(load_tokenizer(path), TEXTS[0]) == encode(BPE, TEXTS[0])


def test_missing_or_malformed_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.json: cannot read the tokenizer: No such file.*; give a tokenizer"):
        load_tokenizer(tmp_path / "none.json")
    bad = tmp_path / "bad.json"
    bad.write_text('{"a"')
    with pytest.raises(DataError, match=r"bad\.json: not a tokenizer: .*EOF while parsing"):
        load_tokenizer(bad)


def test_eos_is_found_among_the_special_tokens_only():
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="a"))
    tokenizer.add_tokens(["</s>"])
    with pytest.raises(DataError, match="no end-of-document token; its special tokens are none; add"):
        eos_id(tokenizer)
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    assert eos_id(tokenizer) == 0


def test_vocabulary_size_counts_to_the_largest_id():
    assert vocabulary_size(Tokenizer(models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))) == 70_001


def test_encoder_gives_each_text_its_own_ids_in_the_dtype_of_the_vocabulary():
    encoder = build_encoder(BPE)
    ids, lengths = encoder.encode(["of a", "", "the"])
    arrays = np.split(ids, np.cumsum(lengths)[:-1])
    assert [array.tolist() for array in arrays] == [BPE.encode(text).ids for text in ("of a", "", "the")]
    assert ids.dtype == encoder.eos.dtype == np.uint16
    assert encoder.eos.tolist() == [eos_id(BPE)]


def test_dtype_is_the_smallest_that_holds_the_ids():
    assert [token_dtype(size) for size in (1, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]


@settings(max_examples=200)
@given(st.text(alphabet="ab 1.'s\n\t\u00e9\u2003\x1c\x85", max_size=80), st.integers(1, 9))
def test_cut_text_changes_no_token(text, piece_chars):
    pieces = list(cut_text(text, piece_chars))
    assert "".join(pieces) == text
    assert all(len(piece) >= piece_chars for piece in pieces[:-1])
    whole = [token for token, _ in BPE.pre_tokenizer.pre_tokenize_str(text)]
    assert [token for piece in pieces for token, _ in BPE.pre_tokenizer.pre_tokenize_str(piece)] == whole


def test_cut_text_leaves_a_text_without_white_space_whole():
    assert list(cut_text("x" * 50, 10)) == ["x" * 50]
    assert list(cut_text("", 10)) == [""]


def test_tokenizer_file_is_plain_json_of_the_tokenizers_library():
    assert json.loads(dump_tokenizer(BPE))["model"]["type"] == "BPE"
