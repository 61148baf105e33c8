import pytest

from tests.unit.preparation.convert.asked import write_source


@pytest.fixture
def source(tmp_path):
    write_source(tmp_path)
    return tmp_path
