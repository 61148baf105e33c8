"""Labels and answers through everything: prepare, training from scratch or from an encoder, ranks, a kill, refusals."""

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pretrain.artifact.open import open_artifact
from pretrain.checkpoint.format import list_checkpoints
from pretrain.config.load import load_config
from pretrain.errors import ConfigError
from pretrain.objective.answers import find_spans
from pretrain.shards.index import load_index
from pretrain.tracking.audit import read_audit
from pretrain.types import Batch
from tests.helpers.cli import run_warm
from tests.helpers.holds import HELD, Hold
from tests.helpers.runs import RunMaker, assert_same_run, kill_rank, tensors_of
from tests.helpers.waiting import finish

WORDS = ["unbelievable", "walking", "walked", "dogs", "cats", "talked", "houses"]
COLORS = ["red", "green", "blue"]
TOKENIZER = "{kind: wordpiece, vocab_size: 90, roles: bert}"

CONFIG = """
seed: 7
run: {{dir: {runs}, name: run}}
data: {{path: {data}, lanes: 3, block_samples: 16, packing: {packing}}}
model: {model}
objective: {{kind: {kind}}}
batch: {{global_tokens: {tokens}, seq_len: 32, micro: 8}}
optim: {{lr: 3e-3, schedule: {{kind: cosine, warmup_steps: 10}}}}
train: {{steps: {steps}}}
eval: {{every_steps: {steps}}}
engine: {engine}
checkpoint: {{every_steps: 20}}
tracking: {{log_every_steps: 20, wandb: off}}
"""
BERT = (
    "{preset: bert-tiny, encoder: {width: 48, heads: 4, ff_width: 96}, tied_embeddings: false, pooler: true, "
    "head: {kind: labels, transform: false, dropout: 0.1}}"
)
MODERNBERT = (
    "{preset: modernbert-tiny, encoder: {layers: 2, width: 48, heads: 4, ff_width: 64, dropout: 0.1}, "
    "tied_embeddings: false, head: {kind: labels, mean: %s}}"
)
SINGLE = "{kind: single, zero_stage: 0, precision: fp32, device: cpu}"
RANKS = "{kind: deepspeed, zero_stage: 2, precision: fp32, device: cpu}"


class LabelRuns(RunMaker):
    """Runs of small encoders over labelled data."""

    def __init__(self, folder: Path, data: Path, **values: object) -> None:
        super().__init__(folder, data)
        self._values = values

    def config(self, name: str = "runs") -> Path:
        """Writes a config whose run folder is `name/run`."""
        path = self._folder / f"{name}.yaml"
        path.write_text(CONFIG.format(runs=self._folder / name, data=self._data, **self._values))
        return path


def classified(rng: random.Random) -> dict[str, object]:
    """Words, and somewhere between them a color: the class."""
    words, color = rng.choices(WORDS, k=rng.randint(3, 20)), rng.choice(COLORS)
    words.insert(rng.randint(0, len(words)), color)
    return {"text": " ".join(words), "label": color.upper()}


def tagged(rng: random.Random) -> dict[str, object]:
    """Words, of which several are one color: the tag of every dog and cat."""
    color = rng.choice(COLORS)
    words = [color, *rng.choices([*WORDS, *[color] * 5], k=rng.randint(3, 20))]
    return {"tokens": words, "tags": [color.upper() if word in ("dogs", "cats") else "O" for word in words]}


def asked(rng: random.Random) -> dict[str, object]:
    """Words, and somewhere between them a color and two numbers; one in three questions is of what is not there."""
    words = rng.choices(WORDS, k=rng.randint(3, 9))
    words.insert(rng.randint(0, len(words)), color := rng.choice(COLORS))
    words.insert(rng.randint(0, len(words)), numbers := rng.choice(["one two", "two one"]))
    topic, answer = rng.choice([("color", color), ("numbers", numbers), ("nothing", "")])
    context = " ".join(words)
    answers = {"text": [answer] if answer else [], "answer_start": [context.index(answer)] if answer else []}
    return {"question": f"which {topic}", "context": context, "answers": answers}


def chosen(rng: random.Random) -> dict[str, object]:
    """A question of a kind of word, and two to four answers, of which one has such a word."""
    topic = rng.choice(["color", "animal"])
    colors, animals = [f"a {word}" for word in COLORS], ["dogs", "cats"]
    right, others = (colors, animals) if topic == "color" else (animals, colors)
    choices = [rng.choice(others) + " " + rng.choice(WORDS[:3]) for _ in range(rng.randint(1, 3))]
    label = rng.randint(0, len(choices))
    choices.insert(label, rng.choice(right) + " " + rng.choice(WORDS[:3]))
    return {"question": f"which {topic}", "choices": choices, "label": label}


def prepare(
    folder: Path, kind: str, make: Callable[[random.Random], dict[str, object]], tokenizer: str = TOKENIZER
) -> Path:
    rng = random.Random(3)
    folder.mkdir()
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(make(rng)) for _ in range(1500)))
    (folder / "prepare.yaml").write_text(
        f"output: data\nkind: {kind}\ninputs: [{{path: rows.jsonl}}]\ntokenizer: {tokenizer}\nsplit: hash:0.1\n"
    )
    result = run_warm("prepare", "prepare.yaml", "--processes", "1", cwd=folder)
    assert result.code == 0, result.stderr
    return folder / "data"


@pytest.fixture(scope="module")
def classes(tmp_path_factory) -> Path:
    """A shard folder of classified texts."""
    return prepare(tmp_path_factory.mktemp("labels") / "classes", "classes", classified)


@pytest.fixture(scope="module")
def tags(tmp_path_factory) -> Path:
    """A shard folder of tagged texts."""
    return prepare(tmp_path_factory.mktemp("labels") / "tags", "tags", tagged)


def last_validation(runs: LabelRuns, name: str) -> dict[str, float]:
    rows = map(json.loads, runs.folder(name).metrics.read_text().splitlines())
    return [row for row in rows if "val_loss" in row][-1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("packing", "model"), [("padded", BERT), pytest.param("bins", MODERNBERT % "true", marks=pytest.mark.long)]
)
def test_an_encoder_from_scratch_learns_classes(tmp_path, classes, packing, model):
    runs = LabelRuns(
        tmp_path, classes, packing=packing, model=model, kind="classify", tokens=1024, steps=60, engine=SINGLE
    )
    runs.train("runs", ranks=1)
    found = last_validation(runs, "runs")
    assert found["val_accuracy"] > 0.95
    assert found["val_labels"] == load_index(classes).split("validation").num_documents
    assert not found.keys() & {"val_tokens", "val_perplexity"}
    assert "val_bits_per_byte" not in found
    assert load_config(runs.folder("runs").config).model.head.labels == ["BLUE", "GREEN", "RED"]


@pytest.fixture(scope="module")
def golden(tmp_path_factory, tags) -> LabelRuns:
    """An uninterrupted run on two ranks that learns tags, and a maker of others beside it."""
    model = MODERNBERT % "false"
    folder = tmp_path_factory.mktemp("tagging")
    maker = LabelRuns(folder, tags, packing="bins", model=model, kind="tag", tokens=1024, steps=60, engine=RANKS)
    maker.train("golden")
    return maker


@pytest.mark.long
def test_an_encoder_from_scratch_learns_tags_on_two_ranks(golden, tags):
    found = last_validation(golden, "golden")
    assert found["val_accuracy"] > 0.95
    counts = json.loads((tags / "statistics.json").read_text())["splits"]["validation"]["labels"]
    assert found["val_labels"] == sum(counts.values())
    known = counts["O"] / found["val_labels"]
    assert known + (1 - known) / 3 < 0.93, "to know cats and dogs, and not the color, would not do"


@pytest.mark.long
def test_a_run_that_learns_tags_and_whose_rank_was_killed_continues_bit_for_bit(golden, tmp_path):
    process = golden.start("killed", HELD, **Hold(tmp_path, "killed", step=55).environment)
    golden.wait_for_step("killed", 44, process)
    kill_rank(process, 1)
    finish(process)
    assert process.returncode == 128 + signal.SIGKILL
    golden.complete("killed")
    assert_same_run(golden, "killed", "golden", 60)


@pytest.mark.long
def test_the_head_of_another_task_begins_anew_at_zero_stage_3_and_the_encoder_does_not(tmp_path, golden, classes):
    """Two tokenizers of equal size: what the tokens mean is not looked at here."""
    first = str(golden.folder("golden").path)
    runs = LabelRuns(
        tmp_path,
        classes,
        packing="bins",
        model=MODERNBERT % "true",
        kind="classify",
        tokens=1024,
        steps=20,
        engine=RANKS,
    )
    overrides = (
        "engine.zero_stage=3",
        "optim.lr=1e-30",
        "optim.weight_decay=0",
        "train.stop_after=1",
        "model.head.labels=[RED, GREEN]",
    )
    output = runs.train("wrong", *overrides, expect=64, ranks=1)
    assert "model.head.labels are RED, GREEN, those of the data BLUE, GREEN, RED" in output
    output = runs.train("runs", *overrides[:4], f"init.from={first}", "init.check_tokenizer=false")
    assert "but for these, which begin anew: head.bias [3], head.weight [3, 48]" in output
    start = tensors_of(list_checkpoints(golden.folder("golden").checkpoints)[-1])
    end = tensors_of(list_checkpoints(runs.folder("runs").checkpoints)[-1])
    same = {name for name in end if name.endswith("/weight") and np.array_equal(start.get(name), end[name])}
    assert {name for name in end if name.endswith("/weight")} - same == {"head.weight/weight", "head.bias/weight"}


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """A shard folder of questions with texts."""
    return prepare(tmp_path_factory.mktemp("labels") / "answers", "answers", asked)


OF_SPANS = (
    "{preset: bert-tiny, encoder: {width: 48, heads: 4, ff_width: 96, dropout: 0.0}, tied_embeddings: false, "
    "head: {kind: spans, transform: false, bias: true}}"
)
OF_A_DECODER = (
    "{preset: llama-tiny, decoder: {width: 48, heads: 4, kv_heads: 2, ff_width: 96}, tied_embeddings: false, "
    "head: {kind: spans}}"
)
HALF = ("train.steps=40", "eval.every_steps=40")


@pytest.fixture(scope="module", params=["encoder", "decoder"])
def answered(request, tmp_path_factory, questions) -> LabelRuns:
    """A run of one process that learns answers, and a maker of others; a decoder's tokenizer joins no texts."""
    folder = tmp_path_factory.mktemp("answering")
    data, model = questions, OF_SPANS
    if request.param == "decoder":
        data = prepare(folder / "answers", "answers", asked, "{kind: bpe, vocab_size: 315}")
        model = OF_A_DECODER
    values = {"packing": "bins", "model": model, "kind": "answers", "tokens": 1024, "steps": 140, "engine": SINGLE}
    maker = LabelRuns(folder, data, **values)
    maker.train("golden", "optim.lr=8e-3", "batch.micro=32", ranks=1)
    return maker


@pytest.mark.long
def test_a_model_learns_answers_in_texts_and_its_export_gives_them_in_transformers(answered, tmp_path):
    found = last_validation(answered, "golden")
    assert found["val_accuracy"] > 0.9 and found["val_f1"] >= found["val_accuracy"]
    run = answered.folder("golden")
    data = Path(load_config(run.config).data.path)
    assert found["val_answers"] == load_index(data).split("validation").num_documents
    assert not found.keys() & {"val_tokens", "val_perplexity", "val_bits_per_byte"}
    result = run_warm("evaluate", str(run.path), "--json", cwd=tmp_path)
    (source,) = json.loads(result.stdout)["sources"].values()
    assert source["loss"] == pytest.approx(found["val_loss"]) and source["f1"] == pytest.approx(found["val_f1"])
    result = run_warm("export", str(run.path), str(tmp_path / "out"), cwd=tmp_path)
    assert result.code == 0, result.stderr
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    right, rng = 0, random.Random(9)
    for record in (asked(rng) for _ in range(30)):
        inputs = tokenizer(record["question"], record["context"], return_tensors="pt", return_offsets_mapping=True)
        offsets = inputs.pop("offset_mapping")[0].tolist()
        with torch.no_grad():
            output = model(**inputs)
        theirs = torch.stack((output.start_logits, output.end_logits), dim=2)
        in_text = torch.tensor([[side == 1 for side in inputs.sequence_ids()]])
        ((first, last),) = find_spans(theirs, in_text).tolist()
        answer = record["context"][offsets[first][0] : offsets[last][1]].strip() if first else ""
        right += [answer] == (record["answers"]["text"] or [""])
    assert right >= 25
    ours = open_artifact(run.path).model
    mine = Batch(inputs["input_ids"], inputs["input_ids"], token_types_BT=inputs.get("token_type_ids"))
    with torch.no_grad():
        scores = ours(mine).logits_BTV
    torch.testing.assert_close(scores, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_a_model_of_answers_continues_labels_and_serves_no_text(answered, tmp_path):
    from pretrain.evaluation.harness_model import HarnessModel

    run = str(answered.folder("golden").path)
    refusals = {
        ("generate", run, "--prompt", "which"): "language model's head",
        ("classify", run, "--text", "which"): "labels nothing: its head is not over labels",
        ("serve", run): "a server continues texts, unlike this model",
        ("export", run, str(tmp_path / "out"), "--to", "onnx"): "head.kind=spans: ONNX Runtime computes lm",
    }
    for command, message in refusals.items():
        result = run_warm(*command, cwd=tmp_path)
        assert result.code == 64 and message in result.errors[0], result.errors
    with pytest.raises(ConfigError, match=r"--tasks is for models with a decoder alone .*, head\.kind=spans; give"):
        HarnessModel(open_artifact(Path(run)), 100)


@pytest.mark.long
def test_answers_are_learned_alike_on_two_ranks_with_accumulation_and_continue_bit_for_bit(answered):
    answered.train("alone", *HALF, ranks=1)
    answered.train("ranks", *HALF, "engine.kind=deepspeed", "engine.zero_stage=3", "batch.micro=4", ranks=2)
    losses = [
        [float.fromhex(row.loss) for row in read_audit(answered.folder(name).audit)] for name in ("alone", "ranks")
    ]
    # Sums over ranks and rows are taken in another order.
    np.testing.assert_allclose(losses[1][:20], losses[0][:20], rtol=2e-5)
    answered.train("stopped", *HALF, "train.stop_after=27", ranks=1)
    answered.train("stopped", *HALF, ranks=1)
    assert_same_run(answered, "stopped", "alone", 40)


@pytest.mark.long
def test_questions_longer_than_a_row_are_counted_and_left_out(answered):
    output = answered.train("short", "batch.seq_len=16", "train.stop_after=1", ranks=1)
    assert "questions are longer, with their texts, than batch.seq_len, and left out; raise it" in output


def test_data_show_and_verify_know_answers(questions, tmp_path):
    shown = run_warm("data", "show", str(questions), "--seq-len", "64", "--rows", "1", cwd=tmp_path)
    assert shown.code == 0, shown.stderr
    assert any(line.strip().startswith("context | [CLS] which ") for line in shown.stdout.splitlines())
    assert any(line.strip().startswith("answer | ") for line in shown.stdout.splitlines())
    verified = run_warm("data", "verify", str(questions), "--seq-len", "64", cwd=tmp_path)
    assert verified.code == 0 and "tokens of the answers that fit" in verified.stdout


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.document_mask=false"], "must not attend to each other; use data.document_mask=true"),
        (["parallel.sequence=2", "engine.kind=ddp"], "model.head.kind=spans compares; use parallel.sequence=1"),
        (["objective.z_loss=0.1"], "kind=answers finds answers in texts; leave it out"),
        (["data.packing=concat"], "data.packing=concat cuts documents"),
        (["model.head.kind=labels"], "objective.kind=answers needs model.head.kind=spans, this model has labels; set"),
        (["objective.kind=masked"], "objective.kind=masked needs model.head.kind=lm, this model has spans"),
        (["checkpoint.best=val_perplexity"], "a classifier has no perplexity"),
    ],
)
def test_answers_that_cannot_be_learned_so_are_refused(tmp_path, questions, overrides, message):
    values = {"packing": "bins", "model": OF_SPANS, "kind": "answers", "tokens": 1024, "steps": 20, "engine": SINGLE}
    runs = LabelRuns(tmp_path, questions, **values)
    result = run_warm("train", str(runs.config()), *overrides, cwd=tmp_path)
    assert (result.code, len(result.errors)) == (64, 1) and message in result.errors[0]


@pytest.fixture(scope="module")
def chooser(tmp_path_factory) -> LabelRuns:
    """A run of one process that learns choices, and a maker of others beside it."""
    folder = tmp_path_factory.mktemp("choosing")
    data = prepare(folder / "choices", "choices", chosen)
    model = OF_SPANS.replace("spans, transform: false", "choices, transform: false, dropout: 0.1")
    model = model.replace("tied_embeddings: false", "tied_embeddings: false, pooler: true, max_seq_len: 64")
    values = {"packing": "bins", "model": model, "kind": "choices", "tokens": 1024, "steps": 100, "engine": SINGLE}
    maker = LabelRuns(folder, data, **values)
    maker.train("golden", "batch.seq_len=64", "batch.micro=16", ranks=1)
    return maker


@pytest.mark.long
def test_an_encoder_learns_choices_and_its_export_gives_their_scores_in_transformers(chooser, tmp_path):
    found = last_validation(chooser, "golden")
    assert found["val_accuracy"] > 0.95 and 0.25 < found["val_chance"] < 0.5
    assert found["val_answers"] > 100 and not found.keys() & {"val_tokens", "val_perplexity"}
    run = chooser.folder("golden")
    result = run_warm("export", str(run.path), str(tmp_path / "out"), cwd=tmp_path)
    assert result.code == 0, result.stderr
    model = transformers.AutoModelForMultipleChoice.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours, rng = open_artifact(run.path).model, random.Random(9)
    right = 0
    for record in (chosen(rng) for _ in range(20)):
        questions = [record["question"]] * len(record["choices"])
        inputs = tokenizer(questions, record["choices"], return_tensors="pt", padding=True)
        mine = Batch(
            inputs["input_ids"],
            inputs["input_ids"],
            token_types_BT=inputs["token_type_ids"],
            lengths_B=inputs["attention_mask"].sum(dim=1).int(),
        )
        with torch.no_grad():
            theirs = model(**{name: value[None] for name, value in inputs.items()}).logits[0]
            torch.testing.assert_close(ours(mine).logits_BTV[:, 0, 0], theirs, atol=1e-5, rtol=1e-5)
        right += int(theirs.argmax()) == record["label"]
    assert right >= 18


@pytest.mark.long
def test_choices_are_learned_alike_on_two_ranks_with_accumulation_and_continue_bit_for_bit(chooser):
    plain = ("batch.seq_len=64", "train.steps=24", "eval.every_steps=24", "model.head.dropout=0")
    chooser.train("alone", *plain, "batch.micro=16", ranks=1)
    chooser.train("ranks", *plain, "engine.kind=deepspeed", "engine.zero_stage=3", "batch.micro=2", ranks=2)
    losses = [
        [float.fromhex(row.loss) for row in read_audit(chooser.folder(name).audit)] for name in ("alone", "ranks")
    ]
    # Sums over ranks and rows are taken in another order.
    np.testing.assert_allclose(losses[1][:15], losses[0][:15], rtol=2e-5)
    chooser.train("stopped", *plain, "batch.micro=16", "train.stop_after=13", ranks=1)
    chooser.train("stopped", *plain, "batch.micro=16", ranks=1)
    assert_same_run(chooser, "stopped", "alone", 24)


@pytest.mark.long
def test_data_show_has_the_choices_and_too_long_ones_are_counted(chooser, tmp_path):
    data = str(Path(load_config(chooser.config("shown")).data.path))
    shown = run_warm("data", "show", data, "--seq-len", "64", "--rows", "1", cwd=tmp_path)
    assert shown.code == 0, shown.stderr
    kinds = [line.strip().partition(" | ")[0] for line in shown.stdout.splitlines()]
    assert "chosen" in kinds and "rejected" in kinds
    verified = run_warm("data", "verify", data, "--seq-len", "64", cwd=tmp_path)
    assert verified.code == 0 and "tokens of the choices that fit" in verified.stdout
    output = chooser.train("short", "batch.seq_len=16", "train.stop_after=1", ranks=1)
    assert "with all of their answers, than batch.seq_len, and left out; raise it" in output


def test_an_objective_that_does_not_fit_the_labels_is_refused(tmp_path, tags):
    runs = LabelRuns(tmp_path, tags, packing="bins", model=BERT, kind="classify", tokens=1024, steps=20, engine=SINGLE)
    result = run_warm("train", str(runs.config()), cwd=tmp_path)
    assert (result.code, len(result.errors)) == (64, 1)
    assert "objective.kind=classify learns from classes, and the data are tags; choose another" in result.errors[0]
