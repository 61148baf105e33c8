"""Record of an objective: everything that a stage may ask of it. One file each in `kinds/objectives/`."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pretrain.config.base import Section


def every_position(section: Any) -> float:
    """Returns the share of targets among positions, 1."""
    return 1.0


def few_positions(section: Any) -> float:
    """Returns the share of targets among positions, about 0: one a document."""
    return 0.0


def chosen_positions(section: Any) -> float:
    """Returns the share of targets among positions, `rate` of the section."""
    return float(section.rate)


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
    loss: str = "pretrain.objective.loss:token_loss"
    """`build(objective_config) -> Loss`."""
    shown: tuple[str, ...] = ()
    """Names of further sums of the loss (`LossOutput.shown_M`), logged as means over the targets."""
    target_share: Callable[[Any], float] = every_position
    """`share(section)`: expected share of the positions at which the head is computed."""
    generator_share: Callable[[Any], float] | None = None
    """Likewise of the generator of `model.generator_heads`; None: it needs none, and permits none."""


def find_part(name: str) -> Callable[..., Any]:
    """Imports a part of a record by its name, `module:function`."""
    part: Callable[..., Any] = pkgutil.resolve_name(name)
    return part
