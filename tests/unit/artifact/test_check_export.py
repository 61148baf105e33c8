"""An export whose scores are not the model's is refused, and leaves nothing."""

import logging

import pytest
import torch

from pretrain.artifact import transfer
from pretrain.artifact.model_path import open_source
from pretrain.artifact.runtime_export import was_exported
from pretrain.artifact.transfer import export_model
from pretrain.errors import CheckpointError
from pretrain.interop import write
from tests.unit.artifact.runs import TEXTS, write_each_shape


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of each shape, with random weights."""
    return write_each_shape(tmp_path_factory.mktemp("check"), TEXTS)


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_exported_well_is_written(folder, tmp_path, caplog, name, dtype):
    written = export_model(folder / name, tmp_path / "out", dtype=dtype)
    assert (tmp_path / "out" / "model.safetensors").is_file() and written.architecture
    assert "not compared" not in caplog.text
    assert was_exported(folder / name, tmp_path / "out", "hf", dtype)


def test_an_export_of_another_dtype_program_or_model_is_none_of_this_one(folder, tmp_path):
    export_model(folder / "gpt", tmp_path / "out")
    assert was_exported(folder / "gpt", tmp_path / "out", "hf", "fp32")
    assert not was_exported(folder / "gpt", tmp_path / "out", "hf", "bf16")
    assert not was_exported(folder / "gpt", tmp_path / "out", "gguf", "fp32")
    assert not was_exported(folder / "bert", tmp_path / "out", "hf", "fp32")
    assert not was_exported(folder / "gpt", tmp_path / "none", "hf", "fp32")


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_a_conversion_that_exchanges_two_weights_is_refused(folder, tmp_path, monkeypatch, name):
    """What a mistake in a family's table would do: names and shapes are right, values are elsewhere."""
    to_theirs = write.to_theirs

    def exchanged(weight, ours):
        found = to_theirs(weight, ours)
        if ".blocks.0." in weight.ours and ours.dim() == 2:
            return [(name, tensor.flip(0)) for name, tensor in found]
        return found

    monkeypatch.setattr(write, "to_theirs", exchanged)
    with pytest.raises(
        CheckpointError, match=r"the export gives other scores than the model \(by up to .*: nothing was"
    ):
        export_model(folder / name, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.iterdir())
    monkeypatch.setattr(write, "to_theirs", exchanged)
    assert export_model(folder / name, tmp_path / "unchecked", check=False).files


def test_what_transformers_cannot_load_is_refused(folder, tmp_path):
    export_model(folder / "gpt", tmp_path / "out")
    what = open_source(folder / "gpt")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM: transformers cannot run the export: .*; report it"):
        transfer.check_scores(what, tmp_path / "out", "LlamaForCausalLM", torch.float32)


def test_a_model_that_does_not_fit_into_memory_twice_is_not_compared_and_that_is_said(
    folder, tmp_path, monkeypatch, caplog
):
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 1 kB\n")
    monkeypatch.setattr(transfer, "_MEMORY_INFO", tmp_path / "meminfo")
    with caplog.at_level(logging.WARNING):
        export_model(folder / "gpt", tmp_path / "out")
    assert "scores of the export were not compared: two models in fp32 take" in caplog.text
