"""Agreement of ranks on the layouts of their files: each different one travels once, and none that is as before."""

import math
from collections.abc import Callable

import pytest

from pretrain import dist
from pretrain.checkpoint.layouts import AgreedLayouts, FileLayout, LayoutVote
from pretrain.errors import CheckpointError
from tests.helpers.thread_ranks import Ranks

RANKS = 6
SHAPES = {f"blocks.{number}.weight": [64, 10] for number in range(40)} | {"norm": [5]}


def shares() -> list[FileLayout]:
    """AgreedLayouts at ZeRO 3: a share of each parameter on every rank, nothing of the smallest on the last."""
    layouts = []
    for rank in range(RANKS):
        lengths = {}
        for name, shape in SHAPES.items():
            share = -(-math.prod(shape) // RANKS)
            length = min(share, math.prod(shape) - rank * share)
            lengths |= {name: length} if length > 0 else {}
        layouts.append(FileLayout({name: SHAPES[name] for name in lengths}, lengths, ["exp_avg"]))
    return layouts


@pytest.fixture
def save(monkeypatch) -> Callable[[list[AgreedLayouts], list[FileLayout]], list[int]]:
    """Lets the ranks agree on layouts; returns the bytes of each exchange."""

    def run(agreed: list[AgreedLayouts], layouts: list[FileLayout]) -> list[int]:
        ranks = Ranks(RANKS)
        sent: list[int] = []

        def join(content: bytes, start: int, total: int) -> bytes:
            together = bytearray(total)
            for piece, place in ranks.gather((content, start)):
                together[place : place + len(piece)] = piece
            sent.append(total)
            return bytes(together)

        monkeypatch.setattr(dist, "join_bytes", join)

        def agree(world: dist.World) -> None:
            content = layouts[world.rank].encode()
            votes = [LayoutVote(*vote) for vote in ranks.gather(LayoutVote.on(content, agreed[world.rank].agreed))]
            agreed[world.rank].agree(votes, world.rank, content)

        ranks.run(agree)
        return sent

    return run


def test_a_layout_travels_once_and_not_again_while_all_are_as_before(save):
    agreed, layouts = [AgreedLayouts() for _ in range(RANKS)], shares()
    different = {layout.encode() for layout in layouts}
    assert len(different) == 2  # of a whole share, and of the rest
    assert save(agreed, layouts) == [sum(map(len, different))] * RANKS
    assert all(one.shapes == SHAPES and one.moments == ["exp_avg"] for one in agreed)
    assert save(agreed, layouts) == []
    agreed[2] = AgreedLayouts()  # a rank in the place of one that was lost
    assert save(agreed, layouts) == [sum(map(len, different))] * RANKS
    assert save(agreed, layouts) == []
    agreed[0].load(dict(SHAPES))
    assert len(save(agreed, layouts)) == RANKS


def test_layouts_that_trade_places_or_change_are_looked_at_again(save):
    agreed, layouts = [AgreedLayouts() for _ in range(RANKS)], shares()
    save(agreed, layouts)
    assert len(save(agreed, layouts[::-1])) == RANKS
    short = layouts[0].num_weights | {"norm": 0}
    other = SHAPES | {"norm": [1, 5]}
    for changed, message in (
        (layouts[0]._replace(num_weights=short), "norm has 5 elements, and the ranks have 4 of it"),
        (layouts[0]._replace(shapes=other), r"norm has shape \[1, 5\] in the save, shape \[5\] on another rank"),
    ):
        for _ in range(2):
            with pytest.raises(CheckpointError, match=message):
                save(agreed, [changed, *layouts[1:]])
