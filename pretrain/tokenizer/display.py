"""Tokens for people to look at."""

import json
from collections.abc import Iterable

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"


def display_tokens(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    r"""Returns what each id stands for, one string each, special tokens by their names.

    White space is itself. Bytes of a character that another token completes are written as escapes: `\xe2\x96`. An id
    that the vocabulary does not have is the empty string.
    """
    of_bytes = tokenizer.decoder is not None and json.loads(tokenizer.decoder.__getstate__())["type"] == "ByteLevel"
    return [_display(tokenizer, number, of_bytes) for number in ids]


def _display(tokenizer: Tokenizer, number: int, of_bytes: bool) -> str:
    text = str(tokenizer.decode([number], skip_special_tokens=False))
    if _REPLACEMENT not in text:
        return text
    content = str(tokenizer.id_to_token(number))
    if of_bytes and all(character in _BYTE_OF for character in content):
        return bytes(_BYTE_OF[character] for character in content).decode("utf-8", "backslashreplace")
    if content.startswith("<0x"):
        return bytes([int(content[3:5], 16)]).decode("utf-8", "backslashreplace")
    return text


def _byte_spellings() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary: printable ones are themselves, others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_spellings()
