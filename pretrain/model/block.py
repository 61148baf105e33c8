"""A block of a stack, and activation checkpointing (Chen et al. 2016).

    block    self-attention, cross attention to the encoder if there is one, feed-forward unless
             `ff_width` is 0; a norm or two and a residual sum each

Saved for the backward pass of a block, by `engine.activation_checkpointing`:

    none        everything that autograd saves
    full        the block's input; the rest is recomputed
    selective   the block's input, results of matrix products and attention; the rest is recomputed

With `feedforward_tiles`, a feed-forward layer keeps its input alone in any of these.
With `activation_checkpointing_every: n`, only every n-th block is checkpointed.
"""

from collections.abc import Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pretrain.config.engine import EngineConfig
from pretrain.config.model import StackConfig
from pretrain.model.backends.backend import AttentionBackend
from pretrain.model.parts.attention import AttentionContext, CrossAttention, SelfAttention
from pretrain.model.parts.experts import MixtureOfExperts
from pretrain.model.parts.feedforward import FeedForward
from pretrain.model.parts.latent_attention import LatentAttention
from pretrain.model.parts.norm import build_norm


def _layer_scale(config: StackConfig) -> nn.Parameter | None:
    return None if config.layer_scale is None else nn.Parameter(torch.empty(config.width))


def _output_norm(config: StackConfig) -> nn.Module | None:
    return build_norm(config) if config.norm_placement == "sandwich" else None


class Memory(NamedTuple):
    """Output of the encoder, None if a cache has its keys and values; mask over the source."""

    hidden_BSD: Tensor | None
    prepared: Any


class BlockInput(NamedTuple):
    """Input of a block, whose fields are the arguments of its `forward`.

    Attributes:
        x_BTD: The stream.
        attention: Context of self-attention; cross attention has the same cache.
        memory: Source of cross attention. None: there is none.
        first_BTD: Input of the first block, for `residual_scalars` alone.
        counted_BT: Tokens that experts count, bool. None: all, or there are no experts.
    """

    x_BTD: Tensor
    attention: AttentionContext
    memory: Memory | None = None
    first_BTD: Tensor | None = None
    counted_BT: Tensor | None = None


class BlockOutput(NamedTuple):
    """Output of a block. A tuple, because the hooks of ZeRO stage 3 find tensors in tuples.

    Attributes:
        x_BTD: The stream.
        values_BTKH: Values of the first block of a stack with `value_residual`; else None.
        routing_W: Packed `RoutingSums` of a block with experts; else None.
    """

    x_BTD: Tensor
    values_BTKH: Tensor | None = None
    routing_W: Tensor | None = None


# By name: some exist only where their module was imported.
_SAVED_OPERATIONS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_mm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_varlen_forward",
    "flex_attention",
    "pretrain::grouped_linear",
}


def _policy(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    if operation.name() in _SAVED_OPERATIONS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointing(config: StackConfig, engine: EngineConfig, number: int) -> dict[str, Any] | None:
    """Returns the options of `torch.utils.checkpoint` for a block; None: it is not checkpointed."""
    if engine.activation_checkpointing == "none" or number % engine.activation_checkpointing_every:
        return None
    draws_noise = max(config.dropout, config.attention_weight_dropout, config.drop_path) > 0
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws_noise}
    if engine.activation_checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return options


class Block(nn.Module):
    """Norm of a sub-layer's input (`x + f(norm(x))`, GPT-2 2.3), of the sum (`norm(x + f(x))`, Vaswani
    et al. 2017, 3.1), of its output (`x + norm(f(x))`, OLMo 2, 2.2), or of both (Gemma 2).

    With `parallel` both sub-layers read the input of the block (Wang and Komatsuzaki 2021, GPT-J).
    """

    def __init__(
        self,
        config: StackConfig,
        backend: AttentionBackend,
        cross_backend: AttentionBackend | None,
        engine: EngineConfig,
        number: int,
    ) -> None:
        super().__init__()
        config = config.of_layer(number)
        self._checkpointing = _checkpointing(config, engine, number)
        self._tiles = engine.feedforward_tiles
        self.norm_placement = config.norm_placement
        # An `input_norm` has normalised the input of the first block already.
        self.attention_norm = build_norm(config) if config.norms_attention(number) else nn.Identity()
        self.attention = build_attention(config, backend, number)
        self.attention_output_norm = _output_norm(config)
        has_mix = config.residual_scalars and number > 0
        self.residual_mix = nn.Parameter(torch.empty(2)) if has_mix else None
        self.cross_norm = None if cross_backend is None else build_norm(config)
        self.cross = None if cross_backend is None else CrossAttention(config, cross_backend)
        self.cross_output_norm = None if self.cross is None else _output_norm(config)
        self.parallel = bool(config.parallel)
        self.feedforward_norm = self.feedforward = self.feedforward_output_norm = None
        if config.has_feedforward(number):
            self.feedforward_norm = None if config.parallel == "one_norm" else build_norm(config)
            self.feedforward = MixtureOfExperts(config) if config.has_experts(number) else FeedForward(config)
            self.feedforward_output_norm = _output_norm(config)
        self.residual_scale = config.residual_scale
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.drop_path = config.drop_path_of(number)
        self.attention_scale = _layer_scale(config)
        self.cross_scale = None if self.cross is None else _layer_scale(config)
        self.feedforward_scale = None if self.feedforward is None else _layer_scale(config)

    def forward(self, *fields: Any) -> BlockOutput:
        """Takes the fields of a `BlockInput` in their order.

        Hooks of torch and checkpointing see only tensors that are arguments themselves.
        """
        # Without gradients nothing is saved in any mode.
        if self._checkpointing is None or not torch.is_grad_enabled():
            return self._layers(*fields)
        # Within what is compiled: its policy is about operations, of which a compiled block is one.
        return checkpoint(self._layers, *fields, **self._checkpointing)

    def _layers(self, *fields: Any) -> BlockOutput:
        x_BTD, context, memory, first_BTD, counted_BT = BlockInput(*fields)
        if self.residual_mix is not None:
            assert first_BTD is not None, "residual scalars need the input of the first block"
            x_BTD = self.residual_mix[0] * x_BTD + self.residual_mix[1] * first_BTD
        read_BTD = before_BTD = self._read(x_BTD, self.attention_norm)
        result_BTD, values_BTKH = self.attention(read_BTD, context)
        if self.parallel and self.feedforward_norm is not None:
            before_BTD = self._read(x_BTD, self.feedforward_norm)
        output_norm = self.attention_output_norm
        x_BTD = self._add(x_BTD, self.attention_norm, result_BTD, self.attention_scale, output_norm)
        if self.cross is not None and self.cross_norm is not None:
            assert memory is not None, "a decoder with cross attention needs a source"
            hidden_BSD, cross_prepared = memory
            read_BTD = self._read(x_BTD, self.cross_norm)
            result_BTD = self.cross(read_BTD, hidden_BSD, cross_prepared, context.cache)
            norms = (self.cross_norm, self.cross_output_norm)
            x_BTD = self._add(x_BTD, norms[0], result_BTD, self.cross_scale, norms[1])
        if self.feedforward is None:
            return BlockOutput(x_BTD, values_BTKH)
        read_BTD = before_BTD if self.parallel else self._read(x_BTD, self.feedforward_norm)
        result_BTD, routing_W = pass_tokens(self.feedforward, read_BTD, counted_BT, self._tiles)
        output_norm = self.feedforward_output_norm
        x_BTD = self._add(x_BTD, self.feedforward_norm, result_BTD, self.feedforward_scale, output_norm)
        return BlockOutput(x_BTD, values_BTKH, routing_W)

    def _read(self, x_BTD: Tensor, norm: nn.Module | None) -> Tensor:
        reads_normed = self.norm_placement in ("pre", "sandwich")
        return norm(x_BTD) if norm is not None and reads_normed else x_BTD

    def _add(
        self,
        x_BTD: Tensor,
        norm: nn.Module | None,
        result_BTD: Tensor,
        scale_D: Tensor | None,
        output_norm: nn.Module | None = None,
    ) -> Tensor:
        """Adds the result of a sub-layer to the stream; `output_norm`: of a sandwich."""
        if self.norm_placement == "output":
            output_norm = norm
        if output_norm is not None:
            result_BTD = output_norm(result_BTD)
        result_BTD = self.dropout(result_BTD)
        if scale_D is not None:
            result_BTD = scale_D * result_BTD
        if self.residual_scale != 1.0:
            result_BTD = result_BTD * self.residual_scale
        if self.drop_path and self.training:
            # By the generator of dropout, which each step and each recomputation seeds alike.
            kept_B11 = nn.functional.dropout(result_BTD.new_ones(len(result_BTD), 1, 1), self.drop_path)
            result_BTD = kept_B11 * result_BTD
        sum_BTD = x_BTD + result_BTD
        return norm(sum_BTD) if norm is not None and self.norm_placement == "post" else sum_BTD


def build_attention(config: StackConfig, backend: AttentionBackend, number: int) -> nn.Module:
    """Builds the self-attention of a block, or the mixer in its place."""
    if mixer := config.mixer(number):
        built: nn.Module = resolve_name(mixer.layer)(config)
        return built
    return LatentAttention(config, backend) if config.latent else SelfAttention(config, backend, number)


def pass_tokens(
    layer: nn.Module, x_BTD: Tensor, counted_BT: Tensor | None, tiles: int
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Passes tokens through the layer of a block in `tiles` parts; returns also the sums of experts.

    Each part is computed again in its backward pass (Chen et al. 2016): saved is the input alone,
    and the hidden values of one part at a time exist. Gradients of weights are summed over parts.
    """
    has_experts = isinstance(layer, MixtureOfExperts)
    # Ranks that share experts exchange once a part, be it without tokens.
    if not has_experts or layer.send is None:
        tiles = min(tiles, x_BTD.shape[0] * x_BTD.shape[1])
    if tiles == 1:
        return layer(x_BTD, counted_BT) if has_experts else (layer(x_BTD), None)
    results = []
    sums = []
    again = torch.is_grad_enabled()
    for x, counted in zip(_pieces(x_BTD, tiles), _pieces(counted_BT, tiles), strict=True):
        part = (x, counted) if has_experts else (x,)
        result = checkpoint(layer, *part, use_reentrant=False) if again else layer(*part)
        if has_experts:
            result, routing_W = result
            sums += [] if routing_W is None else [routing_W]
        results.append(result)
    return torch.cat(results, dim=1).view_as(x_BTD), torch.stack(sums).sum(dim=0) if sums else None


def _pieces(x: Tensor | None, count: int) -> Sequence[Tensor | None]:
    # Pieces, not slices: the gradient of a slice has the size of the whole.
    return [None] * count if x is None else x.flatten(0, 1)[None].tensor_split(count, dim=1)
