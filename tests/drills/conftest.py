"""The corpus and the runs of the integration tests."""

from tests.integration.conftest import corpus, make_run

__all__ = ["corpus", "make_run"]
