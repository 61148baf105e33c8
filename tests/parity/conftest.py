"""A model lent by transformers, for all tests of a file."""

import pytest

from tests.helpers.lent import Lent


@pytest.fixture
def lent(made: Lent) -> Lent:
    """Without the gradients of the test before."""
    made.theirs.zero_grad()
    made.ours.zero_grad()
    return made
