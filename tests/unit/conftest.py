"""A small corpus, writes that fail, warm probes of tokenizers, and no pictures."""

from collections.abc import Iterator

import pytest

from pretrain.preparation import pool, statistics
from pretrain.tokenizer import release_probe
from pretrain.utils.io import set_fault_hook
from tests.helpers.corpus import write_corpus
from tests.helpers.warm_pool import WARM
from tests.helpers.warm_probes import WarmProbe


@pytest.fixture
def corpus(tmp_path):
    write_corpus(tmp_path / "in")
    return tmp_path / "in"


@pytest.fixture
def fault_hook():
    yield set_fault_hook
    set_fault_hook(None)


DRAW_LENGTHS = statistics.draw_lengths


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    """Draws no histogram of lengths, which takes longer than all else of a small folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "draw_lengths", lambda facts: b"")
        yield


@pytest.fixture
def pictures(no_pictures, monkeypatch) -> None:
    """Draws them, where they are tested."""
    monkeypatch.setattr(statistics, "draw_lengths", DRAW_LENGTHS)


@pytest.fixture(scope="session", autouse=True)
def warm_programs() -> Iterator[None]:
    """Runs the probes of tokenizers, and workers of `prepare`, in forks that have imported what they need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release_probe, "start_program", WarmProbe)
        patch.setattr(pool, "multiprocessing", WARM)
        yield
