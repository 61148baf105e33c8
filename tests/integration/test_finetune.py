"""Fine-tuning through the command line: from a run and from a Hugging Face folder, stopped and resumed, exported."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from pretrain.artifact.model_path import open_source
from pretrain.artifact.quantized import round_to_nf4
from pretrain.checkpoint.format import list_checkpoints
from pretrain.checkpoint.retention import find_marks
from tests.helpers.cli import Warm
from tests.helpers.runs import RunMaker, assert_same_run, tensors_of
from tests.helpers.topologies import ledger

pytestmark = pytest.mark.long

WORDS = ["alpha", "beta", "gamma", "delta", "river", "stone", "cloud", "ember", "willow", "harbor"]
BASE = """
seed: 7
run: {{dir: {runs}, name: run}}
data: {{path: {data}, lanes: 3, block_samples: 16}}
model: {{preset: llama-tiny, max_seq_len: 64, decoder: {{layers: 2, width: 32, heads: 4, kv_heads: 2, ff_width: 48}}}}
batch: {{global_tokens: 512, seq_len: 64, micro: 4}}
optim: {{lr: 3e-3, schedule: {{warmup_steps: 5}}}}
train: {{steps: 10}}
engine: {{kind: single, zero_stage: 0, precision: fp32, device: cpu}}
tracking: {{wandb: off}}
"""
TUNED = """
seed: 7
run: {{dir: {runs}, name: run}}
data: {{path: {data}, lanes: 3, block_samples: 16, packing: bins}}
objective: {{kind: supervised}}
batch: {{global_tokens: 512, seq_len: 64, micro: 4}}
optim: {{lr: 3e-3, schedule: {{warmup_steps: 2}}}}
train: {{steps: 8}}
engine: {{kind: single, zero_stage: 0, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 4}}
tracking: {{wandb: off}}
"""
LORA = "finetune={kind: lora, rank: 4, dropout: 0.1, also: [embedding.weight, head.weight]}"


def prepare(warm: Warm, folder: Path, name: str, lines: list[str], **options: object) -> Path:
    """Writes a file, and shards of it."""
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    config = {"output": str(folder / name), "split": "hash:0", **options}
    config["inputs"] = [{"path": str(folder / f"{name}.jsonl"), **(config.pop("input", {}))}]
    (folder / f"{name}.yaml").write_text(json.dumps(config))
    assert warm("prepare", str(folder / f"{name}.yaml"), cwd=folder).code == 0
    return folder / name


@pytest.fixture(scope="module")
def base(tmp_path_factory, warm):
    """A run over texts, its export, and chats of its tokens and two more."""
    folder, rng = tmp_path_factory.mktemp("base"), random.Random(0)
    lines = [json.dumps({"text": " ".join(rng.choices(WORDS, k=rng.randint(5, 30)))}) for _ in range(300)]
    text = prepare(warm, folder, "text", lines, tokenizer={"kind": "bpe", "vocab_size": 300})
    runs = RunMaker(folder, text, BASE)
    assert warm("train", str(runs.config("base")), cwd=folder).code == 0
    assert warm("export", str(runs.folder("base").path), str(folder / "released"), cwd=folder).code == 0
    asked = [rng.choices(WORDS, k=3) for _ in range(200)]
    chats = [json.dumps({"prompt": " ".join(words), "response": " ".join(words[::-1])}) for words in asked]
    tokenizer = {"kind": "given", "path": str(folder / "released"), "special_tokens": ["<|im_start|>", "<|im_end|>"]}
    data = prepare(warm, folder, "chat", chats, kind="records", input={"template": "chatml"}, tokenizer=tokenizer)
    return runs.folder("base").path, folder / "released", data


def test_adapters_over_a_hugging_face_folder_resume_bit_for_bit_and_are_exported(tmp_path, warm, base):
    _, released, data = base
    runs = RunMaker(tmp_path, data, TUNED)

    def train(name: str, *overrides: str) -> str:
        result = warm("train", str(runs.config(name)), f"init.from={released}", LORA, *overrides, cwd=tmp_path)
        assert result.code == 0, result.stderr
        return result.stderr + result.stdout

    output = train("golden")
    assert "adapters of rank 4 in 8 layers" in output
    assert "2 tokens are new to the model of" in output
    train("stopped", "train.stop_after=3")
    train("stopped")
    assert_same_run(runs, "stopped", "golden", 8)
    saved = tensors_of(list_checkpoints(runs.folder("golden").checkpoints)[-1])
    names = {key.rpartition("/")[0] for key in saved}
    assert {"embedding.weight", "head.weight"} < names
    assert all(".lora_" in name for name in names - {"embedding.weight", "head.weight"})
    assert warm("export", str(runs.folder("golden").path), str(tmp_path / "out"), cwd=tmp_path).code == 0
    sizes = [json.loads((folder / "config.json").read_text())["vocab_size"] for folder in (released, tmp_path / "out")]
    assert sizes[1] == sizes[0] + 2


def test_adapters_beside_matrices_of_4_bits_resume_bit_for_bit_and_begin_near_those_beside_whole_ones(
    tmp_path, warm, base
):
    pytest.importorskip("bitsandbytes")
    _, released, data = base
    runs = RunMaker(tmp_path, data, TUNED)
    adapters = "finetune={kind: lora, rank: 4, also: [embedding.weight, head.weight]}"

    def train(name: str, *overrides: str) -> list[float]:
        result = warm("train", str(runs.config(name)), f"init.from={released}", adapters, *overrides, cwd=tmp_path)
        assert result.code == 0, result.stderr
        return [float.fromhex(row["loss"]) for row in ledger(runs.folder(name)).values()]

    whole, quantized = train("whole"), train("golden", "finetune.quantize=nf4")
    assert quantized[0] == pytest.approx(whole[0], rel=0.02) and quantized[0] != whole[0]
    assert quantized[-1] < quantized[0] - 0.1
    train("stopped", "finetune.quantize=nf4", "train.stop_after=3")
    train("stopped", "finetune.quantize=nf4")
    assert_same_run(runs, "stopped", "golden", 8)
    # Compared by its scores with the model that `evaluate` and `generate` load.
    run, out = runs.folder("golden").path, tmp_path / "out"
    assert warm("export", str(run), str(out), cwd=tmp_path).code == 0
    merged = open_source(run).merged
    assert merged is not None and merged.quantized
    name = "decoder.blocks.0.attention.qkv.weight"
    a, b = merged.matrices(name.removesuffix(".weight"))
    torch.testing.assert_close(merged.read(name), round_to_nf4(merged.base.read(name)) + merged.scale * (b @ a))
    assert not torch.allclose(merged.read(name), merged.base.read(name) + merged.scale * (b @ a), atol=1e-3)


def test_adapters_keep_the_checkpoint_of_a_base_that_trains_on(tmp_path, warm, base):
    shutil.copytree(base[0].parent, tmp_path / "base")
    (tmp_path / "text").symlink_to(base[0].parent.parent / "text")
    bases, runs = RunMaker(tmp_path, tmp_path / "text", BASE), RunMaker(tmp_path, base[2], TUNED)
    run, tuned = bases.folder("base").path, runs.folder("tuned")
    started, pinned = f"init.from={run}", run / "checkpoints" / "step-00000010"

    def call(*arguments: str, code: int = 0) -> str:
        result = warm(*arguments, cwd=tmp_path)
        assert result.code == code, result.stderr
        return result.stderr

    def train_base_on(steps: int) -> set[str]:
        call("train", str(bases.config("base")), f"train.steps={steps}", "checkpoint.every_steps=1")
        return {path.name for path in list_checkpoints(run / "checkpoints")}

    call("train", str(runs.config("golden")), started, LORA)
    call("train", str(runs.config("tuned")), started, LORA, "train.stop_after=3")
    assert yaml.safe_load(tuned.config.read_text())["init"]["from"] == str(pinned)
    assert train_base_on(14) == {"step-00000010", "step-00000013", "step-00000014"}
    call("train", str(runs.config("tuned")), started, LORA)
    assert_same_run(runs, "tuned", "golden", 8)
    other = f"init.from={run / 'checkpoints' / 'step-00000014'}"
    told = f"pretrain train {tuned.config} init.from={pinned}"
    assert told in call("train", str(runs.config("tuned")), other, LORA, code=66)
    # As a run was left by a version that wrote down the run, not the checkpoint.
    tuned.config.write_text(tuned.config.read_text().replace(str(pinned), str(run)))
    assert told in call("export", str(tuned.path), str(tmp_path / "out"), code=66)
    call(*told.split()[1:])
    call("export", str(tuned.path), str(tmp_path / "out"))
    moved = run.rename(tmp_path / "elsewhere")
    gone = call("train", str(tuned.config), "train.steps=9", code=66)
    assert f"pretrain train {tuned.config} init.from=NEW/PLACE" in gone
    call("train", str(tuned.config), "train.steps=9", f"init.from={moved / 'checkpoints' / pinned.name}")
    moved.rename(run)
    tuned.path.rename(tmp_path / "moved")
    assert train_base_on(15) == {"step-00000010", "step-00000014", "step-00000015"}
    for mark in find_marks(pinned):
        mark.unlink()
    assert train_base_on(16) == {"step-00000015", "step-00000016"}


def test_frozen_weights_and_slower_layers_resume_bit_for_bit_and_the_frozen_ones_stay(tmp_path, warm, base):
    run, _, data = base
    runs = RunMaker(tmp_path, data, TUNED)
    options = (f"init={{from: {run}, freeze: ['decoder.blocks.0.*']}}", "optim.layer_decay=0.5")
    for name, more in (("golden", ()), ("stopped", ("train.stop_after=3",)), ("stopped", ())):
        result = warm("train", str(runs.config(name)), *options, *more, cwd=tmp_path)
        assert result.code == 0, result.stderr
    assert_same_run(runs, "stopped", "golden", 8)
    before, after = (
        tensors_of(list_checkpoints(folder / "checkpoints")[-1]) for folder in (run, runs.folder("golden").path)
    )
    same = {key for key in after if key.endswith("/weight") and np.array_equal(before[key], after[key])}
    assert same == {key for key in after if key.startswith("decoder.blocks.0.")}
