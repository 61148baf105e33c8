"""Run folders of tiny translators without the seconds of training: prepared pairs, a config, checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import torch

from pretrain.artifact.open import dump_normalize, normalize_of_data, template_of_data
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.state import TrainState
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.load import dump_config, load_config
from pretrain.config.model import SpecialTokens
from pretrain.config.prepare import NormalizeConfig, PrepareConfig
from pretrain.config.run import RunConfig
from pretrain.dist import World
from pretrain.model import build_model, init_weights
from pretrain.preparation.prepare import prepare
from pretrain.shards.index import load_index
from pretrain.tokenizer.file import load_tokenizer
from pretrain.tokenizer.roles import special_tokens_of
from pretrain.types import EMA, Fragment

TEXTS = [
    "A little girl climbing into a wooden playhouse.",
    "Two young, white males are outside near many bushes.",
    "Several men in hard hats are operating a giant pulley system.",
    "A man in a blue shirt is standing on a ladder cleaning a window.",
]
NORMALIZE = NormalizeConfig(steps=["lowercase", "punctuation", "moses"], language="en", target_language="de")

CONFIG = """
seed: 7
run: {{dir: {runs}, name: {name}}}
data: {{path: {data}, packing: bins}}
model: {{preset: t5-tiny, encoder: {{ff_width: {ff_width}, dropout: 0.0}}, decoder: {{ff_width: {ff_width}, dropout: 0.0}}}}
objective: {{kind: seq2seq}}
batch: {{global_tokens: 128, seq_len: 64, source_len: 64, micro: 2}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 1}}}}
train: {{steps: 100}}
engine: {{kind: single, zero_stage: 0, precision: fp32, device: cpu}}
checkpoint: {{keep: 10}}
tracking: {{wandb: off}}
"""  # noqa: E501


TEXT_CONFIG = """
seed: 7
run: {{dir: {runs}, name: {name}}}
data: {{path: {data}}}
model: {{preset: {preset}, max_seq_len: 64, init_std: 0.2, {stack}: {{dropout: 0.0}}}}
objective: {{kind: {kind}}}
batch: {{global_tokens: {seq_len}, seq_len: {seq_len}, micro: 1}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 1}}}}
train: {{steps: 100}}
engine: {{kind: single, zero_stage: 0, precision: fp32, device: cpu}}
tracking: {{wandb: off}}
"""


class _Weights:
    """A model's parameters as one rank's fragments, without an optimizer."""

    def __init__(self, model, averaged):
        self._model, self._averaged = model, averaged

    def owned_fragments(self):
        for name, parameter in self._model.named_parameters():
            values = parameter.detach().reshape(-1)
            average = {EMA: values} if self._averaged else {}
            yield Fragment(name, 0, tuple(parameter.shape), {"weight": values, **average})

    held_fragments = owned_fragments

    def scalars(self):
        """There is nothing but tensors."""
        return {}

    def finish_load(self, optimizer_step, scalars):
        """There is nothing that follows the weights."""


def write_pairs(folder: Path, texts: Sequence[str] = TEXTS) -> Path:
    """Prepares pairs, each text with itself in capitals; all of them are in both splits."""
    source, target = folder.with_suffix(".en"), folder.with_suffix(".de")
    source.write_text("".join(f"{text}\n" for text in texts))
    target.write_text("".join(f"{text.swapcase()}\n" for text in texts))
    one = {
        "path": str(source),
        "paired_path": str(target),
        "format": "lines",
        "normalize": NORMALIZE.model_dump(exclude_none=True),
    }
    values = {
        "output": str(folder),
        "kind": "pairs",
        "inputs": [one, one | {"split": "validation"}],
        "tokenizer": {"kind": "bpe", "vocab_size": 300, "roles": "t5", "sentinels": 0},
        "split": "hash:0",
    }
    prepare(PrepareConfig.model_validate(values), processes=1)
    return folder


def write_texts(folder: Path, texts: Sequence[str], *, roles: str = "document") -> Path:
    """Prepares texts, a file each; all of them are in both splits."""
    files = folder.with_name(f"{folder.name}-texts")
    files.mkdir()
    for number, text in enumerate(texts):
        (files / f"{number}.txt").write_text(text)
    one = {"path": str(files)}
    special = {"special_tokens": ["[MASK]"]} if roles == "document" else {}
    values = {
        "output": str(folder),
        "inputs": [one, one | {"split": "validation"}],
        "tokenizer": {"kind": "bpe", "vocab_size": 300, "roles": roles} | special,
        "split": "hash:0",
    }
    prepare(PrepareConfig.model_validate(values), processes=1)
    return folder


def write_run(folder: Path, *, steps: Sequence[int], texts: Sequence[str] = TEXTS, ff_width: int = 64) -> Path:
    """Writes a run of a tiny T5 over pairs, with a checkpoint of random weights at each step."""
    data = write_pairs(folder.with_name(f"{folder.name}-data"), texts)
    content = CONFIG.format(runs=folder.parent, name=folder.name, data=data, ff_width=ff_width)
    return write_run_of(folder, data, content, steps)


def write_text_run(
    folder: Path,
    data: Path,
    preset: str,
    objective: str,
    *,
    seq_len: int = 32,
    steps: Sequence[int] = (1,),
    averaged: bool = False,
) -> Path:
    """Writes a run of a tiny model over texts, with a checkpoint of random weights at each step."""
    stack = "encoder" if "bert" in preset else "decoder"
    content = TEXT_CONFIG.format(
        runs=folder.parent, name=folder.name, data=data, preset=preset, stack=stack, kind=objective, seq_len=seq_len
    )
    return write_run_of(folder, data, content, steps, averaged=averaged)


def write_each_shape(folder: Path, texts: Sequence[str]) -> Path:
    """Writes texts, and a run with random weights of each shape: `gpt`, `bert`, `t5`."""
    write_texts(folder / "texts", texts)
    write_text_run(folder / "gpt", folder / "texts", "llama-tiny", "causal")
    write_text_run(folder / "bert", folder / "texts", "bert-tiny", "masked")
    write_run(folder / "t5", steps=[1])
    return folder


def write_run_of(folder: Path, data: Path, content: str, steps: Sequence[int], *, averaged: bool = False) -> Path:
    """Writes what a run of a config leaves, with random weights, and with an average of them that equals them."""
    file = folder.with_name(f"{folder.name}.yaml")
    file.write_text(content)
    config = _complete(load_config(file), data)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    texts = dump_normalize(normalize_of_data([data]), template_of_data([data]), load_index(data).begin_id)
    (folder / "normalize.json").write_bytes(texts)
    manager = CheckpointManager(folder / "checkpoints", 10, World(0, 1, 0), {"world_size": 1})
    for step in steps:
        model = build_model(config.model, PLAIN_ENGINE, torch.device("cpu"))
        init_weights(model, config.model, seed=step)
        manager.save(_Weights(model, averaged), TrainState(step, step, 10 * step, 2 * step, "data", "tokenizer"))
    return folder


def _complete(config: RunConfig, data: Path) -> RunConfig:
    """Fills in what a run takes from its data when it starts."""
    index = load_index(data)
    found = special_tokens_of(load_tokenizer(data / "tokenizer.json")).model_copy(update={"eos": index.eos_id})
    special = SpecialTokens.model_validate(found.model_dump())
    model = config.model.model_copy(update={"vocab_size": index.vocab_size, "special_tokens": special})
    return config.model_copy(update={"model": model})
