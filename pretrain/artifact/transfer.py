"""Models in and out: a released model becomes a model folder, any model becomes a Hugging Face folder.

    import   Hugging Face folder or name -> config, names and shapes compared -> weights one by one -> model folder
    export   run, checkpoint or model folder -> weights one by one -> Hugging Face folder

Both stream: no GPU is asked for, and not much more than one parameter is in memory at a time. A checkpoint of any ZeRO
stage and world size is read by the ranges of its fragments. Where two models fit into memory, an export is then run
beside what it was made of, and refused where scores differ (`check_export.py`).
"""

import logging
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pretrain.artifact.check_export import check_scores
from pretrain.artifact.find import is_release
from pretrain.artifact.what import FORMAT, TOKENIZER_FOLDER, What, open_what
from pretrain.checkpoint.layout import MODEL_FILE
from pretrain.checkpoint.weights import write_weights
from pretrain.config.load import dump_config, load_config
from pretrain.config.model import ModelConfig, SpecialTokens
from pretrain.config.recurrent import RecurrentConfig
from pretrain.errors import ConfigError
from pretrain.interop.card import About
from pretrain.interop.generation import load_generation_defaults
from pretrain.interop.hub import fetch_release
from pretrain.interop.labels import WORDS, labelled_by
from pretrain.interop.read import Release, open_release
from pretrain.interop.tokenizer import load_hub_tokenizer, reads_as_written, tokenizer_files
from pretrain.interop.write import Written, write_release
from pretrain.utils.io import make_dir, new_folder, write_file, write_json
from pretrain.utils.jsonl import read_rows

log = logging.getLogger(__name__)

_TOLD = ("step", "tokens", "loss")
"""Metrics that a card tells, besides those of validation; the rest are about the machine."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import made.

    Attributes:
        model_type: Family of the release.
        shape: Stacks of the model.
        num_parameters: Number of values; tied ones once.
        tokenizer: Whether it has one.
        ignored: Tensors of the release that have no place in the model, such as next-sentence prediction.
        not_honoured: Settings of generation, as `key=value`, that change what theirs generates and not what ours does.
    """

    model_type: str
    shape: str
    num_parameters: int
    tokenizer: bool
    ignored: list[str]
    not_honoured: list[str]


def import_model(source: str, out: Path) -> Imported:
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


def _fill(folder: Path, release: Release, source: str) -> Imported:
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
    return Imported(
        model_type=release.family.model_type,
        shape=release.config.shape,
        num_parameters=sum(math.prod(shape) for shape in release.shapes.values()),
        tokenizer=bool(files),
        ignored=release.ignored,
        not_honoured=defaults.not_honoured(),
    )


def _with_known_tokens(config: ModelConfig, known: SpecialTokens | None) -> ModelConfig:
    """Fills in the special tokens that only the tokenizer tells, such as BERT's mask."""
    if known is None:
        return config
    said = config.special_tokens.model_dump()
    filled = {role: known_id if said[role] is None else said[role] for role, known_id in known.model_dump().items()}
    return config.model_copy(update={"special_tokens": SpecialTokens(**filled)})


def export_model(
    what: Path, out: Path, *, dtype: str = "fp32", family: str | None = None, check: bool = True
) -> Written:
    """Writes a Hugging Face folder that `AutoModelFor*.from_pretrained` loads, with tokenizer and card.

    Args:
        what: A run, a checkpoint, a model folder or a Hugging Face folder.
        out: The folder; must not exist, or be empty. It appears when it is whole.
        dtype: fp32 or bf16.
        family: `model_type` to write; None: the first that represents the model exactly.
        check: Run both models on a few tokens, where there is memory for them, and compare.

    Raises:
        ConfigError: No family represents the model exactly: the keys in which the nearest differs are named.
        CheckpointError: No intact checkpoint; or transformers gives other scores, and nothing is left under `out`.
        DiskError: The disk refused; nothing is left under `out`.
    """
    described = open_what(what)
    config = described.config
    if isinstance(config, RecurrentConfig):
        raise ConfigError(
            "no Hugging Face family represents a model of model.kind=recurrent",
            where=str(what),
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


def _labels_words(what: What) -> bool:
    """Whether a classifier is known to have learned labels of words."""
    if what.run is not None:
        config = load_config(what.run.config, import_extensions=False)
        return any(task.kind == "tag" for task in config.objective.tasks)
    return is_release(what.path) and labelled_by(what.path) == WORDS


def _about(what: What, out: Path) -> About:
    if what.run is None:
        return About(name=out.name, source=str(what.path.name))
    config = load_config(what.run.config, import_extensions=False)
    source = f"run {config.run.name}, {what.path.name}"
    return About(name=config.run.name, source=source, run_config=dump_config(config), metrics=_last_metrics(what))


def _last_metrics(what: What) -> dict[str, float]:
    """Returns the last value of each number in metrics.jsonl that says how good the model is."""
    found: dict[str, float] = {}
    for row in read_rows(what.run.metrics) if what.run is not None else ():
        found |= {key: float(value) for key, value in row.items() if key in _TOLD or key.startswith("val_")}
    return found
