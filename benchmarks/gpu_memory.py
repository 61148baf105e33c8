"""Arms of the GPU campaign about what fits: micro-batch, row and model, each beside `pretrain plan`."""

from bisect import bisect_right
from contextlib import closing
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_peers import Weights, Work, build_ours, draw_weights, plan_model, random_steps
from benchmarks.gpu_plan import MEMORY_ERROR, beside_plan, plan_gpu
from benchmarks.gpu_steps import TINY_STACK, engine_of, llama_model
from pretrain.config.engine import EngineConfig
from pretrain.plan.cluster import Cluster
from pretrain.plan.memory import largest_micro, memory_limit, rank_memory
from pretrain.plan.task import ParallelLayout


def memory(bench: Bench) -> None:
    """Doubles the micro-batch, then the row, until memory is full; each peak beside the plan."""
    length, most, longest = bench.pick((2048, 256, 2**17), (32, 4, 64))
    model = llama_model(bench, longest)
    weights = draw_weights(model, bench.device)
    micros = [Work(model, length, 2**power) for power in range(1, most.bit_length())]
    for checkpointing in ("none", "full"):
        config = engine_of(bench, 1, activation_checkpointing=checkpointing)
        _grow(bench, f"micro-batch, {checkpointing}", config, weights, micros)
        if bench.gpu is not None:
            fits = largest_micro(micros[0].task, config, Cluster(1, 1, bench.gpu), 4 * most)
            bench.write(f"largest micro-batch by plan, {checkpointing}", micros[0].shape, value=fits)
    rows = [Work(model, 2 * length * 2**power, 1) for power in range((longest // length).bit_length() - 1)]
    _grow(bench, "row, full", config, weights, rows)


def _grow(bench: Bench, name: str, config: EngineConfig, weights: Weights, sizes: list[Work]) -> None:
    """Takes steps of growing size with one engine, until memory is full."""
    if not bench.wants(name):
        return
    bench.free()
    with closing(build_ours(sizes[0], weights, config)[0]) as step:
        for work in sizes:
            (data,) = random_steps(work, bench.device)
            case = f"{name}, {work.micro} x {work.seq_len}"
            try:
                figures = bench.measure(partial(step, data), 1, warmup=1)
            except torch.OutOfMemoryError as error:
                bench.write(case, work.shape, **_refused(bench, work, config, error))
                return
            figures |= bench.rates(figures["ms"]["median"], work.tokens, work.flops, work.rows)
            bench.write(case, work.shape, **figures, **beside_plan(bench, work, config, figures))


def _refused(bench: Bench, work: Work, config: EngineConfig, error: torch.OutOfMemoryError) -> dict[str, Any]:
    """Returns the figures of a step that does not fit; `memory_held`: the plan is above 0.9 of the memory."""
    planned, gpu = beside_plan(bench, work, config, {}), plan_gpu(bench)
    if gpu is not None:
        limit = memory_limit(Cluster(1, 1, gpu))
        planned |= {"memory_limit": limit, "memory_held": planned["planned_bytes"] >= (1 - MEMORY_ERROR) * limit}
    return {"value": "out of memory", "reason": str(error)[:300], **planned}


def largest_model(bench: Bench) -> None:
    """Trains the largest model that fits by `pretrain plan`, then one that by it needs a tenth more than there is.

    Layers of LLaMA 7B under ZeRO 1 and full activation checkpointing. The first must fit, with a peak within 10% of the
    plan; the second must not.
    """
    gpu = plan_gpu(bench)
    length, most = bench.pick((2048, 200), (32, 3))
    config = engine_of(bench, 1, activation_checkpointing="full")
    if gpu is None:
        bench.write("layers by plan", {}, refused=f"{torch.cuda.get_device_name()} is not in pretrain/plan/gpus.py")
        return

    def work_of(layers: int) -> Work:
        stack = {**bench.pick({}, TINY_STACK), "layers": layers}
        return Work(plan_model("llama2-7b", bench.pick(32_000, 128), stack=stack, max_seq_len=length), length, 1)

    def needed(layers: int) -> int:
        return rank_memory(work_of(layers).task, ParallelLayout(config, 1, 1), Cluster(1, 1, gpu)).total

    limit = memory_limit(Cluster(1, 1, gpu))
    layers = [bisect_right(range(1, most + 1), share * limit, key=needed) for share in (1.0, 1 + MEMORY_ERROR)]
    larger = work_of(layers[1] + 1)
    weights = draw_weights(larger.model, bench.device)
    fits = {}
    for work in (work_of(layers[0]), larger):
        case = f"{work.model.last_stack.layers} layers"
        figures: dict[str, Any] = {}
        with bench.case(case, work.shape):
            try:
                figures = _take_steps(bench, work, weights, config)
                fits[case] = True
            except torch.OutOfMemoryError as error:
                figures = _refused(bench, work, config, error)
                fits[case] = False
            bench.write(case, work.shape, **figures)
    bench.write("fits", {"limit_bytes": limit}, value=fits, held=list(fits.values()) == [True, False])


def _take_steps(bench: Bench, work: Work, weights: Weights, config: EngineConfig) -> dict[str, Any]:
    with closing(build_ours(work, weights, config)[0]) as step:
        (data,) = random_steps(work, bench.device)
        figures = bench.measure(partial(step, data), 2, warmup=1)
    figures |= bench.rates(figures["ms"]["median"], work.tokens, work.flops, work.rows)
    return figures | beside_plan(bench, work, config, figures)
