"""Texts that a run generates after its evaluations, from the weights as they are: `tracking.samples`.

Rank 0 generates, by the code of `pretrain generate`; the others wait for it at the next step. At ZeRO 3 no rank holds
the weights whole, and there are no texts. Draws come from seeds of their own: what is trained is the same with and
without.
"""

import logging

import torch

from pretrain.artifact.codec import PlainCodec
from pretrain.config.run import RunConfig
from pretrain.data.tokenizer import load_tokenizer
from pretrain.dist import World
from pretrain.engine.engine import Engine
from pretrain.errors import CheckpointError, ConfigError
from pretrain.generate.codec import Codec
from pretrain.generate.constraints import Constraints
from pretrain.generate.sampling import Sampling
from pretrain.generate.text import encode_prompt, generate_text
from pretrain.index.dataset import Dataset
from pretrain.model import LanguageModel

log = logging.getLogger(__name__)


class Samples:
    """What is generated, and when.

    Args:
        config: Of the run.
        codec: Its tokenizer.
        model: What is trained.
    """

    def __init__(self, config: RunConfig, codec: Codec, model: LanguageModel) -> None:
        self._config, self._every_steps = config.tracking.samples, config.eval.every_steps
        self._codec, self._model, self._seed = codec, model, config.seed
        sees_whole = model.encoder is None and config.objective.sees_prompts_whole
        self._constraints = Constraints(self._config.max_tokens, eos_ids=codec.eos_ids, sees_prompt_whole=sees_whole)
        for number, prompt in enumerate(self._config.prompts):
            encode_prompt(model, codec, prompt, where=f"tracking.samples.prompts[{number}]")

    def is_due(self, step: int) -> bool:
        """Returns whether the evaluation of a step is one that texts follow."""
        return step % (self._every_steps * self._config.every_evals) == 0

    def generate(self) -> list[tuple[str, str]]:
        """Returns (prompt, text) of each prompt; nothing, and a warning, where the model gives no numbers."""
        sampling = Sampling(temperature=self._config.temperature)
        try:
            # One token at a time has other shapes than training: compiled blocks would be compiled for each.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                prompts = self._config.prompts
                answers = generate_text(self._model, self._codec, prompts, self._constraints, sampling, seed=self._seed)
                return [(answer.prompt, answer.text) for (answer,) in answers]
        except CheckpointError as error:
            log.warning("no samples: %s", error)
            return []


def build_samples(config: RunConfig, dataset: Dataset, engine: Engine, world: World) -> Samples | None:
    """Returns what generates on this rank; None where nothing does.

    Raises:
        ConfigError: A prompt does not fit the model, or the model cannot generate.
    """
    if not config.tracking.samples.prompts or not config.eval.every_steps:
        return None
    model: LanguageModel = engine.module.model
    if not model.is_causal:
        raise ConfigError(
            "tracking.samples: a model without a decoder generates no text", fix="remove tracking.samples.prompts"
        )
    if engine.is_sharded:
        if world.is_main:
            log.warning("tracking.samples: at ZeRO 3 no rank holds the weights whole, no texts are generated")
        return None
    if not world.is_main:
        return None
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    return Samples(config, PlainCodec(tokenizer, ends_sources=model.encoder is not None), model)
