"""Record of an objective: everything that a stage may ask of it. One file each in `kinds/objectives/`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pretrain.config.base import Conflicts, Section


class RowLimits(NamedTuple):
    """Lengths that a config gives to rows, in tokens, and the stacks of the model."""

    seq_len: int
    source_len: int
    num_stacks: int


class RowShape(NamedTuple):
    """Lengths of one kind of rows in tokens: inputs of the decoder or of the only stack, and of an encoder beside."""

    target: int
    source: int | None = None
    weight: float = 1.0  # share of the rows, at any scale


class Shown(NamedTuple):
    """Fields `shown` and `summarize` of an objective."""

    names: tuple[str, ...] = ()
    summarize: Callable[[dict[str, float]], dict[str, float]] = dict

    def metrics(self, means: Iterable[float]) -> dict[str, float]:
        """Returns the metrics; none without means, as of losses by row."""
        return self.summarize(dict(zip(self.names, means, strict=False)))


NOTHING_SHOWN = Shown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Entry of the registry; heavy parts are named `module:function` and imported at their use.

    `section` below is the value of the config's section, or None where there is none.
    """

    # Model and data that it needs.
    shapes: tuple[str, ...]  # permitted stacks: `encoder`, `decoder`, `encoder+decoder`
    data: tuple[str, ...]  # permitted layouts of data; the first is the one that it is for
    head: str = "lm"  # required kind of the head
    reads: str = "tokens"  # required input of the model: `tokens` or `patches`
    whole_rows: bool = False  # rows must be full, as with `data.packing=concat`
    mixes: bool = True  # may be one of `objective.mixture`
    whole_prompts: bool = False  # a decoder alone reads prompts with bidirectional attention
    one_text_a_row: bool = False  # rows have one mode token, not one a document
    labels_words: bool = False  # a head or pooler that summarizes documents does not fit
    running_text: bool = False
    """Each token of a text is predicted from those before it: rows may be cut short, and the loss is a code length."""
    stored_scores: bool = False  # targets are the next tokens of the data
    source_rows: bool = False  # rows of `batch.source_len` tokens beside those of `batch.seq_len`
    reference: Callable[[Any], bool] = lambda section: False
    """`reference(section)`: compares the model with the one that training begins with."""
    conflicts: Callable[[Any], Conflicts] = lambda config: iter(())
    """`conflicts(run_config)`: further values that do not go with it."""
    scored_as: Mapping[str, str] = field(default_factory=dict)
    """Objective by which models of one stack are evaluated on data of another layout, as if fine-tuned on them."""
    apart: str = ""
    """Reason why documents of a row must not attend to each other: `labels documents, which`. Empty: they may."""
    instead_of_tokens: str = ""
    """Action that takes the place of predicting tokens, for whose loss label smoothing and the z-loss are."""

    section: type[Section] | None = None
    """Class of its section of `objective:`, which has the name of the objective."""
    rows: str
    """`build(section, context) -> RowMaker`; raises ConfigError if the tokenizer lacks a token."""
    loss: str = "pretrain.objective.loss:sum_token_loss"
    """`loss(model, batch, **settings) -> LossOutput`."""
    loss_settings: tuple[str, ...] = ("label_smoothing", "z_loss", "multi_token_weight")
    """Keys of its section, or else of `objective:`, that its loss takes."""
    whole_batch: str = ""
    """Of a loss that compares what all micro-batches and ranks have: `compare(batches, outputs,
    rank, **settings)`, which gets the micro-batches of a rank and what `loss` shows of each in a
    rehearsal (training mode without gradients), and returns the micro-batches with what `loss` then
    needs of the others. Empty: a sum over targets."""
    counted: str = ""
    """Metric that counts targets. Empty: that of the head."""
    targets: str = ""
    """Targets in words. Empty: those of the head."""
    shown: tuple[str, ...] = ()
    """Names of further sums of the loss (`LossOutput.shown_M`), logged as means over the targets."""
    summarize: Callable[[dict[str, float]], dict[str, float]] = dict
    """`summarize(means)`: metrics of these means by name. By default these."""
    token_kinds: str = "pretrain.objective.token_kinds:text_kinds"
    """`kinds(rows, section, vocabulary)`, as in that module."""
    row_note: str = ""
    """`note(rows, section, seed)`: words on one row, in which rows of the objective differ; empty: they do not."""
    legend: str = ""
    """Meaning of the braces in which `pretrain data show` has tokens."""
    learns_parts: bool = False  # of texts that the data mark, whose share is shown
    no_targets: str = "documents have one token each; see `pretrain data show`"
    """Reason and remedy of a step without a target, where the layout of the data has none."""
    next_command: str = ""
    """Command that uses a trained model, at `{path}`. Empty: it follows from the model."""
    longest_row: Callable[[Any, RowLimits], int] = lambda section, limits: limits.seq_len
    """`longest_row(section, limits)`: tokens of the longest row of data whose inputs fit."""
    row_shapes: Callable[[Any, int, RowLimits], list[RowShape]] = lambda section, row, limits: [RowShape(row)]
    """`row_shapes(section, row, limits)`: lengths of what becomes of rows of so many tokens."""
    image_source: Callable[[Any, int, int], int | None] = lambda section, num_patches, num_before: None
    """`image_source(section, num_patches, num_before)`: vectors of an image that an encoder beside a decoder reads."""
    target_share: Callable[[Any], float] = lambda section: 1.0
    """`share(section)`: expected share of the positions at which the head is computed."""
    generator_share: Callable[[Any], float] | None = None
    """Likewise of the generator of `model.generator_heads`; None: it needs none, and permits none."""
