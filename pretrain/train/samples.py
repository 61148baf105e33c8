"""Text reader of a run, normalisation and tokenizer of its data; and the texts that a run generates while it trains."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pretrain.artifact.model_path import PlainCodec
from pretrain.artifact.open import normalize_of_data
from pretrain.config.run import RunConfig
from pretrain.dist import World
from pretrain.engine.engine import Engine
from pretrain.errors import CheckpointError
from pretrain.generate import Constraints, RowSeeds, Sampling, generate
from pretrain.generate.text import encode_prompt, text_after
from pretrain.model import LanguageModel
from pretrain.prepare.normalize import build_normalizers
from pretrain.shards.dataset import Dataset
from pretrain.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class TextReader:
    """Normalisation and tokenizer of a run's data.

    Attributes:
        normalize: Normalises a text, or the source of a pair.
        normalize_target: Normalises the target of a pair.
        codec: The tokenizer.
    """

    normalize: Callable[[str], str]
    normalize_target: Callable[[str], str]
    codec: PlainCodec


def build_reader(dataset: Dataset, model: LanguageModel) -> TextReader:
    """Builds the text reader of a run.

    Raises:
        DataError: The tokenizer cannot be read.
        LaunchError: A package of the normalisation is missing.
    """
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    codec = PlainCodec(tokenizer, ends_sources=model.encoder is not None and model.is_causal)
    steps = normalize_of_data([source.folder for source in dataset.sources])
    source, target = (str, str) if steps is None else build_normalizers(steps)
    return TextReader(source, target, codec)


def has_evaluations(dataset: Dataset) -> bool:
    """Returns whether there is anything to evaluate on, after which texts and pictures come."""
    return any("validation" in source.index.splits for source in dataset.sources)


# Texts generated after evaluations (`tracking.samples`).
#
# Rank 0 generates, and the others wait for it at the next step. At ZeRO 3 a forward pass is
# collective, so all ranks generate the same text, always to the maximum length, and cut it at its
# end afterwards. Sampling has its own seeds: training is the same with and without.


log = logging.getLogger(__name__)

BATCH = 16

"""Prompts per batch."""


class Samples:
    """Generates the texts of a run.

    Args:
        config: Config of the run.
        reader: Text reader of its data.
        model: The trained model.
        in_step: Whether all ranks generate together (ZeRO 3).

    Raises:
        ConfigError: A prompt does not fit the model.
    """

    def __init__(self, config: RunConfig, reader: TextReader, model: LanguageModel, *, in_step: bool) -> None:
        self._config, self._every_steps = config.tracking.samples, config.eval.every_steps
        self._codec, self._model, self._seed = reader.codec, model, config.seed
        sees_whole = model.encoder is None and config.objective.sees_prompts_whole
        eos_ids = () if in_step else self._codec.eos_ids
        self._constraints = Constraints(self._config.max_tokens, eos_ids=eos_ids, sees_prompt_whole=sees_whole)
        self._rows = [
            encode_prompt(model, self._codec, reader.normalize(prompt), where=f"tracking.samples.prompts[{number}]")
            for number, prompt in enumerate(self._config.prompts)
        ]

    def is_due(self, step: int) -> bool:
        """Returns whether the evaluation of a step is one that texts follow."""
        return step % (self._every_steps * self._config.every_evals) == 0

    def generate(self) -> list[tuple[str, str]]:
        """Returns (prompt, text) of each prompt; nothing, and a warning, where the model gives no numbers.

        Collective at ZeRO 3.
        """
        sampling, row_seeds, texts = Sampling(temperature=self._config.temperature), RowSeeds(self._seed), list[str]()
        try:
            # One token at a time has other shapes than training: compiled blocks would be compiled for each.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                for start in range(0, len(self._rows), BATCH):
                    rows = self._rows[start : start + BATCH]
                    found = generate(self._model, rows, self._constraints, sampling, seed=list(map(row_seeds, rows)))
                    texts += [self._text(row, one.tokens) for row, one in zip(rows, found, strict=True)]
        except CheckpointError as error:
            log.warning("no samples: %s", error)
            return []
        return list(zip(self._config.prompts, texts, strict=True))

    def _text(self, prompt: list[int], tokens: list[int]) -> str:
        """Returns the text that tokens add to a prompt, or with two stacks their own, to its end."""
        ends = [place for place, token in enumerate(tokens) if token in self._codec.eos_ids]
        kept = tokens[: ends[0]] if ends else tokens
        return text_after(self._codec, prompt if self._model.encoder is None else [], kept)


def build_samples(config: RunConfig, dataset: Dataset, engine: Engine, world: World) -> Samples | None:
    """Builds the generator of this rank; None where it generates nothing.

    Raises:
        ConfigError: A prompt does not fit the model, or the model cannot generate.
    """
    if not config.tracking.samples.prompts:
        return None
    if not has_evaluations(dataset):
        if world.is_main:
            log.warning("tracking.samples: the data have no validation split, so no texts are generated")
        return None
    if not (world.is_main or engine.is_sharded):
        return None
    model: LanguageModel = engine.module.model
    return Samples(config, build_reader(dataset, model), model, in_step=engine.is_sharded)
