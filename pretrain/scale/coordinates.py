"""The coordinate check of `optim.transfer`: activations that neither grow nor shrink with the width.

    config -> one model a width, same depth -> steps on one batch of random tokens -> mean |activation|
           -> slope of log size against log width, by layer and step -> verdict

As in Yang et al. 2022, appendix D.1. Under rules that transfer, every slope stays near 0 through
training; under one rate for all widths they grow from step to step. One batch, repeated, is the
worst case: updates agree. Slopes are those of the wider half of the widths: narrow models are
above the limit that the rules are about, by 1 / sqrt(width).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig, StackConfig
from pretrain.config.run import RunConfig
from pretrain.dist import World
from pretrain.engine.build import pick_device
from pretrain.engine.replicated import ReplicatedState, clip_or_drop
from pretrain.errors import ConfigError
from pretrain.model.block import BlockOutput
from pretrain.model.build import build_model, fill_weights, initial_weight
from pretrain.model.transformer import Transformer
from pretrain.objective import build_loss
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from pretrain.optim.parametrization import scale_of
from pretrain.tracking.picture_files import encode_figure, plain_style
from pretrain.types import Batch

TOLERANCE = 0.15
"""Largest slope that counts as flat: 1.1 times the size at twice the width. Without a rule slopes are 1 and more."""
ROWS = 8
TOKENS = 64
VOCABULARY = 512
"""Size of the batch, and of the vocabulary, which costs time and changes no slope."""
LOGITS = "change of logits"
"""Those at step 0 shrink with the width, by the rule, and are subtracted. What the random head adds to the change
shrinks too, as 1 / sqrt(width): only growth of this row is against the rule."""


@dataclass(frozen=True, slots=True)
class CoordinateCheck:
    """Mean absolute activations, float64 [widths, steps + 1, layers]; step 0 is before the first update."""

    widths: tuple[int, ...]
    layers: tuple[str, ...]
    sizes: np.ndarray

    def slopes(self) -> np.ndarray:
        """Returns the slope of log size against log width, [steps + 1, layers]; NaN where a size is 0."""
        narrow = min(len(self.widths) // 2, len(self.widths) - 2)
        wide = self.sizes[narrow:]
        flat = np.log(np.where(wide > 0, wide, np.nan)).reshape(len(wide), -1)
        x = np.log(self.widths[narrow:])
        x = x - x.mean()
        return (x @ flat / (x @ x)).reshape(self.sizes.shape[1:])

    def worst(self) -> tuple[str, float]:
        """Returns the layer farthest from its rule after the last step, and its slope; NaN: it diverged."""
        last = self.slopes()[-1]
        steepness = np.where(np.isfinite(last), np.abs(last), np.inf)
        if last[-1] < 0:
            steepness[-1] = 0.0
        number = int(np.argmax(steepness))
        return self.layers[number], float(last[number])

    def is_flat(self) -> bool:
        """Returns whether no slope after the last step is beyond `TOLERANCE`."""
        return bool(abs(self.worst()[1]) <= TOLERANCE)


def check_coordinates(config: RunConfig, widths: Sequence[int], steps: int) -> CoordinateCheck:
    """Trains the model of a config at several widths, in fp32, at its peak rate.

    Raises:
        ConfigError: The model is no Transformer of one stack with a language model's head, or has no such width.
    """
    model = config.model
    if not isinstance(model, ModelConfig) or "+" in model.shape or not model.head.record.scores_words:
        raise ConfigError(
            "coordinates are those of a Transformer of one stack with model.head.kind=lm",
            fix="check such a model under the same optim section",
        )
    transfer = config.optim.transfer
    grows = transfer is not None and transfer.base_head_width is not None
    models = [widen(model, width, grows_heads=grows) for width in widths]
    device = torch.device(pick_device(config.engine))
    measured = [_train(config, one, steps, device) for one in models]
    layers = (
        "embedding",
        *(f"block {number}" for number in range(model.last_stack.layers)),
        LOGITS,
    )
    return CoordinateCheck(tuple(widths), layers, np.array(measured))


def widen(model: ModelConfig, width: int, *, grows_heads: bool) -> ModelConfig:
    """Returns a model of another width and a small vocabulary: more heads, or with `grows_heads` wider ones.

    Raises: ConfigError: Heads do not divide this width.
    """
    stack = model.last_stack
    total = stack.heads * stack.per_head_width * width
    unit = stack.width * (stack.heads if grows_heads else stack.per_head_width)
    if total % unit:
        raise ConfigError(
            f"--widths: {width} is no whole number of heads like those of the model (width {stack.width})",
            fix=f"use multiples of {unit // np.gcd(unit, total // width)}",
        )
    heads = stack.heads if grows_heads else total // unit
    kv_heads = max(1, stack.num_kv_heads * heads // stack.heads)
    kv_heads = next(number for number in range(kv_heads, 0, -1) if heads % number == 0)
    sizes = {
        "width": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "ff_width": stack.ff_width * width // stack.width,
    }
    sizes["head_width"] = total // unit if grows_heads else stack.per_head_width
    if stack.embedding_width is not None:
        sizes["embedding_width"] = max(1, stack.embedding_width * width // stack.width)
    wide = StackConfig.model_validate(stack.model_dump() | sizes | {"dropout": 0.0, "attention_dropout": None})
    name = "encoder" if model.decoder is None else "decoder"
    return model.model_copy(update={name: wide, "vocab_size": VOCABULARY})


def _train(config: RunConfig, model_config: ModelConfig, steps: int, device: torch.device) -> list[list[float]]:
    """Returns the sizes of every layer before each step and after the last."""
    optim = config.optim
    scale = partial(scale_of, config=optim, model=model_config)

    def draw(name: str, shape: torch.Size) -> Tensor:
        return initial_weight(name, shape, model_config, config.seed).mul_(scale(name).init)

    model = build_model(model_config, PLAIN_ENGINE, device)
    assert isinstance(model, Transformer)
    fill_weights(model, draw)
    groups = group_parameters(model, optim.layer_decay, scale, split_heads=optim.splits_heads)
    optimizer = build_optimizer(groups, optim, device)
    ReplicatedState(list(model.named_parameters()), optimizer, World(0, 1, 0))  # gives Muon its matrices
    for group in optimizer.param_groups:
        group["lr"] = optim.lr * group.get("lr_ratio", 1.0)
    loss = build_loss(config.objective)
    length = min(TOKENS, model_config.max_seq_len)
    ids = torch.randint(VOCABULARY, (ROWS, length + 1), generator=torch.Generator().manual_seed(config.seed % 2**32))
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).to(device)
    sizes: list[list[float]] = []
    first: Tensor | None = None
    for step in range(steps + 1):
        values, logits = _measure(model, batch)
        first = logits if first is None else first
        sizes.append([*values, float((logits - first).abs().mean())])
        if step < steps:
            (loss(model, batch).loss_sum / batch.targets_BT.numel()).backward()
            clip_or_drop(list(model.parameters()), optim.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
    return sizes


@torch.no_grad()
def _measure(model: Transformer, batch: Batch) -> tuple[list[float], Tensor]:
    """Returns the mean absolute output of the embedding and of each block, and the logits of real tokens."""
    values: list[float] = []
    watched = [model.embedding, *model.stacks[-1].blocks]

    def measure(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output.x_BTD if isinstance(output, BlockOutput) else output
        values.append(float(hidden.abs().mean()))

    hooks = [module.register_forward_hook(measure) for module in watched]
    try:
        logits_BTV = model(batch).logits_BTV
    finally:
        for hook in hooks:
            hook.remove()
    assert logits_BTV is not None
    return values, logits_BTV[..., :VOCABULARY]


def draw_coordinates(check: CoordinateCheck, image_format: str) -> bytes:
    """Returns a picture: sizes over the width, both logarithmic, a panel a step and a line a layer."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    steps = check.sizes.shape[1]
    with plain_style(**{"svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(2.0 + 2.2 * steps, 2.8), layout="constrained")
        panels = figure.subplots(1, steps, sharex=True, sharey=True, squeeze=False)[0]
        colors = colormaps["viridis"](np.linspace(0.0, 0.9, len(check.layers)))
        for step, axes in enumerate(panels):
            axes.set_xscale("log")
            axes.set_yscale("log")
            for number, (layer, color) in enumerate(zip(check.layers, colors, strict=True)):
                sizes = check.sizes[:, step, number]
                if np.all(sizes > 0):
                    axes.plot(
                        check.widths,
                        sizes,
                        color=color,
                        marker="o",
                        markersize=2.5,
                        linewidth=1.2,
                        label=layer,
                    )
            axes.set_xticks(check.widths, [str(width) for width in check.widths])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"step {step}")
            axes.set_xlabel("width")
        panels[0].set_ylabel("mean |activation|")
        figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right upper")
        return encode_figure(figure, image_format)
