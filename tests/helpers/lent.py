"""A model of transformers with random weights, lent to ours through a folder on disk, as `pretrain import` would."""

import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.interop.release import Release, open_release
from pretrain.interop.tensors import from_theirs
from pretrain.model import Transformer, build_model
from pretrain.model.build import named_weights


class Lent(NamedTuple):
    """The same weights twice.

    Attributes:
        theirs: The model of transformers, in eval mode.
        ours: Ours.
        release: The folder, opened: config and names.
    """

    theirs: Any
    ours: Transformer
    release: Release


def lend(theirs: Any, folder: Path) -> Lent:
    """Gives biases and norms values that matter, saves the model as its makers would, and imports it."""
    generator = torch.Generator().manual_seed(0)
    fixed = {parameter.data_ptr() for parameter in theirs.parameters() if not parameter.requires_grad}
    with torch.no_grad():
        # By what is saved: buffers that are not hold rotary frequencies.
        named = {tensor.data_ptr(): (name, tensor) for name, tensor in theirs.state_dict().items()}
        for name, tensor in named.values():
            is_small = tensor.ndim == 1 or tensor.shape[0] == 1 or name.endswith("bias")
            if is_small and tensor.data_ptr() not in fixed:
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    theirs.eval().save_pretrained(folder)
    release = open_release(folder)
    return Lent(theirs, build_imported(release), release)


def build_imported(release: Release) -> Transformer:
    """Builds the model of a release, and fills it parameter by parameter."""
    ours = build_model(release.config, PLAIN_ENGINE, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in named_weights(ours):
            parameter.copy_(release.read(name))
    return ours.eval()


def check_gradients(lent: Lent, tolerance: float = 1e-5) -> None:
    """Asserts that the gradients of both models agree, each parameter's to `tolerance` of its norm."""
    theirs, ours, release = lent
    named = [*theirs.named_parameters(remove_duplicate=False), *theirs.named_buffers(remove_duplicate=False)]
    as_saved = {name for weight in release.family.weights(release.config) for name, _ in weight.theirs}
    saved = [one for name, tensor in named for one in _as_saved(name, tensor.grad, as_saved)]
    expected = {_renamed(name, release.family.renames): gradient for name, gradient in saved}
    bare = not any(name.startswith(release.family.prefix) for name in expected)
    found = dict(ours.named_parameters())
    for weight in release.family.weights(release.config):
        names = [name.removeprefix(release.family.prefix) if bare else name for name, _ in weight.theirs]
        if weight.ours not in found:  # the bias of a choice of experts, which has no gradient
            assert weight.ours.endswith("balance.bias")
            continue
        parameter = found.pop(weight.ours)
        ours_grad = parameter.grad
        their_grad = from_theirs(weight, [_known(expected, name) for name in names], tuple(parameter.shape))
        assert ours_grad is not None, weight.ours
        assert their_grad.norm() > 0, f"{weight.ours} does not matter here"
        assert (ours_grad - their_grad).norm() <= tolerance * their_grad.norm(), weight.ours
    assert not found


def _renamed(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    """The name in the files of a tensor that transformers names otherwise in memory."""
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def _as_saved(name: str, gradient: Tensor | None, as_saved: set[str]) -> list[tuple[str, Tensor | None]]:
    """Splits what transformers fuses while it loads, the matrices of experts, by the names of its files."""
    prefix, fused, kind = name.partition(".mlp.experts.")
    block, inside, part = name.partition(".block_sparse_moe.")
    name = f"{block}{inside}{_GRANITE_NAMES.get(part, part)}"
    layer, is_filter, _ = name.partition("conv1d.weight")
    if gradient is not None and is_filter and name not in as_saved:  # OLMo Hybrid's files have three
        return [(f"{layer}{part}_conv1d.weight", rows) for part, rows in zip("qkv", gradient.chunk(3), strict=True)]
    if gradient is None or not fused or name in as_saved:
        return [(name, gradient)]
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return [
        (f"{prefix}.mlp.experts.{number}.{part}.weight", matrix)
        for number, expert in enumerate(gradient)
        for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True)
    ]


_GRANITE_NAMES = {
    "router.weight": "router.layer.weight",
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
}
_MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _fused_name(name: str) -> str:
    """Returns the name of a tensor of Mixtral's files in the model of transformers."""
    for theirs, released in _MIXTRAL_NAMES.items():
        name = name.replace(f".{released}.", f".{theirs}.")
    return name.replace(".block_sparse_moe.", ".mlp.")


def _known(gradients: dict[str, Tensor | None], name: str) -> Tensor:
    gradient = gradients[name if name in gradients else _fused_name(name)]
    assert gradient is not None, name
    return gradient


@contextmanager
def quiet_transformers():
    """No notices and no progress bars of transformers while a small model with odd ids is made."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        transformers.logging.enable_progress_bar()
