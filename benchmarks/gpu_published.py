"""Arms of the GPU campaign that train to a result: two published ones, and nanoGPT's loss in less time.

Their texts are given by path (`--tinyshakespeare`, `--multi30k`): nothing of them is in the repository. Without a path
an arm is a row that says so; the rehearsal makes up a text instead. The race reads the Python source that is installed.
"""

import gzip
import json
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.gpu_bench import Bench
from benchmarks.gpu_runs import call
from benchmarks.shakespeare import NANOGPT
from pretrain.errors import ConfigError
from pretrain.shards.index import load_index
from pretrain.shards.reader import ShardSet

CHARACTERS = {"least": 1.48, "must": 1.4697}
"""Validation loss that nanoGPT publishes for its configuration of a GPU, 5,000 steps; 1.48 by benchmarks.md."""
TRANSLATION = {"must": 40.0, "published": 41.02, "aim": 41.5}
"""Lower-cased BLEU on test2016 by Moses' tokens, beam 5 (Wu et al. 2021)."""
MULTI30K = {name: f"{name}.{{}}.gz" for name in ("train", "val")} | {"test": "test_2016_flickr.{}.gz"}
"""Files of the folder, by split and language."""

RACE = {"must": 2, "aim": 5}
"""Shares of nanoGPT's seconds in which our recipe has to reach its loss: a half, a fifth."""
RACE_SHARES = (5, 3, 2)
"""Shares that are tried, the shortest first, until one reaches the loss."""
PROBE_STEPS = 16
"""Steps of a short run that tells the seconds of a step and of the start."""


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


def race(bench: Bench) -> None:
    """Trains GPT-2 124M by nanoGPT's train.py for `race_s` seconds, and a recipe by Muon in shares of them.

    nanoGPT has its own configuration, but that its rate rises over a tenth of the steps and falls over the rest. Ours
    is as deep and as wide, with the quickstart's recipe (`modded-2m`, value embeddings included) and batches of 65,536
    tokens. Seconds are those of the whole command, compilation and validation included; losses are means over the
    validation split, in rows of the same tokens, documents not masked.
    """
    shape = bench.pick(
        {"layers": 12, "width": 768, "heads": 12, "T": 1024}, {"layers": 4, "width": 64, "heads": 2, "T": 32}
    )
    budget_s, probe, peer = bench.pick(bench.race_s, 15.0), None, None
    given = bench.nanogpt if bench.nanogpt is not None and (bench.nanogpt / "train.py").exists() else None
    if given is None:
        with bench.case("nanoGPT", shape):
            raise ConfigError("skipped: nanoGPT's train.py is not in the repository", fix="give its clone by --nanogpt")
        if not bench.rehearse:
            return  # nothing to beat
    with bench.case("ours, probe", shape):  # before nanoGPT's run: what fails, fails within a minute
        data = _race_text(bench)
        for _ in range(2):  # the second finds the compiled code on disk, as all later runs
            probe = _train_race(bench, data, shape, PROBE_STEPS)
        bench.write("ours, probe", shape, value=probe)
    if probe is None:
        return
    if given is not None:
        with bench.case("nanoGPT", shape):
            source = _nanogpt_source(bench, given)
            steps = _fill(budget_s, _train_nanogpt(bench, source, shape, PROBE_STEPS))
            peer = _train_nanogpt(bench, source, shape, steps)
            bench.write("nanoGPT", shape, value=peer, tokens=load_index(data).splits["train"].num_tokens)
        if peer is None:
            return
    seconds = budget_s if peer is None else peer["seconds"]
    for share in RACE_SHARES:
        reached = False
        with bench.case(f"ours, 1/{share} of the seconds", shape):
            ours = _train_race(bench, data, shape, _fill(seconds / share, probe))
            reached = peer is not None and ours["loss"] <= peer["loss"] and ours["seconds"] <= seconds / share
            held = {bound: reached for bound, least in RACE.items() if share == least or (reached and share > least)}
            bench.write(f"ours, 1/{share} of the seconds", shape, value=ours, peer=peer, held=held)
        if reached:
            return


def _race_text(bench: Bench) -> Path:
    """Returns the folder of the prepared Python source: the standard library, and all packages that are installed."""
    folder, paths = bench.scratch / "race", sysconfig.get_paths()
    if not (folder / "index.json").exists():
        roots = bench.pick([paths["stdlib"], paths["purelib"]], [f"{paths['stdlib']}/json"])
        files = [path for root in roots for path in sorted(Path(root).rglob("*.py"))]
        # Some tests of packages are not UTF-8.
        texts = (path.read_text(encoding="utf-8", errors="ignore") for path in files)
        source = bench.scratch / "race.jsonl"
        with source.open("w") as lines:
            lines.writelines(json.dumps({"text": text}) + "\n" for text in texts if text)
        options = bench.pick(["--vocab-size", "50257"], ["--vocab-size", "400", "--split", "hash:0.2"])
        call("pretrain", "prepare", "--output", str(folder), "--input", str(source), *options)
    return folder


def _nanogpt_source(bench: Bench, given: Path) -> Path:
    """Returns a copy of nanoGPT with our tokens as its data set `race`: each split one file of uint16."""
    data, source = _race_text(bench), bench.scratch / "nanogpt"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(given, source, ignore=shutil.ignore_patterns(".git"))
    folder = source / "data" / "race"
    folder.mkdir(parents=True)
    for split, name in (("train", "train.bin"), ("validation", "val.bin")):
        shards = ShardSet(data, load_index(data), split)
        with (folder / name).open("wb") as file:
            for shard in map(shards.reader, range(len(shards))):
                for number in range(len(shard.member_starts)):
                    file.write(shard.member(number)[0].tobytes())
    return source


def _train_nanogpt(bench: Bench, source: Path, shape: dict[str, int], steps: int) -> dict[str, Any]:
    """Trains by train.py for some steps; returns losses, steps, and seconds of a step and of all."""
    rows, accumulation = bench.pick((32, 15), (2, 1))  # 480 rows a step: its 12 x 40 in fewer parts
    flags = {
        "dataset": "race", "batch_size": rows, "gradient_accumulation_steps": accumulation, "block_size": shape["T"],
        "n_layer": shape["layers"], "n_head": shape["heads"], "n_embd": shape["width"], "max_iters": steps - 1,
        "lr_decay_iters": steps, "warmup_iters": max(1, steps // 10), "eval_interval": 10**9, "eval_iters": 1,
        "device": bench.device.type, "compile": not bench.rehearse,
    }  # fmt: skip
    out = bench.scratch / "nanogpt.json"
    command = [sys.executable, "-c", NANOGPT, "1337", str(out), *(f"--{name}={value}" for name, value in flags.items())]
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begun
    print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    if done.returncode:
        raise RuntimeError(f"nanoGPT ended with {done.returncode}: {done.stderr[-1000:]}")
    lines = re.findall(r"iter \d+: loss ([\d.]+), time ([\d.]+)ms", done.stdout)[-PROBE_STEPS // 2 :]
    train_loss, step_ms = (statistics.median(map(float, column)) for column in zip(*lines, strict=True))
    figures = {"steps": steps, "seconds": round(seconds, 1), "step_s": step_ms / 1e3, "train_loss": train_loss}
    return figures | json.loads(out.read_text())


def _train_race(bench: Bench, data: Path, shape: dict[str, int], steps: int) -> dict[str, Any]:
    """Trains our recipe for some steps; returns the same."""
    rows, micro = bench.pick((64, 32), (4, 2))
    stack = {name: shape[name] for name in ("layers", "width", "heads")} | {"ff_width": 4 * shape["width"]}
    overrides = [f"model.decoder.{name}={value}" for name, value in stack.items()]
    overrides += [f"model.max_seq_len={shape['T']}", f"batch.seq_len={shape['T']}", f"batch.micro={micro}"]
    overrides += [f"batch.global_tokens={rows * shape['T']}", f"train.steps={steps}", f"eval.every_steps={steps}"]
    overrides += ["eval.max_tokens=null", "data.document_mask=false", "engine.kind=single", "engine.zero_stage=0"]
    overrides += ["optim.lr=3e-3", "optim.muon.lr=3e-3", f"optim.schedule.warmup_steps={max(1, steps // 20)}"]
    overrides += ["checkpoint.every_steps=0", "tracking.log_every_steps=1", "tracking.norms_every_steps=0"]
    run, seconds = _train(bench, "configs/run/quickstart.yaml", "race", data, *overrides)
    logged = [row for row in _metrics(run) if "step_time_s" in row][-PROBE_STEPS // 2 :]
    train_loss, step_s = (statistics.median(row[name] for row in logged) for name in ("loss", "step_time_s"))
    (held,) = [row for row in _metrics(run) if "val_loss" in row]
    figures = {"steps": steps, "seconds": seconds, "step_s": step_s, "train_loss": train_loss}
    return figures | {"loss": held["val_loss"], "targets": int(held["val_tokens"])}


def _fill(budget_s: float, probe: dict[str, Any]) -> int:
    """Returns the steps that take 0.97 of a budget, by a short run, start and end included."""
    start_s = probe["seconds"] - probe["steps"] * probe["step_s"]
    return max(PROBE_STEPS, int((0.97 * budget_s - start_s) / probe["step_s"]))
