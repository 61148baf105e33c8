"""Each mutation of the list applies to the source, names tests that exist, and makes one of them fail (a drill)."""

import ast

import pytest

from tests.drills.mutations import MUTATIONS, ROOT, Mutation, apply, failed_tests


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_still_applies_and_its_tests_exist(mutation, tmp_path):
    copy = tmp_path / mutation.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / mutation.file).read_text())
    apply(mutation, tmp_path)
    ast.parse(copy.read_text())
    file, _, word = mutation.tests.partition(" -k ")
    assert word in (ROOT / file).read_text()


def test_a_mutation_whose_text_is_gone_is_named(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"nothing: a\.py has its text 0 times, not once"):
        apply(Mutation("nothing", "a.py", "y", "z", ""), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_turns_a_test_red(mutation, tmp_path):
    assert failed_tests(mutation, tmp_path)
