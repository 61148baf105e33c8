"""Room for checkpoints, known before the first step: the arithmetic, and what a full or closed disk says."""

import errno

import pytest
import torch
from safetensors import safe_open

from pretrain.checkpoint.manager import check_room, room_problem, try_writing
from pretrain.config.optim import OptimConfig
from pretrain.config.train import CheckpointConfig
from pretrain.dist import World
from pretrain.engine.replicated import ReplicatedState
from pretrain.errors import DiskError
from pretrain.kinds.optimizers import OPTIMIZERS
from pretrain.optim.build import build_optimizer, state_size
from pretrain.optim.groups import group_parameters
from pretrain.plan.course import checkpoint_bytes, checkpoints_at_once
from pretrain.utils import io
from tests.unit.checkpoint.stand_in import StandIn, manager, save, state_of
from tests.unit.model.tiny import build, tiny_config, two_stacks_config


@pytest.fixture(autouse=True)
def _no_hook_left_behind():
    yield
    io.set_fault_hook(None)


def test_the_size_that_is_computed_is_the_size_that_is_written(tmp_path):
    shapes = {f"decoder.blocks.{number}.attention.qkv.weight": (64, 96) for number in range(12)}
    path = manager(tmp_path).save(StandIn(1, shapes, cut=64 * 96), state_of(1))
    written = sum(file.stat().st_size for file in path.iterdir())
    num_parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    computed = checkpoint_bytes(3 * num_parameters, 3 * len(shapes), ranks=1)
    assert written <= computed <= 1.01 * written


@pytest.mark.parametrize("config", [tiny_config(norm="layer", bias=True), two_stacks_config()], ids=["one", "two"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_size_is_that_of_a_real_checkpoint_of_each_optimizer(tmp_path, kind, config):
    model = build(config)
    groups = group_parameters(model)
    optimizer = build_optimizer(groups, OptimConfig(kind=kind, lr=1e-3), torch.device("cpu"))
    masters = list(model.named_parameters())
    path = manager(tmp_path).save(ReplicatedState(masters, optimizer, World(0, 1, 0)), state_of(0))
    saved = safe_open_all(path)
    state = state_size(groups, OptimConfig(kind=kind, lr=1e-3))
    num_parameters = sum(master.numel() for _, master in masters)
    assert (num_parameters + state.elements, len(masters) + state.tensors) == (sum(saved), len(saved))
    written = sum(file.stat().st_size for file in path.iterdir())
    computed = checkpoint_bytes(num_parameters + state.elements, len(masters) + state.tensors, ranks=1)
    headers = len(saved) * 320
    assert written <= computed <= written + headers


def safe_open_all(path) -> list[int]:
    """The elements of each tensor of a checkpoint, by safetensors' own reader."""
    sizes = []
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            sizes += [tensors.get_tensor(key).numel() for key in tensors.keys()]  # noqa: SIM118 (it is no dict)
    return sizes


@pytest.mark.parametrize(
    ("every", "keep", "for_good", "last", "number"),
    [(0, 2, 0, 100, 3), (10, 2, 0, 100, 3), (10, 5, 0, 100, 6), (10, 2, 20, 100, 8), (10, 2, 15, 100, 6)],
)
def test_how_many_there_are_at_once(every, keep, for_good, last, number):
    config = CheckpointConfig(every_steps=every, keep=keep, keep_every_steps=for_good)
    assert checkpoints_at_once(config, last) == number


def test_they_fit_to_the_byte():
    assert room_problem(free=300, existing=0, checkpoint=100, num_kept=3) is None
    assert room_problem(free=299, existing=1, checkpoint=100, num_kept=3) is None
    message = "3 checkpoints of 1,000 bytes .* need 3,000 bytes, and 1,999 are free, besides 1,000 bytes of existing"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(room_problem(free=1999, existing=1000, checkpoint=1000, num_kept=3))


def test_a_run_whose_checkpoints_cannot_fit_is_refused_with_the_numbers(tmp_path):
    huge = 2**60
    message = (
        rf"3 checkpoints of {huge:,} bytes .* need {3 * huge:,} bytes, and [\d,]+ are free; "
        "free space, lower checkpoint.keep, or set run.dir"
    )
    with pytest.raises(DiskError, match=message):
        manager(tmp_path).prepare(huge, 3)


def test_checkpoints_that_are_there_make_room_for_new_ones(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    size = sum(file.stat().st_size for path in tmp_path.iterdir() for file in path.iterdir())
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 100})())
    check_room(tmp_path, (size + 100) // 3, 3)
    with pytest.raises(DiskError, match=f"and 100 are free, besides {size:,} bytes of existing checkpoints"):
        check_room(tmp_path, size, 3)


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "rename", "fsync_dir"])
def test_a_disk_that_refuses_the_trial_write_is_told_before_the_first_step(tmp_path, operation):
    def refuse(name, path):
        if name == operation and path.name.startswith(".trial"):
            raise OSError(errno.EROFS, "Read-only file system")
        if name == operation == "fsync_dir":
            raise OSError(errno.EROFS, "Read-only file system")

    io.set_fault_hook(refuse)
    with pytest.raises(
        DiskError, match=r"\.trial.*: cannot write: Read-only file system; mount it for writing, or use another folder"
    ):
        try_writing(tmp_path)


def test_a_trial_leaves_nothing(tmp_path):
    manager(tmp_path).prepare(1000, 3)
    assert list(tmp_path.iterdir()) == []
