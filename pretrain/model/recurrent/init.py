"""Initial weights of a recurrent model."""

import torch
from torch import Tensor, nn

from pretrain.config.recurrent import RecurrentConfig


def draw_recurrent(name: str, weight: Tensor, config: RecurrentConfig, generator: torch.Generator) -> None:
    """Sets one parameter. What is compared with a Transformer shall be at its best, so not all is torch's default.

    Matrices are uniform by their fan-in, as torch's; those from state to state orthogonal, gate by gate (Saxe et al.
    2014), without which a plain RNN forgets within a few steps. Embeddings are N(0, 1), as torch's: much smaller, they
    leave a cell blind to its input for hundreds of steps; N(0, 1/D) where they are the head too. Biases are 0, but for
    the first of the two of an LSTM's forget gate, which is 1: what it holds is kept until it learns what to forget
    (Jozefowicz et al. 2015).
    """
    part = name.rpartition(".")[2]
    if part.startswith("bias"):
        weight.zero_()
        if part.startswith("bias_ih") and config.decoder.cell == "lstm":
            weight.chunk(4)[1].fill_(1.0)  # torch's order: input, forget, cell, output
    elif part.startswith("weight_hh"):
        for gate in weight.split(weight.shape[1]):
            nn.init.orthogonal_(gate, generator=generator)
    elif name == "embedding.weight":
        weight.normal_(0.0, weight.shape[1] ** -0.5 if config.tied_embeddings else 1.0, generator=generator)
    else:
        bound = weight.shape[1] ** -0.5
        weight.uniform_(-bound, bound, generator=generator)
