"""Contrastive runs on real ranks: one process's losses whatever the cut, resumed bit for bit, and what is refused."""

import json
import random

import numpy as np
import pytest
import torch
import transformers

from pretrain.config.load import load_config
from pretrain.errors import ConfigError
from pretrain.preparation.prepare import prepare
from tests.helpers.cli import run_warm
from tests.helpers.corpus import write_rows
from tests.helpers.prepare_config import labels_config
from tests.helpers.ranks import run_in_ranks
from tests.helpers.topologies import contents, ledger, losses, newest, run_dir, write_run

JOBS = "tests.helpers.topologies:run_jobs"
STEPS = 8
CONFIG = """
seed: 7
run: {{dir: {runs}, name: run}}
data: {{path: {data}, packing: padded, lanes: 3, block_samples: 16}}
model:
  preset: bert-tiny
  tied_embeddings: false
  pooler: false
  head: {{kind: vectors, mean: true, learned_temperature: true}}
  encoder: {{width: 36, heads: 4, ff_width: 52, dropout: 0, attention_dropout: 0}}
objective: {{kind: contrastive, contrastive: {{widths: [12]}}}}
batch: {{global_tokens: 1152, seq_len: 48, micro: 1}}
optim: {{lr: 5e-3, schedule: {{warmup_steps: 2}}}}
train: {{steps: 8}}
eval: {{every_steps: 4}}
checkpoint: {{every_steps: 4, keep: 20}}
tracking: {{log_every_steps: 2, wandb: off}}
"""


def records(count, seed):
    """Texts of two words in common, some with a hard negative, some of a group."""
    rng = random.Random(seed)
    words = [f"w{number}" for number in range(40)]
    for number in range(count):
        pair = rng.sample(words, 2)
        record = {"query": " ".join([*pair, rng.choice(words)]), "positive": " ".join([rng.choice(words), *pair])}
        if number % 3 == 0:
            record["negatives"] = [" ".join(rng.sample(words, 4))]
        yield record | ({"group": number % 10} if number % 4 == 0 else {})


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    path = write_rows(folder / "pairs.jsonl", list(records(300, 1)))
    tokenizer = {"kind": "wordpiece", "vocab_size": 120, "roles": "bert"}
    config = labels_config(folder / "data", path, "triples", tokenizer=tokenizer)
    prepare(config.model_copy(update={"split": "hash:0.1"}), processes=1)
    return folder / "data"


def job(config, kind, stage, micro, *more):
    engine = f"engine={{kind: {kind}, zero_stage: {stage}, precision: fp32, device: cpu}}"
    return {"config": str(config), "overrides": [engine, f"batch.micro={micro}", *more]}


def run(ranks, *jobs):
    for found in run_in_ranks(JOBS, ranks, {"jobs": list(jobs)}):
        assert [code for code, _ in found] == [0] * len(jobs)


@pytest.fixture(scope="module")
def alone(pairs, tmp_path_factory):
    """A run of one process that has each global batch at once, without cached gradients."""
    config = write_run(tmp_path_factory.mktemp("alone") / "run", pairs, template=CONFIG)
    run(1, job(config, "single", 0, 24))
    return config


LONG = [pytest.param(*case, marks=pytest.mark.long) for case in ((1, "single", 0, 5), (2, "deepspeed", 0, 3))]


@pytest.mark.parametrize(
    ("ranks", "kind", "stage", "micro"),
    [(3, "ddp", 0, 4), (2, "deepspeed", 2, 3), (2, "deepspeed", 3, 6), *LONG[1:]],
)
def test_any_cut_of_a_batch_has_the_losses_and_gradients_of_one_process(
    pairs, alone, tmp_path, ranks, kind, stage, micro
):
    config = write_run(tmp_path / "run", pairs, template=CONFIG)
    run(ranks, job(config, kind, stage, micro))
    expected, found = (list(ledger(run_dir(one)).values()) for one in (alone, config))
    assert [row["digest"] for row in found] == [row["digest"] for row in expected]
    # Of the same weights: the first step. Then rounding grows.
    loss, wanted = (float.fromhex(rows[0]["loss"]) for rows in (found, expected))
    assert loss == pytest.approx(wanted, abs=1e-6)
    norm, wanted = (float.fromhex(rows[0]["grad_norm"]) for rows in (found, expected))
    assert norm == pytest.approx(wanted, rel=1e-6)
    assert losses(ledger(run_dir(config))) == pytest.approx(losses(ledger(run_dir(alone))), rel=1e-4)


def test_a_stopped_run_goes_on_bit_for_bit(pairs, tmp_path):
    """With dropout, and with several micro-batches on each rank."""
    dropout = "model.encoder={dropout: 0.1, attention_dropout: 0.1}"
    whole, stopped = (write_run(tmp_path / name, pairs, template=CONFIG) for name in ("whole", "stopped"))
    jobs = [job(whole, "ddp", 0, 4, dropout), job(stopped, "ddp", 0, 4, dropout, "train.stop_after=3")]
    run(2, *jobs, job(stopped, "ddp", 0, 4, dropout))
    left, right = (
        [{key: value for key, value in row.items() if key != "attempt"} for row in ledger(run_dir(one)).values()]
        for one in (whole, stopped)
    )
    assert left == right and len(left) == STEPS
    weights, others = (contents(newest(run_dir(one))) for one in (whole, stopped))
    assert all(bool((weights[key] == others[key]).all()) for key in weights)


def test_a_run_shows_its_similarity_and_temperature(alone):
    rows = [json.loads(line) for line in run_dir(alone).metrics.read_text().splitlines()]
    shown = [row for row in rows if "similarity" in row]
    assert [row["step"] for row in shown] == [2, 4, 6, 8]
    assert all(row["pairs"] == 24 * row["step"] for row in shown)
    assert all(-1 <= row["similarity"] <= 1 and row["temperature"] != 0.05 for row in shown)
    measured = [row for row in rows if "val_loss" in row]
    assert [row["step"] for row in measured] == [4, 8] and "val_perplexity" not in measured[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch.global_tokens=48"], "compares the pairs of a batch, and one row has one pair; raise batch.global"),
        (["objective.contrastive.widths=[36]"], "widths must be less than the width of the model, 36; leave larger"),
        (
            ["parallel.sequence=2", "model.head.mean=false"],
            "parallel.sequence=2 cuts rows, and objective.kind=contrastive compares whole texts",
        ),
        (["model.pooler=true"], "head.kind=vectors compares hidden states, and model.pooler maps them; set it to"),
        (["model.head.kind=none", "model.head.mean=false"], "learned_temperature goes with kind=vectors, not none"),
        (["objective.label_smoothing=0.1"], "label_smoothing is of predicted tokens, and kind=contrastive compares"),
        (["data.document_mask=false"], "compares documents, which must not attend to each other"),
    ],
)
def test_values_that_do_not_go_together_are_refused(pairs, tmp_path, overrides, message):
    config = write_run(tmp_path / "run", pairs, template=CONFIG)
    with pytest.raises(ConfigError) as error:
        load_config(config, overrides)
    assert message in str(error.value)


def test_vectors_of_a_run_are_written_and_measured(alone, tmp_path):
    rows = list(records(40, 2))
    documents = write_rows(tmp_path / "d.jsonl", [{"_id": n, "text": row["positive"]} for n, row in enumerate(rows)])
    queries = write_rows(tmp_path / "q.jsonl", [{"_id": n, "text": row["query"]} for n, row in enumerate(rows)])
    (tmp_path / "qrels.tsv").write_text("".join(f"{n}\t{n}\t1\n" for n in range(39)))
    run_path = str(run_dir(alone).path)
    wrote = run_warm("embed", run_path, str(documents), "--output", "d.npy", cwd=tmp_path)
    assert wrote.code == 0 and wrote.stdout == "d.npy: 40 vectors of 36 numbers\n"
    vectors = np.load(tmp_path / "d.npy")
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    files = ("--retrieval", str(documents), str(queries), str(tmp_path / "qrels.tsv"))
    measured = run_warm("evaluate", run_path, *files, "--json", cwd=tmp_path)
    facts = json.loads(measured.stdout)
    assert (facts["kind"], facts["num_units"], facts["num_left_out"]) == ("retrieval", 39, 1)
    score = facts["scores"]["MRR@10"]
    assert 0.2 < score["low"] < score["value"] < score["high"] <= 1
    against = run_warm("evaluate", run_path, *files, "--compare", run_path, cwd=tmp_path)
    assert "39 queries, and 1 without a relevant document left out" in against.stdout
    assert "p 1.0000 (paired bootstrap, 39 queries" in against.stdout
    losses = run_warm("evaluate", run_path, "--compare", run_path, cwd=tmp_path)
    assert "--compare pairs the losses of rows, and objective.kind=contrastive has none" in losses.stderr
    pairs = [{"sentence1": row["query"], "sentence2": row["positive"], "score": n % 6} for n, row in enumerate(rows)]
    similar = run_warm("evaluate", run_path, "--sts", str(write_rows(tmp_path / "s.jsonl", pairs)), cwd=tmp_path)
    assert similar.code == 0 and "Spearman" in similar.stdout
    both = run_warm("evaluate", run_path, *files, "--sts", "s.jsonl", cwd=tmp_path)
    assert both.code != 0 and "ambiguous evaluation target" in both.stderr


def test_an_exported_run_has_the_vectors_of_transformers_and_comes_back(alone, tmp_path):
    texts = [row["query"] for row in records(20, 3)]
    path = write_rows(tmp_path / "t.jsonl", [{"text": text} for text in texts])
    run_path = str(run_dir(alone).path)
    written = run_warm("export", run_path, "out", cwd=tmp_path)
    assert written.code == 0, written.stderr
    assert "sentence-transformers" in (tmp_path / "out" / "README.md").read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = transformers.BertModel.from_pretrained(tmp_path / "out", add_pooling_layer=False).eval()
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.no_grad():
        hidden = theirs(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    expected = torch.nn.functional.normalize(pooled, dim=1).numpy()
    assert run_warm("import", "out", "back", cwd=tmp_path).code == 0
    for model in (run_path, "out", "back"):
        assert run_warm("embed", model, str(path), "--output", "t.npy", cwd=tmp_path).code == 0
        np.testing.assert_allclose(np.load(tmp_path / "t.npy"), expected, atol=1e-6)
