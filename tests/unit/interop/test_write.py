"""An export: deterministic, sharded, streamed, whole or not there at all."""

import json
import weakref

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pretrain.errors import ConfigError, DiskError
from pretrain.interop.release import open_release
from pretrain.interop.write import About, write_release
from pretrain.utils import io
from tests.unit.interop.releases import VOCAB, random_weights, tiny, write_tiny


@pytest.fixture(autouse=True)
def _no_hook_left_behind():
    yield
    io.set_fault_hook(None)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_files_of_a_small_model(tmp_path):
    _, written = write_tiny(tmp_path / "out", tiny(special_tokens={"bos": 1, "eos": 2}), generation={"num_beams": 4})
    files = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert written.files == sorted(contents(tmp_path / "out")) == files
    assert (written.model_type, written.architecture) == ("llama", "LlamaForCausalLM")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["model_type"], config["torch_dtype"], config["vocab_size"]) == ("llama", "float32", VOCAB)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "num_beams": 4}
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_only_models_that_generate_have_settings_for_it(tmp_path):
    _, bert = write_tiny(tmp_path / "bert", tiny("bert-tiny"))
    _, bare = write_tiny(tmp_path / "bare", tiny(head={"kind": "none"}))
    _, t5 = write_tiny(tmp_path / "t5", tiny("t5-tiny"))
    assert "generation_config.json" not in bert.files + bare.files
    assert "generation_config.json" in t5.files


def test_the_same_weights_give_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        write_tiny(tmp_path / name, tiny(), max_shard_bytes=100_000, about=About("x", metrics={"loss": 2.5}))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_shards_hold_at_most_the_limit_and_the_index_finds_everything(tmp_path):
    limit = 60_000
    weights, written = write_tiny(tmp_path / "out", tiny(), max_shard_bytes=limit)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    sizes, found = [], {}
    for shard in shards:
        part = load_file(tmp_path / "out" / shard)
        assert {name for name, place in index["weight_map"].items() if place == shard} == set(part)
        sizes.append(sum(tensor.numel() * 4 for tensor in part.values()))
        assert sizes[-1] <= limit or len(part) <= 2  # gate and up are one parameter of ours, and larger
        found |= part
    assert max(sizes) > limit
    assert index["metadata"]["total_size"] == sum(sizes) == written.total_bytes == 4 * written.num_parameters
    assert torch.equal(found["lm_head.weight"], weights["head.weight"][:VOCAB])
    with safe_open(tmp_path / "out" / shards[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_sharded_and_whole_hold_the_same(tmp_path):
    weights, _ = write_tiny(tmp_path / "whole", tiny("gpt2-tiny"))
    write_tiny(tmp_path / "sharded", tiny("gpt2-tiny"), max_shard_bytes=10_000)
    whole, sharded = open_release(tmp_path / "whole"), open_release(tmp_path / "sharded")
    for name in weights:
        assert torch.equal(whole.read(name), sharded.read(name))


def test_no_more_than_two_parameters_are_in_memory_however_many_there_are(tmp_path):
    """Each is read when its place in the file has come, and let go: what is held is no shard and no model."""
    config = tiny(decoder={"layers": 6})
    weights = random_weights(config)
    alive, most, asked = 0, 0, []

    def gone():
        nonlocal alive
        alive -= 1

    def read(name):
        nonlocal alive, most
        # torch keeps the array for as long as any view of its memory lives.
        array = np.array(weights[name].numpy())
        weakref.finalize(array, gone)
        alive += 1
        most = max(most, alive)
        asked.append(name)
        return torch.from_numpy(array)

    write_release(config, read, tmp_path / "out", max_shard_bytes=200_000)
    assert sorted(asked) == sorted(weights)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert alive == 0
    assert most <= 2


def test_bf16_is_rounded_to_nearest_and_halves_the_files(tmp_path):
    weights, written = write_tiny(tmp_path / "out", tiny(), dtype="bf16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["model.norm.weight"], weights["decoder.norm.weight"].to(torch.bfloat16))
    assert written.total_bytes == 2 * written.num_parameters
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert open_release(tmp_path / "out").dtype == "bf16"
    with pytest.raises(ConfigError, match="dtype='fp16' is not known; use fp32 or bf16"):
        write_tiny(tmp_path / "other", tiny(), dtype="fp16")


def test_a_model_without_a_head_is_written_without_prefix(tmp_path):
    weights, written = write_tiny(tmp_path / "out", tiny(head={"kind": "none"}))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "embed_tokens.weight" in tensors
    assert not any(name.startswith("model.") for name in tensors)
    assert written.architecture == "LlamaModel"
    assert torch.equal(open_release(tmp_path / "out").read("decoder.norm.weight"), weights["decoder.norm.weight"])


def test_tokenizer_files_are_copied(tmp_path):
    files = [("tokenizer.json", b"{}"), ("vocab.txt", b"a\nb\n")]
    write_tiny(tmp_path / "out", tiny(), tokenizer_files=files)
    found = contents(tmp_path / "out")
    assert [(name, found[name]) for name, _ in files] == files
    assert b"AutoTokenizer" in found["README.md"]


def test_an_empty_folder_is_filled_and_any_other_is_left_alone(tmp_path):
    (tmp_path / "empty").mkdir()
    write_tiny(tmp_path / "empty", tiny())
    before = contents(tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    for name in ("empty", "file"):
        with pytest.raises(ConfigError, match="exists and is not an empty folder; give another name, or remove it"):
            write_tiny(tmp_path / name, tiny())
    assert contents(tmp_path / "empty") == before
    assert (tmp_path / "file").read_text() == "mine"


def test_a_model_that_cannot_be_exported_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match="no Hugging Face family represents this model exactly"):
        write_tiny(tmp_path / "out", tiny(decoder={"norm": "layer"}))
    assert list(tmp_path.iterdir()) == []


def test_whatever_operation_of_the_disk_fails_the_folder_is_whole_or_absent(tmp_path):
    config = tiny()
    weights = random_weights(config)
    operations = []
    io.set_fault_hook(lambda operation, path: operations.append(operation))
    written = write_release(config, weights.__getitem__, tmp_path / "whole", max_shard_bytes=100_000)
    assert len(operations) > 30
    for number in range(len(operations)):
        out = tmp_path / str(number)
        count = iter(range(1_000_000))

        def fail(operation, path, number=number, count=count):
            if next(count) == number:
                raise OSError(28, "No space left on device")

        io.set_fault_hook(fail)
        with pytest.raises(DiskError, match="No space left on device"):
            write_release(config, weights.__getitem__, out, max_shard_bytes=100_000)
        io.set_fault_hook(None)
        assert not out.exists() or sorted(contents(out)) == written.files
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")]


def test_an_error_while_reading_leaves_nothing(tmp_path):
    def read(name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_release(tiny(), read, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
