"""Arms of the GPU campaign about families: each trains on the GPU as it does on a CPU, by every backend.

The reference of a family is its tiny preset in our loop without an engine, on the CPU, eager, in the precision of the
case: from fp32 bf16 alone differs by up to 4e-3. On the GPU it
trains the same steps from the same weights, in one process of the engine. Rows are packed with documents where there is
one stack. FlexAttention in fp32 is compared with float64 by `pytest -m gpu tests/unit/model/test_backend_gpu.py`.
"""

from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_peers import (
    Step,
    Weights,
    Work,
    build_bare,
    build_ours,
    draw_weights,
    plan_model,
    random_steps,
)
from benchmarks.gpu_steps import Comparison, engine_of, with_documents
from pretrain.config.presets import PRESETS

FAMILIES = tuple(name for name, model in PRESETS.items() if name.endswith("-tiny") and "input" not in model)
"""Families of text; those of images have no documents, and so no backend of their own."""
UNCOMPILED = {"fp32": ("auto", "eager", "sdpa"), "bf16": ("auto", "eager", "sdpa", "varlen")}
COMPILED = {"bf16": ("auto, compiled", "flex")}
"""Backends by precision; those that a kernel is compiled for take ten times as long."""


def same_families(bench: Bench) -> None:
    """Compares the losses of every family on the GPU with those on the CPU: fp32 and bf16, each backend.

    The rehearsal has every backend for one family, and `auto` for the others.
    """
    _compare(bench, UNCOMPILED)


def compiled_families(bench: Bench) -> None:
    """Compares as `same_families` does what is compiled: blocks, and the kernel of `flex`."""
    _compare(bench, COMPILED)


def _compare(bench: Bench, backends: dict[str, tuple[str, ...]]) -> None:
    for preset in FAMILIES:
        family = _Family(bench, preset)
        for precision, names in backends.items():
            for name in bench.pick(names, names if preset == FAMILIES[0] else names[:1]):
                family.run(name, precision)


TOLERANCE = {"fp32": 1e-4, "bf16": 2e-3}
"""Largest difference of a loss, relative to it. A row without its documents, or with another row's source, differs by
2e-3 to 2e-2; by 4e-4 in T5, whose head is scaled down."""


class _Family:
    """A tiny model of a family, its rows on both devices, and the losses on the CPU."""

    def __init__(self, bench: Bench, preset: str) -> None:
        source = bench.pick(96, 24) if _shape(preset) == "encoder+decoder" else None
        length = bench.pick(128, 32)
        stack: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
        self._bench, self._preset = bench, preset
        vocab_size = bench.pick(512, 128)
        model = plan_model(preset, vocab_size, stack=stack)
        if experts := model.last_stack.experts:
            # Every token to all experts: in bf16 routers round their scores, and would choose others.
            every = {"top_k": experts.count, "top_groups": experts.groups}
            stack |= {"experts": experts.model_dump(exclude_unset=True) | every}
            model = plan_model(preset, vocab_size, stack=stack)
        self._work = Work(model, length, micro=bench.pick(8, 2), source_len=source, precision="fp32")
        self._weights: Weights = draw_weights(model, bench.device, sensitive=True)
        self._on_host = random_steps(self._work, torch.device("cpu"), count=2)
        if source is None:
            self._on_host = [with_documents(step) for step in self._on_host]
        self._found: dict[str, Comparison] = {}

    def _comparison(self, precision: str) -> Comparison:
        """Returns the comparison of a precision, which begins with the CPU."""
        if precision not in self._found:
            bench, work, cpu = self._bench, replace(self._work, precision=precision), torch.device("cpu")
            data = [step._replace(batches=[batch.to(bench.device) for batch in step.batches]) for step in self._on_host]
            found = Comparison(bench, work, data, timed_steps=0, tolerance=TOLERANCE)

            def build() -> Step:
                return build_bare(work, self._weights, cpu, compiled=False)[0]

            found.run(f"{self._preset}, CPU, {precision}", build, data=self._on_host)
            self._found[precision] = found
        return self._found[precision]

    def run(self, name: str, precision: str) -> None:
        """Trains by a backend; its row has the difference from the CPU."""
        backend, _, compiled = name.partition(", ")
        config = engine_of(self._bench, None, compiled=bool(compiled), precision=precision, attention=backend)
        found = self._comparison(precision)
        found.run(f"{self._preset}, {name}, {precision}", lambda: build_ours(found.work, self._weights, config)[0])


def _shape(preset: str) -> str:
    return plan_model(preset, 128).shape
