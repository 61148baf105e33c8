"""`pretrain finetune`: columns of a file to a task, its commands, and what is refused before them."""

import json
import re

import pytest

from pretrain import cli
from pretrain.config.load import dump_config, load_config
from pretrain.run.folder import RunDir
from tests.unit.artifact.runs import TEXTS, write_run, write_text_run, write_texts

RECORDS = {
    "instruction": {"prompt": "Say it.", "response": "It is said."},
    "chat": {"messages": [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is said."}]},
    "dpo": {"prompt": "Say it.", "chosen": "It is said.", "rejected": "No."},
    "translate": {"source": "A man.", "target": "a MAN"},
    "classify": {"text": "A man.", "label": "one"},
    "tag": {"tokens": ["A", "man"], "tags": ["a", "b"]},
    "answers": {"question": "Who?", "context": "A man.", "answers": {"text": ["man"], "answer_start": [2]}},
    "choices": {"question": "Who?", "choices": ["one", "two"], "label": 0},
    "continued": {"text": "A man."},
}
MODELS = {"translate": "pairs", "classify": "words", "tag": "words", "answers": "words", "choices": "words"}
"""Model of each task; of the others it is `texts`."""
RECIPES = {
    "texts": ("quickstart", "llama-tiny"),
    "words": ("bert_quickstart", "bert-tiny"),
    "pairs": ("t5_quickstart", "t5-tiny"),
}
SHORT = (
    *("train.steps=2", "optim.schedule.warmup_steps=1", "eval.every_steps=2", "tracking.wandb=off"),
    *("batch.global_tokens=128", "batch.seq_len=64", "batch.micro=2"),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the configs of three runs, which are all that planning reads."""
    monkeypatch.chdir(tmp_path)
    for name, (recipe, preset) in RECIPES.items():
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        run.config.write_text(dump_config(load_config(recipe, [f"model.preset={preset}", "batch.seq_len=64"])))
    chats = tmp_path / "chats"
    chats.mkdir()
    (chats / "config.yaml").write_text((tmp_path / "texts/config.yaml").read_text())
    (chats / "tokenizer.json").touch()
    (chats / "normalize.json").write_text(json.dumps({"template": {"user": "{content}", "assistant": "{content}"}}))
    return tmp_path


def write(folder, *records, name="mine.jsonl"):
    """Writes a file of records."""
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return name


def planned(capsys, *arguments):
    """Returns the lines of a dry run."""
    assert cli.run(["finetune", *arguments, "--dry-run"]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("task", RECORDS)
def test_columns_tell_the_task_and_its_recipe_the_rest(folder, capsys, task):
    model = "chats" if task == "dpo" else MODELS.get(task, "texts")
    lines = planned(capsys, model, write(folder, RECORDS[task], RECORDS[task] | {"id": 3}))
    assert lines[0].startswith(f"task: {task}, by the columns ")
    prepare, train, evaluate = lines[-3:]
    assert f"output=data/{task}-mine" in prepare
    assert f" init.from={model} run.name={task}-mine " in train
    assert f" data.path=data/{task}-mine" in train
    assert evaluate == f"$ pretrain evaluate runs/{task}-mine"


@pytest.mark.parametrize(
    ("model", "task", "said", "template"),
    [
        ("texts", "instruction", "template: instruction, as texts has none", "instruction"),
        ("chats", "instruction", "template: that of chats", "auto"),
        ("texts", "chat", "template: chatml, as texts has none", "auto"),
    ],
)
def test_the_template_is_that_of_the_folder_if_it_has_one(folder, capsys, model, task, said, template):
    lines = planned(capsys, model, write(folder, RECORDS[task]))
    assert lines[1] == said
    assert f'"template": "{template}"' in lines[2]


def test_a_recipe_is_fitted_to_shorter_rows_and_to_a_stack_without_a_pooler(folder, capsys):
    chat = planned(capsys, "texts", write(folder, RECORDS["chat"]), "--name", "first")
    assert " run.name=first batch.seq_len=128 " in chat[-2]
    assert " model.pooler=false " in planned(capsys, "texts", write(folder, RECORDS["classify"]))[-2]


def test_other_formats_and_a_file_that_is_held_out(folder, capsys):
    (folder / "mine.csv").write_text("text,label\nA man.,one\n")
    held_out = write(folder, RECORDS["classify"], name="held.jsonl")
    lines = planned(capsys, "words", "mine.csv", "--validation", held_out, "train.steps=3")
    assert '{"path": "held.jsonl", "split": "validation"}' in lines[1]
    assert " split=hash:0 " in lines[1]
    assert lines[2].endswith(" train.steps=3")
    (folder / "plain.txt").write_text("A man.")
    lines = planned(capsys, "texts", "plain.txt")
    assert lines[0].startswith("task: continued, ")
    assert " split=tail:0.1 " in lines[1]


@pytest.mark.parametrize(
    ("model", "records", "options", "message"),
    [
        ("words", [], [], "mine.jsonl: there are no records; give a file with a record a line"),
        ("words", [{"a": 1, "b": 2}], [], "mine.jsonl: the columns a, b are of no task; .* classify: text, label;"),
        ("words", [RECORDS["classify"] | RECORDS["tag"]], [], "choose one: --task classify or --task tag"),
        ("words", [RECORDS["classify"], RECORDS["chat"]], [], "record 2: task classify needs the column text;"),
        ("words", [RECORDS["classify"]], ["--task", "tag"], "record 1: task tag needs the column tokens;"),
        ("words", [RECORDS["classify"]], ["--task", "tga"], "--task: no such task: tga; use instruction, "),
        ("texts", [RECORDS["choices"]], [], "texts: .* with encoder of tokens, and this is decoder of tokens;"),
        ("texts", [RECORDS["dpo"]], [], "no template .*: pretrain finetune texts FILE"),
        ("word", [RECORDS["tag"]], [], "init.from=word: no run, .*; did you mean words"),
        ("words", [RECORDS["tag"]], ["train.stepz=3"], "unknown key 'train.stepz'; did you mean 'train.steps'"),
    ],
)  # fmt: skip
def test_a_file_or_model_that_does_not_fit_is_refused_before_anything_is_written(
    folder, capsys, model, records, options, message
):
    assert cli.run(["finetune", model, write(folder, *records), *options]) in (64, 65)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert not (folder / "data").exists()


def test_a_file_that_is_not_there_is_refused(folder, capsys):
    assert cli.run(["finetune", "words", "none.jsonl"]) == 65
    assert "none.jsonl: no such file or folder" in capsys.readouterr().err


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with runs of tiny models of random weights: `texts`, `words`, `pairs`."""
    folder = tmp_path_factory.mktemp("models")
    for name, preset, objective in (("texts", "llama-tiny", "causal"), ("words", "bert-tiny", "masked")):
        data = write_texts(folder / f"{name}-data", TEXTS * 20, roles="bert" if name == "words" else "document")
        write_text_run(folder / name, data, preset, objective)
    write_run(folder / "pairs", steps=[1])
    return folder


def write_many(folder, task):
    """Writes forty records, each with a number in its texts: records of one context would be in one split."""
    texts = r'A man\.|Say it|Who|(?<="A", ")man'
    lines = [re.sub(texts, rf"\g<0> {number}", json.dumps(RECORDS[task])) for number in range(40)]
    (folder / f"{task}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def finetuned(warm, folder, model, task, *overrides):
    """Fine-tunes by two steps; returns what was printed."""
    result = warm("finetune", str(model), f"{task}.jsonl", "--name", f"{task}-mine", *SHORT, *overrides, cwd=folder)
    assert result.code == 0, result.stderr
    return result.stdout


@pytest.mark.long
@pytest.mark.parametrize("task", [task for task in RECORDS if task != "dpo"])
def test_a_task_is_prepared_trained_and_evaluated_and_a_second_start_is_done(tmp_path, warm, models, task):
    model = models / MODELS.get(task, "texts")
    write_many(tmp_path, task)
    printed = finetuned(warm, tmp_path, model, task)
    assert [line.split()[2] for line in printed.splitlines() if line.startswith("$ ")] == [
        "prepare",
        "train",
        "evaluate",
    ]
    last = printed.splitlines()[-1]
    assert last.startswith("next: pretrain ") and f" runs/{task}-mine" in last
    rows = [json.loads(row) for row in (tmp_path / f"runs/{task}-mine/metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == 2
    again = finetuned(warm, tmp_path, model, task)
    assert f"runs/{task}-mine is complete: 2 steps" in again and again.splitlines()[-1] == last


@pytest.mark.long
def test_preferences_follow_instructions_and_a_folder_of_another_command_is_refused(tmp_path, warm, models):
    for task in ("instruction", "dpo"):
        write_many(tmp_path, task)
    finetuned(warm, tmp_path, models / "texts", "instruction")
    longer = ("model.max_seq_len=128", "batch.seq_len=128", "batch.micro=1")  # a row has both answers
    printed = finetuned(warm, tmp_path, "runs/instruction-mine", "dpo", *longer)
    assert "next: pretrain chat runs/dpo-mine" in printed
    options = ["instruction.jsonl", "--name", "dpo-mine"]
    result = warm("finetune", str(models / "texts"), *options, cwd=tmp_path)
    assert result.code == 64
    assert "-- data/dpo-mine is of another command: give another --name" in result.stderr
