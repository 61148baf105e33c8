"""Every recipe under configs/finetune/ trains for two steps, from tiny models of random weights."""

import json
from pathlib import Path

import pytest
import transformers

from pretrain.config.prepare import InputConfig, PrepareConfig, TokenizerConfig
from pretrain.preparation.prepare import prepare
from tests.helpers.lent import quiet_transformers
from tests.repo.source import ROOT
from tests.unit.artifact.runs import TEXTS, write_run, write_text_run, write_texts

pytestmark = pytest.mark.long

RECIPES = sorted(path.stem for path in (ROOT / "configs/finetune").glob("*.yaml"))
SHORT = ("train.steps=2", "optim.schedule.warmup_steps=1", "eval.every_steps=2", "tracking.wandb=off")
ROWS = ("batch.global_tokens=256", "batch.seq_len=64", "batch.micro=2")
CHAT = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is said."}]


def shards(
    folder: Path, kind: str, run: Path, records: list[dict], special: tuple[str, ...] = (), **options: object
) -> Path:
    """Shards of a few records many times over, with the tokenizer of a run."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records * 40))
    given = TokenizerConfig(kind="given", path=str(run / "tokenizer.json"), special_tokens=list(special))
    one = InputConfig(path=str(file), **options)
    inputs = [one, one.model_copy(update={"split": "validation"})]
    prepare(PrepareConfig(output=str(folder / "data"), kind=kind, inputs=inputs, tokenizer=given, split="hash:0"))
    return folder / "data"


def arrange(recipe: str, folder: Path) -> list[str]:
    """Makes the start and the data of a recipe; returns the overrides that name them."""
    if recipe == "translate":
        run = write_run(folder / "start", steps=[1])
        paths = [folder / "start-data", shards(folder, "pairs", run, [{"source": "A man.", "target": "a MAN"}])]
        mixture = [{"name": name, "path": str(p), "weight": 1} for name, p in zip("ab", paths, strict=True)]
        return [f"init.from={run}", f"data.mixture={json.dumps(mixture)}", "batch.global_tokens=128", "batch.micro=2"]
    is_encoder = recipe in ("classify", "tag", "answers", "choices")
    texts = write_texts(folder / "texts", TEXTS * 20, roles="bert" if is_encoder else "document")
    preset, objective = ("bert-tiny", "masked") if is_encoder else ("llama-tiny", "causal")
    run = write_text_run(folder / "start", texts, preset, objective)
    start = [f"init.from={run}", *ROWS]
    if recipe == "continued":
        mixture = [{"name": name, "path": str(texts), "weight": weight} for name, weight in (("new", 4), ("old", 1))]
        return [*start, f"data.mixture={json.dumps(mixture)}"]
    if recipe == "chat":
        markers = ("<|im_start|>", "<|im_end|>")
        records, options = [{"messages": CHAT}], {"messages_field": "messages", "template": "chatml"}
        return [*start, f"data.path={shards(folder, 'records', run, records, markers, **options)}"]
    if is_encoder:
        kind = {"classify": "classes", "tag": "tags"}.get(recipe, recipe)
        records = [
            {"text": text, "label": str(number), "tokens": text.split(), "tags": ["a", *["b"] * text.count(" ")]}
            | {"question": "Who?", "context": text, "answers": {"text": [text[:3]], "answer_start": [0]}}
            | ({"choices": ["one", "two"], "label": number} if recipe == "choices" else {})
            for number, text in enumerate(TEXTS[:2])
        ]
        return [*start, f"data.path={shards(folder, kind, run, records)}"]
    if recipe == "dpo":
        pair = {"prompt": "Say it.", "chosen": "It is said.", "rejected": "No."}
        data = shards(folder, "preferences", run, [pair], template="instruction")
        return [*start, "model.max_seq_len=128", "batch.seq_len=128", f"data.path={data}"]  # a row has both answers
    records = [{"prompt": "Say it.", "response": "It is said."}]
    return [*start, f"data.path={shards(folder, 'records', run, records, template='instruction')}"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains(tmp_path, warm, recipe):
    overrides = [*arrange(recipe, tmp_path), *SHORT, f"run.dir={tmp_path / 'runs'}"]
    result = warm("train", f"configs/finetune/{recipe}.yaml", *overrides, cwd=tmp_path)
    assert result.code == 0, result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] > 0 for row in rows if "loss" in row] == [True]
    assert any("val_loss" in row for row in rows)


@pytest.mark.parametrize("recipe", ["classify", "tag"])
def test_a_classifier_of_a_recipe_labels_texts_as_its_export_does(tmp_path, warm, recipe):
    overrides = [*arrange(recipe, tmp_path), *SHORT, f"run.dir={tmp_path / 'runs'}"]
    assert warm("train", f"configs/finetune/{recipe}.yaml", *overrides, cwd=tmp_path).code == 0
    run, released = tmp_path / "runs" / recipe, tmp_path / "released"
    exported = warm("export", str(run), str(released), cwd=tmp_path)
    assert exported.code == 0, exported.stderr
    found = [warm("classify", str(path), "--text", TEXTS[0], "--json", cwd=tmp_path).stdout for path in (run, released)]
    assert found[0] == found[1]
    labelled = json.loads(found[0])
    if recipe == "tag":
        assert [word["word"] for word in labelled["words"]] == TEXTS[0].split()
        return
    with quiet_transformers():
        (theirs,) = transformers.pipeline("text-classification", model=str(released), top_k=None)([TEXTS[0]])
    assert labelled["probabilities"] == pytest.approx({one["label"]: one["score"] for one in theirs}, abs=1e-5)
    assert labelled["label"] == theirs[0]["label"]
