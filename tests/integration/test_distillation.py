"""A student of a teacher through the real commands: ranks, a stop, a teacher that trains on, what is refused."""

import json
import shutil

import numpy as np
import pytest

from pretrain.config.load import load_config
from pretrain.preparation.prepare import prepare
from pretrain.tracking.audit import read_audit
from tests.helpers.cli import run_warm
from tests.helpers.prepare_config import prepare_config
from tests.helpers.runs import RunMaker, assert_same_run

CONFIG = """
seed: 3
run: {{dir: {runs}, name: run}}
data: {{path: {data}}}
model: {{preset: llama-tiny, max_seq_len: 32, decoder: {{width: 32, heads: 4, kv_heads: 2, ff_width: 48}}}}
batch: {{global_tokens: 384, seq_len: 32, micro: 12}}
optim: {{lr: 3e-3, schedule: {{warmup_steps: 2}}}}
train: {{steps: 6}}
eval: {{every_steps: 6}}
engine: {{kind: single, zero_stage: 0, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 3}}
tracking: {{log_every_steps: 1, wandb: off}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus) -> RunMaker:
    maker = RunMaker(tmp_path_factory.mktemp("distillation"), corpus, CONFIG)
    maker.train("teacher", "model.decoder.layers=3", "seed=9", "optim.lr=2e-2", ranks=1)
    return maker


def taught(runs: RunMaker, *options: str) -> tuple[str, ...]:
    return f"objective.distill={{teacher: {runs.folder('teacher').path}, weight: 0.5}}", *options


def rows_of(runs: RunMaker, name: str) -> list[dict]:
    return [json.loads(line) for line in runs.folder(name).metrics.read_text().splitlines()]


def losses(runs: RunMaker, name: str) -> list[float]:
    return [float.fromhex(row.loss) for row in read_audit(runs.folder(name).audit)]


def test_ranks_and_micro_batches_take_the_steps_of_one_process(runs):
    runs.train("alone", *taught(runs), ranks=1)
    runs.train("ranks", *taught(runs, "engine.kind=ddp", "batch.micro=2"), ranks=2)
    # Sums over ranks and rows are taken in another order.
    np.testing.assert_allclose(losses(runs, "ranks"), losses(runs, "alone"), rtol=1e-5)
    shown = {
        name: [row["distill_loss"] for row in rows_of(runs, name) if "distill_loss" in row]
        for name in ("alone", "ranks")
    }
    np.testing.assert_allclose(shown["ranks"], shown["alone"], rtol=1e-5)
    assert len(shown["alone"]) == 6 and shown["alone"][-1] < shown["alone"][0]
    assert not any("val_distill_loss" in row for row in rows_of(runs, "alone"))
    runs.train("untaught", ranks=1)
    assert losses(runs, "untaught")[0] == losses(runs, "alone")[0] and losses(runs, "untaught") != losses(runs, "alone")


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_stages_take_the_steps_of_one_process(runs, stage):
    runs.train(f"whole-{stage}", *taught(runs), ranks=1)
    zero = ("engine.kind=deepspeed", f"engine.zero_stage={stage}", "batch.micro=3")
    runs.train(f"sharded-{stage}", *taught(runs, *zero), ranks=2)
    np.testing.assert_allclose(losses(runs, f"sharded-{stage}"), losses(runs, f"whole-{stage}"), rtol=2e-5)


@pytest.mark.long
def test_a_stopped_run_continues_bit_for_bit_though_the_teacher_trained_on(runs):
    shutil.copytree(runs.folder("teacher").path, runs.folder("moving").path)
    distill = (f"objective.distill={{teacher: {runs.folder('moving').path}, kind: reverse_kl}}",)
    runs.train("golden", *distill, ranks=1)
    runs.train("stopped", *distill, "train.stop_after=3", ranks=1)
    runs.train("moving", "model.decoder.layers=3", "seed=9", "optim.lr=2e-2", "train.steps=9", ranks=1)
    runs.train("stopped", *distill, ranks=1)
    assert_same_run(runs, "stopped", "golden", 6)
    taken = load_config(runs.folder("stopped").config).objective.distill.teacher
    assert taken.endswith("moving/run/checkpoints/step-00000006")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.sequence=2", "engine.kind=ddp"], "all scores of whole rows; use parallel.sequence=1"),
        (["parallel.tensor=2", "engine.kind=deepspeed"], "all scores of whole rows; use parallel.tensor=1"),
        (["objective.distill.kind=kl"], "should be 'forward_kl', 'reverse_kl' or 'mse'"),
        (["objective.distill.teacher=nowhere"], "nowhere: neither a checkpoint nor a run with one; check the path"),
        (["batch.seq_len=64", "model.max_seq_len=64", "batch.global_tokens=768"], "reads 32 tokens, and rows have 64"),
    ],
)
def test_what_cannot_be_is_refused(runs, corpus, tmp_path, overrides, message):
    maker = RunMaker(tmp_path, corpus, CONFIG)
    result = run_warm("train", str(maker.config("refused")), *taught(runs), *overrides, cwd=tmp_path)
    assert result.code in (64, 66) and len(result.errors) == 1 and message in result.errors[0], result.stderr


def test_a_teacher_of_another_vocabulary_is_refused(runs, tmp_path):
    texts, out = tmp_path / "texts.txt", tmp_path / "data"
    texts.write_text("The cat and the dog.\n" * 40)
    prepare(prepare_config(out, [texts], tokenizer="char"), processes=1)
    maker = RunMaker(tmp_path, out, CONFIG)
    result = run_warm("train", str(maker.config("refused")), *taught(runs), "eval.every_steps=0", cwd=tmp_path)
    assert result.code in (64, 65) and len(result.errors) == 1
    assert "the teacher has a vocabulary of" in result.errors[0]


def write_scores(runs, data, tmp_path, *options: str, expect: int = 0):
    teacher = str(runs.folder("teacher").path)
    result = run_warm("distill", teacher, "--data", str(data), *options, "--json", cwd=tmp_path)
    assert result.code == expect, result.stderr
    return result


def teacher_files(data) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(data.rglob("*teacher*"))}


@pytest.mark.long
def test_stored_scores_are_learned_and_stale_or_damaged_ones_are_refused(runs, corpus, tmp_path):
    data = shutil.copytree(corpus, tmp_path / "data")
    facts = json.loads(write_scores(runs, data, tmp_path, "--top-k", "8", "--device", "cpu").stdout)
    written = teacher_files(data)
    # Ids of 2 bytes and scores of 2, the largest and the mass of the others, and headers.
    assert 8 * 4 + 8 <= facts["bytes_per_token"] < 8 * 4 + 8 + 2
    tar = next((data / "train").glob("*.teacher.tar"))
    tar.with_suffix(".idx.npy").unlink()
    tar.unlink()
    write_scores(runs, data, tmp_path, "--top-k", "8", "--device", "cpu")
    assert teacher_files(data) == written, "what is missing is written again, to the same bytes"
    maker = RunMaker(tmp_path, data, CONFIG)
    stored = taught(runs, "objective.distill.stored=true", "train.steps=4", "eval.every_steps=4")
    maker.train("alone", *stored, ranks=1)
    maker.train("ranks", *stored, "engine.kind=ddp", "batch.micro=2", ranks=2)
    np.testing.assert_allclose(losses(maker, "ranks"), losses(maker, "alone"), rtol=1e-5)
    maker.train("padded", *stored, "data.packing=bins", ranks=1)
    for name in ("alone", "padded"):
        shown = [row["distill_loss"] for row in rows_of(maker, name) if "distill_loss" in row]
        assert len(shown) == 4 and shown[-1] < shown[0]

    def refusal(*options: str) -> str:
        result = run_warm("train", str(maker.config("refused")), *stored, *options, cwd=tmp_path)
        assert result.code in (64, 65) and len(result.errors) == 1
        return result.errors[0]

    assert "scores of temperature 1, and objective.distill has 2" in refusal("objective.distill.temperature=2.0")
    other = f"objective.distill.teacher={maker.folder('alone').path}"
    assert f"scores of another teacher than {maker.folder('alone').path}" in refusal(other)
    assert "which kind=prefix changes; use distill.stored=false" in refusal("objective.kind=prefix")
    stale = write_scores(runs, data, tmp_path, "--top-k", "9", expect=65)
    assert "scores that are there have top_k 8, not 9; remove it and *.teacher.*" in stale.errors[0]
    content = tar.read_bytes()
    tar.write_bytes(content[:3000] + bytes(64) + content[3064:])
    assert "is damaged: its CRC32 does not match; remove it and its table, and run `pretrain distill`" in refusal()
    record = json.loads((data / "teacher.json").read_text())
    (data / "teacher.json").write_text(json.dumps(record | {"data": "0" * 64}))
    assert "scores of a teacher that read other data than these" in refusal()
    del record["tables"]
    (data / "teacher.json").write_text(json.dumps(record))
    assert "scores of only a part of the shards" in refusal()
    (data / "teacher.json").unlink()
    assert "has no scores of a teacher; write them: pretrain distill TEACHER" in refusal()
