"""Text from a trained model: sampling and decoding."""

from pretrain.generate.decode import generate, stream
from pretrain.generate.sampling import GREEDY, Sampling, sample

__all__ = ["GREEDY", "Sampling", "generate", "sample", "stream"]
