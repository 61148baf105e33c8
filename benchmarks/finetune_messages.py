"""Software messages and their translations, from the gettext catalogs of this machine: parallel text of a domain.

/usr/share/locale/de/LC_MESSAGES/*.mo  ->  messages of one line that are sentences  ->  train, validation, test

Kept are messages of 3 to 30 words, nearly all letters, without formats, markup, options and plurals. A message comes
once: one that differs by case, marks or numbers only, in either language, is the same. Which split it is in is a hash
of its letters. Similar messages of other programs stay: a memory of translations (`benchmarks/finetune_translate.py`)
says what they are worth.
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

CATALOGS = Path("/usr/share/locale/de/LC_MESSAGES")
NAMES = ("iso_", "xkeyboard-config", "shared-mime-info")
"""Catalogs of the names of countries, languages, keyboards and kinds of files: no messages."""

MAGIC = 0x950412DE
CONTEXT_END, PLURAL_END = b"\4", b"\0"
TEST_SHARE, VALIDATION_SHARE = 0.035, 0.02
_SHARES = 10_000
_NOT_PROSE = re.compile(r"[%<>{}\\|=$_@`\t\n#~]|--|  ")
_LETTERS = re.compile(r"[^\W\d_]+")

Pair = tuple[str, str]


def read_catalog(path: Path) -> Iterator[Pair]:
    """Yields messages and translations of a compiled catalog (gettext manual, "The Format of GNU MO Files").

    Contexts are cut off; plurals, and messages without a translation, are left out.
    """
    content = path.read_bytes()
    order = "<" if struct.unpack_from("<I", content)[0] == MAGIC else ">"
    count, originals, translations = struct.unpack_from(f"{order}3I", content, 8)
    charset = "utf-8"
    for number in range(count):
        texts = []
        for table in (originals, translations):
            length, start = struct.unpack_from(f"{order}2I", content, table + 8 * number)
            texts.append(content[start : start + length])
        original, translation = texts
        if not original:  # the header, which sorts first
            named = re.search(rb"charset=([\w-]+)", translation)
            charset = named.group(1).decode() if named else charset
        elif PLURAL_END not in original and translation:
            yield original.split(CONTEXT_END)[-1].decode(charset), translation.decode(charset)


def letters_of(text: str) -> str:
    """Returns the words of a text in lower case, without marks and numbers: what makes two messages the same."""
    return " ".join(_LETTERS.findall(text.lower()))


def is_sentence(source: str, target: str) -> bool:
    """Returns whether a message reads as text, and has been translated."""
    if _NOT_PROSE.search(source) or _NOT_PROSE.search(target) or source == target:
        return False
    letters = sum(letter.isalpha() or letter == " " for letter in source)
    return 3 <= len(source.split()) <= 30 and len(target.split()) <= 40 and letters >= 0.85 * len(source)


def messages(folder: Path = CATALOGS) -> Iterator[Pair]:
    """Yields the pairs that are kept, each once, by catalog and in its order."""
    seen: set[str] = set()
    for path in sorted(folder.glob("*.mo")):
        if path.name.startswith(NAMES):
            continue
        for source, target in read_catalog(path):
            pair = source.strip(), target.strip()
            keys = {f"en {letters_of(pair[0])}", f"de {letters_of(pair[1])}"}
            if is_sentence(*pair) and not keys & seen:
                seen |= keys
                yield pair


def split_of(source: str) -> str:
    """Returns `train`, `validation` or `test`, by a hash of the letters."""
    drawn = int.from_bytes(hashlib.sha256(letters_of(source).encode()).digest()[:8], "big") % _SHARES / _SHARES
    if drawn < TEST_SHARE:
        return "test"
    return "validation" if drawn < TEST_SHARE + VALIDATION_SHARE else "train"


def write_messages(folder: Path, catalogs: Path = CATALOGS) -> dict[str, list[Pair]]:
    """Writes train.jsonl, validation.jsonl, test.en and test.de; returns the pairs of each split.

    Raises:
        SystemExit: There are too few to learn from.
    """
    found: dict[str, list[Pair]] = {"train": [], "validation": [], "test": []}
    for pair in messages(catalogs):
        found[split_of(pair[0])].append(pair)
    if len(found["train"]) < 1000:
        raise SystemExit(f"{catalogs} has {len(found['train'])} messages to learn from: install German catalogs")
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        rows = [json.dumps({"source": source, "target": target}) for source, target in found[split]]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    for number, language in enumerate(("en", "de")):
        lines = [pair[number] for pair in found["test"]]
        (folder / f"test.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return found
