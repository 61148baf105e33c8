"""State that every rank holds whole is written by all of them: even shares, which make the whole."""

import pytest
import torch

from pretrain.dist import World
from pretrain.engine.replicated import ReplicatedState

LENGTHS = {"one": (2, 50), "two": (101,), "small": (1,)}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_saves_an_even_share_of_each_parameter_and_its_moments(size):
    masters = [(name, torch.nn.Parameter(torch.randn(shape))) for name, shape in LENGTHS.items()]
    optimizer = torch.optim.AdamW([master for _, master in masters])
    states = [ReplicatedState(masters, optimizer, World(rank, size, rank)) for rank in range(size)]
    shares = [list(state.owned_fragments()) for state in states]
    for name, master in masters:
        pieces = sorted((f for share in shares for f in share if f.name == name), key=lambda f: f.offset)
        even = master.numel() / size
        assert all(abs(piece.length - even) < 1 for piece in pieces)
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            assert all(piece.tensors[kind].numel() == piece.length for piece in pieces)
        whole = torch.cat([piece.tensors["weight"] for piece in pieces])
        assert torch.equal(whole, master.detach().view(-1))
