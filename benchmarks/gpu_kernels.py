"""Arms of the GPU campaign about single kernels: the machine's ceilings, the loss, attention, FP8, a profile."""

import math
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend

from benchmarks.gpu_bench import Bench, installed_version
from benchmarks.gpu_peers import (
    MicroBatches,
    Step,
    Weights,
    Work,
    build_nanogpt,
    build_ours,
    draw_weights,
    plan_model,
    random_steps,
)
from benchmarks.gpu_steps import TINY_STACK, Comparison, engine_of, gpt2_work, llama_model
from benchmarks.gpu_trace import summarize
from pretrain.config.engine import EngineConfig
from pretrain.errors import ConfigError
from pretrain.model.backends import build_backend
from pretrain.model.backends.backend import AttentionNeeds, MaskSize
from pretrain.model.build import convert_to_fp8
from pretrain.objective.loss import linear_cross_entropy
from pretrain.plan.attention_table import KernelChoice
from pretrain.plan.cluster import Cluster
from pretrain.plan.fp8 import time_product
from pretrain.types import AttentionMask

BF16 = torch.bfloat16
OPTIONAL = {
    "liger-kernel": "liger_kernel",
    "cut-cross-entropy": "cut_cross_entropy",
    "flash-attn": "flash_attn",
    "transformer-engine": "transformer_engine",
    "torchao": "torchao",
}
"""Packages that change what can be measured, and their modules."""


def probe(bench: Bench) -> None:
    """Measures a copy and bf16 products, and asks for the choice of SDPA."""
    num_bytes = bench.pick(2**30, 2**16)
    with bench.case("copy", {"bytes": num_bytes}):
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=bench.device)
        target = torch.ones_like(source)
        figures = bench.measure(partial(target.copy_, source), 20)
        speed = 2 * num_bytes / (figures["ms"]["median"] / 1e3)
        bench.write("copy", {"bytes": num_bytes}, **figures, value=f"{speed / 1e9:.1f} GB/s, read and written")
    for width in bench.pick((2048, 4096, 8192), (64,)):
        shape = {"m": width, "n": width, "k": width}
        with bench.case(f"product {width}", shape):
            # Random values: a product of zeros draws less power, and is faster.
            left, right = (torch.randn(width, width, device=bench.device, dtype=BF16) for _ in range(2))
            figures = bench.measure(partial(torch.mm, left, right), 20)
            speed = 2 * width**3 / (figures["ms"]["median"] / 1e3)
            share = bench.gpu and round(speed / bench.gpu.flops, 3)
            bench.write(f"product {width}", shape, **figures, value=f"{speed / 1e12:.1f} TFLOP/s", share_of_peak=share)
    with bench.case("SDPA's choice", {}):
        packages = {name: installed_version(name, module) for name, module in OPTIONAL.items()}
        bench.write("SDPA's choice", {}, value=sdpa_choices(bench), packages=packages)


def sdpa_choices(bench: Bench) -> dict[str, str]:
    """Returns the kernel that torch chooses for each dtype, mask and grouping."""
    found = {}
    for dtype, kv_heads, masked in product((BF16, torch.float32), (8, 2), (False, True)):
        q, k, v = (
            torch.randn(2, heads, 128, 64, device=bench.device, dtype=dtype) for heads in (8, kv_heads, kv_heads)
        )
        mask = torch.ones(128, 128, dtype=torch.bool, device=bench.device).tril() if masked else None
        chosen = torch._fused_sdp_choice(q, k, v, mask, 0.0, not masked, enable_gqa=kv_heads < 8)
        name = f"{dtype}, {'grouped' if kv_heads < 8 else 'alike'}, {'mask' if masked else 'causal'}"
        found[name.removeprefix("torch.")] = SDPBackend(chosen).name
    return found


class HeadInputs(NamedTuple):
    """Inputs of the loss; the first two want gradients."""

    hidden_PD: Tensor
    weight_VD: Tensor
    targets_P: Tensor


def _plain(inputs: HeadInputs) -> Tensor:
    logits_PV = functional.linear(inputs.hidden_PD, inputs.weight_VD)
    return functional.cross_entropy(logits_PV.float(), inputs.targets_P)


def _chunked(inputs: HeadInputs, compiled: bool, chunk_logits: int) -> Tensor:
    form: dict[str, Any] = {"compiled": compiled, "chunk_logits": chunk_logits}
    output = linear_cross_entropy(*inputs, vocab_size=len(inputs.weight_VD), **form)
    return output.loss_sum / len(inputs.targets_P)


def _liger(inputs: HeadInputs) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(inputs.weight_VD, inputs.hidden_PD, inputs.targets_P)


def _cut(inputs: HeadInputs) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(inputs.hidden_PD, inputs.weight_VD, inputs.targets_P)


LOSS_PEERS = {"liger-kernel": _liger, "cut-cross-entropy": _cut}
"""Mean loss of a linear head by other packages, with their defaults: Liger sums the weight's gradient in its dtype, and
Cut Cross-Entropy drops gradients of logits below a 32nd of the dtype's epsilon."""


def loss_of_peer(package: str, inputs: HeadInputs) -> Tensor:
    """Returns the mean loss of one of `LOSS_PEERS`. Raises: ConfigError: It cannot run here."""
    if inputs.hidden_PD.device.type != "cuda":
        raise ConfigError(f"{package} is skipped: its kernels need a GPU", fix="run the arm on one")
    if installed_version(package, OPTIONAL[package]) is None:
        raise ConfigError(f"{package} is skipped: it is not installed", fix="install the wheels of --carry")
    return LOSS_PEERS[package](inputs)


def _loss_forms() -> dict[str, Callable[[HeadInputs], Tensor]]:
    forms: dict[str, Callable[[HeadInputs], Tensor]] = {"materialised": _plain}
    for power, compiled in product((26, 28, 32), (False, True)):
        size = "at once" if power == 32 else f"2^{power}"
        name = f"ours, {size}{', compiled' if compiled else ''}"
        forms[name] = partial(_chunked, compiled=compiled, chunk_logits=2**power)
    return forms | {package: partial(loss_of_peer, package) for package in LOSS_PEERS}


def loss(bench: Bench) -> None:
    """Times forward and backward of the loss of a linear head in bf16, each compared with materialised logits."""
    tokens, width = bench.pick((16_384, 2048), (64, 32))
    for vocab_size in bench.pick((32_000, 50_304, 128_256), (96,)):
        generator = torch.Generator(bench.device).manual_seed(0)
        draw = partial(torch.randn, device=bench.device, dtype=BF16, generator=generator)
        weight_VD = (draw(vocab_size, width) * width**-0.5).requires_grad_()
        targets_P = torch.randint(vocab_size, (tokens,), device=bench.device, generator=generator)
        inputs = HeadInputs(draw(tokens, width).requires_grad_(), weight_VD, targets_P)
        expected, *references = _with_gradients(_plain, inputs)
        for name, form in _loss_forms().items():
            shape = {"tokens": tokens, "width": width, "vocab_size": vocab_size}
            case = f"{name}, V={vocab_size}"
            with bench.case(case, shape):
                found, *gradients = _with_gradients(form, inputs)
                apart = abs(float(found) - float(expected))
                assert apart < 1e-2, f"the loss differs by {apart}"
                pairs = zip(gradients, references, strict=True)
                figures: dict[str, Any] = {"gradient_differences": [float((x - y).norm() / y.norm()) for x, y in pairs]}
                del gradients, pairs
                figures |= bench.measure(partial(_with_gradients, form, inputs), 10)
                speed = 6 * tokens * vocab_size * width / (figures["ms"]["median"] / 1e3)
                share = bench.gpu and round(speed / bench.gpu.flops, 3)
                bench.write(case, shape, **figures, share_of_peak=share, loss_difference=apart)


def _with_gradients(function: Callable[[HeadInputs], Tensor], inputs: HeadInputs) -> tuple[Tensor, ...]:
    """Returns the loss, and the gradients of hidden states and weight."""
    mean = function(inputs)
    return mean.detach(), *torch.autograd.grad(mean, (inputs.hidden_PD, inputs.weight_VD))


BACKENDS = {"sdpa": "cudnn", "sdpa without cuDNN": "flash", "varlen": "varlen", "flex": "flex"}
"""Kernel that `pretrain/plan/attention_table.py` has for a backend."""


def attention(bench: Bench) -> None:
    """Times forward and backward of each backend in bf16, causal, with one document a row and with several.

    The last row has the entries of this GPU for `pretrain/plan/attention_table.py`.
    """
    tokens = bench.pick(32_768, 128)
    ms: dict[tuple[bool, int, str], list[float]] = {}
    for length in bench.pick((512, 2048, 8192, 65_536), (32, 64)):
        for heads, kv_heads, head_width in bench.pick(((32, 4, 64), (16, 16, 128)), ((2, 1, 16),)):
            shape = {"rows": max(1, tokens // length), "T": length}
            shape |= {"heads": heads, "kv_heads": kv_heads, "width": head_width}
            for packed, (name, kernel) in product((False, True), BACKENDS.items()):
                case = f"{name}, {'packed' if packed else 'dense'}, T={length}, H={head_width}"
                with bench.case(case, shape):
                    figures = _time_attention(bench, name.split()[0], shape, packed, cudnn="without" not in name)
                    ms.setdefault((packed, length, kernel), []).append(figures["ms"]["median"])
                    bench.write(case, shape, **figures)
    bench.write("table", {}, value=table_of(ms))


def table_of(ms: dict[tuple[bool, int, str], list[float]]) -> list[KernelChoice]:
    """Returns the fastest kernel of each packing and length, over all shapes of heads.

    A kernel that refused a shape, and for packed rows those with a mask tensor, are none.
    """
    shapes = max(map(len, ms.values()), default=0)
    speeds: dict[tuple[bool, int], dict[str, float]] = {}
    for (packed, keys, kernel), times in ms.items():
        if len(times) == shapes and packed == (kernel in ("varlen", "flex")):
            speeds.setdefault((packed, keys), {})[kernel] = math.prod(times)
    return [KernelChoice(*key, min(each, key=lambda name: each[name]), "attention") for key, each in speeds.items()]


def _time_attention(bench: Bench, backend: str, shape: dict[str, int], packed: bool, cudnn: bool) -> dict[str, Any]:
    rows, length, width = shape["rows"], shape["T"], shape["width"]
    draw = partial(torch.randn, device=bench.device, dtype=BF16)
    q = draw(rows, length, shape["heads"], width).requires_grad_()
    k, v = (draw(rows, length, shape["kv_heads"], width).requires_grad_() for _ in range(2))
    grad = torch.randn_like(q)
    on_host = AttentionMask(causal=True, documents_BT=_documents(rows, length) if packed else None)
    documents_BT = None if on_host.documents_BT is None else on_host.documents_BT.to(bench.device)
    # As a batch of the loader has them: read on the host, without a wait for the device.
    mask = AttentionMask(causal=True, documents_BT=documents_BT, on_host=on_host)
    attends = build_backend(backend, AttentionNeeds(bench.device, BF16, width))
    size = MaskSize(rows, length, length, bench.device)
    # No decorator of torch restores this switch.
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        preparing = bench.measure(partial(attends.prepare, mask, size), 10)
        prepared = attends.prepare(mask, size)

        def step() -> tuple[Tensor, ...]:
            return torch.autograd.grad(attends.attend(q, k, v, prepared), (q, k, v), grad)

        figures = bench.measure(step, 20)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    pairs = rows * length**2
    if documents_BT is not None:
        pairs = int(sum((documents_BT == number).sum(1).square().sum() for number in documents_BT.unique()))
    # Scores and mixing forward, twice that backward; all pairs of a document counted, masked or not.
    speed = 3 * 4 * pairs * shape["heads"] * width / (figures["ms"]["median"] / 1e3)
    return {**figures, "prepare_host_ms": preparing["host_ms"], "value": f"{speed / 1e12:.1f} TFLOP/s"}


def _documents(rows: int, length: int) -> Tensor:
    """Draws rows of documents whose lengths vary, a sixth of a row on average, int32 [B, T]."""
    starts = np.random.default_rng(0).random((rows, length)) < 6 / length
    return torch.from_numpy(np.cumsum(starts, axis=1).astype(np.int32))


RECIPES = ("tensorwise", "rowwise")
FP8_SHAPES = (
    (1024, 2048, 1024),
    (16_384, 2048, 2048),
    (16_384, 2048, 11_264),
    (8192, 4096, 28_672),
    (4096, 8192, 16_384),
    (16_384, 2048, 32_000),
    (32_768, 768, 50_304),
)
"""M, K, N: torchao's two examples, two matrices of LLaMA 1.1B at 16,384 tokens, one of LLaMA-3 8B, and the heads of
LLaMA 1.1B and GPT-2."""


def fp8(bench: Bench) -> None:
    """Times products with both gradients in bf16 and FP8, compiled, then steps, also at ZeRO 3."""
    for m, k, n in bench.pick(FP8_SHAPES, ((32, 64, 96),)):
        _fp8_product(bench, m, k, n)
    length, rows = bench.pick((2048, 16), (32, 4))
    llama = Work(llama_model(bench, length), length, rows)
    wide = bench.pick({"layers": 4}, TINY_STACK)
    model = plan_model("llama3-8b", bench.pick(32_000, 128), stack=wide, max_seq_len=length)
    full = {"activation_checkpointing": "full"}
    _fp8_step(bench, "1.1B", llama, partial(engine_of, bench, 1), must=1.15, aim=1.25)
    _fp8_step(bench, "8B's blocks", Work(model, length, rows // 2), partial(engine_of, bench, 1), must=1.25, aim=1.4)
    _fp8_step(bench, "1.1B, ZeRO 3", llama, partial(engine_of, bench, 3, **full), must=1.05, aim=1.15)


def _fp8_step(
    bench: Bench, name: str, work: Work, engine: Callable[..., EngineConfig], must: float, aim: float
) -> None:
    weights = draw_weights(work.model, bench.device)
    found = Comparison(bench, work, random_steps(work, bench.device, count=2), timed_steps=6)

    def build(config: EngineConfig) -> Step:
        return build_ours(work, weights, config)[0]

    first, again = f"{name}, bf16", f"{name}, bf16 again"
    for case, recipe in ((first, "off"), *((f"{name}, {recipe}", recipe) for recipe in RECIPES), (again, "off")):
        config = engine(fp8=recipe)
        found.run(case, partial(build, config), config)
    for recipe in RECIPES:
        bounds = ({first: must}, {first: aim}) if recipe == "tensorwise" else ({}, {})
        found.judge(f"{name}, {recipe}", again, *bounds)


def _fp8_product(bench: Bench, m: int, k: int, n: int) -> None:
    shape = {"m": m, "k": k, "n": n}
    x_MK = torch.randn(m, k, device=bench.device, dtype=BF16, requires_grad=True)
    grad_MN = torch.randn(m, n, device=bench.device, dtype=BF16)
    weight_NK = nn.Parameter(torch.randn(n, k, device=bench.device, dtype=BF16) * k**-0.5)
    expected_MN = functional.linear(x_MK, weight_NK).detach()
    ms: dict[str, float] = {}
    for name in ("bf16", *RECIPES):
        with bench.case(f"{name}, {m} x {k} x {n}", shape):
            layer = nn.Sequential(nn.Linear(k, n, bias=False, device="meta"))
            layer[0].weight = weight_NK
            if name != "bf16":
                convert_to_fp8(layer, name, bench.device)
            product = torch.compile(layer)
            apart = float((product(x_MK).detach() - expected_MN).norm() / expected_MN.norm())
            # Factors of 4 bits are off by up to a sixteenth each, and their sums by less.
            assert apart < 0.1, f"the product differs by {apart}"

            def step(product: Callable[[Tensor], Tensor] = product) -> tuple[Tensor, ...]:
                return torch.autograd.grad(product(x_MK), (x_MK, weight_NK), grad_MN)

            figures = bench.measure(step, 20)
            ms[name] = figures["ms"]["median"]
            figures["value"] = f"{6 * m * k * n / (ms[name] / 1e3) / 1e12:.1f} TFLOP/s"
            if name != "bf16" and "bf16" in ms:
                figures["speedup"] = round(ms["bf16"] / ms[name], 4)
            if name != "bf16" and bench.gpu is not None:
                bf16_s, fp8_s = time_product(m, k, n, name, Cluster(1, 1, bench.gpu), min(k, n))
                figures["planned_speedup"] = round(bf16_s / fp8_s, 4)
            bench.write(f"{name}, {m} x {k} x {n}", shape, **figures, output_difference=apart)


def profile(bench: Bench) -> None:
    """Traces two steps of LLaMA 1.1B, and of GPT-2 beside nanoGPT; tables of kernels and traces are beside the rows."""
    rows, length = bench.pick((16, 2048), (2, 32))
    llama = Work(llama_model(bench, length), length, rows)
    small = gpt2_work(bench)
    cases: dict[str, tuple[Work, Callable[[Weights], Step]]] = {
        "llama": (llama, lambda weights: build_ours(llama, weights, engine_of(bench, 1))[0]),
        "gpt2": (small, lambda weights: build_ours(small, weights, engine_of(bench, 1))[0]),
        "gpt2-one-process": (small, lambda weights: build_ours(small, weights, engine_of(bench, None))[0]),
    }
    if bench.nanogpt is not None:
        peer = partial(build_nanogpt, device=bench.device, source=bench.nanogpt, compiled=True)
        cases["nanogpt"] = (small, lambda weights: peer(small, weights))
    for name, (work, build) in cases.items():
        with bench.case(name, work.shape), closing(build(draw_weights(work.model, bench.device))) as step:
            bench.write(name, work.shape, **_trace(bench, name, step, random_steps(work, bench.device)[0]))


TRACED_STEPS = 2


def _trace(bench: Bench, name: str, step: Step, data: MicroBatches) -> dict[str, Any]:
    """Times steps, then traces some: their time by category, idle time, and the share of each kernel.

    The device alone is traced first: what records the host's operators too makes the host slower.
    """
    figures = bench.measure(partial(step, data), 6)
    host = [torch.profiler.ProfilerActivity.CPU]
    device = bench.pick([torch.profiler.ProfilerActivity.CUDA], host)
    _record(bench, step, data, device).export_chrome_trace(str(bench.out / f"profile-{name}-device.json.gz"))
    summary = summarize(bench.out / f"profile-{name}-device.json.gz", TRACED_STEPS)
    key = "self_cpu_time_total" if bench.rehearse else "self_device_time_total"
    traced = _record(bench, step, data, [*host, *device])
    averages = traced.key_averages()
    (bench.out / f"profile-{name}.txt").write_text(averages.table(sort_by=key, row_limit=60, max_name_column_width=90))
    trace = bench.out / f"profile-{name}.json.gz"
    traced.export_chrome_trace(str(trace))
    total = sum(getattr(entry, key) for entry in averages) or 1.0  # 0 on the dry CUDA runtime
    entries = sorted(averages, key=lambda entry: -getattr(entry, key))[:15]
    shares = {entry.key[:100]: round(getattr(entry, key) / total, 4) for entry in entries}
    return {**figures, "value": summary, "shares": shares, "trace_bytes": trace.stat().st_size}


def _record(bench: Bench, step: Step, data: MicroBatches, activities: list[Any]) -> torch.profiler.profile:
    """Returns the profile of some steps."""
    bench.synchronize()
    with torch.profiler.profile(activities=list(dict.fromkeys(activities))) as traced:
        for _ in range(TRACED_STEPS):
            step(data)
        bench.synchronize()
    return traced
