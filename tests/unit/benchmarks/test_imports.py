"""Each benchmark names what the source has."""

import os
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest

import benchmarks

NAMES = sorted(path.stem for path in Path(benchmarks.__path__[0]).glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported_and_says_what_it_measures(name):
    with mock.patch.dict(os.environ):  # some set the threads of their libraries
        assert import_module(f"benchmarks.{name}").__doc__
