"""Pictures of attention that a run draws after its evaluations, from the weights as they are: `tracking.attention`.

    a forward of the text, without gradient or dropout  ->  maps of some heads  ->  a PNG, that of `pretrain attention`

Rank 0 does it all; the others wait for it at the next step. At ZeRO 3 all ranks run the forward, for which every layer
gathers its weights, and rank 0 draws. No random number is taken, and the model is left as it was: what is trained is
the same with and without.
"""

import logging

import torch

from pretrain.attention_maps.figure import FigureSection, build_sections, render_attention, spell_tokens
from pretrain.attention_maps.figure_layout import plan_layout
from pretrain.attention_maps.maps import choose_heads, record_attention
from pretrain.attention_maps.terminal import build_row, encode_texts
from pretrain.config.run import RunConfig
from pretrain.config.tracking import AttentionConfig
from pretrain.dist import World
from pretrain.engine.engine import Engine
from pretrain.errors import ConfigError
from pretrain.model import Transformer
from pretrain.shards.dataset import Dataset
from pretrain.train.samples import TextReader, build_reader, has_evaluations

log = logging.getLogger(__name__)

FEW = 4
"""Layers, and heads of each, that are drawn where the config names none: a map takes a tenth of a second."""

KEY = "tracking.attention"


class AttentionPictures:
    """What is drawn, and when.

    Args:
        config: Text, layers and heads to draw.
        every_steps: Interval of evaluations.
        reader: Text reader of the run's data.
        model: The trained model.
        draws: Whether this rank draws what it has recorded.

    Raises:
        ConfigError: A text does not fit the model, or the picture would be too large.
    """

    def __init__(
        self, config: AttentionConfig, every_steps: int, reader: TextReader, model: Transformer, *, draws: bool
    ) -> None:
        self._config, self._every_steps, self._model, self._draws = config, every_steps, model, draws
        assert config.text is not None
        target = None if config.target is None else reader.normalize_target(config.target)
        options = (f"{KEY}.text", f"{KEY}.target")
        ids = encode_texts(model, reader.codec, reader.normalize(config.text), target, options=options)
        self._row = build_row(ids, model)
        self._tokens = {stack: spell_tokens(reader.codec, numbers) for stack, numbers in ids.items()}

    def is_due(self, step: int) -> bool:
        """Returns whether the evaluation of a step is one that a picture follows."""
        return step % (self._every_steps * self._config.every_evals) == 0

    def check(self) -> None:
        """Checks that the picture can be drawn, by a forward. Collective at ZeRO 3. Raises: ConfigError."""
        try:
            plan_layout([section.shape for section in self._record()])
        except ConfigError as error:
            raise ConfigError(error.what, where=KEY, fix="shorten the text, or draw fewer layers and heads") from None

    def draw(self) -> bytes | None:
        """Returns the picture as a PNG; None on a rank that draws none, or where the weights are not numbers.

        Collective at ZeRO 3.
        """
        sections = self._record()
        if not self._draws:
            return None
        if any(bool(head.weights_TS.isnan().any()) for section in sections for row in section.rows for head in row):
            log.warning("no picture of attention: its weights are not numbers")
            return None
        try:
            return render_attention(sections, "png")
        except Exception as error:  # fonts, caches, memory: matplotlib raises nearly anything, and the run goes on
            log.warning("no picture of attention: %s: %s", type(error).__name__, error)
            return None

    def _record(self) -> list[FigureSection]:
        # The shapes are other ones than in training, and so are the kernels: compiled blocks would be compiled again.
        with torch.compiler.set_stance("force_eager"):
            maps = record_attention(self._model, self._row)
        config = self._config
        layers, heads = (None if chosen is None else sorted(set(chosen)) for chosen in (config.layers, config.heads))
        return build_sections(choose_heads(maps, config.kind, layers, heads, FEW), self._tokens)


def build_pictures(config: RunConfig, dataset: Dataset, engine: Engine, world: World) -> AttentionPictures | None:
    """Returns what draws on this rank, or helps to; None where nothing does. Collective at ZeRO 3.

    Raises:
        ConfigError: A text does not fit the model, or the picture would be too large.
    """
    if config.tracking.attention.text is None:
        return None
    if not has_evaluations(dataset):
        if world.is_main:
            log.warning("%s: the data have no validation split, so nothing is drawn", KEY)
        return None
    if not (world.is_main or engine.is_sharded):
        return None
    model, wanted = engine.module.model, config.tracking.attention
    reader = build_reader(dataset, model)
    pictures = AttentionPictures(wanted, config.eval.every_steps, reader, model, draws=world.is_main)
    pictures.check()
    return pictures
