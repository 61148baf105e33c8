"""Files of others where texts or models are expected: what they are, and what to do."""

import gzip
import json
import re
import sqlite3
import zipfile

import numpy as np
import pytest

from pretrain.artifact.model_path import open_source
from pretrain.errors import CheckpointError, ConfigError, DataError
from pretrain.inspect.describe import describe
from pretrain.interop.release import fetch_release
from tests.helpers.reading import texts


def write(path):
    """Writes a small file of the format that its name says."""
    if path.suffix == ".db":
        with sqlite3.connect(path) as database:
            database.execute("create table t (text)")
    elif path.suffix in (".npz", ".npy"):
        (np.savez if path.suffix == ".npz" else np.save)(path, np.zeros(3))
    elif path.suffix in (".docx", ".xlsx", ".pt", ".bin", ".zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a", "b")
    else:
        content = {".pdf": b"%PDF-1.7\n\xe2\xe3\xcf\xd3", ".gguf": b"GGUF\3\0\0\0", ".ggml": b"lmgg\0\0\0\0"}
        path.write_bytes(content.get(path.suffix, b"<html></html>"))
    return path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.pdf", "a PDF; extract its text first, as by pdftotext; "),
        ("a.docx", "a Word document; save it as text, as by pandoc"),
        ("a.xlsx", "an Excel workbook; save the sheet as CSV"),
        ("a.html", "a web page; put pages into a .warc"),
        ("a.db", "an SQLite database; export it first: sqlite3 -csv -header FILE"),
        ("a.zip", "a zip archive; unpack it first"),
        ("a.lz4", "compressed by lz4; decompress it first"),
        ("a.7z", "a 7z archive; unpack it first"),
        ("a.npy", "a NumPy array; tokens: prepare --from nanogpt"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path, name, message):
    path = write(tmp_path / name)
    with pytest.raises(DataError, match=rf"{re.escape(name)}: {re.escape(message)}"):
        texts(path)
    # By content, where the name says nothing.
    if name not in ("a.html", "a.docx", "a.xlsx", "a.lz4", "a.7z"):
        other = path.rename(tmp_path / "a.unknown")
        with pytest.raises(DataError, match=rf"a\.unknown: {re.escape(message)}"):
            texts(other)


def test_a_wrong_ending_is_named_by_the_content(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    with pytest.raises(
        DataError, match=r"a\.jsonl, byte 1: compressed by gzip, by its first bytes, not UTF-8; give it"
    ):
        texts(tmp_path / "a.jsonl")
    write(tmp_path / "b.pdf").rename(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"b\.txt, byte 9: a PDF, by its first bytes, not UTF-8; extract its text"):
        texts(tmp_path / "b.txt")


FILES = {
    "a.gguf": "a GGUF file, which export writes and nothing reads; give the Hugging Face folder that it was made from",
    "a.ggml": "a GGML file; give the Hugging Face folder",
    "a.onnx": "an ONNX graph, which export writes and nothing reads; give the Hugging Face folder",
    "a.pt": "a pickle of weights without a config.json; save it as a Hugging Face folder",
    "a.bin": "a pickle of weights without a config.json; save it",
    "a.npz": "NumPy arrays; save it",
    "a.safetensors": "weights without the config.json that belongs to them; give the folder that has both",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_or_folder_that_is_no_model_of_ours_is_named(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    file = write(folder / name)
    what, fix = FILES[name].split("; ", 1)
    for path, message in ((file, f"{what}; {fix}"), (folder, f"{what} ({name}); {fix}")):
        check(path, message)


def check(path, message):
    for call, kind in (
        (open_source, CheckpointError),
        (describe, DataError),
        (lambda p: fetch_release(str(p)), ConfigError),
    ):
        with pytest.raises(kind, match=re.escape(f"{path}: {message}")):
            call(path)


def test_folders_of_adapters_and_of_meta_are_named(tmp_path):
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "lab/base"}))
    check(tmp_path / "lora", "adapters of PEFT over lab/base; merge them first (peft: merge_and_unload, then save")
    (tmp_path / "lora/adapter_config.json").write_text("[" * 100_000)
    check(tmp_path / "lora", "adapters of PEFT over a model that they do not name")
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/params.json").write_text('{"dim": 4096}')
    (tmp_path / "meta/consolidated.00.pth").write_bytes(b"PK")
    check(tmp_path / "meta", "weights in the format of Meta or Mistral (params.json); convert them by transformers'")


VOCABULARIES = {
    "tekken.json": (
        b'{"config": {}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}',
        "a vocabulary of mistral-common (tekken)",
    ),
    "qwen.tiktoken": (
        b"IQ== 0\nIg== 1\n",
        "a tiktoken file, which has neither the pattern of words nor special tokens",
    ),
    "tokenizer.model": (
        b"IQ== 0\nIg== 1\n",
        "a tiktoken file, which has neither the pattern of words nor special tokens",
    ),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_vocabulary_without_a_model_is_named(tmp_path, name):
    content, what = VOCABULARIES[name]
    (tmp_path / name).write_bytes(content)
    fix = "give the Hugging Face folder of the model, with config.json, weights and tokenizer.json"
    check(tmp_path, f"a tokenizer without a model: {name} is {what}; {fix}")
    check(tmp_path / name, f"{what}; {fix}")
