"""Imports released models as model folders, exports models as Hugging Face folders, and verifies an export's scores.

    source -> our model, weights rounded to the export's dtype -> scores    compared: the largest difference, relative
    folder -> the class of transformers that loads it          -> scores    to the largest score

A misplaced, transposed or missing weight changes scores far more than rounding does.
"""

import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.artifact.model_path import FORMAT, is_release, open_source
from pretrain.artifact.open import load_model
from pretrain.artifact.source import TOKENIZER_FOLDER, ModelSource
from pretrain.checkpoint.format import MODEL_FILE
from pretrain.checkpoint.load import write_weights
from pretrain.config.load import dump_config, load_config
from pretrain.config.model import ModelConfig, SpecialTokens
from pretrain.config.recurrent import RecurrentConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.interop.generation import load_generation_defaults
from pretrain.interop.hub_files import fetch_release
from pretrain.interop.label_names import WORDS, labelled_by
from pretrain.interop.release import Release, open_release
from pretrain.interop.tokenizer import load_hub_tokenizer, reads_as_written, tokenizer_files
from pretrain.interop.write import About, ExportReport, write_release
from pretrain.types import Batch, SourceBatch
from pretrain.utils.io import make_dir, new_folder, write_file, write_json
from pretrain.utils.jsonl import read_rows

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Relative to the largest score: fp32 rounding over many layers. A lost bias of a trained model exceeds it."""

_ROWS, _LENGTH = 2, 32

_MEMORY_INFO = Path("/proc/meminfo")


def check_scores(source: ModelSource, folder: Path, architecture: str, dtype: torch.dtype) -> None:
    """Compares the scores of an export with those of its source; logs a warning if memory is too small for both.

    Args:
        source: The exported model.
        folder: Folder of the export.
        architecture: Class of transformers that loads it.
        dtype: Dtype of the exported weights.

    Raises:
        CheckpointError: transformers cannot load it, or its scores are others.
    """
    needed = 2 * 4 * sum(prod(shape) for shape in source.shapes.values())
    if needed > (free := _available_bytes()):
        log.warning(
            "scores of the export were not compared: two models in fp32 take %.1f GiB, there are %.1f GiB",
            needed / 2**30,
            free / 2**30,
        )
        return
    tokens = _probe(source)
    ours, theirs = _our_scores(source, tokens, dtype), _their_scores(folder, architecture, tokens)
    if theirs.dim() == 2:  # of a document: ours are at its first token
        ours = ours[:, 0]
    if ours.shape != theirs.shape:
        raise _differ(source, f"{list(ours.shape)} scores became {list(theirs.shape)}")
    difference, scale = float((ours - theirs).abs().max()), float(ours.abs().max())
    if not difference <= TOLERANCE * scale:  # not a number is no match either
        raise _differ(source, f"by up to {difference:.3g}, the largest is {scale:.3g}")


def _differ(source: ModelSource, how: str) -> CheckpointError:
    return CheckpointError(
        f"the export gives other scores than the model ({how}): nothing was written",
        where=str(source.path),
        fix="report it; --no-check writes it all the same",
    )


def _probe(source: ModelSource) -> Tensor:
    """Returns ordinary tokens, int64 [B, T]: the same for the same model."""
    size, special = source.config.vocab_size, source.config.special_tokens.model_dump().values()
    assert size is not None
    ordinary = torch.tensor([number for number in range(size) if number not in set(special)])
    shape = (_ROWS, min(_LENGTH, source.config.max_seq_len))
    return ordinary[torch.randint(len(ordinary), shape, generator=torch.Generator().manual_seed(0))]


@torch.no_grad()
def _our_scores(source: ModelSource, tokens_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns fp32 [B, T, V], padding of the vocabulary left out; without a head the last hidden states."""
    read = source.read
    rounded = replace(source, read=lambda name: read(name).to(dtype).float())
    model = load_model(rounded, torch.device("cpu"))
    encoder_batch = SourceBatch(tokens_BT) if source.config.shape == "encoder+decoder" else None
    found = model(Batch(tokens_BT, tokens_BT, source=encoder_batch))
    if found.logits_BTV is None:
        return found.hidden_BTD
    assert model.head is not None
    return found.logits_BTV[..., : model.head.num_scores]


@torch.no_grad()
def _their_scores(folder: Path, architecture: str, tokens_BT: Tensor) -> Tensor:
    """Returns the scores of transformers' model. Raises: CheckpointError: It cannot load the folder."""
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
    """Returns the available memory; infinity if unknown."""
    try:
        lines = _MEMORY_INFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return float("inf")
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), float("inf"))


# Import and export.
#
#     import   Hugging Face folder or name -> config, names and shapes compared -> weights one by one -> model folder
#     export   run, checkpoint or model folder -> weights one by one -> Hugging Face folder
#
# Both stream, without a GPU and with little more than one parameter in memory. A checkpoint of any ZeRO stage and world
# size is read by the ranges of its fragments.

_CARD_METRICS = ("step", "tokens", "loss")
"""Metrics of a model card, besides those of validation."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of an import.

    Attributes:
        model_type: Family of the release.
        shape: Stacks of the model.
        num_parameters: Number of values; tied ones once.
        tokenizer: The release has a tokenizer.
        ignored: Tensors of the release without a counterpart, such as next-sentence prediction.
        not_honoured: Generation settings, as `key=value`, that the release uses and ours ignores.
    """

    model_type: str
    shape: str
    num_parameters: int
    tokenizer: bool
    ignored: list[str]
    not_honoured: list[str]


def import_model(source: str, out: Path) -> ImportReport:
    """Writes a model folder of a released model: weights fp32 in the checkpoint format, config, tokenizer.

    Args:
        source: A Hugging Face folder, or a name on the hub.
        out: The folder; must not exist, or be empty. It appears when it is whole.

    Raises:
        ConfigError: No such model, one that this core cannot express exactly, or `out` holds something.
        CheckpointError: Files are missing or damaged, or not those of the config.
        LaunchError: The hub cannot be reached.
        DiskError: The disk refused; nothing is left under `out`.
    """
    release = open_release(fetch_release(source))
    with new_folder(out) as temporary:
        return _fill(temporary, release, source)


def _fill(folder: Path, release: Release, source: str) -> ImportReport:
    defaults, files = load_generation_defaults(release.folder), tokenizer_files(release.folder)
    config = _with_known_tokens(release.config, load_hub_tokenizer(release.folder).special_tokens if files else None)
    origin = {"imported_from": source, "model_type": release.family.model_type, "dtype": release.dtype}
    facts = {
        "format": FORMAT,
        "model": config.model_dump(mode="json"),
        "generation": defaults.to_json(),
        "origin": origin,
    }
    write_json(folder / MODEL_FILE, facts)
    if files:
        tokenizer = make_dir(folder / TOKENIZER_FOLDER)
        for name, content in files:
            write_file(tokenizer / name, content)
    write_weights(folder, ((name, release.read(name)) for name in release.names()), origin)
    return ImportReport(
        model_type=release.family.model_type,
        shape=release.config.shape,
        num_parameters=sum(math.prod(shape) for shape in release.shapes.values()),
        tokenizer=bool(files),
        ignored=release.ignored,
        not_honoured=defaults.not_honoured(),
    )


def _with_known_tokens(config: ModelConfig, known: SpecialTokens | None) -> ModelConfig:
    """Fills in special tokens that only the tokenizer defines, such as BERT's mask."""
    if known is None:
        return config
    said = config.special_tokens.model_dump()
    filled = {role: known_id if said[role] is None else said[role] for role, known_id in known.model_dump().items()}
    return config.model_copy(update={"special_tokens": SpecialTokens(**filled)})


def export_model(
    path: Path, out: Path, *, dtype: str = "fp32", family: str | None = None, check: bool = True
) -> ExportReport:
    """Writes a Hugging Face folder that `AutoModelFor*.from_pretrained` loads, with tokenizer and card.

    Args:
        path: A run, a checkpoint, a model folder or a Hugging Face folder.
        out: The folder; must not exist, or be empty. It appears when it is whole.
        dtype: fp32 or bf16.
        family: `model_type` to write; None: the first that represents the model exactly.
        check: Run both models on a few tokens, where there is memory for them, and compare.

    Raises:
        ConfigError: No family represents the model exactly: the keys in which the nearest differs are named.
        CheckpointError: No intact checkpoint; or transformers gives other scores, and nothing is left under `out`.
        DiskError: The disk refused; nothing is left under `out`.
    """
    described = open_source(path)
    config = described.config
    if isinstance(config, RecurrentConfig):
        raise ConfigError(
            "no Hugging Face family represents a model of model.kind=recurrent",
            where=str(path),
            fix="use it with `pretrain generate` and `pretrain evaluate`",
        )
    written = write_release(
        config,
        described.read,
        out,
        dtype=dtype,
        family=family,
        generation=described.generation.to_json(config.special_tokens),
        tokenizer_files=described.load_tokenizer_files(),
        about=_about(described, out),
        labels_words=_labels_words(described),
        check=partial(check_scores, described) if check else None,
    )
    if described.run is not None and not reads_as_written(out):
        log.warning(
            "%s: AutoTokenizer reads this tokenizer by the rules of %s, which gives other ids; load its tokenizer.json "
            "with PreTrainedTokenizerFast instead",
            out,
            written.model_type,
        )
    return written


def _labels_words(source: ModelSource) -> bool:
    """Tells whether a classifier is known to label words."""
    if source.run is not None:
        config = load_config(source.run.config, import_extensions=False)
        return any(task.kind == "tag" for task in config.objective.tasks)
    return is_release(source.path) and labelled_by(source.path) == WORDS


def _about(source: ModelSource, out: Path) -> About:
    if source.run is None:
        return About(name=out.name, source=str(source.path.name))
    config = load_config(source.run.config, import_extensions=False)
    origin = f"run {config.run.name}, {source.path.name}"
    return About(name=config.run.name, source=origin, run_config=dump_config(config), metrics=_last_metrics(source))


def _last_metrics(source: ModelSource) -> dict[str, float]:
    """Returns the last value of each number in metrics.jsonl that says how good the model is."""
    found: dict[str, float] = {}
    for row in read_rows(source.run.metrics) if source.run is not None else ():
        found |= {key: float(value) for key, value in row.items() if key in _CARD_METRICS or key.startswith("val_")}
    return found
