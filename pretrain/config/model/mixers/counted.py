"""Counts of the mixers in the place of attention, by their records (`pretrain/kinds/mixers`)."""

from importlib import import_module
from typing import Any, Protocol

from pretrain.config.model.parts.counts import FlopCounter, Kept, MicroBatch, Weights
from pretrain.config.model.stack import StackConfig
from pretrain.kinds.mixers import Mixer


class MixerCounts(Protocol):
    """Functions of the module that `Mixer.counts` names."""

    def weights(self, stack: StackConfig, name: str) -> Weights:
        """Yields the parameters of a layer in the order of use."""

    def flops(self, count: FlopCounter, stack: StackConfig, name: str, tokens: int, reads: bool) -> bool:
        """Adds a layer of a row; `reads`: its input has a gradient."""

    def kept(self, batch: MicroBatch, stack: StackConfig) -> Kept:
        """Counts a token of a layer, without norm and sum around it."""

    def num_values(self, stack: StackConfig) -> int:
        """Returns the values of a layer's projections, of which autocast makes copies."""

    def exchanged(self, batch: MicroBatch, stack: StackConfig) -> tuple[int, int]:
        """Returns bytes a token of what ranks that share rows exchange before the rule, and behind it."""

    def widest(self, stack: StackConfig) -> int:
        """Returns the columns of the widest projection."""


def counts_of(mixer: Mixer) -> MixerCounts:
    """Returns the counts of a mixer."""
    counts: Any = import_module(mixer.counts)
    return counts
