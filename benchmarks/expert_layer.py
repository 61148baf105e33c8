"""Tokens a CPU second of a layer of experts: ours against transformers', fp32, one thread, in one run.

    python -m benchmarks.expert_layer [--quick] [--only FAMILY ...]   (needs transformers beside the core install)

Forward and backward of one layer, router included, of shapes of released mixtures scaled down. All
arms have the same weights; outputs and gradients are compared first, or no timing counts.

    ours      the feed-forward layer that `pretrain train` builds
    hf        transformers' block with torch's grouped kernel, its default
    hf_eager  the same with a loop over the experts
"""

import argparse
import os
from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import Timing, is_conclusive, measure, print_row, ratio
from pretrain.config.model import ExpertsConfig, StackConfig
from pretrain.model.parts.experts import MixtureOfExperts

MUST = 1.5
PEERS = ("hf", "hf_eager")
TOLERANCE = 1e-5
"""Largest difference of outputs and gradients, over the largest value: orders of sums."""


class Case(NamedTuple):
    """A layer, and the tokens it is timed on."""

    family: str
    width: int
    ff_width: int
    experts: int
    top_k: int
    tokens: int
    rounds: int


# Experts 3.5 times as wide as the model, 2 of 8; half as wide, 8 of 64; 3/8, 8 of 128: a quarter and
# an eighth of the widths of Mixtral 8x7B, OLMoE 7B and Qwen 3 30B.
CASES = [
    Case("mixtral", 512, 1792, 8, 2, 2048, 12),
    Case("olmoe", 512, 256, 64, 8, 2048, 12),
    Case("qwen3_moe", 512, 192, 128, 8, 2048, 12),
    Case("mixtral", 256, 896, 8, 2, 1024, 24),
    Case("olmoe", 256, 128, 64, 8, 1024, 24),
    Case("qwen3_moe", 256, 96, 128, 8, 1024, 24),
]


def build_ours(case: Case) -> MixtureOfExperts:
    """Builds our layer with weights of a seed."""
    experts = ExpertsConfig(count=case.experts, top_k=case.top_k, width=case.ff_width, normalize=case.family != "olmoe")
    layer = MixtureOfExperts(StackConfig(layers=1, width=case.width, heads=4, ff_width=case.ff_width, experts=experts))
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    return layer


def build_hf(case: Case, ours: MixtureOfExperts, experts: str) -> nn.Module:
    """Builds the layer of transformers with the weights of ours; `experts` is their kernel."""
    import transformers
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": case.width, "num_experts_per_tok": case.top_k}
    config: Any
    block: type[nn.Module]
    if case.family == "mixtral":
        config = transformers.MixtralConfig(**sizes, intermediate_size=case.ff_width, num_local_experts=case.experts)
        block = MixtralSparseMoeBlock
    elif case.family == "olmoe":
        config = transformers.OlmoeConfig(**sizes, intermediate_size=case.ff_width, num_experts=case.experts)
        block = OlmoeSparseMoeBlock
    else:
        config = transformers.Qwen3MoeConfig(
            **sizes, moe_intermediate_size=case.ff_width, num_experts=case.experts, norm_topk_prob=True
        )
        block = Qwen3MoeSparseMoeBlock
    config._experts_implementation = experts
    layer = block(config)
    names = {"gate.weight": "router.weight"}
    names |= {"experts.gate_up_proj": "gate_up.weight", "experts.down_proj": "down.weight"}
    mine = dict(ours.named_parameters())
    layer.load_state_dict({name: mine[our].detach().clone() for name, our in names.items()})
    return layer


def build_step(layer: nn.Module, batches: list[Tensor]) -> Callable[[], list[Tensor]]:
    """Returns a forward and backward pass on the next batch; it returns output and gradients.

    Batches are [2, B, T, D]: the input and the gradient of the output. Each has other loads.
    """
    upcoming = cycle(batches)

    def step() -> list[Tensor]:
        x_BTD, grad_BTD = next(upcoming)
        given_BTD = x_BTD.clone().requires_grad_()
        found = layer(given_BTD)
        out_BTD = found[0] if isinstance(found, tuple) else found
        layer.zero_grad(set_to_none=True)
        out_BTD.backward(grad_BTD)
        grads = [parameter.grad for parameter in (given_BTD, *layer.parameters())]
        return [out_BTD.detach(), *sorted((g for g in grads if g is not None), key=lambda g: g.shape)]

    return step


def build_arms(case: Case) -> dict[str, Callable[[], list[Tensor]]]:
    """Builds all arms of a case on the same tokens."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, 4, case.tokens // 4, case.width)
    batches = [torch.randn(shape, generator=generator) for _ in range(6)]
    ours = build_ours(case)
    layers = {"ours": ours, "ours_again": build_ours(case)}
    layers |= {"hf": build_hf(case, ours, "grouped_mm"), "hf_eager": build_hf(case, ours, "eager")}
    return {name: build_step(layer, batches) for name, layer in layers.items()}


def check_same_work(arms: dict[str, Callable[[], list[Tensor]]]) -> float:
    """Returns the largest difference of an output or a gradient from ours, over the largest value."""
    expected = arms["ours"]()
    arms["ours_again"]()
    worst = 0.0
    for peer in PEERS:
        for found, wanted in zip(arms[peer](), expected, strict=True):
            worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    assert worst < TOLERANCE, f"results differ by {worst}: the arms do not do the same work"
    return worst


def report(case: Case, timings: dict[str, list[Timing]]) -> dict[str, Any]:
    """Prints one case and returns its figures."""
    aa = ratio(timings["ours"], timings["ours_again"])
    speed = {arm: round(case.tokens / float(np.median([run.cpu_s for run in runs]))) for arm, runs in timings.items()}
    ratios = {peer: ratio(timings[peer], timings["ours"]) for peer in PEERS}
    for peer, found in ratios.items():
        verdict = "holds" if found.low >= MUST else "MISSED"
        print(f"{case.family:10s} {case.width} ours over {peer:9s} {found}  must be {MUST}: {verdict}")
    quality = "" if is_conclusive(aa) else " (inconclusive: wider than 3%)"
    print(f"{case.family:10s} {case.width} A/A {aa}{quality}  tokens a CPU second {speed}")
    return {
        "aa": str(aa),
        "tokens_a_cpu_s": speed,
        "ratios": {peer: str(found) for peer, found in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a third of the rounds")
    families = sorted({case.family for case in CASES})
    parser.add_argument("--only", nargs="+", choices=families, default=families, metavar="FAMILY")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures, worst = {}, 0.0
    for case in CASES:
        if case.family not in options.only:
            continue
        arms = build_arms(case)
        worst = max(worst, check_same_work(arms))
        timings = measure(arms, case.rounds // 3 if options.quick else case.rounds)
        figures[f"{case.family}, {case.width}"] = report(case, timings)
    print_row("expert_layer", {"difference": worst, "cases": figures}, ("torch", "transformers"))


if __name__ == "__main__":
    main()
