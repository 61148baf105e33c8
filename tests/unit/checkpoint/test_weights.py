"""Weights alone in the checkpoint format: written file by file, read tensor by tensor."""

import pytest
import torch

from pretrain.checkpoint.format import load_manifest
from pretrain.checkpoint.load import WeightReader, load_checkpoint, write_weights
from pretrain.errors import CheckpointError
from tests.unit.checkpoint.stand_in import SHAPES, StandIn

WEIGHTS = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(("max_bytes", "files"), [(10**6, 1), (48, 2), (1, 2)])
def test_what_is_written_is_read_whatever_the_size_of_a_file(tmp_path, max_bytes, files):
    write_weights(tmp_path, WEIGHTS.items(), {"by": "a test"}, max_file_bytes=max_bytes)
    assert len(list(tmp_path.glob("weights-*.safetensors"))) == files
    reader = WeightReader(tmp_path)
    assert reader.shapes == SHAPES
    assert all(torch.equal(reader.read(name), weight) for name, weight in WEIGHTS.items())
    assert load_manifest(tmp_path).topology == {"by": "a test"}


def test_a_tensor_is_asked_for_only_when_the_file_before_it_is_written(tmp_path):
    written = []

    def asked():
        for number in range(4):
            written.append(len(list(tmp_path.glob("*.safetensors"))))
            yield f"weight.{number}", torch.zeros(4)

    write_weights(tmp_path, asked(), {}, max_file_bytes=16)
    # One is at hand when it turns out not to fit any more.
    assert written == [0, 0, 1, 2]


def test_a_part_of_a_parameter_is_read_alone(tmp_path):
    write_weights(tmp_path, WEIGHTS.items(), {})
    part = torch.empty(4)
    WeightReader(tmp_path).read_part("embed", 5, part)
    assert torch.equal(part, WEIGHTS["embed"].flatten()[5:9])


def test_they_are_no_state_to_resume_from(tmp_path):
    write_weights(tmp_path, WEIGHTS.items(), {})
    with pytest.raises(CheckpointError, match=r"weights alone, and no exp_avg; use the optim.kind"):
        load_checkpoint(tmp_path, StandIn(step=7))


def test_a_file_that_is_missing_is_named(tmp_path):
    write_weights(tmp_path, WEIGHTS.items(), {})
    (tmp_path / "weights-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"weights-00001\.safetensors: cannot be parsed"):
        WeightReader(tmp_path)
