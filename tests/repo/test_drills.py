"""The table of drills in CONTRIBUTING.md: each long test has one group, and each part of the source asks for one."""

import ast

import pytest

from tests.drills.__main__ import Group, read_groups
from tests.repo.source import ROOT, SOURCE_FILES, TEST_FILES, name, parse

GROUPS = read_groups()
ASK_FOR_NONE = {"pretrain/__init__.py"}
"""The version."""


def is_drill(tree: ast.Module) -> bool:
    """Whether a file has a test that the gate does not run."""
    nodes = list(ast.walk(tree))
    marks = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return bool(marks & {"pytest.mark.long", "pytest.mark.slurm"}) or "tests.helpers.tables" in modules


def test_every_path_of_the_table_exists():
    named = [path for group in GROUPS for path in (*group.tests, *group.paths)]
    assert named and [path for path in named if not (ROOT / path).exists()] == []


def test_every_long_test_is_in_one_group():
    files = [path for path in TEST_FILES if path.name.startswith("test_") and is_drill(parse(path))]
    found = {
        name(path): [g.name for g in GROUPS if Group("", g.tests, ()).is_asked_for_by(name(path))] for path in files
    }
    assert {file: groups for file, groups in found.items() if len(groups) != 1} == {}


def test_every_source_file_asks_for_a_group():
    files = {name(path) for path in SOURCE_FILES} - ASK_FOR_NONE
    assert [file for file in sorted(files) if not any(group.is_asked_for_by(file) for group in GROUPS)] == []


@pytest.mark.parametrize(
    ("file", "asked"),
    [
        ("pretrain/checkpoint/save.py", ["kills", "mutations"]),
        ("slurm/README.md", ["slurm"]),
        ("tests/integration/slurm/test_chain.py", ["slurm"]),
        ("pretrain/checkpointing.py", []),
        ("LICENSE", []),
    ],
)
def test_a_change_asks_for_the_groups_of_its_path(file, asked):
    assert [group.name for group in GROUPS if group.is_asked_for_by(file)] == asked
