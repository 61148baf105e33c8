"""A tokenizer and its file, tokenizer.json."""

import hashlib
from pathlib import Path

from tokenizers import Tokenizer

from pretrain.errors import DataError
from pretrain.tokenizer.plain import encode_plain_text


def dump_tokenizer(tokenizer: Tokenizer) -> bytes:
    """Returns the content of the tokenizer's `tokenizer.json`."""
    return (tokenizer.to_str(pretty=True) + "\n").encode()


def parse_tokenizer(content: bytes, where: str) -> Tokenizer:
    """Returns the tokenizer of a `tokenizer.json`, as the file has it.

    Raises:
        DataError: Not a tokenizer; `where` says which.
    """
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # `tokenizers` raises plain Exception and ValueError
        raise DataError(
            f"not a tokenizer: {error}", where=where, fix="give a tokenizer.json as `tokenizers` saves it"
        ) from error


def read_tokenizer_file(path: Path) -> bytes:
    """Returns the content of a file. Raises: DataError, where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer: {error.strerror or error}", where=str(path), fix="give a tokenizer.json"
        ) from error


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a `tokenizer.json`, for plain text.

    Raises:
        DataError: No such file, or not a tokenizer.
    """
    return encode_plain_text(parse_tokenizer(read_tokenizer_file(path), str(path)))


def tokenizer_hash(path: Path) -> str:
    """Returns the sha256 of the file, in hex: the identity of a vocabulary across shards, runs and checkpoints."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
