"""Weights of ranks that should be alike: one bit on one rank is found, and named. Real ranks over gloo, no engine."""

import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as td
from torch import Tensor

from pretrain.errors import DivergedError
from pretrain.training.guard import bit_sums, check_replicas, odd_ones
from tests.helpers.waiting import LIMIT_S

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Weights:
    """The weights of a rank, three dtypes; one bit of one may be flipped."""

    def __init__(self, flip: bool) -> None:
        self._weights = [torch.linspace(-1, 1, 60, dtype=dtype).view(3, 20) for dtype in DTYPES]
        if flip:
            self._weights[1].view(-1).view(torch.int16)[17] ^= 1

    def working_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((f"layers.{number}.weight", weight) for number, weight in enumerate(self._weights))


def rank(number: int, size: int, store: Path, flipped: tuple[int, ...], results) -> None:
    td.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=size)
    try:
        check_replicas(Weights(number in flipped), 40)  # type: ignore[arg-type]
        results.put("")
    except DivergedError as error:
        results.put(str(error))
    td.destroy_process_group()


def compare(folder: Path, size: int, flipped: tuple[int, ...]) -> str:
    """What all ranks say, which is the same."""
    context = multiprocessing.get_context("fork")
    results, store = context.Queue(), folder / "store"
    processes = [context.Process(target=rank, args=(number, size, store, flipped, results)) for number in range(size)]
    for process in processes:
        process.start()
    said = {results.get(timeout=LIMIT_S) for _ in processes}
    for process in processes:
        process.join(LIMIT_S)
    (text,) = said
    return text


def test_ranks_that_are_alike_pass(tmp_path):
    assert compare(tmp_path, 2, ()) == ""


@pytest.mark.parametrize(
    ("size", "flipped", "said"),
    [
        (2, (1,), r"rank 0 on \S+ and rank 1 on \S+ differ at step 40, first layers.1.weight; no majority tells which"),
        (3, (1,), r"rank 1 on \S+ differ at step 40, first layers.1.weight; the other 2 agree; the last checkpoint is"),
        (4, (0,), r"rank 0 on \S+ differ at step 40, first layers.1.weight; the other 3 agree; the last checkpoint is"),
    ],
)
def test_one_bit_of_one_weight_is_found_and_the_odd_rank_is_named(tmp_path, size, flipped, said):
    assert re.match(f"the weights of {said}", compare(tmp_path, size, flipped))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype):
    weight = torch.linspace(-1, 1, 7, dtype=dtype)
    (_, before), integers = (
        next(bit_sums(iter([("w", weight)]))),
        {2: torch.int16, 4: torch.int32}[weight.element_size()],
    )
    for bit in range(8 * weight.element_size()):
        flipped = weight.clone()
        flipped.view(integers)[3] ^= torch.tensor(1 << bit).to(integers)
        ((_, after),) = bit_sums(iter([("w", flipped)]))
        assert after != before


@pytest.mark.parametrize(
    ("values", "odd"),
    [([5, 5, 5], []), ([5, 6], [0, 1]), ([5, 5, 6], [2]), ([5, 6, 7], [0, 1, 2]), ([5, 6, 5, 6], [0, 1, 2, 3])],
)
def test_who_is_odd(values, odd):
    assert odd_ones(values) == odd
