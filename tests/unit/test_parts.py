"""Where a part of a parameter lies in the whole one, against the numbers of its elements; and files of such parts."""

import random
from itertools import pairwise

import pytest
import torch

from pretrain.checkpoint.fragments import FragmentReader, write_fragments
from pretrain.errors import CheckpointError
from pretrain.parts import Part, Place
from pretrain.types import Fragment

SHAPES: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = [
    ((12, 5), 0, ()),
    ((12,), 0, ()),
    ((4, 3, 6), 0, ()),
    ((24, 5), 0, (16, 4, 4)),
    ((24,), 0, (16, 4, 4)),
    ((7, 12), 1, ()),
]
"""Whole shape, dimension and sections of what 2 and 4 ranks share."""


def numbers_of(place: Place) -> list[int]:
    run, stride = place.stripes or (place.length, place.length)
    return [place.offset + at // run * stride + at % run for at in range(place.length)]


@pytest.mark.parametrize(("shape", "dim", "sections"), SHAPES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_range_of_a_part_has_its_place_in_the_whole(shape, dim, sections, ranks):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for rank in range(ranks):
        part = Part(rank, ranks, dim, sections)
        taken = part.take(whole)
        assert part.whole(taken.shape) == whole.shape
        flat = taken.reshape(-1)
        for start in range(len(flat)):
            for length in range(len(flat) - start + 1):
                places = part.places(taken.shape, start, length)
                assert len(places) <= max(3, len(sections))
                found = [number for place in places for number in numbers_of(place)]
                assert found == flat[start : start + length].tolist()
                assert [place.start for place in places] == [
                    start + sum(one.length for one in places[:number]) for number in range(len(places))
                ]


def fragments(name: str, whole: torch.Tensor, part: Part, cuts: int) -> list[Fragment]:
    """A part in `cuts` ranges, as ZeRO cuts it."""
    taken = part.take(whole)
    flat = taken.reshape(-1)
    ends = [len(flat) * number // cuts for number in range(cuts + 1)]
    return [
        Fragment(name, place.offset, tuple(whole.shape), {"weight": flat[place.start :][: place.length]}, place.stripes)
        for first, last in pairwise(ends)
        for place in part.places(taken.shape, first, last - first)
    ]


@pytest.mark.parametrize(("shape", "dim", "sections"), SHAPES)
def test_files_of_any_parts_are_read_by_any_other(tmp_path, shape, dim, sections):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    layouts = [(ranks, cuts) for ranks in (1, 2, 4) for cuts in (1, 2, 3)]
    for ranks, cuts in layouts:
        paths = [tmp_path / f"{ranks}-{cuts}-{rank}" for rank in range(ranks)]
        for rank, path in enumerate(paths):
            mine = fragments("w", whole, Part(rank, ranks, dim, sections), cuts)
            random.Random(cuts).shuffle(mine)
            write_fragments(path, mine)
        for others, pieces in layouts:
            for rank in range(others):
                reader = FragmentReader(paths, rank / others if pieces > 1 else None)
                for wanted in fragments("w", whole, Part(rank, others, dim, sections), pieces):
                    out = torch.full((wanted.length,), torch.nan)
                    reader.read_into("w", "weight", wanted.offset, out, wanted.stripes)
                    assert torch.equal(out, wanted.tensors["weight"])
        if dim == 1 and ranks == 2:
            with pytest.raises(CheckpointError, match=r"w/weight lacks \d+ elements"):
                FragmentReader(paths[:1]).read_into("w", "weight", 0, torch.empty(whole.numel()))
