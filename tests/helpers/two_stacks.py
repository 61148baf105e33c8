"""A T5 of two narrow stacks over a few words, and their shards: what tests of encoder-decoder runs have in common."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from pretrain.config.prepare import PrepareConfig

CONFIG = """
seed: 7
run: {{dir: {runs}, name: run}}
data: {{path: {data}, lanes: 3, block_samples: 16}}
model:
  preset: t5-v1.1-tiny
  max_seq_len: 48
  encoder: {{width: 32, heads: 2, head_width: 16, ff_width: 48, dropout: 0.1}}
  decoder: {{width: 32, heads: 2, head_width: 16, ff_width: 48, dropout: 0.1}}
objective: {{kind: span, span: {{density: 0.3, mean_length: 2.0}}}}
"""
"""To be formatted by `RunMaker`, after what a test adds: batch, optimizer, engine."""


def prepare_words(folders: pytest.TempPathFactory, special_tokens: Sequence[str]) -> Path:
    """Makes a shard folder whose vocabulary has twelve sentinels and `special_tokens`; returns it."""
    from pretrain.preparation.prepare import prepare

    folder, output = folders.mktemp("texts"), folders.mktemp("shards")
    rng, words = random.Random(3), ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text(" ".join(rng.choices(words, k=rng.randint(40, 200))) + "\n")
    tokenizer = {"kind": "bpe", "vocab_size": 340, "roles": "t5", "sentinels": 12, "special_tokens": special_tokens}
    config = {"output": str(output), "inputs": [{"path": str(folder)}], "tokenizer": tokenizer, "split": "tail:0.1"}
    prepare(PrepareConfig.model_validate(config), processes=1)
    return output
