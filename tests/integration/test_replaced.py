"""Replaced-token detection on real ranks: one process's losses at every stage, resumed bit for bit, exported."""

import json
import random

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import ElectraForPreTraining

from pretrain.artifact.model_path import open_source
from pretrain.artifact.source import AdaptedModel
from pretrain.artifact.transfer import export_model
from pretrain.config.load import load_config
from pretrain.plan.params import parameter_shapes
from pretrain.plan.task import known_model
from tests.helpers.ranks import run_in_ranks
from tests.helpers.topologies import contents, ledger, losses, newest, run_dir, write_run
from tests.integration.test_finetune_recipes import write_texts

JOBS = "tests.helpers.topologies:run_jobs"
STEPS = 20
CONFIG = """
seed: 7
run: {{dir: {runs}, name: run}}
data: {{path: {data}, lanes: 3, block_samples: 16}}
model:
  preset: electra-tiny
  max_seq_len: 32
  tied_embeddings: false
  head: {{kind: replaced, transform: true, bias: true}}
  encoder: {{width: 36, heads: 4, ff_width: 52, embedding_width: 20, dropout: 0, attention_dropout: 0}}
  generator_heads: 1
objective: {{kind: replaced}}
batch: {{global_tokens: 384, seq_len: 32, micro: 1}}
optim: {{lr: 5e-3, schedule: {{warmup_steps: 5}}}}
train: {{steps: 20}}
eval: {{every_steps: 10}}
checkpoint: {{every_steps: 10, keep: 20}}
tracking: {{log_every_steps: 5, wandb: off}}
"""
"""Sizes of which partitions cut parameters in the middle."""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Texts whose tokenizer has a mask token."""
    folder = tmp_path_factory.mktemp("words")
    lines = [" ".join(f"w{(3 * start + step) % 17}" for step in range(40)) for start in range(60)]
    return write_texts(folder, lines, roles="bert")


def job(config, kind, stage, micro, *more):
    engine = f"engine={{kind: {kind}, zero_stage: {stage}, precision: fp32, device: cpu}}"
    return {"config": str(config), "overrides": [engine, f"batch.micro={micro}", *more]}


def run(ranks, *jobs):
    for found in run_in_ranks(JOBS, ranks, {"jobs": list(jobs)}):
        assert [code for code, _ in found] == [0] * len(jobs)


@pytest.fixture(scope="module")
def alone(words, tmp_path_factory):
    """A run of one process."""
    config = write_run(tmp_path_factory.mktemp("alone") / "run", words, template=CONFIG)
    run(1, job(config, "single", 0, 12))
    return config


LONG = [
    pytest.param(*case, STEPS, marks=pytest.mark.long)
    for case in (("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("ddp", 0))
]


@pytest.mark.parametrize(("kind", "stage", "steps"), [("deepspeed", 2, 4), ("deepspeed", 3, 4), *LONG])
def test_two_ranks_train_like_one_process(words, alone, tmp_path, kind, stage, steps):
    config = write_run(tmp_path / "run", words, template=CONFIG)
    run(2, job(config, kind, stage, 3, f"train.stop_after={steps}", "eval={every_steps: 3, max_tokens: 400}"))
    expected, found = (ledger(run_dir(one)) for one in (alone, config))
    assert losses(found) == pytest.approx(losses(expected)[:steps], rel=1e-4)
    norms, wanted = ([float.fromhex(row["grad_norm"]) for row in rows.values()] for rows in (found, expected))
    assert norms == pytest.approx(wanted[:steps], rel=1e-3)
    assert losses(expected)[-1] < 0.8 * losses(expected)[0]


@pytest.mark.parametrize(
    ("stage", "stops"), [(2, (3, 6)), *(pytest.param(stage, (7, STEPS), marks=pytest.mark.long) for stage in (2, 3))]
)
def test_a_stopped_run_goes_on_bit_for_bit(words, tmp_path, stage, stops):
    whole, stopped = (write_run(tmp_path / name, words, template=CONFIG) for name in ("whole", "stopped"))
    run(2, job(whole, "deepspeed", stage, 6, f"train.stop_after={stops[-1]}"))
    for stop in stops:
        run(2, job(stopped, "deepspeed", stage, 6, f"train.stop_after={stop}"))
    left, right = (
        [{key: value for key, value in row.items() if key != "attempt"} for row in ledger(run_dir(one)).values()]
        for one in (whole, stopped)
    )
    assert left == right and len(left) == stops[-1]
    weights, others = (contents(newest(run_dir(one))) for one in (whole, stopped))
    assert all(bool((weights[key] == others[key]).all()) for key in weights)


def test_a_run_shows_its_generator_and_both_are_exported(alone, tmp_path):
    rows = [json.loads(line) for line in run_dir(alone).metrics.read_text().splitlines()]
    shown = [row for row in rows if "generator_loss" in row]
    assert [row["step"] for row in shown] == [5, 10, 15, 20]
    assert shown[-1]["generator_loss"] < shown[0]["generator_loss"]
    for row in shown:
        assert 0 <= row["found_share"] <= row["replaced_share"] < 0.3
    measured = [row for row in rows if "val_loss" in row]
    assert [row["step"] for row in measured] == [10, 20]
    assert "val_perplexity" not in measured[0] and measured[0]["val_generator_loss"] > 0
    # Each is compared with the model by its scores.
    assert export_model(run_dir(alone).path, tmp_path / "model").architecture == "ElectraForPreTraining"
    written = export_model(run_dir(alone).path, tmp_path / "generator", generator=True)
    assert written.architecture == "ElectraForMaskedLM"
    assert "val_loss" not in (tmp_path / "generator" / "README.md").read_text()


def test_a_classifier_begins_with_the_model_and_leaves_the_generator(alone, tmp_path):
    keep = [line for line in CONFIG.splitlines() if line.split(":")[0] in ("run", "data", "batch", "optim", "train")]
    model = "model: {{head: {{kind: labels}}}}\nobjective: {{kind: classify}}"
    start = f"init: {{{{from: {run_dir(alone).path}}}}}"
    config = write_run(tmp_path / "run", tmp_path, template="\n".join([*keep, model, start]))
    found = load_config(config, []).model
    assert (found.generator_heads, found.head.kind, found.tied_embeddings) == (0, "labels", False)
    source = open_source(run_dir(alone).path)
    known = known_model(found, source.config.vocab_size)
    start = AdaptedModel(source, known, parameter_shapes(known))
    assert start.anew == {"head.weight"}
    assert all(name.startswith(("generator.", "head.")) for name in start.left)


def chains(count, seed):
    """Texts of 160 words out of 31, each followed by one of two."""
    rng = random.Random(seed)
    for _ in range(count):
        numbers = [rng.randrange(31)]
        while len(numbers) < 160:
            numbers.append((3 * numbers[-1] + 1 + rng.randrange(2)) % 31)
        yield " ".join(f"w{number}" for number in numbers)


@pytest.mark.long
def test_an_exported_model_finds_replaced_words_of_texts_that_it_has_not_seen(tmp_path):
    data = write_texts(tmp_path / "chains", list(chains(100, 1)), roles="bert")
    config = write_run(tmp_path / "run", data, template=CONFIG)
    run(1, job(config, "single", 0, 12, "train.steps=400", "eval.every_steps=0", "checkpoint.every_steps=400"))
    export_model(run_dir(config).path, tmp_path / "model")
    model = ElectraForPreTraining.from_pretrained(tmp_path / "model").eval()
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    texts = [tokenizer.encode(text, add_special_tokens=False).ids[:32] for text in chains(100, 2)]
    ids, rng = torch.tensor(texts), torch.Generator().manual_seed(0)
    words = ids.unique()
    drawn = words[torch.randint(len(words), ids.shape, generator=rng)]
    read = ids.where(torch.rand(ids.shape, generator=rng) >= 0.15, drawn)
    is_replaced = read != ids
    with torch.no_grad():
        logits = model(read).logits
    share = is_replaced.float().mean()
    # The loss of a model that knows their frequency alone.
    base = binary_cross_entropy_with_logits(share.logit().expand_as(logits), is_replaced.float())
    loss = binary_cross_entropy_with_logits(logits, is_replaced.float())
    ranked = (logits[is_replaced][:, None] > logits[~is_replaced][None]).float().mean()
    assert loss < 0.7 * base and ranked > 0.8, (float(loss), float(base), float(ranked))
