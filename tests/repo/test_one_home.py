"""One home for each name that a config chooses: its own file and its registry; stages ask its record.

A file knows a name when it compares with it, or keeps it in a collection of names of the same registry (a table, a
tuple, a Literal). Homes are the folders of `pretrain/kinds/`; presets, which are data, may name anything.
"""

import ast
from collections import Counter
from collections.abc import Iterator

from pretrain.kinds.heads import HEADS
from pretrain.kinds.layouts import LAYOUTS
from pretrain.kinds.mixers import MIXERS
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.kinds.optimizers import OPTIMIZERS
from pretrain.kinds.runtimes import RUNTIMES
from pretrain.kinds.schedules import SCHEDULES
from pretrain.kinds.trackers import TRACKERS
from tests.repo.source import SOURCE_FILES, name, parse

REGISTRIES: dict[str, frozenset[str]] = {
    "objectives": frozenset(OBJECTIVES),
    "layouts": frozenset(LAYOUTS),
    "heads": frozenset(HEADS) - {"none"},
    "mixers": frozenset(MIXERS),
    "optimizers": frozenset(OPTIMIZERS),
    # A RoPE scaling is called `linear` too.
    "schedules": frozenset(SCHEDULES) - {"linear"},
    "trackers": frozenset(TRACKERS),
    "runtimes": frozenset(RUNTIMES),
}
"""Names of each registry, but for words that are something else as well."""
HOME = "pretrain/kinds/"
PRESETS = ("pretrain/families/",)

ALLOWED: dict[str, int] = {}
"""Files that know names, and how many places of each do. The list only shrinks; it is empty at the end."""


def strings(nodes: list[ast.expr | None]) -> list[str]:
    """Returns the texts among some nodes, and in the collections among them."""
    inner = [part for node in nodes if isinstance(node, ast.Tuple | ast.List | ast.Set) for part in node.elts]
    return [node.value for node in [*nodes, *inner] if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def places(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Yields the line and the registries of each place where code knows a name."""
    for node in ast.walk(tree):
        texts: list[str] = []
        least = 2
        if isinstance(node, ast.Compare):
            texts, least = strings([node.left, *node.comparators]), 1
        elif isinstance(node, ast.MatchValue):
            texts, least = strings([node.value]), 1
        elif isinstance(node, ast.Dict):
            texts = strings(list(node.keys))
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            texts = strings(list(node.elts))
        registries = {key for key, names in REGISTRIES.items() if len(names.intersection(texts)) >= least}
        if registries:
            yield node.lineno, registries


def test_a_name_has_one_home():
    counts: Counter[str] = Counter()
    for path in SOURCE_FILES:
        if not name(path).startswith((HOME, *PRESETS)):
            counts[name(path)] += sum(1 for _ in places(parse(path)))
    changed = {file: count for file, count in counts.items() if count != ALLOWED.get(file, 0)}
    changed |= {file: 0 for file in ALLOWED if file not in counts}
    # As text, because pytest shows all lines of a text, but only the first item of a dict.
    assert "\n".join(f"{file}: {ALLOWED.get(file, 0)} -> {count}" for file, count in changed.items()) == ""


def test_the_rule_itself():
    code = (
        "a == 'muon'\nb in ('dpo', 'x')\nc = {'lion': 1, 'soap': 2}\nd = {'text': 1}\ne = row['labels']\nf('wandb')\n"
    )
    assert list(places(ast.parse(code))) == [(1, {"optimizers"}), (2, {"objectives"}), (3, {"optimizers"})]
