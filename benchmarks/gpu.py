"""The GPU campaign: every figure that needs a GPU, in order of worth, within the minutes that one is lent.

    python -m benchmarks.gpu --out DIR [--only ARM ...] [--cases WORD ...] [--minutes M] [--nanogpt PATH]
    python -m benchmarks.gpu --list [--only ARM ...]  the arms, what each answers, what must hold, and minutes
    python -m benchmarks.gpu --rehearse --out DIR     all of it on a CPU with tiny shapes; figures mean nothing
    python -m benchmarks.gpu --carry DIR              wheels for a machine that can download nothing

Each arm runs in its own process with its own time limit, its output in SCRATCH/ARM.log, and appends its rows to
DIR/rows.jsonl as it measures: an interrupted lease still yields rows. An arm that fails or runs past its limit is a row
with its error, and the campaign continues; the exit code is then 1. Arms for which no time is left are named, and
exit 0: call again with `--only`.
"""

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, append_row, read_commit
from benchmarks.gpu_carry import carry
from benchmarks.gpu_layouts import GROUPS

LEAST_SHARE = 0.5
"""Share of an arm's limit that must be left to begin it."""
REHEARSAL_SLACK = 5.0
"""How many of its limits an arm may take in the rehearsal, which runs on machines that do other work too."""
LOG_TAIL = 2000
SCRATCH = ROOT / "runs" / "gpu-scratch"
"""Not under OUT, which may have to come back over a network; ignored by git."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A part of the campaign.

    Attributes:
        function: `module:function` of a `Bench`.
        limit_s: Seconds after which it is killed.
        question: Question that its rows answer.
        target: What must hold, and the aim.
        expected_s: Seconds that it is expected to take; an estimate until a row says better. 0: its limit.
    """

    function: str
    limit_s: float
    question: str
    target: str = ""
    expected_s: float = 0.0


ARMS = {
    "probe": Arm(
        "benchmarks.gpu_kernels:probe",
        90,
        "What do a copy and a matrix product reach, and which kernel does SDPA choose?",
        "ceilings of all that follows",
        expected_s=20,
    ),
    "ranks": Arm(
        "benchmarks.gpu_ranks:ranks",
        590,
        "Do ranks over NCCL train as one process, in every layout, and end and continue as they must?",
        "must: losses within 1e-4 of one process in fp32, norms 1e-3; disturbed and continued runs equal in every bit",
        expected_s=sum(GROUPS.values()),
    ),
    "losses": Arm(
        "benchmarks.gpu_steps:same_losses",
        180,
        "Do all engines, backends and compiled blocks train as one process and as Hugging Face do?",
        "must: losses of ten steps within 1e-4 in fp32, 1e-2 in bf16",
        expected_s=90,
    ),
    "llama": Arm(
        "benchmarks.gpu_steps:llama",
        360,
        "How fast is a step of LLaMA 1.1B, T=2048, bf16, by ZeRO 1 and by the own engine?",
        "must: 58% MFU, 1.3 of Hugging Face compiled; aim: 62%, 1.4",
        expected_s=305,
    ),
    "gpt2": Arm(
        "benchmarks.gpu_steps:gpt2",
        180,
        "How fast is a step of GPT-2 124M, T=1024, beside nanoGPT and Hugging Face?",
        "must: 1.0 of nanoGPT compiled, 2.0 of Hugging Face; aim: 1.15, 2.5, 450k tokens/s",
        expected_s=110,
    ),
    "modes": Arm(
        "benchmarks.gpu_steps:modes",
        540,
        "Is a step faster as one graph, with autotuned products, or with its loss at once?",
        "decides what the defaults of engine.compile_scope, compile_mode and loss_chunk are",
        expected_s=320,
    ),
    "checkpoint": Arm(
        "benchmarks.gpu_runs:checkpoint",
        300,
        "How long does a save of LLaMA 1.1B with its moments stop training, and how long does a load take?",
        "must: 0.5 s; aim: 0.1 s",
        expected_s=130,
    ),
    "deterministic": Arm(
        "benchmarks.gpu_runs:deterministic",
        360,
        "Are deterministic runs equal in every bit: two, one that is stopped, one that is killed?",
        "must: equal",
        expected_s=240,
    ),
    "train": Arm(
        "benchmarks.gpu_runs:real_loader",
        150,
        "What do the real loader and tracking cost the whole trainer?",
        "must: 0.98 of a fixed batch, 0.99 of no tracking; aim: 0.995",
        expected_s=90,
    ),
    "zero": Arm(
        "benchmarks.gpu_steps:zero",
        240,
        "What do ZeRO 0 to 3 cost at one rank, against our own loop without an engine?",
        "must: 0.97; aim: 0.98",
        expected_s=120,
    ),
    "fp8": Arm(
        "benchmarks.gpu_kernels:fp8",
        480,
        "What does FP8 gain over bf16 in products, and in steps of LLaMA 1.1B and of 8B's blocks?",
        "must: 1.15 of bf16, 8B's blocks 1.25, ZeRO 3 1.05; speedups of products beside those of `pretrain plan`",
        expected_s=330,
    ),
    "memory": Arm(
        "benchmarks.gpu_memory:memory",
        180,
        "Which micro-batch and which row of LLaMA 1.1B fit, and what did `pretrain plan` say?",
        "must: peaks within 10% of the plan",
        expected_s=100,
    ),
    "largest": Arm(
        "benchmarks.gpu_memory:largest_model",
        180,
        "Does the largest model that fits by `pretrain plan` fit, and none a tenth larger?",
        "must: fits, peak within 10% of the plan",
        expected_s=90,
    ),
    "lora": Arm(
        "benchmarks.gpu_steps:lora",
        150,
        "How fast are adapters on LLaMA-3 8B?",
        "must: 12,000 tokens/s; aim: 14,000",
        expected_s=80,
    ),
    "calibrate": Arm(
        "benchmarks.gpu_runs:calibrate",
        120,
        "How far are the times of `pretrain plan` off, before and after `pretrain doctor --calibrate`?",
        "must: 25% before, 10% after, every step of the campaign",
        expected_s=60,
    ),
    "families": Arm(
        "benchmarks.gpu_families:same_families",
        480,
        "Does every family train on the GPU as on a CPU, by every backend?",
        "must: losses of ten steps within 1e-4 in fp32, 2e-3 in bf16",
        expected_s=320,
    ),
    "compiled": Arm(
        "benchmarks.gpu_families:compiled_families",
        540,
        "Does every family train compiled, and by FlexAttention, as on a CPU?",
        "must: losses of ten steps within 2e-3 in bf16",
        expected_s=480,
    ),
    "t5": Arm(
        "benchmarks.gpu_steps:t5",
        120,
        "How fast is a step of T5-base v1.1, 512 tokens in, 114 out, batch 128?",
        "must: 220 ms; aim: 170 ms, 2.5 of Hugging Face",
        expected_s=70,
    ),
    "bert": Arm(
        "benchmarks.gpu_steps:bert",
        120,
        "How fast is BERT-base on documents of real lengths, packed, beside Hugging Face, padded?",
        "must: 2.0; aim: 650k tokens/s without padding",
        expected_s=70,
    ),
    "tests": Arm(
        "benchmarks.gpu_runs:gpu_tests",
        480,
        "Do kernels, engines and host copies do on a GPU what they do on a CPU?",
        "must: all pass",
        expected_s=400,
    ),
    "loss": Arm(
        "benchmarks.gpu_kernels:loss",
        150,
        "Which form of the loss is the fastest: chunks, compiled or not, materialised logits, two peers?",
        "must: 0.95 of materialised logits; aim: 1.0, and that of both peers",
        expected_s=60,
    ),
    "attention": Arm(
        "benchmarks.gpu_kernels:attention",
        300,
        "Which attention backend is the fastest, for dense and for packed rows of 512 to 65,536 tokens?",
        "the entries of pretrain/plan/attention_table.py, from which `auto` chooses",
        expected_s=170,
    ),
    "decode": Arm(
        "benchmarks.gpu_runs:decode",
        120,
        "How fast is decoding with LLaMA 1.1B, one row and 64, beside transformers?",
        "must: 2.0",
        expected_s=50,
    ),
    "profile": Arm(
        "benchmarks.gpu_kernels:profile",
        240,
        "Where do steps of LLaMA 1.1B, of GPT-2 and of nanoGPT spend their time?",
        "milliseconds by category, idle between kernels, tables of kernels and traces",
        expected_s=110,
    ),
    "characters": Arm(
        "benchmarks.gpu_published:characters",
        240,
        "Does nanoGPT's GPU character model reach its published loss?",
        "must: 1.4697, at least 1.48; skipped without --tinyshakespeare",
        expected_s=120,
    ),
    "translation": Arm(
        "benchmarks.gpu_published:translation",
        480,
        "Does Multi30k in full reach the published BLEU?",
        "must: 40; published: 41.02; aim: 41.5; skipped without --multi30k",
        expected_s=240,
    ),
    "race": Arm(
        "benchmarks.gpu_published:race",
        2400,
        "How much sooner does GPT-2 124M by Muon have the loss that nanoGPT's train.py has after a quarter of an hour?",
        "must: in a half of its seconds; aim: in a fifth; skipped without --nanogpt",
        expected_s=1900,
    ),
}
"""In order of worth. `expected_s` of `families`, and of `probe` to `deterministic` without `ranks`, are of an H200."""


def run_arm(name: str, arm: Arm, job: dict[str, Any], limit_s: float) -> str | None:
    """Runs an arm in its own process group and prints its rows; returns why it failed, or None."""
    job = {**job, "arm": name, "question": arm.question, "function": arm.function}
    paths = [str(ROOT), str(ROOT / "launch"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as `pretrain train` has it
    if job["rehearse"]:
        # Compilation takes minutes on a CPU. One thread: the figures mean nothing.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    log = Path(job["scratch"]) / f"{name}.log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "benchmarks.gpu_bench", json.dumps(job)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text(errors="replace")
    print("".join(line for line in text.splitlines(keepends=True) if line.startswith(f"{name}: ")), end="")
    if code == 0:
        return None
    why = f"ran past its limit of {limit_s:.4g} s" if code is None else f"exit code {code}"
    row = {"arm": name, "question": arm.question, "error": why, "log": text[-LOG_TAIL:]}
    append_row(Path(job["out"]) / "rows.jsonl", row)
    return why


def run_campaign(arms: dict[str, Arm], job: dict[str, Any], minutes: float) -> int:
    """Runs arms in order until the minutes are over; returns the exit code."""
    ends = time.monotonic() + 60 * minutes
    slack = REHEARSAL_SLACK if job["rehearse"] else 1.0
    failed: list[str] = []
    left: list[str] = []
    for name, arm in arms.items():
        begun = time.monotonic()
        limit_s = slack * arm.limit_s
        if ends - begun < LEAST_SHARE * limit_s:
            left.append(name)
            continue
        why = run_arm(name, arm, job, min(limit_s, ends - begun))
        if why is not None:
            failed.append(name)
        print(f"{name}: {why or 'done'}, {time.monotonic() - begun:.0f} s", flush=True)
    if left:
        print(f"left for lack of time: --only {' '.join(left)}")
    if failed:
        print(f"failed, see the logs in {job['scratch']}: --only {' '.join(failed)}")
    print(f"rows: {Path(job['out']) / 'rows.jsonl'}")
    return 1 if failed else 0


def list_arms(arms: dict[str, Arm]) -> Iterable[str]:
    """Yields a paragraph an arm, with the minutes until its end: expected, and at most."""
    expected_s = limit_s = 0.0
    for name, arm in arms.items():
        expected_s += arm.expected_s or arm.limit_s
        limit_s += arm.limit_s
        takes = f"{arm.expected_s:.0f} s expected, at most {arm.limit_s:.0f}"
        until = f"done after {expected_s / 60:.1f} minutes, at most {limit_s / 60:.1f}"
        yield f"{name:14s} {arm.question}\n{'':14s} {arm.target}\n{'':14s} {takes}; {until}"


def main() -> None:
    """Runs, lists or carries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="these arms")
    parser.add_argument("--cases", nargs="+", default=[], metavar="WORD", help="compared steps with a word in the name")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=[], metavar="GROUP", help="of the arm `ranks`")
    parser.add_argument("--minutes", type=float, help="no arm begins without half of its limit left; default: 25")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the rows")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="folder of logs, runs and checkpoints, 45 GB")
    parser.add_argument("--nanogpt", type=Path, help="a clone of nanoGPT, or a folder with its model.py")
    parser.add_argument("--tinyshakespeare", type=Path, metavar="FILE", help="text of nanoGPT's character models")
    parser.add_argument("--multi30k", type=Path, metavar="FOLDER", help="{train,val,test_2016_flickr}.{en,de}.gz")
    parser.add_argument("--race-s", type=float, default=900.0, help="seconds of nanoGPT's run in the race")
    parser.add_argument(
        "--earlier",
        type=Path,
        nargs="+",
        default=[],
        metavar="ROWS",
        help="rows.jsonl of earlier calls, for `calibrate` and `ranks`",
    )
    parser.add_argument("--commit", help="commit of the tree, where it is no clone")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--list", action="store_true", help="list the arms")
    parser.add_argument("--carry", type=Path, metavar="DIR", help="build and download wheels for a bare machine")
    parser.add_argument("--python", default="3.12", help="--carry: Python of that machine")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the arm too
    chosen = {name: arm for name, arm in ARMS.items() if name in options.only}
    if "ranks" in chosen and options.groups:
        expected_s = sum(GROUPS[group] for group in options.groups)
        chosen["ranks"] = replace(chosen["ranks"], expected_s=expected_s, limit_s=30 + 1.5 * expected_s)
    if options.list:
        print("\n".join(list_arms(chosen)))
        return
    if options.carry is not None:
        print(carry(options.carry, options.python))
        return
    options.scratch.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    job = {
        "out": str(options.out.resolve()),
        "scratch": str(options.scratch.resolve()),
        "rehearse": options.rehearse,
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        "commit": options.commit or read_commit(),
        "cases": options.cases,
        "groups": options.groups,
        "race_s": options.race_s,
        "earlier": [str(path.resolve()) for path in options.earlier],
    }
    given = {name: getattr(options, name) for name in ("nanogpt", "tinyshakespeare", "multi30k")}
    job |= {name: path and str(path.resolve()) for name, path in given.items()}
    minutes = options.minutes or (math.inf if options.rehearse else 25.0)
    raise SystemExit(run_campaign(chosen, job, minutes))


if __name__ == "__main__":
    main()
