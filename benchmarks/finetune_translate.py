"""A translator of captions learns to translate software messages: is what it knew of use, and does it keep it?

before        the translator as it is
adapted       trained on with messages alone, by configs/finetune/translate.yaml
replay        the same, and one row in four is of its first data
scratch       the architecture of configs/run/multi30k.yaml on messages alone, as many steps
memory        no model: the translation of the most similar message of the training split, by tf-idf of words

All prepared with the first tokenizer and its lower-casing and Moses; BLEU and chrF of both domains' tests, beam 5,
paired bootstrap. The messages are those of this machine (`benchmarks/finetune_messages.py`).
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.finetune_messages import CATALOGS, Pair, write_messages
from benchmarks.pretraining import pretrain, train

NORMALIZE = {"steps": ["lowercase", "punctuation", "moses"], "language": "en", "target_language": "de"}
BATCH = {"global_tokens": 17 * 128, "seq_len": 128, "source_len": 128, "micro": 17}
"""Pairs lie side by side in rows, as in the first training, with half of its tokens a step."""
ADAPT_RATE, SCRATCH_RATE = 2e-3, 3e-3
REPLAY_WEIGHTS = {"messages": 3, "captions": 1}
COMPARED = {
    "messages": (("adapted", "before"), ("replay", "adapted"), ("adapted", "scratch")),
    "captions": (("adapted", "before"), ("replay", "before")),
}
"""Pairs of arms that are compared on the test of each domain; other arms are not scored there."""


@dataclass(frozen=True, slots=True)
class Test:
    """Lines and their translations."""

    source: Path
    reference: Path


@dataclass(frozen=True, slots=True)
class First:
    """Where the translator comes from.

    Attributes:
        model: What `pretrain average` wrote.
        data: What it was trained on, prepared.
        test: Held out of that.
    """

    model: Path
    data: Path
    test: Test


def prepare_messages(folder: Path, model: Path, catalogs: Path) -> tuple[Path, dict[str, list[Pair]]]:
    """Prepares the messages with the model's tokenizer, as its own data were; returns shards and pairs."""
    text, data = folder / "messages", folder / "messages-data"
    pairs = write_messages(text, catalogs)
    if not (data / "index.json").exists():
        inputs = [
            {"path": str(text / "train.jsonl"), "normalize": NORMALIZE},
            {"path": str(text / "validation.jsonl"), "normalize": NORMALIZE, "split": "validation"},
        ]
        given = [f"tokenizer.path={model / 'tokenizer'}", f"inputs={json.dumps(inputs)}", "split=hash:0"]
        pretrain("prepare", "configs/prepare/pairs.yaml", *given, f"output={data}")
    return data, pairs


def _sources(paths: dict[str, Path]) -> str:
    sources = [{"name": name, "path": str(path), "weight": REPLAY_WEIGHTS[name]} for name, path in paths.items()]
    return f"data.mixture={json.dumps(sources)}"


def plan_arms(folder: Path, first: First, messages: Path, steps: int) -> dict[str, tuple[str, list[str]]]:
    """Returns recipe and overrides of each arm."""
    same = [f"batch={json.dumps(BATCH)}", "data.packing=bins", "data.lanes=1", "data.block_samples=8192"]
    same += [f"train.steps={steps}", f"eval.every_steps={steps}", f"checkpoint.every_steps={steps}"]
    captions = folder / "captions-data"
    adapted = [*same, f"init.from={first.model}"]
    # A Transformer whose norms come last learns little without a long warm-up.
    schedule = json.dumps({"kind": "linear", "warmup_steps": steps // 4})
    scratch = [*same, f"data.path={messages}", f"optim.lr={SCRATCH_RATE}", f"optim.schedule={schedule}"]
    rate = f"optim.lr={ADAPT_RATE}"
    return {
        "adapted": ("configs/finetune/translate.yaml", [*adapted, _sources({"messages": messages}), rate]),
        "replay": (
            "configs/finetune/translate.yaml",
            [*adapted, _sources({"messages": messages, "captions": captions}), rate],
        ),
        "scratch": ("configs/run/multi30k.yaml", scratch),
    }


def train_arms(folder: Path, first: First, messages: Path, steps: int) -> dict[str, dict[str, float]]:
    """Trains every arm, or takes the runs that are there; returns the validation losses of each."""
    # A copy: bins are kept beside the data that they are made of, which may be anybody's.
    captions = folder / "captions-data"
    if not captions.exists():
        shutil.copytree(first.data, captions, ignore=shutil.ignore_patterns("bins"))
    plans = plan_arms(folder, first, messages, steps)
    return {arm: _losses(train(folder, arm, recipe, *options)) for arm, (recipe, options) in plans.items()}


def _losses(held: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in held.items() if name.startswith("val_loss")}


def evaluate(what: Path, test: Test, other: Path) -> dict[str, Any]:
    """Returns what `pretrain evaluate` says of a translator, compared with another."""
    texts = ["--source", str(test.source), "--reference", str(test.reference), "--beams", "5"]
    command = [sys.executable, "-m", "pretrain", "evaluate", str(what), *texts, "--compare", str(other)]
    done = subprocess.run([*command, "--length-penalty", "0.8", "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout))


def score_arms(places: dict[str, Path], tests: dict[str, Test]) -> dict[str, Any]:
    """Scores the arms on both tests, in pairs; returns scores, differences with their p, and signatures."""
    found: dict[str, Any] = {"scores": {}, "differences": {}, "signatures": {}}
    for domain, test in tests.items():
        reports = {pair: evaluate(places[pair[0]], test, places[pair[1]]) for pair in COMPARED[domain]}
        for pair, report in reports.items():
            for arm, system in zip(pair, report["systems"], strict=True):
                scores = system["scores"]
                found["scores"].setdefault(arm, {})[domain] = {name: one["score"] for name, one in scores.items()}
                found["signatures"] |= {name: one["signature"] for name, one in scores.items()}
            told = {one["metric"]: [one["difference"], one["p_value"]] for one in report["compared"]}
            found["differences"].setdefault(domain, {})[" - ".join(pair)] = told
    return found


def recall(pairs: dict[str, list[Pair]]) -> dict[str, float]:
    """Returns scores of the most similar message's translation, computed as `pretrain evaluate` does by words."""
    from sacrebleu.metrics import BLEU, CHRF
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+")
    known = words.fit_transform([source for source, _ in pairs["train"]])
    asked = words.transform([source for source, _ in pairs["test"]])
    nearest = (asked @ known.T).toarray().argmax(axis=1)
    answers = [pairs["train"][row][1] for row in nearest.tolist()]
    references = [[target for _, target in pairs["test"]]]
    metrics = {"bleu_lowercase": BLEU(lowercase=True), "chrf": CHRF(lowercase=True)}
    return {name: metric.corpus_score(answers, references).score for name, metric in metrics.items()}


def translate(folder: Path, first: First, steps: int, catalogs: Path = CATALOGS) -> dict[str, Any]:
    """Runs the case; returns sizes, losses, scores and differences."""
    data, pairs = prepare_messages(folder, first.model, catalogs)
    trained = train_arms(folder, first, data, steps)
    places = {"before": first.model} | {arm: folder / arm for arm in trained}
    messages = folder / "messages"
    tests = {"messages": Test(messages / "test.en", messages / "test.de"), "captions": first.test}
    found = score_arms(places, tests)
    found["scores"]["memory"] = {"messages": recall(pairs)}
    sizes = {split: len(rows) for split, rows in pairs.items()}
    return {"pairs": sizes, "steps": steps, "tokens_per_step": BATCH["global_tokens"], "trained": trained, **found}
