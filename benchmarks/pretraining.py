"""Is a small BERT, or a small T5, of use? The quickstart's recipes against n-grams, and training on from them.

python -m benchmarks.pretraining bert|t5 [--output runs/pretraining] [--task-steps N] [--quick]
python -m benchmarks.pretraining bert|t5 --write-task FOLDER

corpus, recipe     prepared and trained by `pretrain`; a run that is there already is taken
n-grams            the tokens that the model predicts on the validation split, special ones left out, by their
                   frequency, and by the token before (absolute discounting); counted on the training split
a task             of the same corpus, held out by file: which package a piece of source is from (BERT), what a
                   function is called (T5); trained from the recipe's weights and from none, each at two rates
"""

import argparse
import ast
import io
import json
import keyword
import os
import subprocess
import sys
import sysconfig
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer

from benchmarks.common import print_row
from pretrain.artifact.model_path import open_source
from pretrain.artifact.open import open_artifact
from pretrain.evaluation.corpus import Corpus, CorpusOptions, settle
from pretrain.types import IGNORE_INDEX, Batch

DISCOUNT = 0.75
RECIPES = {"bert": "configs/run/bert_quickstart.yaml", "t5": "configs/run/t5_quickstart.yaml"}
ONE_PROCESS = ["engine.kind=single", "engine.zero_stage=0", "tracking.wandb=off"]
STRETCH, HELD_OUT = 40, 0.1
RATES = {"bert": (1e-3, 3e-3), "t5": (2e-3, 5e-3)}


@dataclass(frozen=True, slots=True)
class Ngrams:
    """What a token costs by its frequency, and by the token before it, in nats."""

    unigram: np.ndarray
    pairs: Counter[int]
    followed: np.ndarray
    followers: np.ndarray

    @staticmethod
    def count(tokens: np.ndarray, vocab_size: int) -> "Ngrams":
        """Counts a stream of tokens."""
        counts = np.bincount(tokens, minlength=vocab_size) + 1.0
        keys, times = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
        followed = np.bincount(keys // vocab_size, weights=times, minlength=vocab_size)
        followers = np.bincount(keys // vocab_size, minlength=vocab_size).astype(float)
        pairs = Counter(dict(zip(keys.tolist(), times.tolist(), strict=True)))
        return Ngrams(-np.log(counts / counts.sum()), pairs, followed, followers)

    def bigram(self, before: int, token: int) -> float:
        """The cost of a token after another; by its frequency alone after one that was never seen."""
        total = self.followed[before]
        if before < 0 or not total:
            return float(self.unigram[token])
        seen = max(self.pairs[before * len(self.unigram) + token] - DISCOUNT, 0.0) / total
        rest = DISCOUNT * self.followers[before] / total * np.exp(-self.unigram[token])
        return float(-np.log(seen + rest))


def read_tokens(folder: Path, split: str = "train") -> np.ndarray:
    """Returns all tokens of a split, as any reader of tars would."""
    found = []
    for path in sorted((folder / split).glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".tokens.npy"):
                    file = tar.extractfile(member)
                    assert file is not None
                    found.append(np.load(io.BytesIO(file.read()), allow_pickle=False))
    return np.concatenate(found).astype(np.int64)


def tokens_before(batch: Batch, first_sentinel: set[int]) -> np.ndarray:
    """Returns the token of the text before each target, int64 [B, T]; -1 where a row begins."""
    targets = batch.targets_BT.numpy()
    if batch.source is None:  # masked: the text is what was read, with what was hidden put back
        text = np.where(targets == IGNORE_INDEX, batch.tokens_BT.numpy(), targets)
        return np.concatenate((np.full((len(text), 1), -1), text[:, :-1]), axis=1)
    before = batch.tokens_BT.numpy().copy()  # a decoder reads the token before, and at a span's beginning its sentinel
    for row, source in zip(before, batch.source.tokens_BT.numpy(), strict=True):
        place = {token: number for number, token in enumerate(source.tolist()) if token in first_sentinel}
        for column, token in enumerate(row.tolist()):
            if token in first_sentinel:
                row[column] = source[place[token] - 1] if place.get(token, 0) > 0 else -1
    return before


def compare(run: Path, data: Path) -> dict[str, float]:
    """Returns nats a token of the model and of the n-grams over the same targets: text, nothing special."""
    described = open_source(run)
    choice = CorpusOptions(batch_tokens=4096)
    corpus = Corpus(settle(described, choice), choice, described.config)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    special = set(tokenizer.get_added_tokens_decoder())
    model, vocab_size = open_artifact(run).model, tokenizer.get_vocab_size()
    ngrams = Ngrams.count(read_tokens(data), vocab_size)
    sums, count = {"model": 0.0, "unigram": 0.0, "bigram": 0.0, "model, special ones too": 0.0}, Counter[str]()
    for batch in corpus.sources[0].loader:
        with torch.no_grad():
            logits_BTV = model(batch).logits_BTV.float()
        targets = batch.targets_BT.numpy()
        nll = -logits_BTV.log_softmax(-1).gather(-1, batch.targets_BT.clamp_min(0)[..., None])[..., 0].numpy()
        has_loss = targets != IGNORE_INDEX
        is_text = has_loss & ~np.isin(targets, list(special))
        before = tokens_before(batch, special)
        sums["model, special ones too"] += float(nll[has_loss].sum())
        sums["model"] += float(nll[is_text].sum())
        sums["unigram"] += float(ngrams.unigram[targets[is_text]].sum())
        pairs = zip(before[is_text].tolist(), targets[is_text].tolist(), strict=True)
        sums["bigram"] += sum(ngrams.bigram(one, two) for one, two in pairs)
        count["text"] += int(is_text.sum())
        count["all"] += int(has_loss.sum())
    means = {name: total / count["all" if "special" in name else "text"] for name, total in sums.items()}
    return means | {"targets": count["text"]}


def _sources() -> Iterator[tuple[str, str]]:
    """Yields package and source of each module of the standard library that is in a package."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*/**/*.py")):
        package = path.relative_to(root).parts[0]
        if package in ("site-packages", "test", "lib2to3", "idlelib") or "test" in path.parts[-2]:
            continue
        try:
            yield package, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def roles() -> Iterator[dict[str, Any]]:
    """Yields stretches of the words of a program, with what each is there for."""
    skipped = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}
    for _, text in _sources():
        words = [word for word in tokenize.generate_tokens(io.StringIO(text).readline) if word.type not in skipped]
        words = [word for word in words if len(word.string) < 40 and not word.string.isspace()]
        tags = [_role(words, number) for number in range(len(words))]
        for start in range(0, len(words) - STRETCH, STRETCH):
            stretch = slice(start, start + STRETCH)
            yield {"tokens": [word.string for word in words[stretch]], "tags": tags[stretch]}


def _role(words: list[tokenize.TokenInfo], number: int) -> str:
    before = words[number - 1].string if number else ""
    after = words[number + 1].string if number + 1 < len(words) else ""
    if words[number].type != tokenize.NAME or keyword.iskeyword(words[number].string):
        return "other"
    if before in ("def", "class"):
        return "definition"
    if before == ".":
        return "method" if after == "(" else "attribute"
    if after == "(":
        return "call"
    if after == "=":
        return "argument" if before in ("(", ",") else "assigned"
    return "name"


def functions() -> Iterator[dict[str, str]]:
    """Yields functions without their name, and the name."""
    for _, text in _sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__") and len(node.body) > 1:
                body = ast.unparse(node).replace(node.name, "_")
                yield {"source": body[:300], "target": node.name}


TASKS = {"bert": roles, "t5": functions}
"""Records of the task of each."""


def write_task(folder: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Writes train.jsonl and validation.jsonl: every tenth stretch of rows is held out, so few files are in both."""
    folder.mkdir(parents=True, exist_ok=True)
    found = list(rows)
    stretch = np.arange(len(found)) // 200 % round(1 / HELD_OUT) == 0
    for name, wanted in (("train", False), ("validation", True)):
        kept = [json.dumps(row) for row, held in zip(found, stretch, strict=True) if held == wanted]
        (folder / f"{name}.jsonl").write_text("\n".join(kept) + "\n")


def pretrain(*words: str) -> None:
    """Runs a command of ours."""
    done = subprocess.run([sys.executable, "-m", "pretrain", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pretrain {' '.join(words)} failed:\n{done.stderr[-4000:]}")


def train(folder: Path, name: str, recipe: str, *overrides: str) -> dict[str, float]:
    """Trains a run, or takes the one that is there; returns its last validation."""
    pretrain("train", recipe, f"run.dir={folder}", f"run.name={name}", *ONE_PROCESS, *overrides)
    rows = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "val_loss" in row][-1]


def plan_task(kind: str, data: Path, steps: int, lr: float) -> dict[str, Any]:
    """Returns the config of the task: the recipe's model, with a head of labels where one is predicted."""
    config: dict[str, Any] = {
        "include": "configs/engine/cpu.yaml",
        "data": {"path": str(data), "packing": "padded"},
        "model": yaml.safe_load(Path(RECIPES[kind]).read_text())["model"],
        "optim": {"lr": lr, "schedule": {"kind": "cosine", "warmup_steps": 20, "min_ratio": 0.1}},
        "train": {"steps": steps},
        "eval": {"every_steps": steps},
    }
    if kind == "bert":
        config["model"] |= {"head": {"kind": "labels", "transform": True}, "tied_embeddings": False}
        return config | {
            "objective": {"kind": "tag"},
            "batch": {"global_tokens": 4096, "seq_len": 128, "micro": 16},
        }
    batch = {"global_tokens": 512, "seq_len": 16, "source_len": 128, "micro": 16}
    return config | {"objective": {"kind": "seq2seq"}, "batch": batch}


def train_task(kind: str, folder: Path, data: Path, steps: int) -> dict[str, Any]:
    """Trains the task from the recipe's weights and from none; returns the best of the rates of each."""
    task = folder / f"{kind}-task"
    if not (task / "index.json").exists():
        write_task(folder / f"{kind}-task-text", TASKS[kind]())
        inputs = [
            {"path": str(folder / f"{kind}-task-text" / "train.jsonl")},
            {"path": str(folder / f"{kind}-task-text" / "validation.jsonl"), "split": "validation"},
        ]
        tokenizer = {"kind": "given", "path": str(data / "tokenizer.json")}
        config = {"output": str(task), "kind": "tags" if kind == "bert" else "pairs", "split": "hash:0"}
        path = folder / f"{kind}-task.yaml"
        path.write_text(json.dumps(config | {"inputs": inputs, "tokenizer": tokenizer}))
        pretrain("prepare", str(path))
    found: dict[str, Any] = {}
    for arm, start in (("from it", [f"init.from={folder / kind}"]), ("from scratch", [])):
        tried = []
        for lr in RATES[kind]:
            name = f"{kind}-{arm.replace(' ', '-')}-{lr:g}"
            recipe = folder / f"{name}.yaml"
            recipe.write_text(json.dumps(plan_task(kind, task, steps, lr)))
            held = train(folder, name, str(recipe), *start)
            tried.append({"lr": lr, "val_loss": held["val_loss"], "val_accuracy": held["val_accuracy"]})
        found[arm] = min(tried, key=lambda row: row["val_loss"])
    return found


def main() -> None:
    """Pretrains, compares with n-grams, trains on, and prints one JSON row."""
    os.environ["OMP_NUM_THREADS"] = "1"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(RECIPES))
    parser.add_argument("--output", type=Path, default=Path("runs/pretraining"))
    parser.add_argument("--task-steps", type=int, default=100)
    parser.add_argument("--write-task", type=Path, metavar="FOLDER", help="write the records of the task alone")
    parser.add_argument("--quick", action="store_true", help="a trial, whose figures mean nothing")
    arguments = parser.parse_args()
    if arguments.write_task:
        write_task(arguments.write_task, TASKS[arguments.kind]())
        return
    kind, folder = arguments.kind, arguments.output.resolve() / ("quick" if arguments.quick else "")
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{kind}-data"
    if not (data / "index.json").exists():
        pretrain("prepare", f"configs/prepare/stdlib_{kind}.yaml", f"output={data}")
    short = ["train.steps=30", "eval.every_steps=30"] if arguments.quick else []
    held = train(folder, kind, RECIPES[kind], f"data.path={data}", *short)
    row: dict[str, Any] = {"quick": arguments.quick, "val_loss": held["val_loss"], "step": held["step"]}
    row["nats"] = compare(folder / kind, data)
    print(row, file=sys.stderr)
    row["task"] = train_task(kind, folder, data, 30 if arguments.quick else arguments.task_steps)
    print_row(f"pretraining {kind}", row, ("torch", "tokenizers"))


if __name__ == "__main__":
    main()
