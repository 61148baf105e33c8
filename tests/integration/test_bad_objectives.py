"""An objective that cannot be had is refused before anything is built: one line, and no run folder."""

import json
from pathlib import Path

import pytest

from tests.helpers.refused import check_refused, fill_folder

CONFIG = """
seed: 7
run: {name: run}
data: {path: data, lanes: 1, block_samples: 16}
model: {preset: bert-tiny, max_seq_len: 32, encoder: {width: 32, heads: 4, ff_width: 48}}
objective: {kind: masked}
batch: {global_tokens: 128, seq_len: 32, micro: 2}
optim: {lr: 1e-3}
train: {steps: 4}
engine: {kind: single, zero_stage: 0, precision: fp32, device: cpu}
tracking: {wandb: off}
"""
DECODER = "model={preset: llama-tiny, max_seq_len: 32}"


@pytest.fixture
def folder(tmp_path, corpus) -> Path:
    """A working folder with the config of an encoder, and shards whose tokenizer has no mask token."""
    return fill_folder(tmp_path, CONFIG, corpus)


REFUSED = {
    "no mask token": ([], ["objective.kind=masked needs a mask token", "does not have", "prepare with [MASK] among"]),
    "whole words without a mask token": (["objective.masked.whole_words=true"], ["needs a mask token"]),
    "masked on a decoder": (
        [DECODER],
        ["objective.kind=masked needs a model with encoder, ", " has decoder; use objective.kind=causal, or another"],
    ),
    "causal on an encoder": (["objective.kind=causal"], ["objective.kind=causal needs a model with decoder"]),
    "prefix on an encoder": (["objective.kind=prefix"], ["objective.kind=prefix needs a model with decoder"]),
    "an unknown objective": (["objective.kind=maskd"], ["objective.kind: unknown name 'maskd'", "use masked"]),
    "an unknown option": (["objective.masked.ratio=0.3"], ["unknown key 'objective.masked.ratio'", "masked.rate"]),
    "a rate of nothing": (["objective.masked.rate=0"], ["objective.masked.rate=0", "greater than 0"]),
    "a rate of all": (["objective.masked.rate=1.5"], ["objective.masked.rate=1.5", "less than 1"]),
    "shares of more than all": (
        ["objective.masked.random=0.7", "objective.masked.keep=0.4"],
        ["objective.masked", "random=0.7 and keep=0.4 must sum to at most 1"],
    ),
    "options of another objective": (
        ["objective={kind: masked, span: {density: 0.3}}"],
        ["span does not go with kind=masked", "leave it out"],
    ),
    "a kind beside a mixture": (
        ["objective={kind: masked, mixture: [{kind: masked, weight: 1}]}"],
        ["needs kind or mixture, and not both"],
    ),
    "a mixture of shapes": (
        ["objective={mixture: [{kind: masked, weight: 1}, {kind: causal, weight: 1}]}"],
        ["objective.kind=causal needs a model with decoder, model.preset=bert-tiny has encoder"],
    ),
    "a weight of nothing": (
        ["objective={mixture: [{kind: masked, weight: 0}]}"],
        ["objective.mixture.0.weight=0", "greater than 0"],
    ),
}


@pytest.mark.parametrize(("overrides", "words"), REFUSED.values(), ids=REFUSED)
def test_an_objective_that_cannot_be_is_refused_before_a_run_folder_is_made(folder, warm, overrides, words):
    config = folder / "a.yaml"
    for override in list(overrides):
        if override.startswith(("objective={", "model={")):  # a section as a whole, not laid over the file's
            name, _, value = override.partition("=")
            lines = [line for line in config.read_text().splitlines() if not line.startswith(f"{name}:")]
            config.write_text("\n".join([*lines, f"{name}: {value}"]))
            overrides = [other for other in overrides if other != override]
    result = warm("train", "a.yaml", *overrides, cwd=folder)
    check_refused(result, 64, *words)
    assert not (folder / "runs").exists()


def test_each_rank_refuses_a_tokenizer_without_a_mask_token_and_one_says_so(folder, warm):
    """Without a process group: no rank waits for another."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    check_refused(warm("train", "a.yaml", "engine.kind=ddp", cwd=folder, RANK="0", **place), 64, "needs a mask token")
    other = warm("train", "a.yaml", "engine.kind=ddp", cwd=folder, RANK="1", **place)
    assert (other.code, other.stderr) == (64, "")
    assert not (folder / "runs").exists()


def test_pairs_are_refused_by_an_objective_of_texts(folder, warm):
    lines = [json.dumps({"source": "one two", "target": "three"}) for _ in range(50)]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    (folder / "pairs.yaml").write_text(
        "output: pairs\nkind: pairs\ninputs: [{path: pairs.jsonl}]\ntokenizer: {kind: char, roles: bert}\n"
    )
    assert warm("prepare", "pairs.yaml", cwd=folder).code == 0
    result = warm("train", "a.yaml", "data.path=pairs", "data.packing=bins", cwd=folder)
    words = ["pairs: ", "objective.kind=masked learns from text, and the data are pairs", "choose another"]
    check_refused(result, 64, *words)
