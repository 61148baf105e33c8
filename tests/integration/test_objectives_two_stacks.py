"""Encoder-decoders trained by their objectives on real ranks: one loss whatever the ranks and the ZeRO stage, runs that
are killed and go on, text from what was trained, and the errors that a user meets."""

import json
import shutil

import numpy as np
import pytest

from pretrain.checkpoint.format import list_checkpoints, step_of
from pretrain.tokenizer.file import tokenizer_hash
from pretrain.tracking.audit import read_audit
from tests.helpers import two_stacks
from tests.helpers.cli import run_warm
from tests.helpers.holds import HELD, Hold
from tests.helpers.ranks import run_in_ranks
from tests.helpers.runs import RunMaker, assert_same_run, kill_rank
from tests.helpers.waiting import finish, wait_until
from tests.integration import objective_workers as workers

MODULE = "tests.integration.objective_workers"


@pytest.mark.long
@pytest.mark.parametrize(
    "objective",
    [pytest.param(workers.PAIRS, marks=pytest.mark.long), workers.SPAN],
    ids=lambda objective: objective["kind"],
)
def test_the_gradient_is_that_of_one_big_batch_whatever_the_ranks(tmp_path, objective):
    (workers.write_pairs if objective is workers.PAIRS else workers.write_texts)(tmp_path)
    expected = workers.reference(str(tmp_path), objective)
    for ranks, kind in ((1, "single"), (2, "ddp"), (3, "ddp")):
        arguments = {"folder": str(tmp_path), "micro": 2, "kind": kind, "objective": objective}
        found = run_in_ranks(f"{MODULE}:gradient", ranks, arguments)
        targets = [one["targets"] for one in found]
        assert sum(targets) == expected["targets"]
        if objective is workers.PAIRS and ranks == 3:
            assert max(targets) > 1.5 * min(targets), "the ranks must weigh differently for this to mean anything"
        for one in found:
            # What is shown is without the smoothing that is minimised. fp32 against float64.
            assert one["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            for name, gradient in expected["gradient"].items():
                ours, theirs = np.array(one["gradient"][name]), np.array(gradient)
                assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs) + 1e-9, name


@pytest.mark.long
@pytest.mark.parametrize("objective", [workers.PAIRS, workers.SPAN], ids=lambda objective: objective["kind"])
def test_every_zero_stage_trains_alike(tmp_path, objective):
    (workers.write_pairs if objective is workers.PAIRS else workers.write_texts)(tmp_path)
    cases = [["ddp", 0, "fp32"], *(["deepspeed", stage, "fp32"] for stage in (0, 2, 3))]
    arguments = {"folder": str(tmp_path), "cases": cases, "micro": 2, "steps": 4, "objective": objective}
    first, *others = run_in_ranks(f"{MODULE}:steps_of", 2, arguments)[0]
    for rows in others:
        for row, expected in zip(rows, first, strict=True):
            # fp32 sums in another order, fed back through a few steps of Adam.
            assert row == pytest.approx(expected, rel=1e-3)
    assert first[-1][0] < first[0][0]


CONFIG = (
    two_stacks.CONFIG
    + """batch: {{global_tokens: 576, seq_len: 48, micro: 2}}
optim: {{lr: 1e-2, schedule: {{warmup_steps: 5}}}}
train: {{steps: 30}}
engine: {{kind: deepspeed, zero_stage: 2, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 10}}
tracking: {{log_every_steps: 10, wandb: off}}
"""
)
MODES = ["[S2S]", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
MIXTURES = {
    "prefix": "[{kind: span, weight: 2, span: {density: 0.3, mean_length: 2.0}}, "
    "{kind: ul2, weight: 1, ul2: {denoisers: [{mode: '[S2S]', density: 0.25, prefix: true}]}}]",
    "fim": "[{kind: causal, weight: 1}, {kind: fim, weight: 1, fim: {rate: 0.9, max_documents: 2}}]",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A shard folder whose vocabulary has sentinels, a mode and the tokens of fill in the middle."""
    return two_stacks.prepare_words(tmp_path_factory, MODES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, texts) -> RunMaker:
    """Runs of a tiny T5 that restores spans."""
    return RunMaker(tmp_path_factory.mktemp("runs"), texts, CONFIG)


@pytest.mark.long
def test_a_run_that_restores_spans_is_killed_goes_on_bit_for_bit_and_answers(runs, tmp_path):
    output = runs.train("golden", "eval={every_steps: 15}")
    assert "rows of 56 tokens become a source of 48 and 26 tokens" in output
    # Before step 29 that of step 10 is there, and perhaps that of step 20.
    hold, saved = Hold(tmp_path, "killed", step=29), runs.folder("killed").checkpoints
    process = runs.start("killed", "eval={every_steps: 15}", HELD, **hold.environment)
    wait_until(lambda: list_checkpoints(saved), "a checkpoint is there", process)
    kill_rank(process, 1)
    finish(process)
    step = step_of(list_checkpoints(saved)[-1])
    assert runs.train("killed", "eval={every_steps: 15}").count(f"at step {step} of 30") == 1
    assert_same_run(runs, "killed", "golden", 30)
    losses = [float.fromhex(row.loss) for row in read_audit(runs.folder("golden").audit)]
    assert losses[-1] < losses[0] - 1
    lines = [json.loads(line) for line in runs.folder("golden").metrics.read_text().splitlines()]
    first, second = (line["val_tokens"] for line in lines if "val_tokens" in line)
    assert first == second
    assert not any("val_bits_per_byte" in line for line in lines), "a part of the text is no code for it"
    run = runs.folder("golden").path
    prompt = ["--prompt", "alpha <extra_id_0> gamma", "--max-tokens", "8", "--json"]
    answer = run_warm("generate", str(run), *prompt, cwd=run)
    assert answer.code == 0, answer.stderr
    assert "<extra_id_" not in json.loads(answer.stdout)["text"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("prefix", ["data.document_mask=false"]),
        ("fim", ["model.encoder=null", "data.document_mask=true", "engine.zero_stage=3"]),
    ],
)
def test_a_run_of_several_objectives_stops_and_goes_on_bit_for_bit(runs, name, overrides):
    alone = "kind: causal, span: {density: 0.15, mean_length: 3.0}"  # the defaults: CONFIG's own are none of a mixture
    golden = [
        *overrides,
        f"objective={{{alone}, mixture: {MIXTURES[name]}}}",
        "train={steps: 12}",
        "checkpoint={every_steps: 12}",
    ]
    runs.train(f"{name}-golden", *golden)
    runs.train(f"{name}-stopped", *golden, "train.stop_after=5")
    runs.train(f"{name}-stopped", *golden)
    assert_same_run(runs, f"{name}-stopped", f"{name}-golden", 12)


SHORT = "batch={seq_len: 2, global_tokens: 24}"
DECODER = "model.encoder=null"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["objective.span.mean_length=1"],
            "tokenizer.json: rows of 47 tokens lose 14 spans (density=0.3, mean_length=1.0), and the tokenizer has 12 "
            "sentinels; prepare with tokenizer.roles=t5 and tokenizer.sentinels=14 or more, raise mean_length, or "
            "lower batch.seq_len",
        ),
        (
            ["objective={kind: ul2, span: {density: 0.15, mean_length: 3.0}}", "data.document_mask=false"],
            "tokenizer.json: the tokenizer has no special token [NLU], the mode of a denoiser; prepare with it among "
            "tokenizer.special_tokens, or set its mode to null",
        ),
        (
            ["objective={kind: ul2, span: {density: 0.15, mean_length: 3.0}}"],
            "objective.kind=ul2 has one mode token a row, not one a document; use data.document_mask=false",
        ),
        (
            ["objective={kind: fim, span: {density: 0.15, mean_length: 3.0}, fim: {tokens: [a, b, '[S2S]']}}", DECODER],
            "objective.kind=fim needs the special tokens a, b, which the tokenizer does not have; prepare with them "
            "among tokenizer.special_tokens, or name its own in objective.fim.tokens",
        ),
        (
            [
                "objective={kind: causal, span: {density: 0.15, mean_length: 3.0}, mixture: "
                "[{kind: seq2seq, weight: 1}, {kind: seq2seq, weight: 2}]}"
            ],
            "objective.mixture: seq2seq cannot be mixed; use objective.kind=seq2seq alone",
        ),
        (["data.packing=bins"], "needs full rows, but data.packing=bins; use data.packing=concat"),
        (
            [DECODER],
            "needs a model with encoder+decoder, model.preset=t5-v1.1-tiny has decoder; use objective.kind=causal",
        ),
        ([SHORT], "batch.seq_len=2 is too short for objective.kind=span; raise it"),
        (
            ["objective={kind: seq2seq, span: {density: 0.15, mean_length: 3.0}}"],
            "objective.kind=seq2seq learns from pairs, and the data are text; choose another objective.kind or "
            "data.path",
        ),
    ],
)
def test_what_cannot_be_trained_is_one_line_before_anything_is_written(runs, warm, overrides, message):
    alone = ["engine={kind: single, zero_stage: 0}"]
    found = warm("train", str(runs.config("refused")), *alone, *overrides, cwd=runs.folder("refused").path.parents[1])
    assert found.code == 64, found.stderr
    (line,) = found.errors
    assert line.endswith(message) or message in line
    assert not runs.folder("refused").path.exists()


def test_pairs_that_would_be_cut_are_refused(runs, warm, tmp_path, texts):
    workers.write_pairs(tmp_path / "pairs")
    shutil.copy(texts / "tokenizer.json", tmp_path / "pairs")
    index = json.loads((tmp_path / "pairs/index.json").read_text())
    index["tokenizer_sha256"] = tokenizer_hash(texts / "tokenizer.json")
    (tmp_path / "pairs/index.json").write_text(json.dumps(index))
    objective = "objective={kind: seq2seq, span: {density: 0.15, mean_length: 3.0}}"
    overrides = [f"data.path={tmp_path / 'pairs'}", "engine={kind: single, zero_stage: 0}", objective]
    found = warm("train", str(runs.config("refused")), *overrides, cwd=tmp_path)
    assert found.code == 64, found.stderr
    assert found.errors == ["data.packing=concat cuts documents, which pairs must not be; use data.packing=bins"]


def test_a_tokenizer_without_a_start_is_one_line(runs, warm, corpus):
    overrides = [f"data.path={corpus}", "engine={kind: single, zero_stage: 0}", "data.document_mask=false"]
    prefix = "objective={kind: ul2, span: {density: 0.15, mean_length: 3.0}, ul2: {denoisers: [{prefix: true}]}}"
    found = warm("train", str(runs.config("refused")), *overrides, prefix, cwd=corpus)
    assert found.code == 64, found.stderr
    assert found.errors == [
        f"{corpus / 'tokenizer.json'}: the tokenizer has no token that a decoder reads first; prepare with a <pad> or "
        "<s> token (tokenizer.special_tokens), or set model.special_tokens.start"
    ]
