"""Each kind of tokenizer that is trained: what its vocabulary holds, and where; the same bytes on every run."""

import json
import os
import signal
import subprocess
import sys
import threading
from itertools import repeat
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import ConfigError
from pretrain.tokenizer.encoder import build_encoder
from pretrain.tokenizer.file import dump_tokenizer
from pretrain.tokenizer.roles import vocabulary_size
from pretrain.tokenizer.train import check_tokenizer, train_tokenizer

ROOT = Path(__file__).parents[3]
TEXTS = [
    "The quick brown fox jumps over the lazy dog; the dog isn't quick, it sleeps in 2017 or 2018.\n" * 3,
    "def walk(top):\n    for name in top:\n        yield name\n\n" * 3,
    "\u00c9t\u00e9 \u00e0 Paris, \u65e5\u672c\u8a9e caf\u00e9 \U0001f600\t\ufb01n.\r\n" * 3,
]
LICENSE = [(ROOT / "LICENSE").read_text()]
"""English of eleven thousand characters."""

KINDS = ("bpe", "wordpiece", "unigram", "char")
LEARNING = ("bpe", "wordpiece", "unigram")


def train(kind="bpe", texts=TEXTS, **options):
    if kind != "char":
        options.setdefault("vocab_size", 600)
    config = TokenizerConfig(kind=kind, **options)
    check_tokenizer(config)
    return train_tokenizer(iter(texts), config)


def encode(tokenizer, text):
    return build_encoder(tokenizer).encode([text]).values.tolist()


def pieces(tokenizer, text):
    return [tokenizer.id_to_token(number) for number in encode(tokenizer, text)]


def entries(tokenizer):
    """The vocabulary in the order of ids, which are dense."""
    vocab = tokenizer.get_vocab()
    assert sorted(vocab.values()) == list(range(len(vocab)))
    return sorted(vocab, key=vocab.get)


@pytest.mark.parametrize("kind", KINDS)
def test_roles_of_bert_have_the_first_five_ids(kind):
    names = entries(train(kind, roles="bert", special_tokens=["[USER]", "<|sep|>"]))
    assert names[:7] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[USER]", "<|sep|>"]


@pytest.mark.parametrize("kind", KINDS)
def test_roles_of_t5_have_the_first_three_ids_and_sentinels_the_last_downwards(kind):
    names = entries(train(kind, roles="t5", sentinels=12, special_tokens=["<|task|>"]))
    assert names[:4] == ["<pad>", "</s>", "<unk>", "<|task|>"]
    assert names[-12:] == [f"<extra_id_{number}>" for number in range(11, -1, -1)]


def test_an_end_of_document_comes_with_what_the_kind_needs():
    further = {"special_tokens": ["<a>", "<b>"]}
    assert entries(train("bpe", **further))[:3] == ["<|endoftext|>", "<a>", "<b>"]
    assert entries(train("wordpiece", **further))[:4] == ["[UNK]", "<|endoftext|>", "<a>", "<b>"]
    assert entries(train("unigram", **further))[:4] == ["<unk>", "<|endoftext|>", "<a>", "<b>"]
    assert entries(train("char", **further))[-4:] == ["<unk>", "<|endoftext|>", "<a>", "<b>"]


@pytest.mark.parametrize("kind", LEARNING)
@pytest.mark.parametrize("roles", ["document", "bert", "t5"])
def test_the_vocabulary_has_the_size_asked_for_with_special_tokens_in_it(kind, roles):
    assert len(entries(train(kind, LICENSE, vocab_size=470, roles=roles, sentinels=30))) == 470


@pytest.mark.parametrize("kind", LEARNING)
def test_the_vocabulary_is_smaller_where_the_texts_have_no_more(kind):
    assert len(entries(train(kind, ["no pair twice"], vocab_size=2000))) < 400


@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_is_filled_up_before_its_last_entries(kind):
    plain = entries(train(kind, roles="t5", sentinels=3))
    filled = entries(train(kind, roles="t5", sentinels=3, vocab_multiple=64))
    missing = -len(plain) % 64
    assert missing
    unused = [f"<unused_{number}>" for number in range(missing)]
    assert filled == [*plain[:-3], *unused, *plain[-3:]]
    assert entries(train(kind, roles="t5", sentinels=3, vocab_multiple=1)) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_what_fills_the_vocabulary_is_never_in_a_text(kind):
    tokenizer = train(kind, vocab_multiple=64)
    number = tokenizer.token_to_id("<unused_0>")
    assert number is not None
    assert number not in encode(tokenizer, "a <unused_0><unused_0>\n<unused_0>")


def test_wordpiece_takes_words_apart_as_bert_does():
    tokenizer = train("wordpiece", vocab_size=10_000, roles="bert")
    assert pieces(tokenizer, "the lazy dog;it isn't") == ["the", "lazy", "dog", ";", "it", "isn", "'", "t"]
    assert pieces(tokenizer, "dogwalk") == ["dog", "##w", "##al", "##k"]
    assert tokenizer.decode(encode(tokenizer, "the \n\t lazydog, it")) == "the lazydog, it"


def test_wordpiece_keeps_case_and_accents_unless_told_to_lower_case():
    cased, uncased = train("wordpiece", vocab_size=10_000), train("wordpiece", vocab_size=10_000, lowercase=True)
    assert pieces(cased, "The \u00c9t\u00e9") == ["The", "\u00c9t\u00e9"]
    assert pieces(uncased, "The THE the \u00c9t\u00e9 ete") == ["the", "the", "the", "ete", "ete"]


def test_wordpiece_gives_one_unknown_token_for_a_word_that_it_cannot_spell():
    tokenizer = train("wordpiece", roles="bert")
    assert pieces(tokenizer, "the d\u0416g quick") == ["the", "[UNK]", "quick"]
    # As in BERT, so is a word of more than a hundred characters.
    assert pieces(tokenizer, "d" * 101) == ["[UNK]"]
    assert "[UNK]" not in pieces(tokenizer, "d" * 100)


def test_wordpiece_of_a_small_vocabulary_knows_the_most_frequent_characters():
    tokenizer = train("wordpiece", texts=["eee ee aa x"], vocab_size=2 + 4)
    assert entries(tokenizer) == ["[UNK]", "<|endoftext|>", "##a", "##e", "a", "e"]


def test_unigram_learns_words_with_their_space_and_spells_the_rest_in_bytes():
    tokenizer = train("unigram", LICENSE, vocab_size=800)
    assert pieces(tokenizer, "the Work of the License\n (") == [
        *("the", "\u2581Work", "\u2581of", "\u2581the", "\u2581License", "\n", "\u2581("),
    ]
    assert pieces(tokenizer, "\u0416") == ["<0xD0>", "<0x96>"]
    assert entries(tokenizer)[2 : 2 + 256] == [f"<0x{byte:02X}>" for byte in range(256)]
    assert len(encode(tokenizer, LICENSE[0])) < len(LICENSE[0]) / 2.5


def test_unigram_learns_a_frequent_word_that_is_a_part_of_no_other():
    """The trainer of `tokenizers` begins with strings that different characters follow; a word's end is one of them."""
    words = ["that", "upon", "where", "hence", "quartz"]
    tokenizer = train("unigram", [" ".join(words * 9)], vocab_size=400)
    assert pieces(tokenizer, " " + " ".join(words)) == ["\u2581" + word for word in words]
    # What makes them candidates is gone.
    assert all(ord(character) < 0xF0000 for entry in entries(tokenizer) for character in entry)


def test_unigram_trains_on_the_characters_that_it_uses_itself():
    text = "\U000f0000\U000f00ff <UNK>" * 50
    tokenizer = train("unigram", [text], vocab_size=400)
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_unigram_has_words_of_white_space_for_code():
    words = train("unigram").pre_tokenizer.pre_tokenize_str("a    b\n\n\t c1  ")
    assert [word for word, _ in words] == ["a", "\u2581" * 3, "\u2581b", "\n\n\t", "\u2581c1", "\u2581", "\u2581"]


def test_unigram_does_not_learn_what_spells_a_special_token_or_a_byte():
    spellings = ("<extra_id_0>", "<0x41>", "</s>", "<unused_0>", "<UNK>")
    text = "\n".join(spelling for spelling in spellings for _ in range(50))
    tokenizer = train("unigram", [text], roles="t5", sentinels=2, vocab_multiple=64)
    names = entries(tokenizer)
    assert names[-2:] == ["<extra_id_1>", "<extra_id_0>"]
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert not special & set(encode(tokenizer, text))
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_unigram_trains_on_texts_without_any_word_that_it_could_learn():
    tokenizer = train("unigram", texts=["\0\0", ""])
    assert tokenizer.decode(encode(tokenizer, "\u65e5 a")) == "\u65e5 a"


@pytest.mark.parametrize("kind", LEARNING)
def test_digits_are_split(kind):
    whole, split = train(kind), train(kind, split_digits=True)
    text = "in 2017 or 2018"
    assert len(encode(whole, text)) < len(encode(split, text))
    digits = [piece.strip("#\u2581\u0120") for piece in pieces(split, text)]
    assert [piece for piece in digits if any(map(str.isdigit, piece))] == list("20172018")


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_normalized_and_lower_cased(kind):
    nfc, nfkc = train(kind, normalizer="nfc"), train(kind, normalizer="nfkc")
    assert encode(nfc, "cafe\u0301") == encode(nfc, "caf\u00e9")
    assert encode(nfc, "\ufb01n") != encode(nfc, "fin")
    assert encode(nfkc, "\ufb01n") == encode(nfkc, "fin")
    assert encode(train(kind), "cafe\u0301") != encode(train(kind), "caf\u00e9")
    lower = train(kind, lowercase=True)
    assert encode(lower, "THE Quick") == encode(lower, "the quick") != encode(train(kind), "THE Quick")


def test_others_get_the_special_tokens_around_a_text_and_we_do_not():
    bert, t5 = train("wordpiece", roles="bert"), train("unigram", roles="t5")
    assert bert.encode("the", "dog").tokens == ["[CLS]", "the", "[SEP]", "dog", "[SEP]"]
    assert bert.encode("the", "dog").type_ids == [0, 0, 0, 1, 1]
    assert t5.encode("the").ids == [*encode(t5, "the"), 1]
    assert pieces(bert, "the") == ["the"]


def test_special_tokens_are_special_when_the_file_is_read_again():
    tokenizer = Tokenizer.from_buffer(dump_tokenizer(train("unigram", roles="t5", vocab_multiple=64)))
    assert tokenizer.encode("<extra_id_0></s>", add_special_tokens=False).ids == [vocabulary_size(tokenizer) - 1, 1]


PROGRAM = """
import hashlib, sys
from pretrain.tokenizer.file import dump_tokenizer
from tests.unit.tokenizer.test_kinds import KINDS, LICENSE, TEXTS, train
for kind in KINDS:
    print(kind, hashlib.sha256(dump_tokenizer(train(kind, LICENSE + TEXTS))).hexdigest())
"""


@pytest.mark.long
def test_training_gives_the_same_bytes_whatever_the_hash_seeds_and_threads():
    """The hash tables of `tokenizers` are seeded anew in each process."""
    outputs = []
    for seed, threads in (("0", "1"), ("1", "2"), ("2", "7")):
        env = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        outputs.append(ran.stdout)
    assert outputs[0].count("\n") == len(KINDS)
    assert len(set(outputs)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_training_twice_in_one_process_gives_the_same_bytes(kind):
    assert dump_tokenizer(train(kind, roles="t5")) == dump_tokenizer(train(kind, roles="t5"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "bpe", "vocab_size": 300, "roles": "t5"}, r"vocab_size=300 has no room for the 256 bytes and 103"),
        ({"kind": "wordpiece", "vocab_size": 6, "roles": "bert"}, r"vocab_size=6 has no room for 5 special tokens"),
        ({"kind": "unigram", "vocab_size": 256}, r"vocab_size=256 has no room for the 256 bytes, 2 special .*; use"),
        ({"special_tokens": ["user"]}, r"tokenizer.special_tokens: 'user' could be confused with text; write it"),
        ({"special_tokens": ["<a b>"]}, r"'<a b>' could be confused with text"),
        ({"special_tokens": ["<|>"]}, r"'<\|>' could be confused with text"),
        ({"special_tokens": ["<unused_3>"]}, r"'<unused_3>' could be confused with text"),
        ({"special_tokens": ["<|endoftext|>"]}, r"special_tokens: <\|endoftext\|> is there already; name each once"),
        ({"special_tokens": ["<a>", "<a>"]}, r"special_tokens: <a> is there already"),
        ({"kind": "char", "special_tokens": ["<unk>"]}, r"special_tokens: <unk> is there already"),
        ({"roles": "t5", "special_tokens": ["<extra_id_7>"]}, r"special_tokens: <extra_id_7> is there already"),
        ({"kind": "given", "path": "x", "lowercase": True}, r"tokenizer.lowercase=True does not go with kind=given"),
        ({"kind": "given", "path": "x", "roles": "t5"}, r"tokenizer.roles=t5 does not go with kind=given"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_any_text_is_read(options, message):
    with pytest.raises(ConfigError, match=message):
        check_tokenizer(TokenizerConfig(**options))


@pytest.mark.parametrize("kind", LEARNING)
def test_the_least_size_that_a_refusal_names_is_enough(kind):
    with pytest.raises(ConfigError, match=r"use \d+ or more") as caught:
        train(kind, vocab_size=2)
    least = int(caught.value.fix.split()[1])
    with pytest.raises(ConfigError):
        train(kind, vocab_size=least - 1)
    assert len(entries(train(kind, vocab_size=least))) <= least


def test_the_files_are_plain_json_of_the_tokenizers_library():
    types = {kind: json.loads(dump_tokenizer(train(kind)))["model"]["type"] for kind in KINDS}
    assert types == {"bpe": "BPE", "wordpiece": "WordPiece", "unigram": "Unigram", "char": "WordLevel"}


@pytest.mark.parametrize("kind", LEARNING)
def test_ctrl_c_ends_training_also_where_another_thread_gets_the_signal(kind):
    def texts():
        yield from TEXTS
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        yield from repeat(TEXTS[0])

    with pytest.raises(KeyboardInterrupt):
        train(kind, texts())
