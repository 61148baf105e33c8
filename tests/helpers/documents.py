"""Reads the Markdown files of the repository: their fenced blocks, and the commands in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCED = re.compile(r"^```(\w+) *(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, the file name behind it (or nothing), and its text."""

    language: str
    file: str
    text: str


def read_blocks(document: str, section: str = "") -> list[Block]:
    """Returns the fenced blocks of a document, in order, or those of a section of it."""
    text = (ROOT / document).read_text()
    if section:
        (text,) = [part for part in re.split(r"^## ", text, flags=re.MULTILINE) if part.startswith(f"{section}\n")]
    return [Block(*match.groups()) for match in _FENCED.finditer(text)]


def read_commands(document: str) -> list[str]:
    """Returns the lines of the `sh` blocks of a document."""
    return [line for block in read_blocks(document) if block.language == "sh" for line in block.text.splitlines()]


def pretrain_arguments(line: str) -> list[str] | None:
    """Returns what follows `pretrain` in a command line, whatever launches it; None where it is not there."""
    words = shlex.split(line, comments=True)
    return words[words.index("pretrain") + 1 :] if "pretrain" in words else None
