"""Dropout draws by counter: the same step drops the same units again, and no two steps,
micro-batches or ranks do."""

import itertools

import torch

from pretrain.config.load import load_config
from pretrain.dist import World
from pretrain.training.step import seed_noise


def test_noise_is_that_of_its_seed_step_micro_batch_and_rank_alone():
    config = load_config("configs/run/quickstart.yaml")

    def draw(seed: int, step: int, micro: int, rank: int) -> tuple[float, ...]:
        seed_noise(config.model_copy(update={"seed": seed}), World(rank, 4, rank), step, micro)
        return tuple(torch.rand(4).tolist())

    counters = list(itertools.product((1, 2), range(6), range(3), range(4)))
    drawn = {counter: draw(*counter) for counter in counters}
    assert len(set(drawn.values())) == len(counters)
    assert all(draw(*counter) == values for counter, values in drawn.items())
