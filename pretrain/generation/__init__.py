"""Text from a trained model: greedy decoding, sampling, beam search, filling of masks."""

from pretrain.generation.beam import Beams, beam_search
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import (
    GREEDY,
    Continuation,
    RowSeeds,
    SampledToken,
    Sampling,
    generate,
    sample,
    stream,
)

__all__ = [
    "GREEDY",
    "Beams",
    "Constraints",
    "Continuation",
    "RowSeeds",
    "SampledToken",
    "Sampling",
    "beam_search",
    "generate",
    "sample",
    "stream",
]
