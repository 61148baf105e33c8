"""The tiny runs that are resumed at every step: their shapes, and data of which an epoch ends in the middle."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from pretrain.config.prepare import PrepareConfig

ROWS, SEQ_LEN = 8, 32
EPOCH_STEPS = 24
"""About so many steps are an epoch."""

STACK = "{width: 32, heads: 4, kv_heads: 4, ff_width: 48, layers: 1, dropout: 0.1}"
SHAPES = {
    "decoder": ("llama-tiny", "decoder: " + STACK, "causal"),
    "encoder": ("bert-tiny", "encoder: " + STACK, "masked"),
    "encoder-decoder": ("t5-tiny", f"encoder: {STACK}\n  decoder: {STACK}", "span"),
}


@dataclass(frozen=True)
class Case:
    """One way to train: a shape with its objective, a ZeRO stage, micro-batches a step and rank, a precision."""

    shape: str
    stage: int
    accumulation: int
    precision: str
    ranks: int
    kind: str = "deepspeed"

    def __str__(self) -> str:
        engine = f"zero{self.stage}" if self.kind == "deepspeed" else self.kind
        return f"{self.shape}-{engine}-accumulation{self.accumulation}-{self.precision}-{self.ranks}ranks"


SHAPE_NAMES = tuple(SHAPES)
CASES = [
    Case(
        shape=SHAPE_NAMES[2 - column],
        stage=(2 + row) % 4,
        accumulation=(4, 1)[(row + column) % 2],
        precision=("fp32", "bf16")[(row // 2 + column) % 2],
        ranks=1 if column == 2 and row % 2 else 2,
    )
    for row in range(4)
    for column in range(3)
]
CASES += [
    Case("decoder", stage=0, accumulation=4, precision="bf16", ranks=1, kind="auto"),
    Case("encoder-decoder", stage=0, accumulation=1, precision="bf16", ranks=2, kind="auto"),
]
"""Every shape meets every stage; the rest meets in pairs. `auto` is one process and DDP there."""


def prepare_small(folder: Path) -> Path:
    """Shards of `EPOCH_STEPS` steps, with the special tokens of every objective."""
    from pretrain.preparation.prepare import prepare

    rng = random.Random(7)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    # A word and its space are one token of the tokenizer that is trained on them, a document has one more.
    num_tokens = number = 0
    while num_tokens < EPOCH_STEPS * ROWS * SEQ_LEN:
        length = rng.randint(20, 60)
        num_tokens += length + 1
        (folder / f"{number:03d}.txt").write_text(" ".join(rng.choices(words, k=length)) + "\n")
        number += 1
    output = folder.parent / f"{folder.name}-shards"
    tokenizer = {"kind": "bpe", "vocab_size": 320, "roles": "t5", "sentinels": 12, "special_tokens": ["[MASK]"]}
    config = {"output": str(output), "inputs": [{"path": str(folder)}], "tokenizer": tokenizer, "split": "hash:0"}
    prepare(PrepareConfig.model_validate(config), processes=1)
    return output


def write_case(folder: Path, data: Path, case: Case) -> Path:
    """Writes the config of a case, whose run folder is `run` beside it."""
    folder.mkdir(parents=True)
    preset, stacks, objective = SHAPES[case.shape]
    micro = ROWS // case.ranks // case.accumulation
    engine = {"kind": case.kind, "zero_stage": case.stage, "precision": case.precision, "device": "cpu"}
    text = f"""
seed: 7
run: {{dir: {folder}, name: run}}
data: {{path: {data}, lanes: 2, block_samples: 16}}
model:
  preset: {preset}
  max_seq_len: {SEQ_LEN}
  {stacks}
objective: {{kind: {objective}}}
batch: {{global_tokens: {ROWS * SEQ_LEN}, seq_len: {SEQ_LEN}, micro: {micro}}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 5}}}}
train: {{steps: 100}}
engine: {json.dumps(engine)}
checkpoint: {{keep: 100}}
tracking: {{log_every_steps: 50, wandb: off}}
"""
    config = folder / "run.yaml"
    config.write_text(text)
    return config
