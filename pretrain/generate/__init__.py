"""Text from a trained model: greedy decoding, sampling, beam search, filling of masks."""

from pretrain.generate.beam import Beams, beam_search
from pretrain.generate.constraints import Constraints
from pretrain.generate.sampling import GREEDY, Continuation, RowSeeds, SampledToken, Sampling, generate, sample, stream

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
