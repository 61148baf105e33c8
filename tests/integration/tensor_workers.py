"""What the ranks of the tests of tensor parallelism do: train, save and load with matrices over ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td

from pretrain.checkpoint.load import load_checkpoint
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.state import TrainState
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.lengths import RowLengths
from pretrain.config.model import parse_model
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.presets import expand_preset
from pretrain.data.loader import cut_columns
from pretrain.dist import World
from pretrain.model import build_model
from pretrain.model.build import init_weights
from pretrain.model.sequence_parallel import share_rows
from pretrain.objective import build_loss
from pretrain.parts import part_of
from pretrain.plan.activations import activation_bytes
from pretrain.plan.task import TrainingTask
from pretrain.types import Batch, Columns
from tests.integration.sequence_workers import random_batch
from tests.integration.workers import MODEL, TWO_STACKS, VOCAB, build, train, whole_moments
from tests.unit.plan.kept import SavedStorages, live_tensors

DECODER = MODEL["decoder"] | {"heads": 8, "kv_heads": 4, "width": 40, "ff_width": 52}
ENCODER = MODEL | {"decoder": None, "encoder": DECODER | {"layers": 2}}
LLAMA = MODEL | {"decoder": DECODER}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "untied": LLAMA | {"tied_embeddings": False, "head": {"kind": "lm", "bias": True}},
    "gpt2": LLAMA
    | {
        "decoder": DECODER
        | {"position": "learned", "norm": "layer", "bias": True, "gated": False, "activation": "gelu", "ff_width": 48}
    },
    "qwen": LLAMA | {"decoder": DECODER | {"qk_norm": True, "qkv_bias": True, "window": 5, "global_every": 2}},
    "values": LLAMA | {"decoder": DECODER | {"value_residual": True, "value_embeddings": 1, "residual_scalars": True}},
    "gemma": LLAMA
    | {
        "scaled_embeddings": True,
        "head": {"kind": "lm", "soft_cap": 3.0},
        "decoder": DECODER | {"norm_placement": "output", "activation": "gelu_tanh", "attention_sinks": True},
    },
    "sandwich": LLAMA
    | {
        "embedding_scale": 3.0,
        "head": {"kind": "lm", "scale": 0.5},
        "decoder": DECODER
        | {"norm_placement": "sandwich", "norm_offset": True, "qk_norm": True, "score_cap": 2.0, "score_factor": 0.3}
        | {"residual_scale": 0.5, "window": 5, "global_layers": [1]},
    },
    "parallel": LLAMA
    | {
        "decoder": DECODER
        | {"parallel": True, "norm": "layer", "norm_bias": True, "output_bias": True, "head_width": 8}
        | {"rope_fraction": 0.5, "unrotated_layers": [1]},
    },
    "one norm": LLAMA | {"decoder": DECODER | {"parallel": "one_norm", "norm": "layer", "gate_limit": 2.0}},
    "narrow": ENCODER
    | {
        "head": {"kind": "lm", "transform": True, "bias": True, "activation": "gelu"},
        "encoder": DECODER
        | {"layers": 2, "embedding_width": 24, "position": "learned", "position_offset": "pad", "input_norm": True},
    },
    "biases": LLAMA | {"decoder": DECODER | {"position": "relative", "relative_buckets": 8, "relative_shared": False}},
    "relative": LLAMA | {"decoder": DECODER | {"position": "relative", "relative_buckets": 8}},
    "encoder": ENCODER | {"encoder": DECODER | {"layers": 2, "window": 6, "global_every": 2, "token_types": 2}},
    "labels": ENCODER
    | {"encoder": DECODER | {"layers": 2}, "head": {"kind": "labels", "labels": list(map(str, range(VOCAB)))}}
    | {"tied_embeddings": False, "pooler": True},
    "hybrid": LLAMA
    | {
        "decoder": DECODER
        | {"mixers": ["delta", "mamba2", "convolution", "attention"], "layers": 4}
        | {"delta": {"value_heads": 16, "key_width": 3, "value_width": 4}, "convolution": {"bias": True}}
        | {"mamba2": {"heads": 8, "head_width": 5, "state_width": 4, "groups": 4, "bias": True}},
    },
    "two stacks": TWO_STACKS,
}


def losses_of(
    world: World,
    cases: list[list[Any]],
    steps: int,
    micro: int,
    tensor: int,
    model: str,
    sequence: int = 1,
    objective: dict[str, Any] | None = None,
    **options: Any,
) -> list[list[list[float]]]:
    """Trains each (kind, stage, precision, ...) with matrices that `tensor` ranks share."""
    world = replace(world, tensor=tensor, sequence=sequence)
    loss = ObjectiveConfig.model_validate(objective or {})
    found = []
    for case in cases:
        engine = build(world, *case, micro=micro, model=MODELS[model], sharded=case[1] == 3, objective=loss, **options)
        found.append(train(engine, world, range(steps), micro, source=model == "two stacks"))
    return found


def gradients_of(
    world: World, cases: list[list[Any]], micro: int, tensor: int, model: str, sequence: int = 1
) -> list[dict[str, list[float]]]:
    """First moment of every parameter after one step without clipping: a tenth of its gradient."""
    world = replace(world, tensor=tensor, sequence=sequence)
    found = []
    for case in cases:
        engine = build(world, *case, micro=micro, model=MODELS[model], sharded=case[1] == 3, grad_clip=0.0)
        train(engine, world, range(1), micro, source=model == "two stacks")
        found.append(whole_moments(engine))
    return found


def collectives_of(world: World, tensor: int, stages: list[int]) -> list[str]:
    """Names by the profiler of the collectives of a step, of each of these stages of ZeRO."""
    place = replace(world, tensor=tensor)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for stage in stages:
            engine = build(place, "deepspeed", stage, "fp32", micro=3, model=LLAMA, sharded=stage == 3)
            train(engine, place, range(1), 3)
    return sorted({event.key for event in found.key_averages() if event.key.startswith(("c10d::", "gloo:"))})


def moved(world: World, folder: str, cases: list[list[Any]], micro: int) -> list[list[float]]:
    """Trains 3 steps by each (tensor, kind, stage, ...) in turn, from the checkpoint of the one before."""
    found: list[list[float]] = []
    step = 0
    for tensor, *case in cases:
        place = replace(world, tensor=tensor)
        engine = build(place, *case, micro=micro, model=LLAMA, sharded=case[1] == 3)
        if step:
            load_checkpoint(Path(folder) / f"step-{step:08}", engine.state)
        found += train(engine, place, range(step, step + 3), micro)
        step += 3
        CheckpointManager(Path(folder), 9, world, {}).save(engine.state, TrainState(step=step, optimizer_step=step))
    return found


def saved_bytes(world: World, length: int, tiles: list[int]) -> list[list[int]]:
    """Bytes kept after a forward pass of a row of this rank's columns, and those planned, by feed-forward tiles."""
    td.init_process_group("gloo", rank=world.rank, world_size=world.size)
    place = replace(world, tensor=world.size)
    config = parse_model(expand_preset(LLAMA | {"max_seq_len": length}))
    tokens = torch.arange(length)[None] % VOCAB
    columns = cut_columns(Batch(tokens, tokens), Columns(world.rank, world.size))
    found = []
    for number in tiles:
        engine = PLAIN_ENGINE.model_copy(update={"feedforward_tiles": number})
        model = build_model(config, engine, torch.device("cpu"), world=place)
        init_weights(model, config, seed=3)
        saved, before = SavedStorages(model), live_tensors()
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            out = build_loss(ObjectiveConfig())(model, columns)
        # What is computed again lies in Python, where no hook of autograd sees it.
        for key, tensor in live_tensors().items():
            if key not in before:
                saved.pack(tensor)
        assert out.loss_sum.requires_grad
        task = TrainingTask(config, RowLengths(length, length), tensor=world.size)
        found.append([saved.num_bytes(), activation_bytes(task, engine, 1, "cpu").kept])
    return found


def layout_errors(world: World, model: str, seeds: list[int]) -> list[float]:
    """For each random layout the largest error of a loss or gradient in fp64, relative to the largest element of it.

    Gradients of parts are compared with those parts of one process's; those of all ranks are summed before.
    """
    td.init_process_group("gloo", rank=world.rank, world_size=world.size)
    config = parse_model(expand_preset(MODELS[model]))
    built = []
    for place in (World(0, 1, 0), replace(world, tensor=world.size)):
        one = build_model(config, PLAIN_ENGINE, torch.device("cpu"), world=place)
        share_rows(one, place, PLAIN_ENGINE.group_timeout_s)
        init_weights(one, config, seed=3)
        built.append(one.double())
    whole, cut = built
    loss = build_loss(ObjectiveConfig(label_smoothing=0.1, z_loss=0.01))
    errors = []
    for seed in seeds:
        types = any(stack.token_type is not None for stack in whole.stacks)
        batch = random_batch(seed, len(whole.stacks) == 2, whole.is_causal, types)
        columns = cut_columns(batch, Columns(world.rank, world.size))
        (expected, *grads), (found, *parts) = (
            [(out := loss(one, rows)).loss_sum.detach(), *torch.autograd.grad(out.loss_sum, list(one.parameters()))]
            for one, rows in ((whole, batch), (cut, columns))
        )
        td.all_reduce(found)
        worst = float((found - expected).abs() / expected.abs().clamp(min=1e-9))
        floor = 1e-4 * max(float(grad.abs().max()) for grad in grads)
        for parameter, grad, part in zip(cut.parameters(), grads, parts, strict=True):
            if part_of(parameter).ranks == 1:
                td.all_reduce(part)
            size = max(float(grad.abs().max()), floor)
            worst = max(worst, float((part - part_of(parameter).take(grad)).abs().max()) / size)
        errors.append(worst)
    return errors
