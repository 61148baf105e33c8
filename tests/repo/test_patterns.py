"""Patterns of the source take time that grows with the text: their steps are counted, on adversarial texts.

    source -> (pattern, method) -> re's own parse -> a matcher that backtracks as re does, and counts
           -> texts of n and of 2 n repetitions: about twice the steps

Fixed by possessive repeats (`\\w++`) and by a look behind at the beginning, `(?<!\\w)\\w++@`, without
which a search begins anew within each run.
"""

import ast
import fnmatch
import re
from collections.abc import Iterator, Sequence
from itertools import product
from re import _compiler, _parser
from re import _constants as op
from typing import Any

import pytest

from pretrain.families import FAMILIES
from tests.repo.source import SOURCE_FILES, findings_by_file

WHOLE = ("match", "fullmatch")
METHODS = (*WHOLE, "search", "sub", "subn", "split", "findall", "finditer")
MAKERS = (*METHODS, "compile", "Regex")
SIZE = 10
MOST_GROWTH = 2.6
"""Of the steps on twice the text: 2 where they are linear, 4 where they are quadratic, and a constant."""
MOST_STEPS = 50_000
NO_CHAR = "\x00"
POOL = "a0 \n\"'.,!-_/:[]{}<>%@?#=*+$|\\~\u2019" + NO_CHAR
MOST_PARTS = 5


class TooManyError(Exception):
    """Ends a match that backtracks exponentially."""


class StepCounter:
    """Matches as `re` does, attempt by attempt, and counts the items that are compared with a place of a text."""

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self.parsed = _parser.parse(pattern, flags)
        self._atoms: dict[str, re.Pattern[str]] = {}
        self._text = ""
        self._steps = 0

    def count(self, text: str, method: str) -> int:
        """Returns the steps of a method on a text. Raises: TooManyError."""
        self._text, self._steps, at = text, 0, 0
        if method in WHOLE:
            ends = self._ends(list(self.parsed), 0)
            next((end for end in ends if method == "match" or end == len(text)), None)
            return self._steps
        while at <= len(text):
            end = self.first_end(at)
            at = at + 1 if end is None else max(end, at + 1)
        return self._steps

    def first_end(self, at: int) -> int | None:
        """Returns the end of the match that begins at a place of the last text."""
        return next(self._ends(list(self.parsed), at), None)

    def is_at(self, kind: Any, value: Any, text: str, at: int) -> int | None:
        """Returns the end of a character, a set or a place; None: it is not there."""
        key = f"{kind}{value}"
        if key not in self._atoms:
            one = _parser.SubPattern(self.parsed.state, [(kind, value)])
            self._atoms[key] = _compiler.compile(one, self.parsed.state.flags)
        found = self._atoms[key].match(text, at)
        return None if found is None else found.end()

    def _ends(self, items: Sequence[Any], at: int) -> Iterator[int]:
        """Yields the ends of the matches of a sequence of items, in the order of attempts."""
        if not items:
            yield at
            return
        for middle in self._item(*items[0], at):
            yield from self._ends(items[1:], middle)

    def _item(self, kind: Any, value: Any, at: int) -> Iterator[int]:
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            ends = self._repeats(kind is op.MIN_REPEAT, *value[:2], list(value[2]), 0, at)
            yield from ends if kind is not op.POSSESSIVE_REPEAT else _first(ends)
        elif kind is op.ATOMIC_GROUP:
            yield from _first(self._ends(list(value), at))
        elif kind is op.BRANCH:
            for branch in value[1]:
                yield from self._ends(list(branch), at)
        elif kind is op.SUBPATTERN:
            yield from self._ends(list(value[3]), at)
        elif kind in (op.ASSERT, op.ASSERT_NOT):
            start = at if value[0] > 0 else at - value[1].getwidth()[0]
            is_found = start >= 0 and next(self._ends(list(value[1]), start), None) is not None
            yield from [at] if is_found == (kind is op.ASSERT) else []
        else:
            self._steps += 1
            if self._steps > MOST_STEPS:
                raise TooManyError
            end = self.is_at(kind, value, self._text, at)
            yield from [] if end is None else [end]

    def _repeats(self, is_lazy: bool, least: int, most: int, items: list[Any], done: int, at: int) -> Iterator[int]:
        if is_lazy and done >= least:
            yield at
        for middle in self._ends(items, at) if done < most else ():
            if middle > at or done < least:
                yield from self._repeats(is_lazy, least, most, items, done + 1, middle)
        if not is_lazy and done >= least:
            yield at


def _first(ends: Iterator[int]) -> Iterator[int]:
    end = next(ends, None)
    yield from [] if end is None else [end]


def _words_and_atoms(items: Any) -> Iterator[str | tuple[Any, Any]]:
    """Yields the words of a pattern, and its characters and sets."""
    word = ""
    for kind, value in items:
        if kind is op.LITERAL:
            word += chr(value)
        elif word:
            yield word
            word = ""
        if kind in (op.LITERAL, op.NOT_LITERAL, op.IN, op.ANY):
            yield kind, value
        inner = value if isinstance(value, tuple | list) else [value]
        for one in inner[1] if kind is op.BRANCH else inner:
            if isinstance(one, _parser.SubPattern):
                yield from _words_and_atoms(one)
    if word:
        yield word


def _parts(counter: StepCounter) -> list[str]:
    """Returns texts that a pattern tells apart: its words, and one character of each kind."""
    found = list(_words_and_atoms(counter.parsed))
    atoms = [one for one in found if isinstance(one, tuple)]
    kinds = {tuple(counter.is_at(*atom, char, 0) for atom in atoms): char for char in POOL}
    by_use = sorted(kinds, key=lambda kind: -sum(end is not None for end in kind))
    words = [one for one in found if isinstance(one, str) and len(one) > 1]
    return list(dict.fromkeys([*(kinds[kind] for kind in by_use[:MOST_PARTS]), *words[:2]]))


def texts(counter: StepCounter, size: int) -> Iterator[str]:
    """Yields texts that make a pattern backtrack, if any do: runs of what it tells apart, whose end fits nothing."""
    for one, other in product(_parts(counter), repeat=2):
        for text in (one * size + other * size, one + other * size, (one + other) * size):
            yield text + NO_CHAR


def _repeats_without_end(items: Any) -> bool:
    if isinstance(items, tuple | list | _parser.SubPattern):
        return any(map(_repeats_without_end, items))
    return items is op.MAXREPEAT


def growth(pattern: str, method: str, flags: int = 0) -> float:
    """Returns the largest factor of steps between texts and texts that are twice as long."""
    counter = StepCounter(pattern, flags)
    if not _repeats_without_end(counter.parsed):
        return 1
    pairs = zip(texts(counter, SIZE), texts(counter, 2 * SIZE), strict=True)
    try:
        return max(
            (counter.count(long, method) / max(counter.count(short, method), 1) for short, long in pairs), default=1
        )
    except TooManyError:
        return float("inf")


def _literal(node: ast.expr) -> str | None:
    """Returns the text of a pattern, with `x` for each value that is put in; None for one that is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(str(one.value) if isinstance(one, ast.Constant) else "x" for one in node.values)
    else:
        return None
    return re.sub(r"\\p\{\w+\}", "[.!?]", text)  # of `regex`, which `re` lacks


def _flags(call: ast.Call) -> int:
    given = [node for one in (*call.args[1:], *call.keywords) for node in ast.walk(one)]
    named = [getattr(re, node.attr, None) for node in given if isinstance(node, ast.Attribute)]
    return sum(one for one in named if isinstance(one, re.RegexFlag))


def patterns(tree: ast.Module) -> Iterator[tuple[int, str, str, int]]:
    """Yields line, pattern, method and flags of each use; of a compiled one, for each method called by its name."""
    uses: dict[str, set[str]] = {}
    names: dict[int, str] = {}
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in METHODS:  # `map(_NAME.search, ...)` is a use too
            uses.setdefault(ast.unparse(node.value), set()).add(node.attr)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            names[id(node.value)] = ast.unparse(node.targets[0])
        elif (
            isinstance(node, ast.Call)
            and (method := getattr(node.func, "attr", getattr(node.func, "id", ""))) in MAKERS
        ):
            calls.append((node, method, ast.unparse(node.func).rpartition(".")[0]))
    for call, method, owner in calls:
        if method == "Regex" or owner in ("re", "regex"):
            pattern = _literal(call.args[0])
            is_compiled = method in ("compile", "Regex")
            methods = uses.get(names.get(id(call), ""), {"search"}) if is_compiled else {method}
            if pattern is not None:
                yield from ((call.lineno, pattern, one, _flags(call)) for one in sorted(methods))


def findings(tree: ast.Module) -> list[str]:
    """Returns the patterns of a file whose steps grow faster than the text."""
    found = ((line, pattern, growth(pattern, method, flags)) for line, pattern, method, flags in patterns(tree))
    return [
        f"line {line}: {pattern} takes {factor:.1f} times" for line, pattern, factor in found if factor > MOST_GROWTH
    ]


def test_steps_of_every_pattern_grow_with_the_text():
    assert findings_by_file(SOURCE_FILES, findings) == {}


def test_patterns_of_tensor_names_grow_with_the_name():
    families = FAMILIES.values()
    uses = {(one, "fullmatch") for family in families for one in family.ignored}
    uses |= {(one, "sub") for family in families for one, _ in family.renames}
    assert len(uses) > 5 and [use for use in uses if growth(*use) > MOST_GROWTH] == []


@pytest.mark.parametrize(
    "code",
    [
        r"re.search(r'[.!?]+[\"\x27]*(?=\s|$)', text)",
        r"re.sub(r'(\w+://)(?:[^/\s]*@)?', '', text)",
        r"_X = re.compile(r'\A---\s*\n(.*?)\n---\s*(?:\n|\Z)', re.DOTALL)",
        r"_X = re.compile(r'\w+@')" + "\nmap(_X.search, texts)",
        "re.match(r'(a+)+$', text)",
        "re.fullmatch(r'[^/]*a[^/]*a[^/]*a[^/]*b', text)",
        "re.fullmatch(r'(?:.+/)?(?:.+/)?(?:.+/)?x', text)",
        "re.fullmatch(r'(a|a)*b', text)",
        "re.fullmatch(rf'{one}:([0-9]+[.]?[0-9]*)+', text)",
        r"split = Regex(r'(?=.*[0-9])a| ')",
    ],
)
def test_the_rule_finds_each_way_to_backtrack(code):
    assert len(findings(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        r"re.findall(r'(?<![.!?])[.!?]++[\"\x27]*+(?=\s|$)', text)",
        r"_X = re.compile(r'\w+@')" + "\n_X.match(text)",
        r"_X = re.compile(r'(?<!\w)\w+@')" + "\n_X.search(text)",
        "re.fullmatch(r'([0-9]+([.][0-9]*)?[dhms])+', text)",
        "re.sub(r'//[^/@ ]*@', '//', text)",
        f"re.fullmatch({fnmatch.translate('*a*a?[b-d]*a*b')!r}, text)",  # of a component of a path
    ],
)
def test_the_rule_lets_linear_patterns_pass(code):
    assert len(list(patterns(ast.parse(code)))) == 1 and findings(ast.parse(code)) == []


@pytest.mark.parametrize("text", ["", "a", "aab", 'b.!?" c! d', "a'b'c  d", "x://u@v/w?q"])
@pytest.mark.parametrize(
    "pattern", [r"(a|ab)+?b?", r"[.!?]++[\"]*(?=\s|$)", r"\b\w{2,}|(?<=a)'", r"(?>a+)b", r"^\w*:|$"]
)
def test_the_counter_matches_as_re_does(pattern, text):
    counter = StepCounter(pattern)
    counter.count(text, "search")
    ends = [counter.first_end(at) for at in range(len(text) + 1)]
    found = [re.compile(pattern).match(text, at) for at in range(len(text) + 1)]
    assert ends == [one and one.end() for one in found]
