"""Time of a training step by the documents of its rows: ours against ours, fp32, one thread, in one run.

    python -m benchmarks.short_documents [--quick] [--documents N ...]

Rows of the same random tokens, cut into equal documents: 64 of 32 tokens a row, the reference, up to 1,024 of two.
Models of 2 layers and a width of 64, so that attention weighs. Kernel calls of attention in a layer are counted.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

from benchmarks.common import is_conclusive, measure, print_row, ratio
from benchmarks.gpu_peers import MicroBatches, Step, Work, build_bare, draw_weights, plan_model
from pretrain.model.backends import build_backend
from pretrain.model.backends.backend import AttentionNeeds, MaskSize
from pretrain.model.backends.sdpa import Calls
from pretrain.types import AttentionMask, Batch, StackRows

CPU = torch.device("cpu")
ROWS, LENGTH, VOCAB = 4, 2048, 512
FEW = 64
MUST, AIM = 1.1, 1.0
STACK = {"layers": 2, "width": 64, "heads": 4, "ff_width": 192}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LLaMA": ("llama2-7b", {}),
    "BERT": ("bert-base", {"dropout": 0.0}),
    "T5": ("t5-v1.1-base", {"head_width": 16}),
}


def build_step(name: str) -> Step:
    """Builds our model, loss and optimizer."""
    preset, more = MODELS[name]
    model = plan_model(preset, VOCAB, stack={**STACK, **more}, max_seq_len=LENGTH)
    work = Work(model, LENGTH, ROWS, precision="fp32", source_len=LENGTH if name == "T5" else None)
    return build_bare(work, draw_weights(model, CPU), CPU, compiled=False)[0]


def cut_rows(name: str, documents: int) -> MicroBatches:
    """Draws rows of so many documents each; of T5, sources and targets."""
    generator = torch.Generator().manual_seed(0)
    ids, targets, sources = torch.randint(1, VOCAB, (3, ROWS, LENGTH), generator=generator)
    places = torch.arange(LENGTH)
    length = LENGTH // documents
    packed = {
        "positions_BT": (places % length).expand(ROWS, -1).contiguous(),
        "documents_BT": (places // length).int().expand(ROWS, -1).contiguous(),
    }
    source = StackRows(sources, **packed) if name == "T5" else None
    return MicroBatches([Batch(ids, targets, source=source, **packed)], [ids.numel()])


def count_calls(documents: int) -> int:
    """Returns the kernel calls of causal attention in a layer."""
    mask = AttentionMask(causal=True, documents_BT=cut_rows("LLaMA", documents).batches[0].documents_BT)
    backend = build_backend("sdpa", AttentionNeeds(CPU))
    direct = backend.prepare(mask, MaskSize(ROWS, LENGTH, LENGTH, CPU)).direct
    return len(direct.query_lengths) if isinstance(direct, Calls) else 1


def time_model(name: str, counts: list[int], rounds: int) -> dict[str, Any]:
    """Times the steps of a model; prints and returns its figures."""
    step = build_step(name)
    arms: dict[str, Callable[[], Any]] = {str(n): partial(step, cut_rows(name, n)) for n in counts}
    arms["again"] = arms[str(FEW)]
    for arm in arms.values():
        arm()
    timings = measure(arms, rounds)
    few = timings[str(FEW)]
    aa = ratio(timings["again"], few)
    us = {
        arm: round(1e6 * float(np.median([run.cpu_s for run in runs])) / ROWS / LENGTH, 1)
        for arm, runs in timings.items()
    }
    ratios = {}
    for number in counts:
        cost = ratio(timings[str(number)], few)
        held = "aim reached" if cost.median <= AIM else "holds" if cost.high <= MUST else "MISSED"
        verdict = f"must {MUST}, aim {AIM}: {held}" if number > FEW else ""
        print(f"{name:6s} {number:5d} documents a row over {FEW}: {cost}  {us[str(number)]} us a token  {verdict}")
        ratios[str(number)] = str(cost)
    print(f"{name:6s} A/A {aa}{'' if is_conclusive(aa) else ' (inconclusive: wider than 3%)'}")
    return {"us_a_token": us, "ratios": ratios, "aa": str(aa), "conclusive": is_conclusive(aa)}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="five rounds of the decoder")
    parser.add_argument("--documents", type=int, nargs="+", default=[16, 256, 1024], help="documents of a row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = sorted({FEW, *options.documents})
    models = ["LLaMA"] if options.quick else list(MODELS)
    figures = {name: time_model(name, counts, 5 if options.quick else 11) for name in models}
    calls = {number: count_calls(number) for number in counts}
    print(f"kernel calls in a layer: {calls}")
    print_row("short documents", {"unit": "us of CPU a token", "models": figures, "calls": calls}, ("torch",))


if __name__ == "__main__":
    main()
