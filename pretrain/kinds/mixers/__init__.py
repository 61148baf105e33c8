"""Mixers by the names of `mixers`. A new one: a file with its record, and a line here."""

from typing import Annotated

from pydantic import AfterValidator

from pretrain.config.base import check_name
from pretrain.kinds.mixer import Ability, Mixer, MixerSection
from pretrain.kinds.mixers.convolution import CONVOLUTION, ConvolutionConfig
from pretrain.kinds.mixers.delta import DELTA, DeltaConfig
from pretrain.kinds.mixers.mamba2 import MAMBA2, Mamba2Config

ATTENTION = "attention"
"""Name of the mixer that has no record, since the keys of a stack are its own."""

MIXERS: dict[str, Mixer] = {
    "delta": DELTA,
    "mamba2": MAMBA2,
    "convolution": CONVOLUTION,
}


def _check(name: str) -> str:
    return name if name == ATTENTION else check_name(name, {ATTENTION: None, **MIXERS})


MixerName = Annotated[str, AfterValidator(_check)]

__all__ = [
    "ATTENTION",
    "MIXERS",
    "Ability",
    "ConvolutionConfig",
    "DeltaConfig",
    "Mamba2Config",
    "Mixer",
    "MixerName",
    "MixerSection",
]
