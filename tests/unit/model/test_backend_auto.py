"""`auto`: what it chooses for which mask, and what it says about it."""

import logging

import pytest
import torch

from pretrain.model.backends import auto, build_backend
from pretrain.model.backends.auto import AutoAttention
from pretrain.model.backends.backend import AttentionNeeds, DistanceBias, MaskSize
from pretrain.plan import attention_table
from pretrain.plan.attention_table import KernelChoice, fastest_kernel
from pretrain.types import AttentionMask
from tests.unit.model.masks import CPU, MASKS, NEEDS, RUNS

CUDA = torch.device("cuda")


@pytest.fixture
def said(caplog):
    """The log, as if nothing had been said before."""
    auto._log_choice.cache_clear()
    caplog.set_level(logging.DEBUG)
    return caplog


class Recorder:
    """Stands in for a backend: preparing a mask for a GPU needs one."""

    def __init__(self, backend):
        self.backend = backend

    def prepare(self, mask, size, bias=None, **options):
        if "cudnn" in options:
            return options["cudnn"]
        if type(self.backend).__name__ == "VarlenAttention":
            # Plans on the host: the device is where the result would go.
            return self.backend.prepare(mask, size._replace(device=CPU), bias)
        return None


def prepared(needs, name, bias=None):
    """The backend that is chosen on a GPU for a mask, and whether cuDNN may serve it."""
    backend = AutoAttention(needs)
    backend.sdpa = Recorder(backend.sdpa)
    backend.others = {name: Recorder(other) for name, other in backend.others.items()}
    mask, queries, keys = MASKS[name]
    return backend.prepare(mask, MaskSize(3, queries, keys, CUDA), bias)


def chosen(needs, name, bias=None):
    """The name of this backend."""
    return prepared(needs, name, bias).name


@pytest.mark.parametrize("name", MASKS)
def test_a_cpu_gets_sdpa_for_every_mask(name):
    mask, queries, keys = MASKS[name]
    prepared = build_backend("auto", NEEDS).prepare(mask, MaskSize(3, queries, keys, CPU))
    assert prepared.name == "sdpa"


def test_a_gpu_gets_the_backend_that_needs_no_mask_tensor():
    half, single = (AttentionNeeds(CUDA, dtype) for dtype in (torch.bfloat16, torch.float32))
    by_mask = {
        "dense causal": "sdpa",
        "padded causal": "sdpa",
        "one step with a window": "sdpa",
        "one step after padding": "sdpa",
        "packed causal": "varlen",
        "window": "varlen",
        "padded": "varlen",
        "packed sources": "varlen",
        "prefix": "flex",
        "documents in bits": "flex",
    }
    assert {name: chosen(half, name) for name in by_mask} == by_mask
    assert {chosen(single, name) for name, backend in by_mask.items() if backend != "sdpa"} == {"flex"}


def test_the_table_of_kernels_decides_by_packing_and_length(monkeypatch):
    needs = AttentionNeeds(CUDA, torch.bfloat16)
    assert prepared(needs, "dense causal").prepared is True
    table = [KernelChoice(False, 1, "cudnn", ""), KernelChoice(True, 1, "varlen", "")]
    table += [KernelChoice(False, 8, "flash", "here"), KernelChoice(True, 8, "flex", "here")]
    monkeypatch.setattr(attention_table, "KERNELS", table)
    assert [fastest_kernel(packed, keys) for packed in (False, True) for keys in (7, 8)] == [
        *("cudnn", "flash"),
        *("varlen", "flex"),
    ]
    assert prepared(needs, "dense causal").prepared is False
    assert [chosen(needs, name) for name in ("packed causal", "padded", "window")] == ["flex", "flex", "varlen"]


def test_a_learned_bias_gets_flex_unless_runs_must_repeat_to_the_bit(said):
    needs, bias = AttentionNeeds(CUDA, torch.bfloat16, bias=True), DistanceBias(torch.zeros(4, 15, requires_grad=True))
    assert chosen(needs, "dense causal", bias) == "flex"
    torch.use_deterministic_algorithms(True)
    try:
        backend = AutoAttention(needs)
        backend.sdpa = Recorder(backend.sdpa)
        prepared = backend.prepare(MASKS["dense causal"][0], MaskSize(3, 8, 8, CUDA), bias)
    finally:
        torch.use_deterministic_algorithms(False)
    assert prepared.name == "sdpa"
    assert "flex sums the gradient of a bias in any order" in said.messages[-1]


def test_dropout_with_documents_gets_sdpa_and_the_reasons(said):
    assert chosen(AttentionNeeds(CUDA, torch.bfloat16, dropout=True), "packed causal") == "sdpa"
    assert said.messages == [
        "attention backend: sdpa for a causal mask with documents: attention backend varlen has no dropout of "
        "attention weights; attention backend flex has no dropout of attention weights"
    ]


def test_each_choice_is_logged_once(said):
    backend = build_backend("auto", NEEDS)
    size = MaskSize(3, 8, 8, CPU)
    for _ in range(2):
        backend.prepare(AttentionMask(causal=True), size)
        backend.prepare(AttentionMask(causal=False, documents_BT=RUNS, window=4), size)
    reason = "its memory is linear in length for every mask on cpu"
    assert said.messages == [
        f"attention backend: sdpa for a causal mask: {reason}",
        f"attention backend: sdpa for attention of all to all with documents, a window of 4: {reason}",
    ]
