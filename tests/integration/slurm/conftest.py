"""Clusters for the tests of this folder, which are all marked `slurm`: `python -m pytest -m slurm`."""

import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from pretrain.run.folder import RunDir
from tests.helpers.runs import RunMaker
from tests.helpers.slurm_lab import SlurmLab, why_no_slurm
from tests.helpers.slurm_runs import CONFIG, SlurmRun, prepare_folder

MAX_FOLDER_LENGTH = 64
"""Unix sockets lie in the folder of a cluster."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, and skips them where no cluster can be."""
    reason = why_no_slurm()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def start_lab(tmp_path_factory) -> Iterator[Callable[..., SlurmLab]]:
    """Starts clusters (`SlurmLab.start` without the folder) and takes them down after the test."""
    labs = []

    def start(**options: object) -> SlurmLab:
        folder = tmp_path_factory.mktemp("lab")
        if len(str(folder)) > MAX_FOLDER_LENGTH:
            folder = Path(tempfile.mkdtemp(prefix="lab", dir="/tmp"))
        labs.append(SlurmLab.start(folder, **options))  # type: ignore[arg-type]
        return labs[-1]

    yield start
    for lab in labs:
        lab.stop()


@pytest.fixture
def lab(start_lab) -> SlurmLab:
    """A cluster of two nodes."""
    return start_lab(nodes=2)


@pytest.fixture
def make_job(tmp_path, corpus) -> Callable[..., SlurmRun]:
    """Prepares a run for a cluster."""

    def make(lab: SlurmLab, template: str = CONFIG) -> SlurmRun:
        prepare_folder(tmp_path)
        runs = RunMaker(tmp_path, corpus, template)
        return SlurmRun(lab, runs.config(), runs.folder())

    return make


@pytest.fixture(scope="session")
def golden(tmp_path_factory, corpus) -> Callable[[str], RunDir]:
    """Returns the run of a config that nobody disturbs, on this machine."""

    @cache
    def run(template: str = CONFIG) -> RunDir:
        folder = tmp_path_factory.mktemp("golden")
        prepare_folder(folder)
        runs = RunMaker(folder, corpus, template)
        runs.train("runs", ranks=1 if "single" in template else 2, PYTHONPATH=str(folder))
        return runs.folder("runs")

    return run
