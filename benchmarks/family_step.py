"""Time of a training step of BERT, T5 and LoRA: ours against transformers, with peft, fp32, one thread, in one run.

    python -m benchmarks.family_step [--quick] [--only CASE ...]

A step is forward, backward, a clip of the norm and fused AdamW, from the same weights. Losses of the first steps are
compared first: within 1e-4, or no timing counts. Of LoRA it is the first alone, since one adapter of our fused layer is
three of theirs, which then learn apart.

    BERT            rows of the same length, 15% of the tokens masked: ours computes the head there only
    BERT, lengths   documents of different lengths: ours packs them, transformers pads them
    T5              sources and targets of the same lengths
    LoRA            adapters of rank 8 on every linear layer of the blocks of a LLaMA, by peft in both
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

from benchmarks.common import is_conclusive, measure, print_row, ratio
from benchmarks.gpu_peers import (
    MicroBatches,
    Step,
    Weights,
    Work,
    build_hugging_face,
    build_ours,
    draw_weights,
    plan_model,
    random_steps,
)
from benchmarks.gpu_steps import MASKED_SHARE, pack_rows, pad_rows
from pretrain.config.engine import EngineConfig
from pretrain.types import IGNORE_INDEX

CPU = torch.device("cpu")
VOCAB = 4096
TOLERANCE = 1e-4
MUST, AIM = 1.0, 1.2
STACK = {"layers": 4, "width": 256, "heads": 4}


@dataclass(frozen=True)
class Arms:
    """Steps of both, each with its batches of the same tokens."""

    ours: Callable[[], Step]
    theirs: Callable[[], Step]
    our_data: MicroBatches
    their_data: MicroBatches
    compared_steps: int = 5


def arms_of(work: Work, our_data: MicroBatches, their_data: MicroBatches) -> Arms:
    """Returns both sides of a case."""
    weights: Weights = draw_weights(work.model, CPU, sensitive=True)
    config = EngineConfig(kind="single", zero_stage=0, precision="fp32", compile=False, device="cpu")
    theirs = partial(build_hugging_face, work, weights, CPU, compiled=False)
    return Arms(lambda: build_ours(work, weights, config)[0], theirs, our_data, their_data)


def bert_arms(varied: bool) -> Arms:
    """Returns BERT on 32 documents of up to 256 tokens, or on 16 rows of 128."""
    length, count = (256, 32) if varied else (128, 16)
    model = plan_model("bert-base", VOCAB, stack={**STACK, "ff_width": 1024, "dropout": 0.0}, max_seq_len=length)
    rng = np.random.default_rng(0)
    lengths = np.full(count, length)
    if varied:
        # Log-normal, as the lengths of articles are.
        lengths = np.clip(rng.lognormal(np.log(length / 2.5), 0.9, count), 8, length).astype(np.int64)
    texts = [torch.from_numpy(rng.integers(1, VOCAB, size)) for size in lengths]
    chosen = [torch.from_numpy(rng.random(size) < MASKED_SHARE) for size in lengths]
    padded, packed = pad_rows(texts, chosen, length), pack_rows(texts, chosen, lengths, length)
    if not varied:
        targets_P = (padded.targets_BT.flatten() != IGNORE_INDEX).nonzero()[:, 0]
        packed = replace(padded, lengths_B=None, target_positions_P=targets_P)
        padded = replace(padded, lengths_B=None)
    work = Work(model, length, count, head_share=MASKED_SHARE, precision="fp32")
    ours, theirs = (MicroBatches([batch], [packed.num_targets()]) for batch in (packed, padded))
    return arms_of(work, ours, theirs)


def t5_arms() -> Arms:
    """Returns T5 v1.1 on 16 sources of 128 tokens and targets of 32."""
    model = plan_model("t5-v1.1-base", VOCAB, stack={**STACK, "head_width": 64, "ff_width": 512}, max_seq_len=128)
    work = Work(model, 32, 16, precision="fp32", source_len=128)
    data = random_steps(work, CPU)[0]
    return arms_of(work, data, data)


def lora_arms() -> Arms:
    """Returns adapters on a LLaMA, 8 rows of 128 tokens."""
    model = plan_model("llama2-7b", VOCAB, stack={**STACK, "kv_heads": 4, "ff_width": 688}, max_seq_len=128)
    work = Work(model, 128, 8, precision="fp32", lora_rank=8)
    data = random_steps(work, CPU)[0]
    return replace(arms_of(work, data, data), compared_steps=1)


CASES: dict[str, Callable[[], Arms]] = {
    "BERT": partial(bert_arms, varied=False),
    "BERT, lengths": partial(bert_arms, varied=True),
    "T5": t5_arms,
    "LoRA": lora_arms,
}


def time_case(name: str, arms: Arms, rounds: int) -> dict[str, Any]:
    """Compares losses, times steps; prints and returns the figures."""
    ours, again, theirs = arms.ours(), arms.ours(), arms.theirs()
    sides = {
        "ours": (ours, arms.our_data),
        "ours_again": (again, arms.our_data),
        "transformers": (theirs, arms.their_data),
    }
    losses = {arm: [float(step(data)) for _ in range(arms.compared_steps)] for arm, (step, data) in sides.items()}
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["ours"], losses["transformers"], strict=True))
    assert apart < TOLERANCE, f"{name}: losses differ by {apart}: {losses}"
    timings = measure({arm: partial(step, data) for arm, (step, data) in sides.items()}, rounds)
    aa, speed = ratio(timings["ours"], timings["ours_again"]), ratio(timings["transformers"], timings["ours"])
    ms = {arm: round(1e3 * float(np.median([run.cpu_s for run in runs])), 1) for arm, runs in timings.items()}
    held = "aim reached" if speed.low >= AIM else "holds" if speed.low >= MUST else "MISSED"
    doubt = "" if is_conclusive(aa) else " (inconclusive: wider than 3%)"
    print(f"{name:14s} ours over transformers {speed}  must {MUST}, aim {AIM}: {held}  A/A {aa}{doubt}  ms {ms}")
    return {"speed": str(speed), "aa": str(aa), "conclusive": is_conclusive(aa), "ms": ms, "loss_difference": apart}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="seven rounds of each case")
    parser.add_argument("--only", nargs="+", choices=CASES, help="some of the cases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 7 if options.quick else 25
    figures = {name: time_case(name, CASES[name](), rounds) for name in options.only or CASES}
    print_row("family step", {"unit": "ms of CPU a step", "cases": figures}, ("torch", "transformers", "peft"))


if __name__ == "__main__":
    main()
