"""Arms of the GPU campaign about published results: nanoGPT's GPU character model, and Multi30k in full.

Their texts are given by path (`--tinyshakespeare`, `--multi30k`): nothing of them is in the repository. Without a path
an arm is a row that says so; the rehearsal makes up a text instead.
"""

import gzip
import json
import shutil
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.gpu_bench import Bench
from benchmarks.gpu_runs import call
from pretrain.errors import ConfigError

CHARACTERS = {"least": 1.48, "must": 1.4697}
"""Validation loss that nanoGPT publishes for its configuration of a GPU, 5,000 steps; 1.48 by benchmarks.md."""
TRANSLATION = {"must": 40.0, "published": 41.02, "aim": 41.5}
"""Lower-cased BLEU on test2016 by Moses' tokens, beam 5 (Wu et al. 2021)."""
MULTI30K = {name: f"{name}.{{}}.gz" for name in ("train", "val")} | {"test": "test_2016_flickr.{}.gz"}
"""Files of the folder, by split and language."""


def _train(bench: Bench, recipe: str, name: str, data: Path, *overrides: str) -> tuple[Path, float]:
    """Trains a recipe on the device of the campaign, in one process; returns its run and the seconds."""
    runs = bench.scratch / "runs"
    shutil.rmtree(runs / name, ignore_errors=True)
    engine = [f"engine.device={bench.device.type}", f"engine.precision={bench.pick('bf16', 'fp32')}"]
    where = [f"run.dir={runs}", f"run.name={name}", f"data.path={data}", "tracking.wandb=off"]
    begun = time.perf_counter()
    call("pretrain", "train", str(ROOT / recipe), *where, *engine, "engine.compile=auto", *overrides)
    return runs / name, round(time.perf_counter() - begun, 1)


def characters(bench: Bench) -> None:
    """Trains nanoGPT's GPU configuration of character-level Shakespeare: 10.6M parameters, T=256, 5,000 steps.

    The loss is the best mean over the whole validation split, cut into windows of 256; nanoGPT's is over 200 batches.
    """
    with bench.case("nanoGPT's GPU model", {}):
        text = _characters_text(bench)
        data = bench.scratch / "characters"
        shutil.rmtree(data, ignore_errors=True)
        split = ["--tokenizer", "char", "--split", "tail:0.1"]
        call("pretrain", "prepare", "--input", str(text), "--output", str(data), *split)
        steps, every, length, rows = bench.pick((5000, 250, 256, 64), (4, 2, 32, 2))
        full = {"layers": 6, "width": 384, "heads": 6, "ff_width": 1536, "dropout": 0.2}
        stack = bench.pick(full, {"layers": 2, "width": 64, "heads": 4, "ff_width": 256, "dropout": 0.2})
        overrides = [f"model.decoder.{name}={value}" for name, value in stack.items()]
        overrides += [f"model.max_seq_len={length}", f"batch.seq_len={length}", f"batch.micro={rows}"]
        overrides += [f"batch.global_tokens={rows * length}", f"train.steps={steps}", f"eval.every_steps={every}"]
        if bench.rehearse:
            overrides += ["optim.schedule.warmup_steps=1"]
        run, seconds = _train(bench, "configs/run/shakespeare_char.yaml", "characters", data, *overrides)
        losses = {row["step"]: row["val_loss"] for row in _metrics(run) if "val_loss" in row}
        best = min(losses, key=lambda step: losses[step])
        held = {name: losses[best] <= bound for name, bound in CHARACTERS.items()}
        figures = {"value": round(losses[best], 4), "bounds": CHARACTERS, "held": held}
        shape = {"steps": steps, "T": length, "rows": rows, **stack}
        bench.write("nanoGPT's GPU model", shape, **figures, best_step=best, losses=losses, seconds=seconds)


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _characters_text(bench: Bench) -> Path:
    if bench.tinyshakespeare is not None:
        return bench.tinyshakespeare
    if not bench.rehearse:
        what = "skipped: the text of nanoGPT's shakespeare_char example is not in the repository"
        raise ConfigError(what, fix="give it by --tinyshakespeare FILE")
    text = bench.scratch / "characters.txt"
    text.write_text("".join(islice(cycle("To be, or not to be: that is the question.\n"), 20_000)))
    return text


def translation(bench: Bench) -> None:
    """Trains Multi30k from English to German for 8,000 updates, averages ten checkpoints, and scores test2016."""
    with bench.case("Multi30k in full", {}):
        texts = _translation_texts(bench)
        data = bench.scratch / "multi30k"
        shutil.rmtree(data, ignore_errors=True)
        paths = [f"output={data}"]
        for number, split in enumerate(("train", "val")):
            for key, language in (("path", "en"), ("paired_path", "de")):
                paths.append(f"inputs.{number}.{key}={texts / MULTI30K[split].format(language)}")
        if bench.rehearse:
            paths.append("tokenizer.vocab_size=400")
        call("pretrain", "prepare", str(ROOT / "configs/prepare/multi30k.yaml"), *paths)
        steps, averaged = bench.pick((8000, 10), (4, 2))
        overrides = [f"train.steps={steps}", "batch.micro=34"]
        if bench.rehearse:
            overrides = [f"train.steps={steps}", "optim.schedule.warmup_steps=1", "checkpoint.every_steps=2"]
        run, seconds = _train(bench, "configs/run/multi30k.yaml", "multi30k", data, *overrides)
        model = bench.scratch / "models" / "multi30k"
        shutil.rmtree(model, ignore_errors=True)
        call("pretrain", "average", str(run), "--last", str(averaged), "--output", str(model))
        files = []
        for option, language in (("--source", "en"), ("--reference", "de")):
            plain = bench.scratch / f"test.{language}"
            plain.write_bytes(gzip.decompress((texts / MULTI30K["test"].format(language)).read_bytes()))
            files += [option, str(plain)]
        beams = ["--beams", "1,5", "--length-penalty", "0.8", "--json"]
        scored = json.loads(call("pretrain", "evaluate", str(model), *files, *beams))
        _write_scores(bench, scored, {"updates": steps, "averaged": averaged}, seconds)


def _write_scores(bench: Bench, scored: dict[str, Any], shape: dict[str, int], seconds: float) -> None:
    bleu = {str(one["beams"]): round(one["scores"]["bleu_tokenized"]["score"], 2) for one in scored["systems"]}
    held = {name: bleu["5"] >= bound for name, bound in TRANSLATION.items()} | {"beam": bleu["5"] > bleu["1"]}
    figures = {"value": bleu, "bounds": TRANSLATION, "held": held, "seconds": seconds}
    bench.write("Multi30k in full", shape, **figures, scored=scored)


def _translation_texts(bench: Bench) -> Path:
    if bench.multi30k is not None:
        return bench.multi30k
    if not bench.rehearse:
        names = ", ".join(sorted({name.format("LANGUAGE") for name in MULTI30K.values()}))
        what = f"skipped: Multi30k's sentences are not in the repository ({names})"
        raise ConfigError(what, fix="give their folder by --multi30k FOLDER")
    folder = bench.scratch / "pairs"
    folder.mkdir(exist_ok=True)
    sentences = {
        "en": "A man in a red shirt is riding bicycle {}.",
        "de": "Ein Mann in rotem Hemd auf einem Fahrrad {}.",
    }
    for name, count in (("train", 300), ("val", 30), ("test", 4)):
        for language, sentence in sentences.items():
            text = "".join(f"{sentence.format(number)}\n" for number in range(count))
            (folder / MULTI30K[name].format(language)).write_bytes(gzip.compress(text.encode()))
    return folder
