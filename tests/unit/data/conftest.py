"""A small corpus, and writes that fail."""

import pytest

from pretrain.io import set_fault_hook
from tests.helpers.corpus import write_corpus


@pytest.fixture
def corpus(tmp_path):
    write_corpus(tmp_path / "in")
    return tmp_path / "in"


@pytest.fixture
def fault_hook():
    yield set_fault_hook
    set_fault_hook(None)
