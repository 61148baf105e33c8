"""Tokenizers of others: ids are those of transformers, or of sentencepiece where there is its model alone."""

import io
import json
import logging
import os
from functools import cache
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import DataError
from pretrain.tokenizer.file import dump_tokenizer, read_given, read_release
from pretrain.tokenizer.released import list_tokenizer_files, read_released
from pretrain.tokenizer.train import train_tokenizer
from tests.helpers.tokenizers import train_bpe, train_sentencepiece
from tests.unit.tokenizer.test_kinds import LICENSE

LINES = LICENSE[0].splitlines()
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


@cache
def trained(kind):
    """A tokenizer.json of 300 to 700 entries."""
    if kind == "bpe":
        return dump_tokenizer(train_bpe(LINES, 300))
    if kind == "llama":
        return dump_tokenizer(train_sentencepiece(LINES, 600))
    return dump_tokenizer(
        train_tokenizer(LINES, TokenizerConfig(kind=kind, vocab_size=300, roles="bert", lowercase=True))
    )


def added(content, *, special=True, **flags):
    off = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content, "special": special} | off | flags


def written(folder, kind=None, **files):
    """A folder with files of JSON by name, `__` for a dot, and a tokenizer.json of a kind."""
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(json.dumps(value))
    if kind:
        (folder / "tokenizer.json").write_bytes(trained(kind))
    return folder


def given(folder):
    return read_given(TokenizerConfig(kind="given", path=str(folder)))


def assert_alike(content, theirs):
    """Both encode the same, with every added token in texts."""
    ours = Tokenizer.from_buffer(content)
    names = list(theirs.get_added_vocab())
    texts = [
        *LINES,
        "  a \t b\n\n",
        "caf\u00e9 e\u0323\u0302",
        *(f"{one} a{one}b {one}" for one in names),
        "".join(names),
    ]
    for text in texts:
        for whole in (False, True):
            assert ours.encode(text, add_special_tokens=whole).ids == theirs(text, add_special_tokens=whole).input_ids


THINK = {"300": added("<|im_start|>"), "301": added("<|im_end|>"), "302": added("<think>", special=False)}
OUTSIDE = {
    "added_tokens_decoder": ("bpe", {"tokenizer_config__json": FAST | {"added_tokens_decoder": THINK}}, "<|im_start|>"),
    "added_tokens.json": ("bpe", {"added_tokens__json": {"<y>": 301, "<|x|>": 300}}, "<|x|>"),
    "additional": ("bpe", {"tokenizer_config__json": FAST | {"additional_special_tokens": ["<|x|>"]}}, "<|x|>"),
    "special_tokens_map": ("bpe", {"special_tokens_map__json": {"pad_token": "<pad>"}}, "<pad>"),
    "white space": (
        "bpe",
        {"tokenizer_config__json": FAST | {"added_tokens_decoder": {"300": added("<mask>", lstrip=True)}}},
        "<mask>",
    ),
    "add_prefix_space": (
        "bpe",
        {"tokenizer_config__json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}},
        "a",
    ),
    "the class of a model": ("bpe", {"config__json": {"model_type": "qwen2"}}, LINES[0]),
    "legacy": (
        "llama",
        {"tokenizer_config__json": {"tokenizer_class": "LlamaTokenizer"}, "config__json": {"model_type": "llama"}},
        " ",
    ),
    "case": (
        "wordpiece",
        {"tokenizer_config__json": {"tokenizer_class": "BertTokenizer", "do_lower_case": False}},
        "A",
    ),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_what_lies_outside_of_tokenizer_json_is_read_as_transformers_reads_it(case, tmp_path, caplog):
    kind, files, _ = OUTSIDE[case]
    folder = written(tmp_path, kind, **files)
    with caplog.at_level(logging.WARNING):
        found = given(folder)
    assert_alike(found.content, AutoTokenizer.from_pretrained(folder))
    assert "in tokenizer.json and" in caplog.text, "the difference is said"


def test_the_first_token_that_differs_is_named_with_both_numbers(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        given(written(tmp_path, "bpe", tokenizer_config__json=FAST | {"added_tokens_decoder": THINK}))
    assert "'<|im_start|>' is none in tokenizer.json and 300 in AutoTokenizer; the latter is used" in caplog.text


def test_a_release_that_a_start_asks_for_twice_is_read_and_told_of_once(tmp_path, caplog):
    written(tmp_path, "bpe", tokenizer_config__json=FAST | {"added_tokens_decoder": THINK})
    with caplog.at_level(logging.WARNING):
        assert read_release(str(tmp_path)) == read_release(str(tmp_path)) != trained("bpe")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("bpe", {"tokenizer_config__json": FAST | {"clean_up_tokenization_spaces": True}}),
        ("bpe", {"config__json": {"model_type": "gpt2"}}),
        ("bpe", {"tokenizer_config__json": {"tokenizer_class": "NoSuchTokenizer"}}),
        ("llama", {"tokenizer_config__json": FAST, "config__json": {"model_type": "llama"}}),
        ("wordpiece", {"config__json": {"model_type": "bert"}}),
    ],
)
def test_a_file_that_transformers_reads_as_it_is_stays_as_it_is(kind, files, tmp_path, caplog):
    folder = written(tmp_path, kind, **files)
    assert given(folder).content == trained(kind)
    assert not caplog.text


def test_a_file_alone_asks_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)
    assert given(written(tmp_path, "bpe")).content == trained("bpe")


@pytest.mark.parametrize("model_type", ["gpt2", "roberta"])
def test_a_vocabulary_with_its_merges_is_read_with_further_tokens(model_type, tmp_path):
    folder = written(tmp_path, config__json={"model_type": model_type}, added_tokens__json={"<|x|>": 300})
    Tokenizer.from_buffer(trained("bpe")).model.save(str(folder))
    assert_alike(given(folder).content, AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"special_tokens_map__json": {"eos_token": "<|end|>"}}, "<|end|>"),
        ({}, "<|endoftext|>"),
        # Where tokens are listed in tokenizer_config.json, transformers asks that file.
        ({"special_tokens_map__json": {"eos_token": "<|end|>"}, "decoder": True}, "<|endoftext|>"),
    ],
)
def test_a_document_ends_with_the_token_that_transformers_takes(files, end, tmp_path):
    settings = FAST | {"eos_token": "<|endoftext|>"}
    if files.pop("decoder", False):
        settings |= {"added_tokens_decoder": {"0": added("<|endoftext|>")}}
    folder = written(tmp_path, "bpe", tokenizer_config__json=settings, **files)
    assert given(folder).eos == end == AutoTokenizer.from_pretrained(folder).eos_token


def test_what_no_tokenizer_json_encodes_is_refused_with_the_text(tmp_path):
    settings = FAST | {"split_special_tokens": True}
    what = (
        r"no tokenizer.json encodes as transformers: '<\|endoftext\|>' is \[0\] in it and \[\d+, .*\] in transformers"
    )
    with pytest.raises(DataError, match=what):
        given(written(tmp_path, "bpe", tokenizer_config__json=settings))


FOREIGN = {
    "tokenizer.model": (b"IQ== 0\nIg== 1\n", "a tiktoken file, which has neither the pattern of words nor special"),
    "qwen.tiktoken": (b"IQ== 0\nIg== 1\n", "a tiktoken file, which has neither"),
    "tekken.json": (b'{"vocab": [{"rank": 0, "token_bytes": "AA=="}]}', r"a vocabulary of mistral-common \(tekken\)"),
    "model.gguf": (b"GGUF\x03\0\0\0", "a GGUF file, which llama.cpp reads"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_formats_of_other_programs_are_named_with_what_to_give(name, tmp_path):
    content, what = FOREIGN[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match=rf"{name}: {what}.*; give the folder of a release(, or its| with a) token"):
            given(path)


def test_a_sentencepiece_model_as_a_file_asks_for_its_folder(tmp_path):
    (tmp_path / "spiece.model").write_bytes(pieces())
    with pytest.raises(DataError, match=r"a sentencepiece model, whose special tokens are in the files beside it"):
        given(tmp_path / "spiece.model")


# sentencepiece models: the truth is the program.

BYTES = {"byte_fallback": True, "vocab_size": 500}
LLAMA = BYTES | {
    "model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
}  # fmt: skip
KINDS = {
    "unigram": {},
    "bpe": {"model_type": "bpe"},
    "char": {"model_type": "char"},
    "bytes": BYTES,
    "llama": LLAMA,
    "gemma": LLAMA | {"add_dummy_prefix": False},
    "identity": {"normalization_rule_name": "identity"},
    "fold": {"normalization_rule_name": "nmt_nfkc_cf"},
    "spaces": {"remove_extra_whitespaces": False},
    "bare": {"add_dummy_prefix": False},
    "digits": {"split_digits": True},
    "symbols": {"user_defined_symbols": ["<sym>", "tele"]},
    "symbols, bare bpe": LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": ["<sym>"]},
    "control": {"control_symbols": ["<ctl>"]},
    "unknown": {"unk_piece": "[UNK]"},
}
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "pad_piece": "<pad>"}
FAMILIES = {
    "t5": ("spiece.model", {"model_type": "t5"}, T5),
    "llama": ("tokenizer.model", {"model_type": "llama", "tokenizer_class": "LlamaTokenizer"}, {}),
    "mistral": ("tokenizer.model", {"model_type": "mistral", "tokenizer_class": "LlamaTokenizer"}, {}),
    "xlm-roberta": ("sentencepiece.bpe.model", {"model_type": "xlm-roberta"}, {}),
    "alone": ("tokenizer.model", None, {}),
    "t5, other ids": ("spiece.model", {"model_type": "t5"}, {}),
}
MEANT = (
    "", " ", "  ", " a", "a ", "  a  b   c ", "a\nb\n\n", "\r\n a", "\ta", "007 12345", "<sym>a <sym> b<sym>television",
    "caf\u00e9 e\u0323\u0302 \uff76\uff9e \ufb01 \u212b \u1112\u1161\u11ab \u0928\u093c",
    "\u2581a\u2581", "x\u200by \U0001f600 \u4e2d",
    "x" * 400, "a<0x41> <0x41>b",
)  # fmt: skip


@cache
def pieces(**options):
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, hard_vocab_limit=False, minloglevel=2, num_threads=1,
        **{"vocab_size": 300} | {key: list(one) if isinstance(one, tuple) else one for key, one in options.items()},
    )  # fmt: skip
    return model.getvalue()


def write_pieces(folder, family, kind):
    name, config, roles = FAMILIES[family]
    options = roles | (KINDS[kind] if isinstance(kind, str) else kind)
    content = pieces(**{key: tuple(one) if isinstance(one, list) else one for key, one in options.items()})
    (folder / name).write_bytes(content)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return SentencePieceProcessor(model_proto=content)


PAIRS = [
    *(("llama", kind) for kind in KINDS),
    *(("t5", kind) for kind in ("unigram", "spaces", "identity", "symbols", "unknown")),
    ("t5, other ids", "unigram"),
    *(("mistral", kind) for kind in ("llama", "unigram")),
    *(("xlm-roberta", kind) for kind in ("unigram", "bare")),
    *(("alone", kind) for kind in ("llama", "unigram", "bytes")),
]


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_a_sentencepiece_model_is_read_as_sentencepiece_reads_it(family, kind, tmp_path):
    program = write_pieces(tmp_path, family, kind)
    ours = Tokenizer.from_buffer(given(tmp_path).content)
    unknown = ours.id_to_token(3) if family == "xlm-roberta" else program.id_to_piece(program.unk_id())
    for text in (*LINES, *MEANT):
        ids = program.encode(text)
        found = ours.encode(text, add_special_tokens=False).ids
        if family != "xlm-roberta":  # its own ids are one higher
            assert found == ids, text
        names = [unknown if one == program.unk_id() else program.id_to_piece(one) for one in ids]
        assert [ours.id_to_token(one) for one in found] == names, text


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ({"model_type": "word"}, "a sentencepiece model of whole words; give one of unigram, bpe or char"),
        ({"treat_whitespace_as_suffix": True}, r"sentencepiece encodes 'a' as \['a\u2581'\], and a tokenizer.json"),
        (
            LLAMA | {"user_defined_symbols": ["<sym>"]},
            r"sentencepiece encodes '<sym>' as \['\u2581', '<sym>'\], and a tokenizer.json of its model as \['<sym>'\]",
        ),
    ],
)
def test_rules_that_no_tokenizer_json_has_are_refused_with_the_text(kind, what, tmp_path):
    write_pieces(tmp_path, "llama", kind)
    with pytest.raises(DataError, match=what):
        given(tmp_path)


def test_a_damaged_sentencepiece_model_is_one_line(tmp_path):
    written(tmp_path, config__json={"model_type": "llama"})
    (tmp_path / "tokenizer.model").write_bytes(pieces()[:1000])
    with pytest.raises(DataError, match=r"its tokenizer cannot be read: .+; fetch the folder again") as caught:
        given(tmp_path)
    assert "\n" not in caught.value.line()


def make_holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 20 * 2**30)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (os.mkfifo, "not a regular file"),
        (Path.mkdir, "not a regular file"),
        (make_holes, "larger than 268,435,456 bytes"),
    ],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "tokenizer.model", "added_tokens.json"])
def test_a_file_that_would_block_or_fill_the_memory_is_refused(tmp_path, name, make, what):
    (tmp_path / "vocab.json").write_text("{}")
    make(tmp_path / name)
    for read in (read_released, list_tokenizer_files):
        with pytest.raises(DataError, match=f"{name}: {what}; give the folder of a tokenizer"):
            read(tmp_path)
