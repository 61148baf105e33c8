"""An export gives the scores of what it was made of: both are run on the same tokens, before the folder has its name.

What -> our model, weights rounded as the export's are -> scores    compared: the largest difference, beside the
folder -> the class of transformers that loads it      -> scores    largest score

A weight that is in the wrong place, transposed or left out changes scores by more than rounding does by far.
"""

import logging
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.artifact.open import load_model
from pretrain.artifact.what import What
from pretrain.errors import CheckpointError
from pretrain.types import Batch, Source

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Of the largest score: fp32 through many layers, summed in other orders; a lost bias of a trained model is more."""

_ROWS, _LENGTH = 2, 32
_MEMORY_INFO = Path("/proc/meminfo")


def check_scores(what: What, folder: Path, architecture: str, dtype: torch.dtype) -> None:
    """Runs both models, if there is memory for them, and says so where there is not.

    Args:
        what: What was exported.
        folder: The export.
        architecture: Class of transformers that loads it.
        dtype: Of its weights.

    Raises:
        CheckpointError: transformers cannot load it, or its scores are others.
    """
    needed = 2 * 4 * sum(prod(shape) for shape in what.shapes.values())
    if needed > (free := _available_bytes()):
        log.warning(
            "scores of the export were not compared: two models in fp32 take %.1f GiB, there are %.1f GiB",
            needed / 2**30,
            free / 2**30,
        )
        return
    tokens = _probe(what)
    ours, theirs = _our_scores(what, tokens, dtype), _their_scores(folder, architecture, tokens)
    if theirs.dim() == 2:  # of a document: ours are at its first token
        ours = ours[:, 0]
    if ours.shape != theirs.shape:
        raise _differ(what, f"{list(ours.shape)} scores became {list(theirs.shape)}")
    difference, scale = float((ours - theirs).abs().max()), float(ours.abs().max())
    if not difference <= TOLERANCE * scale:  # not a number is no match either
        raise _differ(what, f"by up to {difference:.3g}, the largest is {scale:.3g}")


def _differ(what: What, how: str) -> CheckpointError:
    return CheckpointError(
        f"the export gives other scores than the model ({how}): nothing was written",
        where=str(what.path),
        fix="report it; --no-check writes it all the same",
    )


def _probe(what: What) -> Tensor:
    """Returns ordinary tokens, int64 [B, T]: the same for the same model."""
    size, special = what.config.vocab_size, what.config.special_tokens.model_dump().values()
    assert size is not None
    ordinary = torch.tensor([number for number in range(size) if number not in set(special)])
    shape = (_ROWS, min(_LENGTH, what.config.max_seq_len))
    return ordinary[torch.randint(len(ordinary), shape, generator=torch.Generator().manual_seed(0))]


@torch.no_grad()
def _our_scores(what: What, tokens_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns fp32 [B, T, V], padding of the vocabulary left out; without a head the last hidden states."""
    read = what.read
    rounded = replace(what, read=lambda name: read(name).to(dtype).float())
    model = load_model(rounded, torch.device("cpu"))
    source = Source(tokens_BT) if what.config.shape == "encoder+decoder" else None
    found = model(Batch(tokens_BT, tokens_BT, source=source))
    if found.logits_BTV is None:
        return found.hidden_BTD
    assert model.head is not None
    return found.logits_BTV[..., : model.head.num_scores]


@torch.no_grad()
def _their_scores(folder: Path, architecture: str, tokens_BT: Tensor) -> Tensor:
    """Returns what transformers gives. Raises: CheckpointError: It cannot load the folder."""
    import transformers

    bar, level = transformers.logging.is_progress_bar_enabled(), transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        model: Any = getattr(transformers, architecture).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except Exception as error:  # transformers raises nearly anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"transformers cannot load the export: {reason}",
            where=architecture,
            fix="report it; --no-check writes it all the same",
        ) from None
    finally:
        transformers.logging.set_verbosity(level)
        if bar:
            transformers.logging.enable_progress_bar()
    inputs = {"input_ids": tokens_BT, "attention_mask": torch.ones_like(tokens_BT)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens_BT
    found = model.eval()(**inputs)
    scores = getattr(found, "logits", None)
    return (found.last_hidden_state if scores is None else scores).float()


def _available_bytes() -> float:
    """Returns the memory that is free, or can be made so; infinity where that is not known."""
    try:
        lines = _MEMORY_INFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return float("inf")
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), float("inf"))
