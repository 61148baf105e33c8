"""Time of generating tokens on a CPU: ours against `generate` of transformers, fp32, one thread, in one run.

    python -m benchmarks.decode [--quick] [--only CASE ...]        (needs transformers beside the core install)

A LLaMA of 4 layers and a width of 256 with drawn weights, which nothing ends. Greedy and beam tokens of both are
compared first: where one differs, no timing counts. Drawn tokens cannot be equal, as the generators differ.

    ours           `generate` and `beam_search`, as `pretrain generate` calls them
    transformers   `generate` with its dynamic cache and SDPA
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import is_conclusive, measure, print_row, ratio
from benchmarks.gpu_peers import Weights, draw_weights, hugging_face_model
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig, StackConfig
from pretrain.generation.beam import Beams, beam_search
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import Sampling, generate
from pretrain.model import Transformer, build_model

CPU = torch.device("cpu")
VOCAB = 8192
STACK = StackConfig(layers=4, width=256, heads=8, kv_heads=4, ff_width=688, norm_eps=1e-6)
MODEL = ModelConfig(decoder=STACK, vocab_size=VOCAB, max_seq_len=2048)


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of so many tokens, so many new ones, and the method; must and aim are of ours over transformers."""

    rows: int
    prompt: int
    new: int
    beams: int = 1
    top_p: float = 1.0
    must: float = 1.05
    aim: float = 1.3


CASES = {
    "greedy, 1 row": Case(1, 16, 48),
    "greedy, 8 rows": Case(8, 16, 48),
    "greedy, context 1,024": Case(1, 1024, 32),
    "beam 4": Case(1, 16, 48, beams=4, must=1.1, aim=1.5),
    "beam 4, 8 rows": Case(8, 16, 24, beams=4, must=1.1, aim=1.5),
    "top-p 0.9": Case(1, 16, 48, top_p=0.9, must=1.1, aim=1.5),
    "top-p 0.9, 8 rows": Case(8, 16, 48, top_p=0.9, must=1.1, aim=1.5),
}

Arm = Callable[[], list[list[int]]]
"""Returns the new tokens of each row."""


def build_ours() -> tuple[Transformer, Weights]:
    """Returns our model, and its weights to lend."""
    weights = draw_weights(MODEL, CPU, sensitive=True)
    model = build_model(MODEL, PLAIN_ENGINE, CPU).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model, weights


def our_arm(model: Transformer, case: Case, prompts: list[list[int]]) -> Arm:
    constraints = Constraints(max_new_tokens=case.new)
    if case.beams > 1:
        beams = Beams(case.beams)
        return lambda: [row[0].tokens for row in beam_search(model, prompts, constraints, beams)]
    sampling = Sampling(temperature=0.0 if case.top_p == 1 else 1.0, top_p=case.top_p)
    return lambda: [row.tokens for row in generate(model, prompts, constraints, sampling)]


def their_arm(model: nn.Module, case: Case, prompts: Tensor) -> Arm:
    options: dict[str, Any] = {"num_beams": case.beams, "do_sample": case.top_p < 1}
    if case.top_p < 1:
        options |= {"top_p": case.top_p, "top_k": 0, "temperature": 1.0}
    mask = torch.ones_like(prompts)
    call = partial(model.generate, prompts, attention_mask=mask, max_new_tokens=case.new, use_cache=True, **options)
    return lambda: call()[:, case.prompt :].tolist()


def time_case(name: str, case: Case, ours: Transformer, theirs: nn.Module, rounds: int) -> dict[str, Any]:
    """Compares the tokens of a case, times it, prints and returns its figures."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, VOCAB, (case.rows, case.prompt), generator=generator)
    arms = {
        "ours": our_arm(ours, case, prompts.tolist()),
        "ours_again": our_arm(ours, case, prompts.tolist()),
        "transformers": their_arm(theirs, case, prompts),
    }
    tokens = {arm: call() for arm, call in arms.items()}
    assert all(len(row) == case.new for rows in tokens.values() for row in rows), "a row ended early"
    assert tokens["ours"] == tokens["ours_again"]
    assert case.top_p < 1 or tokens["ours"] == tokens["transformers"], f"{name}: tokens differ"
    timings = measure(arms, rounds)
    aa, speed = ratio(timings["ours"], timings["ours_again"]), ratio(timings["transformers"], timings["ours"])
    count = case.rows * case.new
    medians = {arm: float(np.median([run.cpu_s for run in runs])) for arm, runs in timings.items()}
    per_second = {arm: round(count / median, 1) for arm, median in medians.items()}
    held = f"must {case.must}: {'holds' if speed.low >= case.must else 'MISSED'}, aim {case.aim}"
    doubt = "" if is_conclusive(aa) else " (inconclusive: wider than 3%)"
    print(f"{name:22s} ours over transformers {speed}  {held}  A/A {aa}{doubt}  tokens a CPU second {per_second}")
    return {"speed": str(speed), "aa": str(aa), "conclusive": is_conclusive(aa), "tokens_per_cpu_s": per_second}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="five rounds of each case")
    parser.add_argument("--only", nargs="+", choices=CASES, help="some of the cases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ours, weights = build_ours()
    theirs: Any = hugging_face_model(MODEL, weights, CPU).eval()
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    rounds = 5 if options.quick else 15
    figures = {}
    for name in options.only or CASES:
        figures[name] = time_case(name, CASES[name], ours, theirs, rounds)
    print_row("decode", {"unit": "tokens a CPU second", "cases": figures}, ("torch", "transformers"))


if __name__ == "__main__":
    main()
