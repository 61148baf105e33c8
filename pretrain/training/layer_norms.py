"""Norms of gradients and updates by layer: the parts that learn, stand still, or blow up.

    arm()                        hooks on the optimizer, for one step
    before the optimizer steps   gradient of each master weight      ->  squares, added up by layer
    after it, under AdamW        change that it has just subtracted  ->  the same
    take()                       an all-reduce of two numbers a layer, where ZeRO cuts the weights

Works at every ZeRO stage, under DDP and in one process, because all of them hand the same torch
optimizer fp32 weights with a gradient for each; the fragments of a checkpoint tell where a
parameter's piece lies in them. These gradients are clipped: norms are scaled back, so that the
squares of all layers add up to that of `grad_norm`.

An update of AdamW is computed from the moments that it leaves behind, so that no copy of the
weights is needed:

    w' = (1 - lr decay) w - d   with   d = lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

Not here: updates of optimizers over whole matrices (Muon, Adafactor), which leave no such moments.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pretrain import dist
from pretrain.engine.engine import Update
from pretrain.types import FragmentStore

_BLOCK = re.compile(r"(?<!\w)(\w+)\.blocks\.(\d+)\.")
_CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Elements of an update at a time, by device: the size of a core's cache; enough for a launch."""


def layer_of(name: str, width: int = 1) -> str:
    """Returns the layer of a parameter: `decoder_03` in a block, else its first part."""
    match = _BLOCK.search(name)
    return f"{match[1]}_{int(match[2]):0{width}}" if match else name.partition(".")[0]


def name_layers(names: Iterable[str]) -> dict[str, str]:
    """Returns the layer of each parameter, with block numbers of one width."""
    names = list(names)
    numbers = [int(match[2]) for match in map(_BLOCK.search, names) if match]
    width = len(str(max(numbers, default=0)))
    return {name: layer_of(name, width) for name in names}


class LayerNorms:
    """Measures chosen steps of a run. All ranks call the same methods at the same steps.

    `state` tells where each parameter's pieces lie; with `is_cut` each rank has a share of them.
    """

    def __init__(
        self, names: Sequence[str], optimizer: torch.optim.Optimizer, state: FragmentStore, *, is_cut: bool
    ) -> None:
        layers = name_layers(names)
        self._layers = list(dict.fromkeys(layers.values()))
        self._place = {name: self._layers.index(layer) for name, layer in layers.items()}
        self._state = state
        self._is_cut = is_cut
        self._optimizer = optimizer
        self._has_updates = isinstance(optimizer, torch.optim.AdamW)
        self._pieces: dict[int, list[tuple[int, int, int]]] = {}
        self._squares: list[tuple[int, int, Tensor]] = []
        self._hooks: list[RemovableHandle] = []

    def arm(self) -> None:
        """Measures the step that is about to be applied."""
        self._disarm()
        self._hooks = [self._optimizer.register_step_pre_hook(self._before_step)]
        if self._has_updates:
            self._hooks.append(self._optimizer.register_step_post_hook(self._after_step))
        # Of what several ranks have, each measures the share that it saves.
        state = self._state
        for fragment in state.owned_fragments() if self._is_cut else state.held_fragments():
            weight = fragment.tensors.get("weight")
            if weight is not None and fragment.name in self._place:
                piece = (weight.storage_offset(), weight.numel(), self._place[fragment.name])
                self._pieces.setdefault(weight.untyped_storage().data_ptr(), []).append(piece)

    def _disarm(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._squares = []
        self._pieces = {}

    def take(self, update: Update, device: torch.device) -> dict[str, float]:
        """Returns `grad_norm/LAYER` and, under AdamW, `update_norm/LAYER`. Collective.

        Empty where no step was armed, or the step was skipped. `device`: of the exchange.
        """
        is_armed = bool(self._hooks)
        squares = self._squares
        self._disarm()
        if not is_armed or update.skipped:
            return {}
        sums = torch.zeros(2 * len(self._layers), dtype=torch.float64)
        if squares:
            places = torch.tensor([kind * len(self._layers) + layer for kind, layer, _ in squares])
            sums.index_add_(0, places, torch.stack([value for *_, value in squares]).double().cpu())
        if self._is_cut:
            sums = dist.all_reduce_sum(sums.to(device)).cpu()
        gradients, updates = (part.sqrt() for part in sums.chunk(2))
        seen = float(gradients.norm())
        if seen:
            gradients *= update.grad_norm / seen
        kinds = {"grad_norm": gradients} | ({"update_norm": updates} if self._has_updates else {})
        return {
            f"{kind}/{layer}": float(norm)
            for kind, norms in kinds.items()
            for layer, norm in zip(self._layers, norms, strict=True)
        }

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for master, start, end, layer, _group in self._stepped(optimizer):
            assert master.grad is not None
            self._add(0, layer, master.grad.reshape(-1)[start:end])

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for master, start, end, layer, group in self._stepped(optimizer):
            if not optimizer.state[master]["step"]:
                continue  # the first step of all, which the optimizer's kernel has skipped
            size = _CHUNK.get(master.device.type, _CHUNK["cpu"])
            for first in range(start, end, size):
                place = slice(first, min(first + size, end))
                self._add(1, layer, *adamw_update(optimizer.state[master], master, group, place))

    def _add(self, kind: int, layer: int, values: Tensor, factor: float = 1.0) -> None:
        norm = torch.linalg.vector_norm(values).double().mul(factor)
        self._squares.append((kind, layer, norm.square()))

    def _stepped(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, int, int, int, dict[str, Any]]]:
        """Yields (tensor, start, end, layer, group) of each piece in the stepped tensors."""
        for group in optimizer.param_groups:
            for master in group["params"]:
                if master.grad is None:
                    continue
                origin, size = master.storage_offset(), master.numel()
                pieces = self._pieces.get(master.untyped_storage().data_ptr(), ())
                for offset, length, layer in pieces:
                    if 0 <= offset - origin < size:
                        yield master, offset - origin, offset - origin + length, layer, group


def adamw_update(state: dict[str, Tensor], weight: Tensor, group: dict[str, Any], place: slice) -> tuple[Tensor, float]:
    """Returns the change of a weight by the last AdamW step, up to its sign: a direction, a factor.

    `weight` and its state are those after the step; `place` selects elements, flattened.
    """
    beta1, beta2 = group["betas"]
    step = float(state["step"])
    decay = group["lr"] * group["weight_decay"]
    root = (1 - beta2**step) ** 0.5
    factor = group["lr"] * root / (1 - beta1**step)
    first, second = (state[key].view(-1)[place] for key in ("exp_avg", "exp_avg_sq"))
    change = second.sqrt().add_(group["eps"] * root)  # common factors come last: fewer passes
    torch.div(first, change, out=change)
    if decay:
        # w = (w' + d) / (1 - lr decay), and the change is lr decay w + d
        change.add_(weight.view(-1)[place], alpha=decay / factor)
    return change, factor / (1 - decay)
