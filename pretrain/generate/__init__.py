"""Text from a trained model: greedy decoding, sampling, beam search, filling of masks."""

from pretrain.generate.beam import Beams, beam_search
from pretrain.generate.constraints import Constraints
from pretrain.generate.decode import Continuation, Drawn, generate, stream
from pretrain.generate.sampling import GREEDY, RowSeeds, Sampling, sample

__all__ = [
    "GREEDY",
    "Beams",
    "Constraints",
    "Continuation",
    "Drawn",
    "RowSeeds",
    "Sampling",
    "beam_search",
    "generate",
    "sample",
    "stream",
]
