"""Builds models, and draws each weight as a pure function of (seed, parameter name).

    normal   N(0, init_std), the end of each residual branch scaled down      GPT-2, BERT, LLaMA
    xavier   uniform by the mean of fan-in and fan-out; tables N(0, 1/D)      the 2017 Transformer
    t5       normal by fan-in, scaled for attention without a scale           T5

Norm weights are 1 (0 with `norm_offset`), biases and sinks 0, factors of `layer_scale` as it says;
with `init_output: zero` the ends of residual branches and an untied head are 0 too. A fused matrix
(queries, keys and values; gate and up) is drawn part by part, because fan-in and fan-out are those
of its parts. Recurrent models: `draw_recurrent`; decays and filters of other mixers: their `draws`.
"""

import hashlib
import importlib.util
import logging
import math
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name

import torch
from torch import Tensor, nn

from pretrain.config.engine import EngineConfig
from pretrain.config.model import GENERATOR, AnyModelConfig, ModelConfig, RecurrentConfig, StackConfig
from pretrain.dist import World
from pretrain.errors import ConfigError, install_fix
from pretrain.model.block import Block
from pretrain.model.expert_parallel import share_experts
from pretrain.model.lazy_compiler import UnsetWeights, defer_compiler
from pretrain.model.parts.head import Head
from pretrain.model.recurrent.recurrent import Recurrent, check_engine, draw_recurrent
from pretrain.model.stack import Stack
from pretrain.model.tensor_parallel import mark_parts, share_tensors
from pretrain.model.transformer import Transformer
from pretrain.parts import Part, part_of

log = logging.getLogger(__name__)

LanguageModel = Transformer | Recurrent

_RESIDUAL_OUTPUTS = (
    "attention.output.weight",
    "cross.output.weight",
    "feedforward.down.weight",
    "feedforward.shared.down.weight",
)

LAYER_SCALES = (".attention_scale", ".cross_scale", ".feedforward_scale")
"""Ends of the names of learned factors of sub-layers' results, which begin at `layer_scale`."""

_TABLE_NAMES = ("embedding", "embedding.before", "patches.before", "token_type", "position", "mask")
_TABLES = tuple(f"{name}.weight" for name in _TABLE_NAMES)
_PROJECTIONS = ("embedding.projection.weight", "patches.projection.weight")

FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 products: Ada, then Hopper (9.0) and Blackwell."""

_QUERIES = ("attention.qkv.weight", "cross.query.weight")

MAX_BLOCK_GRAPHS = 64
"""Graphs of compiled blocks before torch runs further ones eagerly; torch's default is 8.

All blocks share one code object, and so one limit. A kind of block (of ModernBERT: the first,
global and local ones; of T5: those of either stack) has six graphs: two passes (training,
evaluation) of three degrees of generality (all sizes fixed, bounds of documents free, row lengths
free).
"""


def _draw_normal(
    name: str, weight: Tensor, config: ModelConfig, stack: StackConfig, generator: torch.Generator
) -> None:
    """`init_std`; with `init_scaled`, residual outputs get `init_std / sqrt(residual branches)`.

    The variance of the residual stream then does not grow with depth (GPT-2, 2.3).
    """
    std = config.init_std
    if config.init_scaled and name.endswith(_RESIDUAL_OUTPUTS):
        # Attention and feed-forward of each block, and cross attention.
        reads_encoder = name.startswith("decoder.") and config.reads_encoder
        branches = 1 + stack.has_feedforward(stack.layers - 1) + reads_encoder
        std = config.init_std / math.sqrt(branches * stack.layers)
    weight.normal_(0.0, std, generator=generator)


def _fused_parts(name: str, weight: Tensor, stack: StackConfig) -> tuple[Tensor, ...]:
    kv_rows = stack.num_kv_heads * stack.per_head_width
    if name.endswith("attention.qkv.weight"):
        rows = [stack.heads * stack.per_head_width, kv_rows, kv_rows]
        return weight.split(rows + rows[:1] * stack.attention_gate)
    if name.endswith(("cross.key_value.weight", "gate_up.weight")):
        return weight.chunk(2, dim=-2)
    return (weight,)


def _draw_xavier(
    name: str, weight: Tensor, config: ModelConfig, stack: StackConfig, generator: torch.Generator
) -> None:
    """Variance 2 / (fan-in + fan-out), uniform (Glorot and Bengio 2010); tables as tensor2tensor."""
    if name.endswith(_TABLES) or name == "head.weight":
        weight.normal_(0.0, stack.width**-0.5, generator=generator)
        return
    for part in _fused_parts(name, weight, stack):
        bound = math.sqrt(6 / sum(part.shape[-2:]))
        part.uniform_(-bound, bound, generator=generator)


def _draw_t5(name: str, weight: Tensor, config: ModelConfig, stack: StackConfig, generator: torch.Generator) -> None:
    """Variance 1 / fan-in (Mesh TensorFlow); 1 for tables, 1/D for a relative bias.

    Query weights are divided by sqrt(H) if attention does not divide its scores by it.
    """
    if name.endswith(_TABLES):
        is_bias = name.endswith("position.weight") and stack.position == "relative"
        weight.normal_(0.0, stack.width**-0.5 if is_bias else 1.0, generator=generator)
        return
    for number, part in enumerate(_fused_parts(name, weight, stack)):
        std = part.shape[-1] ** -0.5
        if number == 0 and name.endswith(_QUERIES) and not stack.scaled_attention:
            std *= stack.per_head_width**-0.5
        part.normal_(0.0, std, generator=generator)


def _draw_values(
    name: str, weight: Tensor, config: ModelConfig, stack: StackConfig, generator: torch.Generator
) -> None:
    """An embedding as large as the values of the first step: products of a normed vector and drawn weights."""
    std = config.init_std * stack.width**0.5 if config.init == "normal" else 1.0
    weight.normal_(0.0, std, generator=generator)


_DRAWS = {"normal": _draw_normal, "xavier": _draw_xavier, "t5": _draw_t5}


def _draw_patches(
    name: str, weight: Tensor, config: ModelConfig, stack: StackConfig, generator: torch.Generator
) -> None:
    """Variance 1 / fan-in (LeCun et al. 1998), for patches of any size (ViT, as released)."""
    weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)


def seeded_by_name(name: str, seed: int) -> torch.Generator:
    """Returns the generator of one parameter."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def initial_weight(name: str, shape: torch.Size, config: AnyModelConfig, seed: int) -> Tensor:
    """Draws one parameter, fp32, on the CPU."""
    generator = seeded_by_name(name, seed)
    if isinstance(config, ModelConfig) and config.generator_heads and name.startswith(GENERATOR):
        name, config = name.removeprefix(GENERATOR), config.generator
    weight = torch.empty(shape, dtype=torch.float32, device="cpu")
    if isinstance(config, RecurrentConfig):
        draw_recurrent(name, weight, config, generator)
    elif draw_part := _draws_of_mixer(name, config):
        draw_part(weight, generator)
    elif len(shape) == 1:
        _fill_vector(name, weight, _stack_of(name, config))
    elif config.init_output == "zero" and (name == "head.weight" or name.endswith(_RESIDUAL_OUTPUTS)):
        weight.zero_()
    else:
        stack = _stack_of(name, config)
        draw = _draw_values if ".value_embedding." in name else _DRAWS[config.init]
        draw = _draw_patches if name in _PROJECTIONS else draw
        draw(name, weight, config, stack, generator)
    return weight


def _draws_of_mixer(
    name: str, config: ModelConfig
) -> Callable[[Tensor, torch.Generator], None] | None:  # fmt: skip
    """Returns the function that draws a weight of a mixer in its own way; None: it has none."""
    place = re.fullmatch(r"(encoder|decoder)\.blocks\.(\d+)\.attention\.(.+)", name)
    mixer = getattr(config, place[1]).mixer(int(place[2])) if place else None
    return resolve_name(mixer.layer).draws.get(place[3]) if place and mixer else None


def _fill_vector(name: str, weight: Tensor, stack: StackConfig) -> None:
    value = 1.0
    if name.endswith((".bias", ".sinks", ".log_scale")) or (name.endswith("norm.weight") and stack.norm_offset):
        value = 0.0
    elif name.endswith(".value_mix"):
        value = 1.0 / len(weight)
    elif name.endswith(LAYER_SCALES):
        value = stack.layer_scale or 1.0
    weight.fill_(value)
    if name.endswith(".residual_mix"):
        weight[1] = 0.0


def _stack_of(name: str, config: ModelConfig) -> StackConfig:
    """Returns the stack of a parameter; those between and above the stacks count as the last one's."""
    of_input = ("encoder.", "patches." if config.captions else "embedding.")
    return config.input_stack if name.startswith(of_input) else config.last_stack


def init_weights(model: nn.Module, config: AnyModelConfig, seed: int) -> None:
    """Draws every parameter of a model."""
    fill_weights(model, partial(initial_weight, config=config, seed=seed))


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a checkpoint: parameters, then the biases that balance experts."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def fill_weights(model: nn.Module, draw: Callable[[str, torch.Size], Tensor | None]) -> None:
    """Overwrites every weight in place, one at a time; costs one fp32 copy of the largest.

    `draw` returns a whole parameter, of which this rank may have a part; None: zeros.
    """
    for name, weight in named_weights(model):
        part = part_of(weight)
        value = draw(name, part.whole(weight.shape))
        weight.zero_() if value is None else weight.copy_(part.take(value))


def _missing_for_triton() -> str:
    compiler = shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if compiler and headers.is_file():
        return ""
    return f"{headers}" if compiler else "a C compiler (gcc, clang, CC)"


def compiles_on(engine: EngineConfig, device: torch.device) -> bool:
    """Returns whether blocks are compiled; by `auto`, not on a machine that Triton cannot work on."""
    compiles = engine.compiles(device.type)
    if compiles and engine.compile == "auto" and (missing := _missing_for_triton()):
        _warn_uncompiled(missing)
        return False
    return compiles


@cache
def _warn_uncompiled(missing: str) -> None:
    log.warning("blocks run uncompiled, slower: Triton needs %s; install it, or set engine.compile=false", missing)


def convert_to_fp8(module: nn.Module, recipe: str, device: torch.device) -> None:
    """Gives every linear layer of a module FP8 products, in place; its parameters stay the same objects.

    A weight is rounded at each product and saved as it is; a CPU emulates the products in bf16.

    Raises:
        ConfigError: torchao is missing, or the device has no FP8.
    """
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        have, need = ("{}.{}".format(*version) for version in (capability, FP8_CAPABILITY))
        text = f"engine.fp8={recipe} needs a GPU of compute capability {need} or more, this one has {have}"
        raise ConfigError(text, fix="use engine.fp8=off")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        fix = f"use engine.fp8=off, or {install_fix('fp8')}"
        raise ConfigError(f"engine.fp8={recipe} needs the torchao package: {error}", fix=fix) from None
    options = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=device.type == "cpu")
    convert_to_float8_training(module, config=options)


def why_no_fa3(engine: EngineConfig, capability: tuple[int, int], *, dropout: bool) -> str | None:
    """Returns the reason for torch's own flash kernels, FlashAttention 2; None: FlashAttention 3 runs in their place.

    Args:
        engine: Only `precision` and `deterministic` are read.
        capability: Compute capability of the GPU.
        dropout: Weights of attention have dropout.
    """
    if capability[0] != 9:
        return "FlashAttention 3 is for compute capability 9.x (Hopper)"
    if importlib.util.find_spec("flash_attn_interface") is None:
        return "flash_attn_interface (FlashAttention 3) is not installed"
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        return "FlashAttention 3 needs torch 2.13: in older ones a backward pass of it was not found"
    if engine.precision == "fp32":
        return "FlashAttention 3 is for 16 bits, not engine.precision=fp32"
    if engine.deterministic:
        return "FlashAttention 3 was not shown to be deterministic, and engine.deterministic=true"
    return "FlashAttention 3 has no dropout of attention weights" if dropout else None


def activate_fa3() -> None:
    """Puts FlashAttention 3 in the place of torch's flash kernels, for this process."""
    from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

    if current_flash_attention_impl() == "FA3":
        return
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch, or without its kernels
        reason = str(error).splitlines()[0]
        log.warning("flash kernels: torch's own (FlashAttention 2); flash_attn_interface does not load: %s", reason)
    else:
        log.info("flash kernels: FlashAttention 3 of flash_attn_interface")


def build_model(
    config: AnyModelConfig,
    engine: EngineConfig,
    device: torch.device,
    *,
    storage: bool = True,
    world: World | None = None,
) -> LanguageModel:
    """Builds a model on `device` with its weights unset.

    Without `storage` the parameters stay on the meta device, to be filled one by one. `world`: the
    ranks that share its experts or matrices, and then collective; None: this rank has all.

    Raises:
        ConfigError: The attention backend does not support the model or the device, or the engine
            requests activation checkpointing, compilation or FP8 of a recurrent model, or FP8 that
            the device or the environment lacks.
    """
    model: LanguageModel
    parts: dict[str, Part] = {}
    defer_compiler()
    with torch.device("meta"), UnsetWeights():
        if isinstance(config, RecurrentConfig):
            check_engine(engine)
            model = Recurrent(config)
        else:
            model = Transformer(config, engine, device)
            if world is not None:
                share_experts(model, world, engine.group_timeout_s)
                parts = share_tensors(model, world, engine.group_timeout_s)
            if engine.has_fp8:
                for stack in model.stacks:
                    convert_to_fp8(stack.blocks, engine.fp8, device)
            if device.type == "cuda":
                dropout = any(stack and stack.attention_weight_dropout for stack in (config.encoder, config.decoder))
                if why_no_fa3(engine, torch.cuda.get_device_capability(device), dropout=dropout) is None:
                    activate_fa3()
    if storage and device.type != "meta":
        with UnsetWeights():
            model.to_empty(device=device)
        model.tie()
    mark_parts(model, parts)
    if isinstance(model, Recurrent):
        if not storage:
            model.allow_swaps()
    elif compiles_on(engine, device):
        _compile_blocks(model, engine)
    return model


def _compile_blocks(model: Transformer, engine: EngineConfig) -> None:
    # Not by the argument of torch.compile, which torch 2.13 alone has.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MAX_BLOCK_GRAPHS)
    compiled = partial(torch.compile, mode=engine.compile_mode)
    within = set()
    if engine.compile_scope == "stack":
        within = {block for stack in model.stacks for block in stack.blocks}
    for module in model.modules():
        # Only the forward: hooks of an engine stay outside of the graph, names do not change.
        if isinstance(module, Block) and module not in within:
            module.forward = compiled(module.forward)  # type: ignore[method-assign]
        elif isinstance(module, Stack) and within:
            module.pass_blocks = compiled(module.pass_blocks)  # type: ignore[method-assign]
        elif isinstance(module, Head):
            module.compiles_loss = True
