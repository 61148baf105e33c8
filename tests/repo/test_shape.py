"""The shape of the source tree: rooms and their sizes, grain, names, cycles, density and prose.

Ceilings are those of today and only fall: a test that finds slack names the number to write instead. One that has to
rise rises in the commit that adds the capability, with the reason in its message.
"""

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

from tests.repo.source import ROOT, SOURCE_FILES, module_name, name, parse

ROOMS: dict[str, tuple[int, int]] = {
    "": (8, 1307),
    "artifact": (11, 2320),
    "attention_maps": (6, 1025),
    "checkpoint": (14, 2783),
    "cli": (16, 2937),
    "config": (30, 6316),
    "data": (13, 2624),
    "datacheck": (11, 2327),
    "doctor": (13, 2012),
    "drill": (6, 862),
    "engine": (7, 1380),
    "evaluate": (12, 2355),
    "generate": (11, 1842),
    "inspect": (3, 472),
    "interop": (31, 6190),
    "model": (26, 5485),
    "objective": (14, 2178),
    "optim": (6, 1360),
    "plan": (16, 3825),
    "prepare": (50, 9424),
    "pretrain_launch": (19, 3706),
    "report": (8, 1624),
    "run": (7, 1524),
    "scale": (7, 1478),
    "shards": (12, 2514),
    "tokenizer": (12, 2733),
    "tracking": (12, 1912),
    "train": (16, 3389),
    "utils": (14, 2170),
}
"""Files and lines of each folder of `pretrain/` (modules beside them are the room ""), and of `launch/`."""
LINES_SLACK = 60
MAX_FLAT_MODULES = 18
MIN_MEAN_LINES = 140
MIN_LINES_OF_ONE_IMPORTER = 60
FACADE = "pretrain"
"""Imports what it offers at the first use of each name only."""
SHARED_BASENAMES = {"__init__", "build"}
SECTIONS = {"config", "cli"}
"""Rooms whose files are named after a section or a group of commands, as the room is that they belong to."""

MAX_WIDTH = 100
MAX_WIDE_LINES = 0.03
MAX_PARALLEL_ASSIGNMENTS = 0.02
MIN_COMMENT_LINES = 0.02

RIDDLE = re.compile(r"(What|Whether|How|Who|Which|Where)\b")
HEADLESS = re.compile(r"(Of|As|Likewise|Its)\b")
ENTRY = re.compile(r"^\s+\w+: (.+)$", re.MULTILINE)

BETTER_WORDS = {
    "mend": "fix, correct",
    "told": "given, reported, sent",
    "nobody": "no process, no reader",
    "in vain": "timed out",
    "eats": "modifies in place",
    "lets go of": "releases",
    "whatever": "any, each",
    "goes on": "continues",
}
"""Words that the field has a term for, and the terms."""

IMPORTED_AS = {"pyyaml": "yaml", "huggingface_hub": "huggingface_hub", "pillow": "PIL"}


@cache
def imports() -> dict[str, set[str]]:
    """Returns the modules of the tree that each module imports, lazy and type-checking imports too."""
    modules = {module_name(path): path for path in SOURCE_FILES}
    found = {}
    for module, path in modules.items():
        used: set[str] = set()
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module, f"{name(path)} has a relative import"
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                used |= inner & modules.keys() or {node.module}
        found[module] = (used & modules.keys()) - {module}
    found[FACADE] = set()
    return found


def importers() -> dict[str, set[str]]:
    """Returns the modules that import each module."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, used in imports().items():
        for target in used:
            found[target].add(module)
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def room_of(module: str) -> str:
    """Returns the room of a module; "" for one beside the rooms."""
    first, *rest = module.split(".")
    if first != "pretrain":
        return first
    return rest[0] if rest and (ROOT / "pretrain" / rest[0]).is_dir() else ""


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yields every docstring with its node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node, text


def comment_lines(text: str) -> int:
    """Returns how many comments a file has."""
    return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))


def too_low(ceilings: dict[str, int], found: dict[str, int], slack: int = 0) -> list[str]:
    """Returns the ceilings that are broken, and those that leave more room than `slack`."""
    wrong = [f"{key}: {found[key]} > {ceilings[key]}" for key in found if found[key] > ceilings[key]]
    return wrong + [
        f"{key}: lower its ceiling of {ceilings[key]} to {found[key]}"
        for key in found
        if ceilings[key] - found[key] > slack
    ]


def share(part: float, whole: Iterable[object]) -> float:
    """Returns a part as a share of a collection."""
    return part / max(1, len(list(whole)))


def test_rooms_and_their_sizes():
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in SOURCE_FILES:
        room = room_of(module_name(path))
        files[room] += 1
        lines[room] += len(path.read_text().splitlines())
    assert files.keys() == ROOMS.keys()
    # As text, because pytest shows all lines of a text, but only the first item of a list.
    assert "\n".join(too_low({room: ceiling for room, (ceiling, _) in ROOMS.items()}, files)) == ""
    assert "\n".join(too_low({room: ceiling for room, (_, ceiling) in ROOMS.items()}, lines, LINES_SLACK)) == ""


def test_no_folder_is_a_list_of_files_and_no_file_is_a_fragment():
    flat = Counter(path.parent for path in SOURCE_FILES if path.name != "__init__.py")
    assert {name(folder): count for folder, count in flat.items() if count > MAX_FLAT_MODULES} == {}
    sizes = {module_name(path): len(path.read_text().splitlines()) for path in SOURCE_FILES}
    assert sum(sizes.values()) / len(sizes) >= MIN_MEAN_LINES
    packages = {module_name(path) for path in SOURCE_FILES if path.name == "__init__.py"}
    alone = {module: next(iter(users)) for module, users in importers().items() if len(users) == 1}
    beside = {module for module, user in alone.items() if module.rpartition(".")[0] == user.rpartition(".")[0]}
    assert [module for module in sorted(beside - packages) if sizes[module] < MIN_LINES_OF_ONE_IMPORTER] == []


def test_names_are_found_by_a_search():
    stems = Counter(
        path.stem
        for path in SOURCE_FILES
        if path.stem not in SHARED_BASENAMES and room_of(module_name(path)) not in SECTIONS
    )
    assert [stem for stem, count in stems.items() if count > 1] == []
    classes = Counter(node.name for path in SOURCE_FILES for node in parse(path).body if isinstance(node, ast.ClassDef))
    assert [found for found, count in classes.items() if count > 1 and not found.startswith("_")] == []


def test_no_module_imports_itself_through_others():
    assert cycles(imports()) == []


def test_density():
    texts = [path.read_text() for path in SOURCE_FILES]
    lines = [line for text in texts for line in text.splitlines()]
    assert share(sum(len(line) > MAX_WIDTH for line in lines), lines) <= MAX_WIDE_LINES
    assigned = [node for path in SOURCE_FILES for node in ast.walk(parse(path)) if isinstance(node, ast.Assign)]
    parallel = [
        node for node in assigned if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    ]
    assert share(len(parallel), assigned) <= MAX_PARALLEL_ASSIGNMENTS
    assert share(sum(map(comment_lines, texts)), lines) >= MIN_COMMENT_LINES


def test_prose():
    found = [(path, node, text) for path in SOURCE_FILES for node, text in docstrings(parse(path))]
    riddles = [name(path) for path, node, text in found if isinstance(node, ast.Module) and RIDDLE.match(text)]
    headless = [
        f"{name(path)}: {entry}" for path, _, text in found for entry in ENTRY.findall(text) if HEADLESS.match(entry)
    ]
    assert riddles == [] and headless == []


def test_words_of_the_field():
    rule = re.compile(r"\b(" + "|".join(BETTER_WORDS) + r")\b", re.IGNORECASE)
    found = [
        f"{name(path)}:{number}: {word} -> {BETTER_WORDS[word.lower()]}"
        for path in SOURCE_FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for word in rule.findall(line)
    ]
    assert found == []


def test_every_dependency_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[\[<>=;! ]", entry)[0].lower() for entry in project["dependencies"]}
    imported = set()
    for path in SOURCE_FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert {one for one in required if IMPORTED_AS.get(one, one) not in imported} == set()


def test_the_rules_themselves():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert cycles({"a": {"b"}, "b": set()}) == []
    assert too_low({"a": 3, "b": 9}, {"a": 4, "b": 5}, slack=3) == ["a: 4 > 3", "b: lower its ceiling of 9 to 5"]
    assert ENTRY.findall("Says it.\n\n    Args:\n        run: Of the run.\n") == ["Of the run."]
    assert comment_lines("x = 1  # why\n# because\n") == 2
