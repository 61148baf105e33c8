"""Runs `prepare` over the small corpus of a test."""

from pretrain.preparation import prepare as prepare_module
from pretrain.preparation import statistics
from pretrain.preparation.progress import no_progress
from tests.helpers.prepare_config import prepare_config


def options(tmp_path, name="out", **changes):
    """A config over the corpus, and how to run it."""
    defaults = {"inputs": (str(tmp_path / "in"),), "vocab_size": 300, "split": "hash:0.2", "part_bytes": 1500}
    chosen = {"processes": 1, **defaults, **changes}
    processes, inputs = chosen.pop("processes"), chosen.pop("inputs")
    return prepare_config(tmp_path / name, inputs, **chosen), processes


def draw_nothing() -> None:
    """Has this process draw no histogram of lengths, which takes longer than all else of a small folder."""
    statistics.draw_lengths = lambda facts: b""


def prepare(chosen, progress=no_progress):
    config, processes = chosen
    return prepare_module.prepare(config, progress, processes=processes)
