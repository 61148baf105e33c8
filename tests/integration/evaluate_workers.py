"""What the ranks of the evaluation tests do."""

from pathlib import Path
from typing import Any

from pretrain.dist import World
from pretrain.evaluate.corpus import CorpusOptions
from pretrain.evaluate.distributed import joined_ranks
from pretrain.evaluate.held_out import evaluate_held_out
from pretrain.evaluate.translation import TranslationTask, evaluate_translation


def evaluations(world: World, folder: str) -> dict[str, Any]:
    """Everything that `pretrain evaluate` measures on prepared data and of translations, as facts."""
    place = Path(folder)
    with joined_ranks("cpu") as (joined, device):
        assert (joined, device) == (world, "cpu")
        return measure(place)


def measure(place: Path) -> dict[str, Any]:
    """The same without joining."""
    choice = CorpusOptions(batch_tokens=64)
    sources = CorpusOptions(data=(str(place / "texts"), str(place / "more")), split="train", batch_tokens=64)
    task = TranslationTask(place / "test.en", place / "test.de", beams=(2,), max_tokens=8, batch_tokens=64)
    translated = evaluate_translation(place / "mt", task, output=place / "out.txt").facts()
    for system in translated["systems"]:
        del system["seconds"], system["sentences_per_s"]
    return {
        "loss": evaluate_held_out(place / "gpt", sources).facts(),
        "compared": evaluate_held_out(place / "gpt", choice, other=place / "gpt2", resamples=100).facts(),
        "labels": evaluate_held_out(place / "bert", choice, other=place / "bert2", resamples=100).facts(),
        "translated": translated,
    }
