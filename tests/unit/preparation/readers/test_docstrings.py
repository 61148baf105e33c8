"""Records of documented functions, read from Python source."""

import pytest

from pretrain.errors import ConfigError, DataError
from pretrain.kinds.layouts.triples import group_of
from pretrain.preparation.inputs.listing import list_inputs
from pretrain.preparation.split import parse_split
from pretrain.preparation.text_pieces import triple_pieces
from tests.helpers.reading import documents

SOURCE = '''
def first(a, b=1):
    """Return both of the arguments.

    More of it.
    """
    # a comment
    return a, b

class Some:
    async def inner(self):
        "Wait for what is asked for."
        await self.asked

    def short(self):
        """Too short."""
        return 1

def alone():
    """Has nothing but a docstring."""
'''


def test_each_documented_function_is_a_record_of_its_first_paragraph_and_its_code(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(SOURCE)
    (tmp_path / "b.py").write_text("x = 1\n")
    found = documents(tmp_path, kind="triples", format="docstrings")
    assert [(one.source, one.text) for one in found if one.text] == [
        ("Return both of the arguments.", "def first(a, b=1):\n    return (a, b)"),
        ("Wait for what is asked for.", "async def inner(self):\n    await self.asked"),
    ]
    assert sum(one.consumed_bytes for one in found) == sum(file.stat().st_size for file in tmp_path.iterdir())
    groups = [group_of(*triple_pieces(one, parse_split("hash:0", 0))[0].marks) for one in found if one.text]
    assert groups[0] == groups[1] != 0


def test_a_file_that_is_not_python_is_named(tmp_path):
    (tmp_path / "a.py").write_text("print 'a'\n")
    with pytest.raises(DataError, match=r"a\.py: not Python: .*; correct it, or leave such files out"):
        documents(tmp_path, kind="triples", format="docstrings")
    (bad,) = documents(tmp_path, kind="triples", format="docstrings", on_error="skip")
    assert "not Python" in bad.error


def test_the_default_corpus_has_its_format_and_other_kinds_need_inputs():
    assert {file.format for file in list_inputs([], "triples")} == {"docstrings"}
    with pytest.raises(ConfigError, match=r"kind=pairs needs inputs: Python's library has none; give --input FILES"):
        list_inputs([], "pairs")
