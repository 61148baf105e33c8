"""Norms by layer are the same under every engine and ZeRO stage, on real gloo ranks."""

import math

import pytest

from tests.helpers.ranks import run_in_ranks

WORKER = "tests.integration.norms_workers:norms_of"
FP32 = [["ddp", 0, "fp32"], *(["deepspeed", stage, "fp32"] for stage in range(4))]
BF16 = [["deepspeed", stage, "bf16"] for stage in range(4)]
OFFLOADED = [["deepspeed", 2, "fp32", "adamw", "optimizer"], ["deepspeed", 3, "fp32", "adamw", "optimizer"]]


def check(found, cases, reference, rel):
    for (norm, layers), case in zip(found, cases, strict=True):
        squares = sum(value**2 for key, value in layers.items() if key.startswith("grad_norm/"))
        assert math.sqrt(squares) == pytest.approx(norm, rel=1e-6), case
        assert layers == {key: pytest.approx(value, rel=rel) for key, value in reference.items()}, case


def test_norms_by_layer_do_not_depend_on_how_the_weights_lie_on_the_ranks():
    cases = [FP32[0], FP32[3], FP32[4]]
    first, second = run_in_ranks(WORKER, 2, {"cases": cases})
    assert first == second, "all ranks hear the same"
    (_, reference), *_ = first
    assert set(reference) == {f"{kind}/{layer}" for kind in ("grad_norm", "update_norm")
                              for layer in ("embedding", "decoder_0", "decoder_1", "decoder")}  # fmt: skip
    assert min(reference.values()) > 0
    # fp32 sums in another order; a moment near zero turns a rounding into a part of its update
    check(first, cases, reference, rel=1e-3)


@pytest.mark.long
def test_norms_by_layer_are_told_at_every_stage_and_precision():
    cases = [*FP32, *OFFLOADED, *BF16]
    first, second = run_in_ranks(WORKER, 2, {"cases": cases})
    assert first == second
    reference = first[0][1]
    exact = len(FP32) + len(OFFLOADED)
    check(first[:exact], cases[:exact], reference, rel=1e-3)
    check(first[exact:], cases[exact:], reference, rel=0.05)  # bf16 keeps 8 bits of each product


@pytest.mark.long
def test_optimizers_over_whole_matrices_tell_gradients_only():
    cases = [[*case, kind] for case in (FP32[0], FP32[3]) for kind in ("muon", "adafactor")]
    first, _ = run_in_ranks(WORKER, 2, {"cases": cases})
    for _, layers in first:
        assert set(layers) == {f"grad_norm/{layer}" for layer in ("embedding", "decoder_0", "decoder_1", "decoder")}
        assert min(layers.values()) > 0
