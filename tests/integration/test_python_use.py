"""pretrain from Python: the names that the package offers, and the notebook that shows them."""

import importlib
import json
import os
import subprocess
import sys

import pytest

import pretrain
from tests.helpers.fork_server import ROOT
from tests.helpers.waiting import LIMIT_S

NOTEBOOK = ROOT / "docs" / "python.ipynb"
BANG = "import subprocess as _shell\n_run = lambda line: _shell.run(line, shell=True, check=True)\n"
"""`!command` of a notebook, in plain Python; a command that fails ends the program."""


def program_of(notebook: dict) -> str:
    """Returns the code cells of a notebook as one program."""
    lines = [line.rstrip("\n") for cell in notebook["cells"] if cell["cell_type"] == "code" for line in cell["source"]]
    return BANG + "\n".join(f"_run({line[1:]!r})" if line.startswith("!") else line for line in lines)


def test_importing_the_package_loads_nothing_that_is_slow():
    code = "import sys, pretrain; sys.exit(bool({'torch', 'numpy', 'pydantic', 'yaml'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=LIMIT_S)


def test_every_name_that_is_offered_is_there():
    assert sorted(pretrain.__all__) == sorted(pretrain._HOMES)
    for name, home in pretrain._HOMES.items():
        assert getattr(pretrain, name) is getattr(importlib.import_module(home), name)


def test_another_name_is_no_attribute():
    with pytest.raises(AttributeError, match="module 'pretrain' has no attribute 'nothing'"):
        pretrain.nothing  # noqa: B018


@pytest.mark.long
def test_the_notebook_runs_in_an_empty_folder(tmp_path):
    commands = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # noqa: PTH120
    done = subprocess.run(
        [sys.executable, "-c", program_of(json.loads(NOTEBOOK.read_text()))],
        cwd=tmp_path,
        env={**os.environ, "PATH": commands},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "logits (2, 128, 512)" in done.stdout
    assert "step-00000040" in done.stdout
