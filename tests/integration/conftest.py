"""A small prepared corpus, a function that writes run configs over it, and quick commands."""

import random
from pathlib import Path

import pytest

from tests.helpers.cli import Warm, run_warm
from tests.helpers.runs import RunMaker


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A character-level shard folder: 40 documents of 500 to 2,500 characters, a tenth of each for validation."""
    from pretrain.preparation.prepare import prepare
    from tests.helpers.prepare_config import prepare_config

    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(7)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    for number in range(40):
        text = " ".join(rng.choices(words, k=rng.randint(100, 500)))
        (folder / f"{number:02d}.txt").write_text(text + "\n")
    output = tmp_path_factory.mktemp("shards")
    prepare(prepare_config(output, [folder], tokenizer="char", split="tail:0.1"), processes=1)
    return output


@pytest.fixture(scope="session")
def warm() -> Warm:
    """Runs commands in forks of one process that has imported torch."""
    return run_warm


@pytest.fixture
def make_run(tmp_path, corpus) -> RunMaker:
    """Starts runs of a tiny model over the corpus."""
    return RunMaker(tmp_path, corpus)
