"""Masked language modelling through everything: ranks, ZeRO stages, the command line, a kill."""

import json
import math
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.data.loader import StepCounts
from pretrain.dist import World
from pretrain.model import Transformer, build_model, init_weights
from pretrain.objective.loss import sum_token_loss
from pretrain.tokenizer.file import load_tokenizer
from pretrain.tracking.audit import read_audit
from pretrain.training.step import start_exchange
from pretrain.types import IGNORE_INDEX, Batch
from tests.helpers.cli import run_warm
from tests.helpers.holds import HELD, Hold
from tests.helpers.ranks import run_in_ranks
from tests.helpers.runs import RunMaker, assert_same_run, kill_rank
from tests.helpers.waiting import finish
from tests.integration import workers
from tests.integration.references import follow
from tests.integration.workers import ROWS, SEQ_LEN, VOCAB

MODEL = {
    "preset": "bert-tiny",
    "vocab_size": VOCAB,
    "vocab_multiple": 8,
    "max_seq_len": SEQ_LEN,
    "encoder": {"width": 36, "heads": 6, "ff_width": 50, "dropout": 0.0},
}
SHARES = (1.0, 0.9, 0.8, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0, 0.0, 0.0, 0.0)
"""Of a row's tokens that are targets: of three ranks the first has most of them, and the last none."""


def masked_batch(step: int) -> Batch:
    """The global batch of a step: random tokens, one in three of them a repetition of what is to be predicted."""
    generator = torch.Generator().manual_seed(500 + step)
    tokens = torch.randint(1, VOCAB, (ROWS, SEQ_LEN), generator=generator)
    chosen = torch.rand(ROWS, SEQ_LEN, generator=generator) < torch.tensor(SHARES)[:, None]
    targets = tokens.masked_fill(~chosen, IGNORE_INDEX)
    kept = torch.rand(ROWS, SEQ_LEN, generator=generator) < 1 / 3
    return Batch(tokens.masked_fill(chosen & ~kept, 0), targets)


def rows_of(batch: Batch, first: int, count: int) -> Batch:
    """Some rows, with the places of their targets."""
    tokens, targets = batch.tokens_BT[first : first + count], batch.targets_BT[first : first + count]
    return Batch(tokens, targets, target_positions_P=torch.nonzero(targets.flatten() != IGNORE_INDEX)[:, 0])


def shares_of(batch: Batch, rank: int, world_size: int, micro: int) -> list[Batch]:
    """The micro-batches of a rank."""
    size = ROWS // world_size
    return [rows_of(batch, first, micro) for first in range(rank * size, (rank + 1) * size, micro)]


def train_masked(world: World, cases: list[list[Any]], steps: int, micro: int) -> list[list[list[float]]]:
    """Trains each (kind, stage, precision) from the same start; returns [loss, grad norm] of each step."""
    found = []
    for case in cases:
        engine, rows = workers.build(world, *case, micro=micro, model=MODEL), []
        for step in range(steps):
            whole = masked_batch(step)
            total, sums = whole.num_targets(), torch.zeros(2, dtype=torch.float64)
            mine = shares_of(whole, world.rank, world.size, micro)
            for batch in mine:
                sums += engine.forward_backward(batch, world.size / total, batch is mine[-1])
            pending = start_exchange(sums, StepCounts(), None)
            norm = engine.update(1e-2).grad_norm
            rows.append([pending().loss_sum / total, norm])
        found.append(rows)
    return found


def build_exact() -> Transformer:
    """The model that the ranks start from, in float64 without an engine."""
    config = ModelConfig.model_validate(expand_preset(MODEL))
    model = build_model(config, PLAIN_ENGINE.model_copy(update={"attention": "eager"}), torch.device("cpu"))
    init_weights(model, config, seed=5)
    return model.double()


def token_mean(model: Transformer, batch: Batch) -> Tensor:
    """The definition: logits of every position, torch's own loss."""
    logits_BTV = model(batch).logits_BTV
    assert logits_BTV is not None
    logits = logits_BTV[..., :VOCAB].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch.targets_BT.flatten(), ignore_index=IGNORE_INDEX)


@pytest.fixture(scope="module")
def reference() -> list[list[float]]:
    """[loss, grad norm] of each step of one process, one big batch, float64."""
    model = build_exact()
    return follow(model, lambda step: token_mean(model, masked_batch(step)), 5)


@pytest.mark.parametrize(("world_size", "micro"), [(1, 12), (1, 1), (1, 4), (2, 6), (2, 2), (3, 4), (3, 1), (3, 2)])
def test_the_gradient_is_that_of_the_global_token_mean_however_targets_are_spread(world_size, micro):
    """Float64: ranks weigh by their targets, and one without any weighs nothing."""
    model, batch = build_exact(), masked_batch(0)
    loss = token_mean(model, batch)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    mean_loss = 0.0
    for rank in range(world_size):
        for part in shares_of(batch, rank, world_size, micro):
            output = sum_token_loss(model, part)
            # What an engine does: it adds up micro-batches and averages over ranks.
            (output.loss_sum * (world_size / batch.num_targets()) / world_size).backward()
            mean_loss += output.nll_sum.item() / batch.num_targets()
    found = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    assert mean_loss == pytest.approx(loss.item(), rel=1e-13)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "micro", "cases"),
    [
        (2, 3, [["deepspeed", stage, "fp32"] for stage in range(4)] + [["ddp", 0, "fp32"]]),
        (3, 2, [["deepspeed", 3, "fp32"], ["ddp", 0, "fp32"]]),
    ],
    ids=["two", "three"],
)
def test_every_engine_trains_like_one_big_batch_when_a_rank_has_no_target(reference, world_size, micro, cases):
    arguments = {"cases": cases, "steps": len(reference), "micro": micro}
    ranks = run_in_ranks("tests.integration.test_objectives_encoder:train_masked", world_size, arguments)
    assert all(rank == ranks[0] for rank in ranks), "all ranks must see the same global loss and gradient norm"
    for case, rows in zip(cases, ranks[0], strict=True):
        for step, (row, expected) in enumerate(zip(rows, reference, strict=True)):
            # fp32 against float64, fed back through Adam.
            assert row[0] == pytest.approx(expected[0], rel=1e-4), (case, step)
            assert row[1] == pytest.approx(expected[1], rel=1e-3), (case, step)


# --- a user's run ------------------------------------------------------------------------------------------------

CONFIG = """
seed: 7
run: {{dir: {runs}, name: run}}
data: {{path: {data}, lanes: 3, block_samples: 16}}
model: {{preset: bert-tiny, max_seq_len: 32, encoder: {{width: 32, heads: 4, ff_width: 48, dropout: 0}}}}
objective: {{kind: masked, masked: {{whole_words: true, rate: 0.3}}}}
batch: {{global_tokens: 384, seq_len: 32, micro: 2}}
optim: {{lr: 5e-3, schedule: {{warmup_steps: 5}}}}
train: {{steps: 40}}
eval: {{every_steps: 20}}
engine: {{kind: deepspeed, zero_stage: 2, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 10}}
tracking: {{log_every_steps: 10, wandb: off}}
"""


class EncoderRuns(RunMaker):
    """Runs of a tiny BERT."""

    def config(self, name: str = "runs") -> Path:
        """Writes a config whose run folder is `name/run`."""
        path = self._folder / f"{name}.yaml"
        path.write_text(CONFIG.format(runs=self._folder / name, data=self._data))
        return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Sentences of a few words, prepared through the command line with a WordPiece that has [MASK]."""
    folder, rng = tmp_path_factory.mktemp("bert"), random.Random(3)
    words = ["unbelievable", "walking", "walked", "talking", "talked", "believe", "dogs", "cats", "the", "a"]
    lines = (json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(5, 60)))}) for _ in range(600))
    (folder / "text.jsonl").write_text("\n".join(lines))
    (folder / "prepare.yaml").write_text(
        "output: data\n"
        "inputs: [{path: text.jsonl}]\n"
        "tokenizer: {kind: wordpiece, vocab_size: 44, roles: bert}\n"
        "split: hash:0.05\n"
    )
    result = run_warm("prepare", "prepare.yaml", "--processes", "1", cwd=folder)
    assert result.code == 0, result.stderr
    return folder / "data"


@pytest.fixture(scope="module")
def golden(tmp_path_factory, shards) -> EncoderRuns:
    """An uninterrupted run on two ranks, and a maker of others beside it."""
    maker = EncoderRuns(tmp_path_factory.mktemp("encoder"), shards)
    maker.train("golden")
    return maker


def metrics_of(golden: EncoderRuns, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in golden.folder(name).metrics.read_text().splitlines()]


@pytest.mark.long
def test_a_run_learns_and_says_how_often_it_is_right(golden):
    rows = metrics_of(golden, "golden")
    validated = [row for row in rows if "val_loss" in row]
    assert len(validated) == 2
    assert validated[-1]["val_loss"] < validated[0]["val_loss"] < math.log(44)
    assert 0.05 < validated[-1]["val_accuracy"] < 1
    assert validated[-1]["val_perplexity"] == pytest.approx(math.exp(validated[-1]["val_loss"]))
    trained = [row for row in rows if "loss" in row]
    assert trained[-1]["loss"] < trained[0]["loss"]
    # Of 384 tokens a step about 30 in 100 are targets, [SEP] is none; what is read is all of them.
    ledger = read_audit(golden.folder("golden").audit)
    assert 0.2 * 384 < np.mean([row.tokens for row in ledger]) < 0.3 * 384
    assert trained[-1]["tokens_per_s"] * trained[-1]["step_time_s"] == pytest.approx(384)


@pytest.mark.long
def test_a_run_whose_rank_was_killed_continues_bit_for_bit(golden, tmp_path):
    process = golden.start("killed", HELD, **Hold(tmp_path, "killed", step=35).environment)
    golden.wait_for_step("killed", 24, process)
    kill_rank(process, 1)
    finish(process)
    assert process.returncode == 128 + signal.SIGKILL
    golden.complete("killed")
    assert_same_run(golden, "killed", "golden", 40)


@pytest.mark.long
def test_other_ranks_and_stages_mask_the_same_tokens(golden):
    golden.train("zero3", "train.stop_after=8", "engine.zero_stage=3", ranks=3)
    ours, reference = (read_audit(golden.folder(name).audit) for name in ("zero3", "golden"))
    assert len(ours) == 8
    for row, expected in zip(ours, reference, strict=False):
        assert (row.digest, row.tokens) == (expected.digest, expected.tokens)
        # fp32 sums in another order, fed back through eight steps of Adam.
        assert float.fromhex(row.loss) == pytest.approx(float.fromhex(expected.loss), rel=1e-4)


@pytest.mark.long
def test_generate_fills_masks_of_the_run(golden, shards):
    run = str(golden.folder("golden").path)
    result = run_warm("generate", run, "--prompt", "the [MASK] talked", "--json", cwd=shards.parent)
    assert result.code == 0, result.stderr
    found = json.loads(result.stdout)
    (candidates,) = found["masks"]
    assert len(candidates) == 5
    assert 0 < sum(candidate["probability"] for candidate in candidates) <= 1
    special = {token.content for token in load_tokenizer(shards / "tokenizer.json").get_added_tokens_decoder().values()}
    assert candidates[0]["token"] not in special, "special tokens are never predicted, so never likely"
