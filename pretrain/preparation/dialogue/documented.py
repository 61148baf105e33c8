"""Documentation that a machine has: modules of Python's library and their functions, manual pages.

Modules are imported, as functions in C have no source to parse; the import of MODULES has no effect.
"""

import builtins
import gzip
import importlib
import inspect
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

from pretrain.preparation.dialogue.question import words

MODULES = words(
    "base64 bisect calendar cmath copy fnmatch functools getpass glob gzip hashlib heapq html "
    "inspect json linecache math operator os.path pickle platform random re secrets shlex "
    "shutil statistics struct textwrap time timeit tokenize traceback urllib.parse warnings "
    "zlib"
)
MANUALS = Path("/usr/share/man/man1")
PACKAGE = "GNU coreutils"
"""Package of the commands that questions are about, as its pages name it."""
_PURPOSE = re.compile(r'^\.SH "?NAME"?\n(?:\.\\".*\n)*([\w.-]+) \\- (.*)$', re.MULTILINE)
_MARKUP = re.compile(r"^[.'].*$\n?|\\f.|\\[&,/]", re.MULTILINE)
_HEAD_CHARS = 400
WORDNET = Path("/usr/share/dictd/wn.index")
"""Index of WordNet as Debian's package dict-wn has it; the definitions are beside it, in `wn.dict.dz`."""
MAX_WORDS = 200
"""Words of WordNet that questions are about: those with the most to say, as they are common."""
_WORD = re.compile(r"^([a-z]{4,7})\t([\w+/]+)\t([\w+/]+)$", re.ASCII | re.MULTILINE)
_NOUN = re.compile(r"\n    n (?:1: )?([a-z][a-z\s]{9,40})(?:;|\n    2:|\n\Z)")
_BASE_64 = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"


@dataclass(frozen=True, slots=True)
class Function:
    """Function of a module: its arguments, where Python has them, and its first sentence."""

    module: str
    name: str
    arguments: tuple[str, ...]
    purpose: str

    @property
    def full_name(self) -> str:
        """The name behind its module."""
        return f"{self.module}.{self.name}"


def _public_names(module_name: str, module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None)
    if names is None:
        members = vars(module).items()
        names = [name for name, one in members if getattr(one, "__module__", "") == module_name]
    return sorted(name for name in names if not name.startswith("_"))


def read_functions() -> list[Function]:
    """Returns the functions whose names one module alone has, by module and name."""
    by_name: dict[str, list[Function]] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in _public_names(module_name, module):
            value = getattr(module, name)
            if inspect.isroutine(value) and not hasattr(builtins, name):
                one = Function(module_name, name, _arguments(value), _purpose(value))
                by_name.setdefault(name, []).append(one)
    return [functions[0] for functions in by_name.values() if len(functions) == 1]


def _arguments(function: object) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # one in C without a signature
        return ()


def _purpose(function: object) -> str:
    paragraph = (inspect.getdoc(function) or "").split("\n\n")[0]
    return paragraph.replace("\n", " ").split(". ")[0].strip().removesuffix(".")


@cache
def _pages() -> tuple[str, ...]:
    texts = []
    for path in sorted(MANUALS.glob("*.1.gz")):
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as page:
            head = page.read(_HEAD_CHARS)
            if PACKAGE in head:
                texts.append(head + page.read())
    return tuple(texts)


def read_commands() -> list[tuple[str, str]]:
    """Returns the commands of coreutils with their purposes; none without manual pages."""
    named = (_PURPOSE.search(page) for page in _pages())
    return [(match[1], match[2].strip()) for match in named if match]


def read_definitions() -> list[tuple[str, str]]:
    """Returns common nouns with their first sense in WordNet; none without it."""
    if not WORDNET.is_file():
        return []
    content = gzip.decompress(WORDNET.with_suffix(".dict.dz").read_bytes())
    defined: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for word, place, size in _WORD.findall(WORDNET.read_text(encoding="utf-8")):
        start = _number(place)
        text = content[start : start + _number(size)].decode()
        if match := _NOUN.search(text):
            defined[word] = " ".join(match[1].split())
            sizes[word] = len(text)
    common = sorted(sizes, key=lambda word: -sizes[word])[:MAX_WORDS]
    return [(word, defined[word]) for word in common]


def _number(digits: str) -> int:
    """Returns a number to the base of 64, as indexes of dictd have it."""
    value = 0
    for digit in digits:
        value = 64 * value + _BASE_64.index(digit)
    return value


def read_texts() -> Iterator[str]:
    """Yields topics of the language, documentation of modules with their members, and manual pages."""
    yield from (text for _, text in sorted(topics.items()))
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        parts = [inspect.getdoc(module) or ""]
        for name in _public_names(module_name, module):
            value = getattr(module, name)
            members = {name: value}
            if inspect.isclass(value):
                for inner in sorted(vars(value)):
                    if not inner.startswith("_"):
                        members[f"{name}.{inner}"] = getattr(value, inner)
            for member, one in members.items():
                if text := inspect.getdoc(one):
                    parts.append(f"{module_name}.{member}\n{text}")
        yield "\n\n".join(parts)
    for page in _pages():
        yield _MARKUP.sub("", page).replace("\\-", "-")
