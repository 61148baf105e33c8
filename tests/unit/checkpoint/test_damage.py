"""Single flipped bits and truncations anywhere in a checkpoint: all are found, and the older good one is loaded."""

import os
import random
from pathlib import Path

import pytest

from pretrain.checkpoint.format import MANIFEST
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.dist import World
from tests.helpers.waiting import LIMIT_S
from tests.unit.checkpoint.forked_ranks import Share, manager_on, run_ranks
from tests.unit.checkpoint.stand_in import load_newest, state_of


@pytest.fixture
def saved(tmp_path, monkeypatch) -> Path:
    """The checkpoints of steps 1 and 2 of two ranks. Nothing is synced here: no power fails, and it takes its time."""

    def body(world: World) -> None:
        checkpoints = manager_on(world, tmp_path / "saved")
        for step in (1, 2):
            checkpoints.save(Share(step, world), state_of(step))

    assert run_ranks(2, body) == [0, 0]
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return tmp_path / "saved"


def flipped(content: bytes, rng: random.Random) -> bytes:
    """Changes one bit."""
    damaged = bytearray(content)
    damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def cut(content: bytes, rng: random.Random) -> bytes:
    """Takes bytes from the end: any number, often one of a few."""
    return content[: rng.randrange(max(0, len(content) - rng.choice([4, 64, 1 << 20])), len(content))]


def check_damages(saved: Path, damages, caplog) -> int:
    """Damages files of the newer checkpoint, one at a time, and loads; returns how many times."""
    old, new = (saved / f"step-0000000{step}" for step in (1, 2))
    aside = new.with_name(f"{new.name}.bad-damaged")
    whole = {path.name: path.read_bytes() for path in sorted(new.iterdir())}
    assert sorted(whole) == [MANIFEST, "rank-00000.safetensors", "rank-00001.safetensors"]
    number = 0
    for number, (name, content) in enumerate(damages(whole), start=1):
        caplog.clear()
        (new / name).write_bytes(content)
        assert load_newest(saved) == 1, (name, number)
        assert f"checkpoint {new} is damaged" in caplog.text and "trying an older one" in caplog.text
        assert f"checkpoint {old} is good: the run continues from there" in caplog.text
        aside.rename(new)
        (new / name).write_bytes(whole[name])
        assert old.is_dir()
    caplog.clear()
    assert load_newest(saved) == 2
    assert not caplog.text
    return number


def flips(count: int):
    """Flips of bits over all files, by size but for the first of each."""

    def damages(whole):
        rng = random.Random(11)
        names = list(whole)
        for number in range(count):
            name = names[number % 3] if number % 2 else rng.choices(names, [len(whole[n]) for n in names])[0]
            yield name, flipped(whole[name], rng)

    return damages


def truncations(count: int):
    """Truncations of all files, by a single byte too."""

    def damages(whole):
        rng = random.Random(12)
        for number in range(count):
            name = list(whole)[number % 3]
            yield name, whole[name][:-1] if number < 3 else cut(whole[name], rng)

    return damages


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.timeout(3 * LIMIT_S)
def test_any_flipped_bit_is_found_and_the_older_checkpoint_loaded(saved, caplog, count):
    assert check_damages(saved, flips(count), caplog) == count


@pytest.mark.parametrize("count", [100, pytest.param(1_000, marks=pytest.mark.long)])
def test_any_truncation_is_found_and_the_older_checkpoint_loaded(saved, caplog, count):
    assert check_damages(saved, truncations(count), caplog) == count


def test_a_file_of_another_step_or_of_another_rank_is_damage(saved):
    old, new = (saved / f"step-0000000{step}" for step in (1, 2))
    own = {rank: (new / f"rank-0000{rank}.safetensors").read_bytes() for rank in (0, 1)}
    others = [
        (0, own[1]),
        (1, own[0]),
        *((rank, (old / f"rank-0000{rank}.safetensors").read_bytes()) for rank in (0, 1)),
    ]
    checkpoints = CheckpointManager(saved, 2, World(0, 1, 0), {})
    for rank, content in others:
        (new / f"rank-0000{rank}.safetensors").write_bytes(content)
        assert f"rank-0000{rank}" in str(checkpoints.verify(new))
        (new / f"rank-0000{rank}.safetensors").write_bytes(own[rank])
    assert checkpoints.verify(new) is None
    manifest = (new / MANIFEST).read_bytes()
    (new / MANIFEST).write_bytes((old / MANIFEST).read_bytes())
    assert checkpoints.verify(new) is not None
    (new / MANIFEST).write_bytes(manifest)
