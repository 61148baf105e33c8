"""What is said of a GPU whose memory is too small."""

import pytest
import torch

from pretrain.config.load import load_config
from pretrain.config.run import RunConfig
from pretrain.dist import World
from pretrain.errors import EXIT_UNAVAILABLE, OutOfMemoryError
from pretrain.training.run import memory_explained

WORLD = World(1, 2, 1)


def config_of(*overrides: str) -> RunConfig:
    return load_config("configs/run/quickstart.yaml", list(overrides))


def raised(config: RunConfig, folder) -> OutOfMemoryError:
    with pytest.raises(OutOfMemoryError) as caught, memory_explained(config, folder, WORLD):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it.")
    return caught.value


def test_the_error_names_the_rank_what_was_wanted_and_a_smaller_micro_batch(tmp_path):
    config = config_of("batch.micro=8", "engine={kind: deepspeed, zero_stage: 2}")
    error = raised(config, tmp_path)
    assert error.exit_code == EXIT_UNAVAILABLE
    assert "out of GPU memory on rank 1" in error.line() and "Tried to allocate 2.00 GiB" in error.line()
    assert "use batch.micro=4 (now 8), which changes nothing else; or use engine.activation_checkpointing" in error.fix
    assert "engine.zero_stage=3" in error.fix and error.fix.endswith("ask `pretrain plan` what fits")


def test_what_is_used_already_is_not_advised(tmp_path):
    engine = "engine={kind: deepspeed, zero_stage: 3, activation_checkpointing: full}"
    fix = raised(config_of("batch.micro=1", engine), tmp_path).fix
    assert fix == "use engine.offload_activations=cpu; or ask `pretrain plan` what fits"
    fix = raised(config_of("batch.micro=1", engine, "engine.offload_activations=cpu"), tmp_path).fix
    assert fix == "ask `pretrain plan` what fits"


def test_other_errors_pass(tmp_path):
    with pytest.raises(ValueError, match="other"), memory_explained(config_of(), tmp_path, WORLD):
        raise ValueError("other")


@pytest.mark.gpu
def test_on_a_gpu_the_peak_is_told_and_a_snapshot_is_written(tmp_path):
    torch.cuda.init()
    config = config_of("profile.memory_history=true")
    held = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    told = pytest.raises(OutOfMemoryError, match=r"tensors held up to \d+\.\d of \d+\.\d GiB")
    with told as caught, memory_explained(config, tmp_path, WORLD):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    del held
    snapshot = tmp_path / "profile" / "memory-rank-1.pickle"
    assert caught.value.where == str(snapshot)
    assert snapshot.stat().st_size > 1000
