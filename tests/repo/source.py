"""What the repository's rules are checked on: the project's Python files, parsed."""

import ast
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE_FILES = sorted(path for folder in ("pretrain", "launch") for path in (ROOT / folder).rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    """Returns a file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name(path: Path) -> str:
    """Returns a path as shown in a failure."""
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    """Returns the dotted name of a source file."""
    root = ROOT / "launch" if path.is_relative_to(ROOT / "launch") else ROOT
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def findings_by_file(paths: Iterable[Path], rule: Callable[[ast.Module], list[str]]) -> dict[str, list[str]]:
    """Returns what a rule finds in each file, without the files in which it finds nothing."""
    found = {name(path): rule(parse(path)) for path in paths}
    return {file: findings for file, findings in found.items() if findings}
