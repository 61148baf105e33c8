"""Texts and pictures of attention that a run makes after its evaluations.

    tracking.samples     prompts             ->  generated texts
    tracking.attention   a text, its target  ->  maps of heads  ->  a PNG of `pretrain attention`

Rank 0 makes them, and the others wait for it at the next step. At ZeRO 3 a forward pass is
collective: all ranks generate the same text, to the maximum length, and cut it at its end; all
record attention, and rank 0 draws. Training is the same without.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pretrain.artifact.open import normalize_of_data
from pretrain.artifact.plain_codec import PlainCodec
from pretrain.attention_maps.figure import FigureSection, build_sections, render_attention, spell_tokens
from pretrain.attention_maps.figure_layout import plan_layout
from pretrain.attention_maps.maps import choose_heads, record_attention
from pretrain.attention_maps.terminal import build_row, encode_texts
from pretrain.config.run import RunConfig
from pretrain.config.tracking import AttentionConfig
from pretrain.dist import World
from pretrain.engine.engine import Engine
from pretrain.errors import CheckpointError, ConfigError
from pretrain.generation.constraints import Constraints
from pretrain.generation.incremental_decoder import Prompt
from pretrain.generation.sampling import RowSeeds, Sampling, generate
from pretrain.generation.text import context_of, encode_prompt, text_after
from pretrain.model import LanguageModel
from pretrain.model.lazy_compiler import running_eagerly
from pretrain.preparation.normalize import build_normalizers
from pretrain.shards.dataset import Dataset
from pretrain.tokenizer.file import load_tokenizer

log = logging.getLogger(__name__)

BATCH = 16
"""Prompts per batch."""
FEW = 4
"""Layers, and heads of each, where the config names none: a map takes a tenth of a second."""
KEY = "tracking.attention"


@dataclass(frozen=True, slots=True)
class TextReader:
    """Tokenizer of a run's data; normalisation of a text or source, and of a target."""

    normalize: Callable[[str], str]
    normalize_target: Callable[[str], str]
    codec: PlainCodec


def build_reader(dataset: Dataset, model: LanguageModel) -> TextReader:
    """Builds the text reader of a run. Raises: DataError, LaunchError (a package is missing)."""
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    ends_sources = model.encoder is not None and model.is_causal
    codec = PlainCodec(tokenizer, ends_sources, eos=dataset.index.eos_id, begin=dataset.index.begin_id)
    steps = normalize_of_data([source.folder for source in dataset.sources])
    source, target = (str, str) if steps is None else build_normalizers(steps)
    return TextReader(source, target, codec)


def takes_part(dataset: Dataset, engine: Engine, world: World, effect: str) -> bool:
    """Returns whether this rank takes part after evaluations; warns without a validation split."""
    if any("validation" in source.index.splits for source in dataset.sources):
        return world.is_main or engine.needs_all_ranks
    if world.is_main:
        log.warning("%s, as the data have no validation split", effect)
    return False


class Samples:
    """Generates the texts of a run, with `in_step` on all ranks together. Raises: ConfigError."""

    def __init__(self, config: RunConfig, reader: TextReader, model: LanguageModel, *, in_step: bool) -> None:
        self._config = config.tracking.samples
        self._every_steps = config.eval.every_steps
        self._codec = reader.codec
        self._model = model
        self._seed = config.seed
        sees_whole = model.encoder is None and config.objective.sees_prompts_whole
        eos_ids = () if in_step else self._codec.eos_ids
        most = self._config.max_tokens
        self._constraints = Constraints(most, eos_ids=eos_ids, sees_prompt_whole=sees_whole)
        self._rows = [
            encode_prompt(model, self._codec, reader.normalize(prompt), where=f"tracking.samples.prompts[{number}]")
            for number, prompt in enumerate(self._config.prompts)
        ]

    def is_due(self, step: int) -> bool:
        """Returns whether texts follow the evaluation of a step."""
        every = self._every_steps * self._config.every_evals
        return every > 0 and step % every == 0

    def generate(self) -> list[tuple[str, str]]:
        """Returns prompts and texts; none, with a warning, for NaN logits. Collective at ZeRO 3."""
        sampling = Sampling(temperature=self._config.temperature)
        row_seeds = RowSeeds(self._seed)
        texts: list[str] = []
        try:
            # One token at a time has other shapes than training: compiled blocks would be compiled
            # for each.
            with torch.no_grad(), running_eagerly():
                for start in range(0, len(self._rows), BATCH):
                    rows = self._rows[start : start + BATCH]
                    seeds = list(map(row_seeds, rows))
                    answers = generate(self._model, rows, self._constraints, sampling, seed=seeds)
                    texts += [self._text(row, one.tokens) for row, one in zip(rows, answers, strict=True)]
        except CheckpointError as error:
            log.warning("no samples: %s", error)
            return []
        return list(zip(self._config.prompts, texts, strict=True))

    def _text(self, prompt: Prompt, tokens: list[int]) -> str:
        ends = [place for place, token in enumerate(tokens) if token in self._codec.eos_ids]
        shown = tokens[: ends[0]] if ends else tokens
        return text_after(self._codec, context_of(self._model, prompt), shown)


def build_samples(config: RunConfig, dataset: Dataset, engine: Engine, world: World) -> Samples | None:
    """Builds the generator of this rank; None where it generates nothing. Raises: ConfigError."""
    prompts = config.tracking.samples.prompts
    effect = "tracking.samples: no texts are generated"
    if not prompts or not takes_part(dataset, engine, world, effect):
        return None
    model: LanguageModel = engine.module.model
    return Samples(config, build_reader(dataset, model), model, in_step=engine.needs_all_ranks)


class AttentionPictures:
    """The pictures of a run; with `draws` on this rank. Raises: ConfigError."""

    def __init__(
        self, config: AttentionConfig, every_steps: int, reader: TextReader, model: LanguageModel, *, draws: bool
    ) -> None:
        self._config = config
        self._every_steps = every_steps
        self._model = model
        self._draws = draws
        assert config.text is not None
        target = None if config.target is None else reader.normalize_target(config.target)
        options = (f"{KEY}.text", f"{KEY}.target")
        text = reader.normalize(config.text)
        ids = encode_texts(model, reader.codec, text, target, options=options)
        self._row = build_row(ids, model)
        self._tokens = {stack: spell_tokens(reader.codec, numbers) for stack, numbers in ids.items()}

    def is_due(self, step: int) -> bool:
        """Returns whether a picture follows the evaluation of a step."""
        every = self._every_steps * self._config.every_evals
        return every > 0 and step % every == 0

    def check(self) -> None:
        """Draws a layout as a check. Collective at ZeRO 3. Raises: ConfigError."""
        try:
            plan_layout([section.shape for section in self._record()])
        except ConfigError as error:
            raise ConfigError(
                error.what,
                where=KEY,
                fix="shorten the text, or draw fewer layers and heads",
            ) from None

    def draw(self) -> bytes | None:
        """Returns a PNG; None on ranks that draw none, or where the weights are not numbers.

        Collective at ZeRO 3.
        """
        sections = self._record()
        if not self._draws:
            return None
        heads = [head for section in sections for row in section.rows for head in row]
        if any(bool(head.weights_TS.isnan().any()) for head in heads):
            log.warning("no picture of attention: its weights are not numbers")
            return None
        try:
            return render_attention(sections, "png")
        except Exception as error:  # fonts, caches, memory: matplotlib raises nearly anything
            log.warning("no picture of attention: %s: %s", type(error).__name__, error)
            return None

    def _record(self) -> list[FigureSection]:
        # Other shapes than in training: compiled blocks would be compiled again.
        with running_eagerly():
            maps = record_attention(self._model, self._row)
        config = self._config
        layers = None if config.layers is None else sorted(set(config.layers))
        heads = None if config.heads is None else sorted(set(config.heads))
        return build_sections(choose_heads(maps, config.kind, layers, heads, FEW), self._tokens)


def build_pictures(config: RunConfig, dataset: Dataset, engine: Engine, world: World) -> AttentionPictures | None:
    """Builds the pictures that this rank draws, or helps to; None without. Collective at ZeRO 3.

    Raises: ConfigError, where a text does not fit the model, or the picture would be too large.
    """
    wanted = config.tracking.attention
    if wanted.text is None or not takes_part(dataset, engine, world, f"{KEY}: nothing is drawn"):
        return None
    model = engine.module.model
    reader = build_reader(dataset, model)
    pictures = AttentionPictures(wanted, config.eval.every_steps, reader, model, draws=world.is_main)
    pictures.check()
    return pictures
