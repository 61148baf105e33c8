"""Arms of the GPU campaign about whole commands and runs: tests, the trainer, checkpoints, determinism, decoding, plan.

Their text is the standard library of the running Python, prepared once a campaign.
"""

import itertools
import json
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.common import ROOT, Timing, measure, ratio
from benchmarks.gpu_bench import Bench, installed_version
from benchmarks.gpu_peers import Work, build_bare, build_ours, draw_weights, hugging_face_model
from benchmarks.gpu_plan import compare_plans, read_rows
from benchmarks.gpu_steps import engine_of, llama_model
from benchmarks.trainer_ours import Trainer
from benchmarks.trainer_peers import forget_accelerate
from pretrain.checkpoint.format import list_checkpoints
from pretrain.checkpoint.load import load_checkpoint
from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.dist import read_world
from pretrain.errors import EXIT_RESUME_ME, ConfigError
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import generate
from pretrain.plan.cluster import load_calibration
from pretrain.plan.gpus import name_of_device
from pretrain.tracking.audit import compare, read_audit
from pretrain.utils.log import setup_logging

BLOCK_STEPS, BLOCKS = 5, 6
VOCAB_SIZE = 32_000


def call(*command: str) -> str:
    """Runs a command, its output in the log of the arm; returns what it printed. Raises: RuntimeError."""
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout


def gpu_tests(bench: Bench) -> None:
    """Runs the tests that need a GPU, a row a file; in the rehearsal those of one file, which skip themselves."""
    found = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    # The kernels come last: they are nine of ten tests.
    files = sorted(found, key=lambda path: path.name == "test_backend_gpu.py")
    for path in bench.pick(files, files[:1]):
        shape = {"file": str(path.relative_to(ROOT))}
        with bench.case("pytest -m gpu", shape):
            bench.write("pytest -m gpu", shape, **_run_tests(bench, path))


def _run_tests(bench: Bench, path: Path) -> dict[str, Any]:
    """Runs the GPU tests of a file; returns counts and the names of those that fail, which the arm then has too."""
    report = bench.scratch / "tests.xml"
    workers = ["-n", "8"] if not bench.rehearse and installed_version("pytest-xdist", "xdist") is not None else []
    words = ["-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", *workers, str(path)]
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "pytest", *words], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    (suite,) = ElementTree.parse(report).getroot()
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    wrong = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite
        if case.find("failure") is not None or case.find("error") is not None
    ]
    bench.failed += wrong
    return {"value": counts, "wrong": wrong, "seconds": round(time.perf_counter() - begun, 1)}


def prepare_text(bench: Bench) -> Path:
    """Returns the folder of the prepared text; prepares it where no arm has yet."""
    folder = bench.scratch / "text"
    if not (folder / "index.json").exists():
        part = Path(sysconfig.get_paths()["stdlib"]) / "json"
        size = bench.pick(["--vocab-size", "16384"], ["--vocab-size", "400", "--input", str(part)])
        call("pretrain", "prepare", "--output", str(folder), *size)
    return folder


def write_config(bench: Bench, name: str, model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Path:
    """Writes the config of a new run over the text, by default of LLaMA 1.1B; `sections` replace keys of its own."""
    shutil.rmtree(bench.scratch / "runs" / name, ignore_errors=True)
    rows, length, micro = bench.pick((16, 2048, 8), (4, 32, 2))
    llama = llama_model(bench, length)
    config: dict[str, dict[str, Any]] = {
        "run": {"dir": str(bench.scratch / "runs"), "name": name},
        "data": {"path": str(prepare_text(bench))},
        "model": model or llama.model_copy(update={"vocab_size": bench.pick(VOCAB_SIZE, 512)}).model_dump(),
        "objective": {"kind": "causal"},
        "batch": {"global_tokens": rows * length, "seq_len": length, "micro": micro},
        "optim": {"lr": 3e-4, "schedule": {"kind": "constant", "warmup_steps": 0}},
        "train": {"steps": 1_000_000},
        "eval": {"every_steps": 0},
        "engine": engine_of(bench, 1).model_dump(),
        "checkpoint": {"every_steps": 0},
        "tracking": {"log_every_steps": 1_000_000, "norms_every_steps": 0, "wandb": "off"},
    }
    for section, values in sections.items():
        config[section] |= values
    path = bench.scratch / f"{name}.yaml"
    path.write_text(json.dumps(config))
    return path


def _work_of(config: RunConfig) -> Work:
    """Returns the work of a step of a run."""
    assert isinstance(config.model, ModelConfig)
    micro = config.batch.micro
    return Work(config.model, config.batch.seq_len, micro, config.batch.rows // micro)


def real_loader(bench: Bench) -> None:
    """Times the trainer with its loader against a fixed batch, and with a row of metrics a step against none."""
    with bench.case("whole trainer", {}):
        wandb = "off" if installed_version("wandb", "wandb") is None else "offline"
        metrics = {"log_every_steps": 1, "norms_every_steps": 10, "wandb": wandb}
        config = load_config(write_config(bench, "untracked"), [])
        tracked = load_config(write_config(bench, "tracked", tracking=metrics), [])
        steps = bench.pick(BLOCK_STEPS, 2)
        timings = _time_trainers(bench, config, tracked, steps)
        work = _work_of(config)
        ms = {arm: 1e3 * statistics.median(one.wall_s for one in runs) / steps for arm, runs in timings.items()}
        rates = bench.rates(ms["real"], work.tokens, work.flops, work.rows)
        shown = {arm: round(value, 3) for arm, value in ms.items()}
        bench.write("whole trainer", work.shape, value=shown, wandb=wandb, **rates, **bench.memory())
        compared = {
            "real loader": ("fixed", "real", 0.98),
            "tracking": ("real", "tracked", 0.99),
            "A/A": ("again", "real", 0.97),
        }
        for name, (above, below, must) in compared.items():
            found = ratio(timings[above], timings[below], clock="wall_s")
            bench.write(f"{name}, share of the speed without", work.shape, value=str(found), held=found.median >= must)


def _time_trainers(bench: Bench, config: RunConfig, tracked: RunConfig, steps: int) -> dict[str, list[Timing]]:
    """Returns the times of blocks of steps, arms in random order: whole trainers, side by side."""
    world = read_world()
    setup_logging(world.rank, world.size, bench.scratch / "trainer.log")
    trainers = []
    for one in (config, tracked):
        forget_accelerate()
        trainers.append(Trainer(one, world))
        trainers[-1].take(bench.pick(8, 2))
    plain, held = trainers[0], trainers[0].steps

    def take(trainer: Trainer) -> None:
        trainer.take(steps)
        bench.synchronize()

    def take_fixed() -> None:
        loader, held.loader = held.loader, itertools.repeat(held.first[0])
        take(plain)
        held.loader = loader

    real, tracked_steps = partial(take, plain), partial(take, trainers[1])
    arms: dict[str, Callable[[], None]] = {"real": real, "again": real, "fixed": take_fixed, "tracked": tracked_steps}
    timings = measure(arms, bench.pick(BLOCKS, 2), before=bench.synchronize)
    for trainer in trainers:
        trainer.close()
    return timings


def checkpoint(bench: Bench) -> None:
    """Saves LLaMA 1.1B with its moments from a run, and loads it: stalls, time until committed, time of a load."""
    steps, every = bench.pick((25, 10), (5, 2))
    path = write_config(bench, "saves", train={"steps": steps}, checkpoint={"every_steps": every})
    config = load_config(path, [])
    work = _work_of(config)
    shape = work.shape
    with bench.case("saves", shape):
        folder = bench.scratch / "runs" / "saves"
        call("pretrain", "train", str(path))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        saved = [row for row in rows if "checkpoint_stall_s" in row]
        for number, row in enumerate(saved, start=1):
            figures = {name: row[name] for name in ("checkpoint_stall_s", "checkpoint_write_s")}
            bench.write(f"save {number}", shape, value=figures, held=figures["checkpoint_stall_s"] <= 0.5)
        newest = list_checkpoints(folder / "checkpoints")[-1]
        num_bytes = sum(file.stat().st_size for file in newest.iterdir())
        weights = draw_weights(work.model, bench.device)
        _, engine = build_ours(work, weights, config.engine)
        for number in (1, 2):
            begun = time.perf_counter()
            load_checkpoint(newest, engine.state)
            bench.synchronize()
            seconds = round(time.perf_counter() - begun, 3)
            bench.write(f"load {number}, files in the page cache", shape, value=seconds, bytes=num_bytes)
    shutil.rmtree(bench.scratch / "runs" / "saves", ignore_errors=True)


def deterministic(bench: Bench) -> None:
    """Compares the ledgers of two runs, of one that is stopped and one that is killed; and what determinism costs."""
    steps = bench.pick(200, 40)
    model = bench.pick({"preset": "llama-5m", "vocab_size": VOCAB_SIZE}, None)
    batch = {"batch": bench.pick({"global_tokens": 65_536, "seq_len": 1024, "micro": 16}, {})}
    length = {"train": {"steps": steps}, "checkpoint": {"every_steps": steps // 4}}
    runs = bench.scratch / "runs"

    def configure(name: str, exact: bool) -> Path:
        engine = engine_of(bench, 1, deterministic=exact).model_dump()
        return write_config(
            bench, name, engine=engine, tracking={"log_every_steps": steps}, model=model, **batch, **length
        )

    with bench.case("equal ledgers", {"steps": steps}):
        call("pretrain", "train", str(configure("exact", True)))
        for name, sent in (("again", None), ("stopped", signal.SIGTERM), ("killed", signal.SIGKILL)):
            other = f"exact-{name}"
            path = configure(other, True)
            codes = [] if sent is None else [_interrupt(path, runs / other, sent, after_steps=steps // 4 + 1)]
            call("pretrain", "train", str(path))
            difference = compare(runs / "exact" / "audit.jsonl", runs / other / "audit.jsonl")
            rows = read_audit(runs / other / "audit.jsonl")
            shape = {"steps": len(rows), "starts": max(row.attempt for row in rows), "exit_codes": codes}
            held = difference is None and len(rows) == steps and codes in ([], [EXIT_RESUME_ME], [-signal.SIGKILL])
            bench.write(other, shape, value=str(difference or "equal"), held=held)
            bench.failed += [] if held else [other]
        call("pretrain", "train", str(configure("fast", False)))
        seconds = {name: _step_seconds(runs / name) for name in ("exact", "fast")}
        bench.write("cost", {"steps": steps}, value=seconds)


def _interrupt(config: Path, run: Path, sent: signal.Signals, after_steps: int) -> int:
    """Starts a run, sends a signal once its ledger has so many steps, and returns its exit code.

    Raises: RuntimeError: It has ended before.
    """
    process = subprocess.Popen([sys.executable, "-m", "pretrain", "train", str(config)], stdout=sys.stderr)
    ledger = run / "audit.jsonl"
    while not ledger.exists() or len(read_audit(ledger)) < after_steps:
        if process.poll() is not None:
            raise RuntimeError(f"{run.name} ended with {process.returncode} before it could be interrupted")
        time.sleep(0.005)
    process.send_signal(sent)
    return process.wait()


def _step_seconds(run: Path) -> float:
    """Returns the mean time of a step in the last row of metrics that has one."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["step_time_s"] for row in rows if row.get("step_time_s")][-1]


def decode(bench: Bench) -> None:
    """Times greedy decoding of LLaMA 1.1B in bf16 against transformers, one row and 64."""
    prompt, new = bench.pick((64, 128), (4, 4))
    model = llama_model(bench)
    weights = draw_weights(model, bench.device)
    ours = build_bare(Work(model, prompt, 1), weights, bench.device, compiled=False)[1].eval()
    theirs = hugging_face_model(model, weights, bench.device).eval()
    for parameter in (*ours.parameters(), *theirs.parameters()):
        parameter.data = parameter.data.to(torch.bfloat16)  # buffers, as of rotary periods, stay fp32
    theirs.generation_config.eos_token_id = None
    for rows in bench.pick((1, 64), (2,)):
        shape = {"rows": rows, "prompt": prompt, "new": new}
        with bench.case(f"{rows} rows", shape):
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(1, model.vocab_size or 2, (rows, prompt), generator=generator)
            on_device = ids.to(bench.device)
            prompts = ids.tolist()
            constraints = Constraints(max_new_tokens=new)
            peer = partial(theirs.generate, on_device, max_new_tokens=new, do_sample=False, use_cache=True)
            with torch.no_grad():
                found = [one.tokens for one in generate(ours, prompts, constraints)]
                expected = peer()[:, prompt:].tolist()
                equal = sum(a == b for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))
                timed = partial(generate, ours, prompts, constraints)
                figures = {"ours": bench.measure(timed, 3, 1), "Hugging Face": bench.measure(peer, 3, 1)}
            ms = {name: one["ms"]["median"] for name, one in figures.items()}
            speed = ms["Hugging Face"] / ms["ours"]
            for name, one in figures.items():
                bench.write(f"{name}, {rows} rows", shape, **one, tokens_per_s=round(1e3 * rows * new / ms[name], 1))
            figure = {"speed": round(speed, 3), "equal_tokens": round(equal / (rows * new), 4)}
            bench.write(f"speed, {rows} rows", shape, value=figure, held=speed >= 2.0)


def calibrate(bench: Bench) -> None:
    """Measures for `pretrain plan`, and compares its times, before and after, with all steps of the campaign."""
    with bench.case("time by plan", {}):
        path = str(write_config(bench, "planned"))
        gpu = "cpu" if bench.rehearse else name_of_device(torch.cuda.get_device_name())
        file = bench.scratch / "calibration.json"
        named = [] if gpu is None else ["--gpu", gpu]
        call("pretrain", "doctor", path, "--calibrate", "--ranks", "1", "--output", str(file), *named, "--json")
        bench.write("calibration", {}, value=json.loads(file.read_text()))
        measured = load_calibration(file)
        found = read_rows([*bench.earlier, bench.out / "rows.jsonl"])
        rows = [row for row in found if row["environment"]["gpu"] in (None, measured.device)]
        if not rows:
            raise ConfigError("no row has a step to compare", fix="run `llama` and others before, or give --earlier")
        bench.write("time by plan", {}, **compare_plans(rows, measured))
