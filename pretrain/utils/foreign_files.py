"""Formats of others that nothing here reads, by first bytes and names, and what to do with each.

    name_text     an input of `prepare`: documents, tables, archives, databases
    name_compressed    a file that is not compressed as its name says
    name_model    a path where a model is expected: a file, or a folder without config.json
    name_vocabulary    a file of a tokenizer of another program

A name alone decides where the content cannot be looked at, as of an address.
"""

import codecs
import os
import re
from pathlib import Path

from pretrain.utils.safe_read import parse_json, read_bounded

HEAD_BYTES = 64

_AS_TEXT = "export its text first, as .txt, .jsonl or .csv"
_UNPACK = "unpack it first"
_FOLDER = "give the Hugging Face folder that it was made from"
_SAFE = "save it as a Hugging Face folder (save_pretrained: config.json and .safetensors)"

# First bytes -> what they are, and the remedy.
_TEXT_HEADS = {
    b"%PDF": ("a PDF", "extract its text first, as by pdftotext"),
    b"\xd0\xcf\x11\xe0": ("a document of an old Office", _AS_TEXT),
    b"SQLite format 3": ("an SQLite database", "export it first: sqlite3 -csv -header FILE 'SELECT ...' > NEW.csv"),
    b"Rar!": ("a RAR archive", _UNPACK),
    b"7z\xbc\xaf": ("a 7z archive", _UNPACK),
    b"LZIP": ("compressed by lzip", "decompress it first: lzip -d FILE"),
    b"\x04\x22\x4d\x18": ("compressed by lz4", "decompress it first: lz4 -d FILE"),
    b"\x1f\x8b": ("compressed by gzip", "give it the ending .gz, as in FILE.jsonl.gz"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "give it the ending .zst, as in FILE.jsonl.zst"),
    b"\xfd7zXZ": ("compressed by xz", "give it the ending .xz, as in FILE.jsonl.xz"),
    b"\x5d\0\0": ("compressed by lzma", "decompress it first: xz -d --format=lzma < FILE > NEW_FILE"),
    b"BZh": ("compressed by bzip2", "give it the ending .bz2, as in FILE.jsonl.bz2"),
    b"PAR1": ("Parquet", "give it the ending .parquet"),
    b"ARROW1": ("an Arrow file", "give it the ending .arrow"),
    b"\x93NUMPY": ("a NumPy array", "tokens: prepare --from nanogpt reads .bin and .npy"),
    b"\x89HDF": ("an HDF5 file", _AS_TEXT),
    b"GGUF": ("a model in GGUF", "give texts"),
    b"PK\x03\x04": ("a zip archive", _UNPACK),
}
_TEXT_ENDINGS = {
    ".xlsx": ("an Excel workbook", "save the sheet as CSV"),
    ".xls": ("an Excel workbook", "save the sheet as CSV"),
    ".ods": ("a spreadsheet", "save the sheet as CSV"),
    ".docx": ("a Word document", "save it as text, as by pandoc -t plain"),
    ".doc": ("a Word document", "save it as text"),
    ".odt": ("an OpenDocument text", "save it as text, as by pandoc -t plain"),
    ".epub": ("an e-book", "save it as text, as by pandoc -t plain"),
    ".rtf": ("rich text", "save it as text, as by pandoc -t plain"),
    ".pdf": _TEXT_HEADS[b"%PDF"],
    **dict.fromkeys((".html", ".htm", ".xhtml"), ("a web page", "put pages into a .warc, or extract their text first")),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3"), _TEXT_HEADS[b"SQLite format 3"]),
    ".rar": _TEXT_HEADS[b"Rar!"],
    ".7z": _TEXT_HEADS[b"7z\xbc\xaf"],
    ".lz": _TEXT_HEADS[b"LZIP"],
    ".lz4": _TEXT_HEADS[b"\x04\x22\x4d\x18"],
    ".tgz": ("a compressed tar", "give it the ending .tar.gz"),
    ".zip": _TEXT_HEADS[b"PK\x03\x04"],
    **dict.fromkeys((".pkl", ".pickle"), ("a pickle, which may run code", "save its texts as .jsonl")),
}
COMPRESSED_HEADS = {
    "gzip": (b"\x1f\x8b",),
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes([byte]) + b"\x2a\x4d\x18" for byte in range(0x50, 0x60))),
    "xz": (b"\xfd7zXZ",),
    "bzip2": (b"BZh",),
}
"""First bytes by compression; of zstd those of skipped frames too."""
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_WHOLE = "give the Hugging Face folder of the model, with config.json, weights and tokenizer.json"
_PICKLED = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
_MODEL_HEADS = {
    b"GGUF": ("a GGUF file, which export writes and nothing reads", _FOLDER),
    **dict.fromkeys((b"ggml", b"lmgg", b"tjgg", b"fmgg"), ("a GGML file", _FOLDER)),
    b"\x93NUMPY": ("a NumPy array", _SAFE),
    b"\x89HDF": ("weights of Keras in HDF5", _SAFE),
}
_MODEL_ENDINGS = {
    ".gguf": _MODEL_HEADS[b"GGUF"],
    ".ggml": _MODEL_HEADS[b"ggml"],
    ".onnx": ("an ONNX graph, which export writes and nothing reads", _FOLDER),
    ".safetensors": ("weights without the config.json that belongs to them", "give the folder that has both"),
    **dict.fromkeys((".npz", ".npy"), ("NumPy arrays", _SAFE)),
    **dict.fromkeys(_PICKLED, ("a pickle of weights without a config.json", _SAFE)),
    **dict.fromkeys((".h5", ".keras", ".msgpack", ".tflite"), ("weights of another framework", _SAFE)),
    ".nemo": ("a checkpoint of NeMo", "convert it to a Hugging Face folder by NeMo's own script"),
}


def name_text(name: str, head: bytes = b"") -> tuple[str, str] | None:
    """Returns what an input is that is no text, by its name and first bytes, and what to do; or None."""
    ending = Path(name).suffix.lower()
    # Office documents are zips.
    return _TEXT_ENDINGS.get(ending) or _by_head(_TEXT_HEADS, head)


def name_compressed(compression: str, head: bytes) -> tuple[str, str] | None:
    """Returns what a file is that is not compressed so, by its first bytes, and what to do; or None."""
    magics = COMPRESSED_HEADS[compression]
    if head.startswith(magics) or any(magic.startswith(head) for magic in magics):
        return None  # the beginning of one too
    if named := _by_head(_TEXT_HEADS, head):
        return named
    if not head.strip(b"\0"):
        return "zeros", "copy or download the file again"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # which may cut a character
    except UnicodeDecodeError:
        return None
    if any(one < " " and not one.isspace() for one in text):
        return None
    return f"plain text ({text[:20]!r})", "leave the ending of the compression out of its name"


def name_vocabulary(path: Path) -> str | None:
    """Returns the format of a vocabulary of another program; None: not known."""
    if not path.is_file():  # nor a pipe, which would block
        return None
    try:
        with path.open("rb") as file:
            start = file.read(1 << 16)
    except OSError:
        return None
    if start.startswith(b"GGUF"):
        return "a GGUF file, which llama.cpp reads"
    if _TIKTOKEN.match(start):
        return "a tiktoken file, which has neither the pattern of words nor special tokens"
    if start.lstrip().startswith(b"{") and b'"token_bytes"' in start:
        return "a vocabulary of mistral-common (tekken)"
    return None


def name_model(path: Path) -> tuple[str, str] | None:
    """Returns what a path is that is no model of ours, and what to do; None: nothing known."""
    if not path.is_dir():
        return _name_file(path)
    if (path / "adapter_config.json").is_file():
        base = _base_of(path / "adapter_config.json")
        return f"adapters of PEFT over {base}", "merge them first (peft: merge_and_unload, then save_pretrained)"
    if (path / "params.json").is_file():
        script = "transformers' convert_llama_weights_to_hf.py"
        return (
            "weights in the format of Meta or Mistral (params.json)",
            f"convert them by {script}, or fetch the -hf folder",
        )
    files = sorted(path.iterdir()) if os.access(path, os.R_OK | os.X_OK) else []
    for file in files:
        if file.suffix.lower() in _MODEL_ENDINGS and (foreign := name_model(file)):
            return f"{foreign[0]} ({file.name})", foreign[1]
    for file in files:
        if file.suffix in (".json", ".model", ".tiktoken") and (vocabulary := name_vocabulary(file)):
            return f"a tokenizer without a model: {file.name} is {vocabulary}", _WHOLE
    return None


def _name_file(path: Path) -> tuple[str, str] | None:
    head = read_head(path)
    ending = path.suffix.lower() if head else ""
    if ending in _PICKLED and not head.startswith((b"PK", b"\x80")):
        return None  # tokens, or anything else
    if named := _by_head(_MODEL_HEADS, head) or _MODEL_ENDINGS.get(ending):
        return named
    vocabulary = name_vocabulary(path)
    return None if vocabulary is None else (vocabulary, _WHOLE)


def read_head(path: Path) -> bytes:
    """Returns the first bytes of a regular file; none where there is no such file."""
    if not path.is_file():  # nor a pipe, which would block
        return b""
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def _base_of(config: Path) -> str:
    try:
        return str(parse_json(read_bounded(config, 2**20))["base_model_name_or_path"])[:100]
    except (OSError, ValueError, KeyError, TypeError):
        return "a model that they do not name"


def _by_head(known: dict[bytes, tuple[str, str]], head: bytes) -> tuple[str, str] | None:
    return next((name for magic, name in known.items() if head.startswith(magic)), None)
