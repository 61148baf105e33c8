"""Tensors of a folder: every layout is read, whatever is damaged or leads outside is one clear line, no code runs."""

import json
import os
import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file

from pretrain.errors import CheckpointError
from pretrain.interop.tensors import TensorFact, TensorFolder

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(7)}


def shard(folder, name, names):
    part = {key: TENSORS[key] for key in names}
    if name.endswith(".bin"):
        torch.save(part, folder / name)
    else:
        save_file(part, folder / name)


def index(folder, name, places):
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def single(folder, name):
    shard(folder, name, TENSORS)


def sharded(folder, name):
    stem, suffix = name.split(".")
    first, second = f"{stem}-00001-of-00002.{suffix}", f"{stem}-00002-of-00002.{suffix}"
    shard(folder, first, ["a"])
    shard(folder, second, ["b", "c"])
    index(folder, name, {"a": first, "b": second, "c": second})


def of_old_format(folder, name):
    torch.save(TENSORS, folder / name, _use_new_zipfile_serialization=False)


def refusal(folder):
    with pytest.raises(CheckpointError) as error:
        TensorFolder(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (single, "model.safetensors"),
        (sharded, "model.safetensors"),
        (single, "pytorch_model.bin"),
        (sharded, "pytorch_model.bin"),
        (of_old_format, "pytorch_model.bin"),
    ],
)
def test_every_layout_is_read(tmp_path, make, name):
    make(tmp_path, name)
    folder = TensorFolder(tmp_path)
    assert folder.facts["a"] == TensorFact((2, 3), "fp32")
    assert folder.facts["b"] == TensorFact((4,), "bf16")
    assert folder.facts["c"].dtype not in ("fp32", "bf16")
    for key, tensor in TENSORS.items():
        assert torch.equal(folder.load(key), tensor)


def test_safetensors_go_before_pickles(tmp_path):
    single(tmp_path, "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at")
    assert set(TensorFolder(tmp_path).facts) == set(TENSORS)


class Attack:
    """Unpickled by pickle itself, runs a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("old_format", [True, False])
def test_nothing_that_is_pickled_is_executed(tmp_path, old_format):
    done = tmp_path / "executed"
    torch.save({"a": Attack(done)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old_format)
    assert "pytorch_model.bin: cannot be parsed: " in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Attack(done)))
    assert "pytorch_model.bin: cannot be parsed: " in refusal(tmp_path)
    assert not done.exists()


@pytest.mark.parametrize("content", [[torch.ones(1)], {"a": 1}, {"a": {"b": torch.ones(1)}}, torch.ones(1)])
def test_a_pickle_of_anything_but_named_tensors_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert refusal(tmp_path).endswith("cannot be parsed: not a dict of tensors; fetch the file again")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("keep", [0, 5, 100, -3])
def test_a_file_that_is_cut_short_is_refused(tmp_path, name, keep):
    single(tmp_path, name)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{name}: cannot be parsed: " in refusal(tmp_path)


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", ".safetensors", "x.bin", 3, None,
     "a\x00.safetensors", "a.safetensors\n"],
)  # fmt: skip
def test_an_index_cannot_lead_out_of_the_folder(tmp_path, file):
    folder = tmp_path / "model"
    folder.mkdir()
    single(tmp_path, "model.safetensors")
    index(folder, "model.safetensors", {"a": file})
    assert "is not the name of a .safetensors file of this folder; do not trust it" in refusal(folder)


@pytest.mark.parametrize("places", [None, [], {}, "a"])
def test_an_index_without_a_map_is_refused(tmp_path, places):
    index(tmp_path, "model.safetensors", places)
    assert "model.safetensors.index.json: has no weight_map" in refusal(tmp_path)


def test_a_shard_that_is_missing_is_named(tmp_path):
    sharded(tmp_path, "model.safetensors")
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: no such file; fetch the model again" in refusal(tmp_path)


FILES = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


@pytest.mark.parametrize(
    "places",
    [
        {"a": FILES[0], "b": FILES[1], "d": FILES[0]},  # one that is nowhere, and one that is not listed
        {"a": FILES[1], "b": FILES[0], "c": FILES[0]},  # in the other file
        {"rotary_emb.inv_freq": FILES[0], "c": FILES[1]},
    ],
)
def test_tensors_are_those_of_the_files_whatever_an_index_lists(tmp_path, places):
    sharded(tmp_path, "model.safetensors")
    index(tmp_path, "model.safetensors", places)
    folder = TensorFolder(tmp_path)
    assert folder.listed == places and folder.facts.keys() == TENSORS.keys()
    assert all(torch.equal(folder.load(key), tensor) for key, tensor in TENSORS.items())


def test_a_tensor_of_two_files_is_one_where_it_is_the_same(tmp_path):
    sharded(tmp_path, "model.safetensors")
    shard(tmp_path, FILES[1], TENSORS)
    assert torch.equal(TensorFolder(tmp_path).load("a"), TENSORS["a"])
    save_file({"a": torch.zeros(2, 3), "b": TENSORS["b"], "c": TENSORS["c"]}, tmp_path / FILES[1])
    with pytest.raises(CheckpointError, match="a is in several files, with different values; fetch the model again"):
        TensorFolder(tmp_path).load("a")


def test_what_no_file_has_is_advised_by_the_index(tmp_path):
    sharded(tmp_path, "model.safetensors")
    index(tmp_path, "model.safetensors", {"a": FILES[0], "d": FILES[0]})
    folder = TensorFolder(tmp_path)
    assert folder.advise(["d"]) == f"fetch {FILES[0]} again: the index has tensors that are not in it"
    assert folder.advise(["b"]) == f"fetch the index again: it does not list {FILES[1]} beside it"
    single(tmp_path, "model.safetensors")
    assert TensorFolder(tmp_path).advise(["d"]) == ""


def test_a_tensor_is_read_when_it_is_asked_for(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(5), "b": torch.ones(3)}, path)
    folder = TensorFolder(tmp_path)
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", 7.0))
    assert folder.load("b").tolist() == [1, 1, 7]
