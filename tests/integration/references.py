"""The definitions that engines are compared with: torch alone, one process, one big batch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.model import LanguageModel, build_model, init_weights
from pretrain.optim.groups import group_parameters
from pretrain.types import IGNORE_INDEX, Batch
from tests.integration.workers import MODEL, VOCAB, global_batch


def bare_float64(steps: int) -> list[list[float]]:
    """The definition: the token mean over one big batch, float64, no engine, no chunked loss; [loss, grad norm]."""
    model = _plain_model()
    model.double()
    return follow(model, lambda step: _token_mean(model, global_batch(step)), steps)


def follow(model: nn.Module, loss_at: Callable[[int], Tensor], steps: int) -> list[list[float]]:
    """Trains a model by torch's AdamW alone, on the loss that each step gives; [loss, grad norm] of each."""
    decaying, rest = group_parameters(model)
    groups = [{"params": decaying.parameters, "weight_decay": 0.1}, {"params": rest.parameters, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=False)
    rows = []
    for step in range(steps):
        loss = loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rows.append([loss.item(), norm.item()])
    return rows


def bare_blocks(optimizer: str, steps: int) -> list[list[float]]:
    """torch's own optimizer over each matrix of the model apart, one big batch, fp32, no engine; [loss, grad norm]."""
    model = _plain_model()
    apart: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        rows = [36, 12, 12] if name.endswith("qkv.weight") else [parameter.shape[0]]
        rows = [50, 50] if name.endswith("gate_up.weight") else rows
        apart[name] = [torch.nn.Parameter(part.detach().clone()) for part in parameter.split(rows)]
    hidden = [part for name, parts in apart.items() if "embedding" not in name for part in parts if part.ndim == 2]
    others = [part for name, parts in apart.items() for part in parts if "embedding" in name or part.ndim == 1]
    if optimizer == "muon":
        steppers = [torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1)]
        steppers += [torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)]
    else:
        steppers = [torch.optim.Adafactor(hidden, lr=1e-2, eps=(1e-18, 1e-3), weight_decay=0.1)]
        steppers += [torch.optim.Adafactor(others, lr=1e-2, eps=(1e-18, 1e-3), weight_decay=0.0)]
    rows_out = []
    for step in range(steps):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.cat(list(apart[name])))
        loss = _token_mean(model, global_batch(step))
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for name, parameter in model.named_parameters():
            for part, gradient in zip(
                apart[name], parameter.grad.split([p.shape[0] for p in apart[name]]), strict=True
            ):
                part.grad = gradient.clone()
        for stepper in steppers:
            stepper.step()
        rows_out.append([loss.item(), norm.item()])
    return rows_out


def _plain_model() -> LanguageModel:
    """The model with the weights that engines start from, on one thread."""
    torch.set_num_threads(1)
    config = ModelConfig.model_validate(expand_preset(MODEL))
    model = build_model(config, PLAIN_ENGINE.model_copy(update={"attention": "eager"}), torch.device("cpu"))
    init_weights(model, config, seed=5)
    return model


def _token_mean(model: LanguageModel, batch: Batch) -> torch.Tensor:
    logits = model(batch).logits_BTV[..., :VOCAB].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch.targets_BT.flatten(), ignore_index=IGNORE_INDEX)
