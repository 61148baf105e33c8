"""A Hugging Face folder is opened only where it fits its config, and what does not fit is listed."""

import itertools
import json

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from pretrain.errors import CheckpointError, ConfigError
from pretrain.families import FAMILIES
from pretrain.interop.choose import facts
from pretrain.interop.nearest_family import unknown_model_type
from pretrain.interop.release import open_release
from tests.helpers.tables import thinned
from tests.unit.interop.releases import TINY, VOCAB, change_config, load_tensors, save_tensors, tiny, write_tiny


@pytest.fixture
def llama(tmp_path):
    write_tiny(tmp_path / "model", tiny())
    return tmp_path / "model"


@pytest.fixture
def gpt2(tmp_path):
    write_tiny(tmp_path / "model", tiny("gpt2-tiny"))
    return tmp_path / "model"


def refusal(folder, kind=CheckpointError):
    with pytest.raises(kind) as error:
        open_release(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("preset", TINY.values())
def test_what_was_written_is_read_bit_for_bit(preset, tmp_path):
    config = tiny(preset)
    weights, _ = write_tiny(tmp_path / "model", config)
    release = open_release(tmp_path / "model")
    assert list(release.shapes) == list(weights)
    assert release.dtype == "fp32"
    assert release.ignored == []
    for name, weight in weights.items():
        found = release.read(name)
        assert found.dtype == torch.float32
        assert tuple(found.shape) == release.shapes[name]
        assert torch.equal(found, weight)
    assert facts(release.config) == facts(config)


def test_what_is_read_may_be_written_to(llama):
    release = open_release(llama)
    release.read("decoder.norm.weight").zero_()
    assert release.read("decoder.norm.weight").any()


def test_every_name_that_does_not_fit_is_listed(llama):
    tensors = load_tensors(llama)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]
    tensors["model.norm.weight"] = torch.ones(3)
    tensors["score.weight"] = torch.ones(2, 64)
    save_tensors(llama, tensors)
    assert refusal(llama) == (
        f"{llama}: the tensors are not those of config.json (llama): "
        "2 missing: lm_head.weight, model.layers.1.mlp.up_proj.weight; 1 unexpected: score.weight; "
        "1 misshapen: model.norm.weight is [3], should be [64]; give the config.json that belongs to these weights"
    )


def test_a_long_list_is_cut(llama):
    change_config(llama, num_hidden_layers=4)
    message = refusal(llama)
    assert "18 missing: model.layers.2.input_layernorm.weight, " in message
    assert " and 10 more; give the config.json" in message


def test_a_config_of_other_sizes_is_found_out_before_anything_is_read(llama):
    change_config(llama, vocab_size=VOCAB + 1)
    message = refusal(llama)
    assert f"2 misshapen: lm_head.weight is [{VOCAB}, 64], should be [{VOCAB + 1}, 64], model.embed_tokens" in message


def nearest(family):
    return (
        f"; if it computes what {family} does, set model_type to '{family}', and compare its scores; "
        "a new family is one file, see docs/extending.md"
    )


@pytest.mark.parametrize(
    ("preset", "values", "message"),
    [
        ("gpt2-tiny", {"model_type": "ctrl", "rotary_dim": 64}, "gpt2, does not know its rotary_dim"),
        ("mistral-tiny", {"model_type": "doge"}, "mistral, knows all of its keys"),
        ("bert-tiny", {"model_type": "nezha", "relative_attention_num_buckets": 32},
         "bert, does not know its relative_attention_num_buckets"),
        ("mixtral-tiny", {"model_type": "jamba", **{f"mamba_{n}": 1 for n in range(10)}},
         f"mixtral, does not know its {', '.join(f'mamba_{n}' for n in range(8))} and 2 more"),
        # What is off is no difference.
        ("t5-tiny", {"model_type": "longt5", "local_radius": 127, "pruned": False, "globals": None, "scales": []},
         "t5, does not know its local_radius"),
    ],
)  # fmt: skip
def test_an_unknown_model_type_is_answered_with_the_nearest_family_and_the_keys_that_differ(
    preset, values, message, tmp_path
):
    write_tiny(tmp_path / "model", tiny(preset))
    change_config(tmp_path / "model", **values)
    family = message.partition(",")[0]
    assert refusal(tmp_path / "model", ConfigError) == (
        f"{tmp_path}/model/config.json: model_type='{values['model_type']}' is not known; the nearest family, "
        f"{message}{nearest(family)}"
    )


def test_a_config_without_a_key_of_any_family_lists_the_known_ones(llama):
    (llama / "config.json").write_text('{"blocks": 3, "vocab_size": 61}')
    message = refusal(llama, ConfigError)
    assert message.startswith(f"{llama}/config.json: model_type=None is not known; known: gpt2, gpt_bigcode, llama, ")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("kimi_linear", "decays each dimension of a key apart"),
        ("nemotron_h", "a mixer or a feed-forward layer each"),
        ("falcon_h1", "attention and Mamba-2 side by side"),
        ("zamba2", "layers of attention share weights"),
    ],
)
def test_a_hybrid_that_no_keys_represent_is_refused_with_the_reason(model_type, reason):
    message = str(unknown_model_type({"model_type": model_type, "hidden_size": 64}))
    assert f"model_type='{model_type}' cannot be represented: its" in message and reason in message
    assert message.endswith("use another hybrid: olmo_hybrid, qwen3_next, bamba, lfm2, granitemoehybrid, mamba2")


@pytest.mark.parametrize("model_type", thinned(FAMILIES, 2))
def test_the_keys_of_a_family_are_known_to_the_nearest(model_type):
    values = FAMILIES[model_type].write_config(tiny(TINY[model_type]))
    assert "knows all of its keys" in str(unknown_model_type(values | {"model_type": "x"}))


def test_a_key_that_ours_cannot_represent_names_the_file(llama):
    change_config(llama, rope_scaling={"rope_type": "proportional", "factor": 2.0})
    assert refusal(llama, ConfigError).startswith(f"{llama}/config.json: rope_scaling.rope_type='proportional': only ")


def scale_to_fp8(folder, rows, columns):
    """Stores the projections in FP8 with a scale for so many rows and columns; returns what they stand for."""
    tensors, meant = load_tensors(folder), {}
    for name in [one for one in tensors if "_proj." in one]:
        weight = tensors[name]
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        stored, meant[name] = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
        for row, column in itertools.product(range(scales.shape[0]), range(scales.shape[1])):
            place = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
            scales[row, column] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            meant[name][place] = stored[place].float() * scales[row, column]
        tensors |= {name: stored, f"{name}_scale_inv": scales}
    save_tensors(folder, tensors)
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    change_config(folder, quantization_config=method | {"weight_block_size": [rows, columns]})
    return meant


@pytest.mark.parametrize("block", [(16, 32), (24, 40), (1024, 1024)])
def test_weights_in_fp8_are_multiplied_by_the_scales_of_their_blocks(llama, block):
    meant = scale_to_fp8(llama, *block)
    release = open_release(llama)
    assert release.ignored == []
    stored = load_tensors(llama)
    for name, weight in meant.items():
        number, part = name.split(".")[2], name.split(".")[4]
        ours = {"o_proj": "attention.output", "down_proj": "feedforward.down"}.get(part)
        if ours:
            assert torch.equal(release.read(f"decoder.blocks.{number}.{ours}.weight"), weight)
        if block == (16, 32):  # theirs takes blocks that divide a matrix alone
            theirs = Fp8Dequantize(None)._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.float32)
            assert torch.equal(theirs, weight)


def test_scales_of_other_blocks_are_named(llama):
    scale_to_fp8(llama, 16, 32)
    change_config(llama, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    assert "a scale for 16 by 16 values; give the config.json that belongs to these weights" in refusal(llama)


def test_quantized_weights_are_refused(llama):
    change_config(llama, quantization_config={"bits": 4})
    assert "the weights are quantized (quantization_config)" in refusal(llama, ConfigError)
    change_config(llama, quantization_config=...)
    tensors = load_tensors(llama)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_tensors(llama, tensors)
    assert "model.norm.weight is of dtype I8, should be one of fp64, fp32, fp16, bf16" in refusal(llama)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a JSON object"),
        (b"[]", "not a JSON object: not an object"),
        (b'{"a": ', "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b"\xff\xfe\xfd", "not a JSON object"),
        (b" " * (16 * 1024 * 1024 + 1), "more than 16777216 bytes"),
    ],
    ids=["empty", "list", "torn", "deep", "binary", "large"],
)
def test_a_config_that_is_no_json_object_is_one_line(llama, content, reason):
    (llama / "config.json").write_bytes(content)
    message = refusal(llama)
    assert message.startswith(f"{llama}/config.json: ")
    assert reason in message


def test_a_folder_without_a_config_or_weights_says_so(llama):
    (llama / "model.safetensors").unlink()
    assert "has neither model.safetensors nor pytorch_model.bin, nor an index of either" in refusal(llama)
    (llama / "config.json").unlink()
    assert f"{llama}/config.json: cannot be read: No such file" in refusal(llama)


def test_names_of_a_bare_model_are_read_as_under_a_head(gpt2):
    tensors = load_tensors(gpt2)
    expected = open_release(gpt2).read("decoder.blocks.1.attention.qkv.weight")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    # What the first release of GPT-2 has beside its weights.
    for number in range(2):
        bare[f"h.{number}.attn.bias"] = torch.ones(1, 1, 128, 128)
        bare[f"h.{number}.attn.masked_bias"] = torch.tensor(-1e4)
    save_tensors(gpt2, bare)
    release = open_release(gpt2)
    assert torch.equal(release.read("decoder.blocks.1.attention.qkv.weight"), expected)
    assert release.ignored == ["h.0.attn.bias", "h.0.attn.masked_bias", "h.1.attn.bias", "h.1.attn.masked_bias"]


BASES = {
    **dict.fromkeys(("t5", "mt5", "umt5"), "transformer."),
    "vision-encoder-decoder": "vision_encoder_decoder.",
}
"""Prefixes of base models, where no name of a release has one."""


@pytest.mark.parametrize("family", thinned(FAMILIES, 4, BASES))
def test_a_name_may_lack_the_prefix_of_the_base_model_or_have_it_once_more(family, tmp_path):
    """As `from_pretrained` reads them: of a stack or of a head, all of them or some."""
    weights, _ = write_tiny(tmp_path, tiny(TINY[family]))
    prefix, tensors = BASES.get(family) or FAMILIES[family].prefix, load_tensors(tmp_path)
    config, ignored = open_release(tmp_path).config, open_release(tmp_path).ignored
    bare = {name: name.removeprefix(prefix) for name in tensors}
    under = {name: prefix + bare[name] for name in tensors}
    twice = {name: prefix + name for name in tensors}
    mixed = {name: (bare, under, twice)[number % 3][name] for number, name in enumerate(tensors)}
    for names in (bare, mixed):
        save_tensors(tmp_path, {name: tensors[old] for old, name in names.items()})
        release = open_release(tmp_path)
        assert release.config == config and release.ignored == [names[name] for name in ignored]
        assert all(torch.equal(release.read(name), weight) for name, weight in weights.items())


@pytest.mark.parametrize("name", ["lm_head.bias", "further.norm.weight", "model.model.lm_head.weight", "module.norm"])
def test_a_name_that_no_prefix_makes_known_is_refused_by_itself(llama, name):
    save_tensors(llama, load_tensors(llama) | {name: torch.ones(3)})
    assert f"1 unexpected: {name};" in refusal(llama)


def test_a_tensor_may_be_there_with_and_without_a_prefix_where_it_is_the_same(llama):
    tensors = load_tensors(llama)
    tensors["norm.weight"] = tensors["model.norm.weight"].clone()
    save_tensors(llama, tensors)
    assert open_release(llama).ignored == []
    tensors["norm.weight"][0] += 1
    save_tensors(llama, tensors)
    assert "model.norm.weight are one tensor, with different values; remove one" in refusal(llama)


def test_a_tied_tensor_may_be_there_twice_where_it_is_the_same(gpt2):
    tensors = load_tensors(gpt2)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_tensors(gpt2, tensors)
    assert torch.equal(open_release(gpt2).read("embedding.weight")[:VOCAB], tensors["lm_head.weight"])
    tensors["lm_head.weight"][0, 0] += 1
    save_tensors(gpt2, tensors)
    with pytest.raises(CheckpointError, match=r"transformer.wte.weight and lm_head.weight differ, but tie_word_embed"):
        open_release(gpt2).read("embedding.weight")


def test_a_tied_tensor_may_be_there_under_its_other_name(gpt2):
    tensors = load_tensors(gpt2)
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    save_tensors(gpt2, tensors)
    assert torch.equal(open_release(gpt2).read("embedding.weight")[:VOCAB], tensors["lm_head.weight"])


def test_half_precision_is_read_exactly_and_reported(llama):
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_tensors(llama).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float16)
    save_tensors(llama, tensors)
    change_config(llama, torch_dtype="float32")
    release = open_release(llama)
    assert release.dtype == "bf16"
    assert torch.equal(release.read("head.weight")[:VOCAB], tensors["lm_head.weight"].float())
    assert torch.equal(release.read("decoder.norm.weight"), tensors["model.norm.weight"].float())


def change_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


LAYER = "model.layers.1.mlp.up_proj.weight"


def swap(places):
    places["model.norm.weight"], places[LAYER] = places[LAYER], places["model.norm.weight"]


@pytest.mark.parametrize(
    "change",
    [
        lambda places: places.update({"lm_head.weight": places["model.norm.weight"]}),  # it is tied
        lambda places: places.update({"model.layers.0.self_attn.rotary_emb.inv_freq": places[LAYER]}),
        lambda places: places.pop(LAYER),  # beside gate_proj
        swap,
    ],
)
def test_an_index_that_lists_other_tensors_than_its_files_have_is_read(tmp_path, change):
    weights, _ = write_tiny(tmp_path / "model", tiny(tied_embeddings=True), max_shard_bytes=20_000)
    change_index(tmp_path / "model", change)
    release = open_release(tmp_path / "model")
    assert release.ignored == []
    assert all(torch.equal(release.read(name), weight) for name, weight in weights.items())


def test_a_tensor_that_an_index_does_not_list_is_left_where_no_weight_is_it(tmp_path):
    write_tiny(tmp_path / "model", tiny(), max_shard_bytes=20_000)
    file = tmp_path / "model" / "model-00001-of-00001.safetensors"
    save_file({"model.further": torch.ones(3), "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(2)}, file)
    change_index(tmp_path / "model", lambda places: places.update({"model.other": file.name}))
    assert open_release(tmp_path / "model").ignored == [
        "model.further", "model.layers.0.self_attn.rotary_emb.cos_cached"
    ]  # fmt: skip
    change_index(tmp_path / "model", lambda places: places.update({"model.further": file.name}))
    assert "1 unexpected: model.further" in refusal(tmp_path / "model")


def test_what_an_index_and_its_files_lack_is_advised(tmp_path):
    write_tiny(tmp_path / "model", tiny(), max_shard_bytes=20_000)
    shards = {}
    change_index(tmp_path / "model", shards.update)
    file, name = shards[LAYER], LAYER
    rest = {key for key, one in shards.items() if one == file}
    change_index(tmp_path / "model", lambda places: [places.pop(key) for key in rest])
    assert refusal(tmp_path / "model").endswith(f"; fetch the index again: it does not list {file} beside it")
    save_file({"model.other": torch.ones(1)}, tmp_path / "model" / file)
    change_index(tmp_path / "model", lambda places: places.update({name: file}))
    assert refusal(tmp_path / "model").endswith(f"; fetch {file} again: the index has tensors that are not in it")


def test_a_head_that_is_nowhere_may_be_the_embedding(llama):
    tensors = load_tensors(llama)
    del tensors["lm_head.weight"]
    save_tensors(llama, tensors)
    assert refusal(llama).endswith(
        "1 missing: lm_head.weight; set tie_word_embeddings=true in it if the scores are those of the embedding"
    )


def test_two_spellings_of_one_tensor_are_refused_where_they_differ(tmp_path):
    write_tiny(tmp_path / "model", tiny("bert-tiny"))
    tensors = load_tensors(tmp_path / "model")
    name = "bert.embeddings.LayerNorm.weight"
    tensors["bert.embeddings.LayerNorm.gamma"] = tensors[name].clone()
    save_tensors(tmp_path / "model", tensors)
    assert torch.equal(open_release(tmp_path / "model").read("encoder.input_norm.weight"), tensors[name])
    tensors["bert.embeddings.LayerNorm.gamma"] += 1
    save_tensors(tmp_path / "model", tensors)
    assert "are one tensor, with different values; remove one" in refusal(tmp_path / "model")
    del tensors[name]
    save_tensors(tmp_path / "model", tensors)
    assert open_release(tmp_path / "model").read("encoder.input_norm.weight").any()


def test_a_config_of_transformers_5_is_read(llama):
    config = json.loads((llama / "config.json").read_text())
    theta = config["rope_theta"]
    change_config(llama, rope_theta=..., rope_scaling=..., torch_dtype=..., dtype="float32",
                  rope_parameters={"rope_type": "default", "rope_theta": theta})  # fmt: skip
    assert open_release(llama).config.decoder.rope_theta == theta
