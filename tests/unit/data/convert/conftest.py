import pytest

from pretrain.io import set_fault_hook
from tests.unit.data.convert.asked import write_source


@pytest.fixture
def source(tmp_path):
    write_source(tmp_path)
    return tmp_path


@pytest.fixture
def fault_hook():
    yield set_fault_hook
    set_fault_hook(None)
