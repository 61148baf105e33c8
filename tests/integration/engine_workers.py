"""What the ranks of the engine tests do: train under every engine and option, and bring back what they saw."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.state import TrainState
from pretrain.config.data import BatchConfig, plan_batch
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.dist import World, all_reduce_sum
from pretrain.engine import build as engine_build
from pretrain.engine.build import fill_sharded, start_accelerator
from pretrain.engine.engine import Engine
from pretrain.model import build_model
from pretrain.model.build import initial_weight
from pretrain.model.stack import Stack
from tests.integration.workers import MODEL, ROWS, SEQ_LEN, TWO_STACKS, build, global_batch, rows_of, train


def losses_of(
    world: World, cases: list[list[Any]], steps: int, micro: int, grad_clip: float = 1.0
) -> list[list[list[float]]]:
    """Trains each (kind, stage, precision) from the same start."""
    built = (build(world, *case, micro=micro, grad_clip=grad_clip) for case in cases)
    return [train(engine, world, range(steps), micro) for engine in built]


def two_stacks_losses(world: World, cases: list[list[Any]], steps: int, micro: int) -> list[list[list[float]]]:
    """The same for an encoder-decoder with padded sources."""
    return [
        train(build(world, *case, micro=micro, model=TWO_STACKS), world, range(steps), micro, source=True)
        for case in cases
    ]


def fp8_losses(world: World, cases: list[list[Any]], steps: int, micro: int) -> list[list[list[float]]]:
    """Trains each (kind, stage, recipe, checkpointing) in bf16, its matrices of a size that FP8 takes."""
    model = MODEL | {"decoder": {"width": 32, "heads": 4, "kv_heads": 2, "head_width": 8, "ff_width": 48}}
    return [
        train(
            build(world, kind, stage, "bf16", micro=micro, model=model, fp8=fp8, checkpointing=checkpointing),
            world,
            range(steps),
            micro,
        )
        for kind, stage, fp8, checkpointing in cases
    ]


def device_waits(world: World, cases: list[list[Any]], micro: int) -> list[int]:
    """Counts DeepSpeed's waits for the whole device in four steps of each case; on a CPU these do nothing."""
    from deepspeed.accelerator import get_accelerator

    counts = []
    for case in cases:
        engine = build(world, *case, micro=micro)
        with mock.patch.object(type(get_accelerator()), "synchronize") as waits:
            train(engine, world, range(4), micro)  # the first two warm up
            counts.append(waits.call_count)
    return counts


def sharded_losses(world: World, precisions: list[str], steps: int, micro: int) -> list[list[list[list[float]]]]:
    """Trains an encoder-decoder at stage 3 from parameters cut up one by one, and from whole ones."""

    def trained(precision: str, sharded: bool) -> list[list[float]]:
        engine = build(world, "deepspeed", 3, precision, micro=micro, model=TWO_STACKS, sharded=sharded)
        return train(engine, world, range(steps), micro, source=True)

    return [[trained(precision, True), trained(precision, False)] for precision in precisions]


def sharded_peak(world: World) -> list[int]:
    """Fills a model for stage 3; returns [elements of the model, of its largest parameter, most that were live]."""
    config = EngineConfig(kind="deepspeed", zero_stage=3, precision="fp32", device="cpu")
    plan = plan_batch(BatchConfig(global_tokens=ROWS * SEQ_LEN, seq_len=SEQ_LEN, micro=2), world.size)
    accelerator = start_accelerator(config, 1.0, plan, 30000, world)
    model_config = ModelConfig.model_validate(expand_preset(TWO_STACKS))
    model = build_model(model_config, config, torch.device("cpu"), storage=False)
    sizes = [parameter.numel() for parameter in model.parameters()]
    peak = 0

    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        nonlocal peak
        held = sum(p.ds_tensor.numel() for p in model.parameters() if hasattr(p, "ds_tensor"))
        whole = sum(p.numel() for p in model.parameters() if not p.is_meta)
        peak = max(peak, held + whole + shape.numel())
        return initial_weight(name, shape, model_config, 5)

    fill_sharded(model, draw, config, accelerator, world)
    return [sum(sizes), max(sizes), peak]


def offload_facts(world: World, cases: list[list[Any]]) -> list[list[Any]]:
    """Of each case: what DeepSpeed says is in host memory, what the engine says of itself, the type of optimizer."""
    facts = []
    for case in cases:
        engine: Any = build(world, *case, micro=2)
        inner = engine._wrapped
        sections = (inner.zero_offload_optimizer(), inner.zero_offload_param())
        devices = [section.device if section else "none" for section in sections]
        facts.append([*devices, engine.description, type(inner.basic_optimizer).__name__])
    return facts


def compiled_losses(
    world: World, cases: list[tuple[int, str]], steps: int, micro: int
) -> tuple[list[list[list[float]]], int]:
    """Trains with compiled blocks, by ZeRO stage and checkpointing; returns rows and the number of graph breaks."""
    from torch._dynamo.utils import counters

    rows = []
    for stage, checkpointing in cases:
        options = {"compile": True, "checkpointing": checkpointing}
        rows.append(train(build(world, "deepspeed", stage, "fp32", micro=micro, **options), world, range(steps), micro))
    return rows, sum(counters["graph_break"].values())


def offloaded_losses(world: World, cases: list[list[Any]], steps: int, micro: int) -> list[list[list[list[float]]]]:
    """Trains each (kind, stage, precision, checkpointing, compile) with activations on the host, and without."""

    def trained(case: list[Any], offload: str) -> list[list[float]]:
        kind, stage, precision, checkpointing, compiled = case
        options: dict[str, Any] = {"checkpointing": checkpointing, "compile": compiled}
        engine: Any = build(world, kind, stage, precision, "adamw", offload, micro=micro, **options)
        rows = train(engine, world, range(steps), micro)
        stack = next(module for module in engine._wrapped.modules() if isinstance(module, Stack))
        assert (stack.offload is not None and bool(stack.offload._buffers)) == (offload == "activations")
        return rows

    return [[trained(case, "activations"), trained(case, "none")] for case in cases]


def node_copies(world: World, zero_hpz: int, folder: str, loads: bool) -> dict[str, Any]:
    """Trains at stage 3 from the start, and saves at step 3; or goes on from there. Returns rows of six steps or three.

    Also the elements that this rank has of a copy of the weights that it shares with its node, after an evaluation.
    """
    configured = engine_build.deepspeed_config

    def releasing(*arguments: Any) -> dict[str, Any]:
        # As of a model of more than 1e9 parameters: weights are released after each use, and gathered again.
        config = configured(*arguments)
        released = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
        return config | {"zero_optimization": config["zero_optimization"] | released}

    with mock.patch.object(engine_build, "deepspeed_config", releasing):
        engine = build(world, "deepspeed", 3, "fp32", micro=3, sharded=True, zero_hpz=zero_hpz)
    rows = []
    if loads:
        load_checkpoint(Path(folder) / "step-00000003", engine.state)
    else:
        rows = train(engine, world, range(3), 3)
        CheckpointManager(Path(folder), 2, world, {}).save(engine.state, TrainState(step=3, optimizer_step=3))
    rows += train(engine, world, range(3, 6), 3)
    engine.evaluate(rows_of(global_batch(0), slice(0, 3)))
    copies = [getattr(parameter, "ds_secondary_tensor", None) for parameter in engine.module.parameters()]
    return {"rows": rows, "copied": sum(copy.numel() for copy in copies if copy is not None)}


def first_moments(world: World, cases: list[list[Any]], clips: list[float]) -> list[list[float]]:
    """Global norm of the gradient of step 0, and that of AdamW's first moment after it, for each case and clip."""
    rows = []
    for case in cases:
        for clip in clips:
            engine = build(world, *case, micro=2, grad_clip=clip)
            ((_, norm, _),) = train(engine, world, range(1), 2)
            square = sum(float(f.tensors["exp_avg"].square().sum()) for f in engine.state.owned_fragments())
            total = all_reduce_sum(torch.tensor([square], dtype=torch.float64))
            rows.append([norm, float(total) ** 0.5])
    return rows


def poisoned(world: World, cases: list[list[Any]]) -> list[list[Any]]:
    """Trains 4 steps with a non-finite gradient at step 2; returns rows, and whether weights and moments stayed."""
    results = []
    for case in cases:
        engine = build(world, *case, micro=2)
        rows = train(engine, world, range(2), 2)
        before = snapshot(engine)
        rows += train(engine, world, range(2, 3), 2, poison=2)
        unchanged = all(torch.equal(a, b) for a, b in zip(before, snapshot(engine), strict=True))
        rows += train(engine, world, range(3, 4), 2)
        results.append([rows, unchanged])
    return results


def snapshot(engine: Engine) -> list[torch.Tensor]:
    """Copies of all weights and moments on this rank."""
    return [tensor.clone() for fragment in engine.state.held_fragments() for tensor in fragment.tensors.values()]
