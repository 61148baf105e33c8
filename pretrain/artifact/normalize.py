"""What was done to the text that a model learned from, and must be done to whatever it reads later.

data folder  (`normalize` of the inputs, in prepare.json)  --training-->  run folder  --average-->  model folder
Hugging Face: nothing, its tokenizer does all
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.artifact.what import What
from pretrain.checkpoint.layout import MODEL_FILE
from pretrain.config.prepare import NormalizeConfig
from pretrain.errors import CheckpointError

log = logging.getLogger(__name__)

NORMALIZE_KEY = "normalize"
"""In a run's normalize.json and in a model folder's model.json: the steps, or nothing."""

_IDENTITY = "prepare.json"


def find_normalize(what: What) -> NormalizeConfig | None:
    """Returns what the training text of a model went through; None: nothing.

    Raises:
        CheckpointError: What is written down is no such steps.
    """
    file = what.path / MODEL_FILE if what.run is None else what.run.normalize
    if not file.is_file():
        return None
    try:
        return _parse(json.loads(file.read_text(encoding="utf-8")).get(NORMALIZE_KEY))
    except (ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{NORMALIZE_KEY} is damaged: {reason}", where=str(file), fix="restore it") from None


def dump_normalize(normalize: NormalizeConfig | None) -> bytes:
    """Returns what a run folder says of it."""
    steps = None if normalize is None else normalize.model_dump(exclude_none=True)
    return json.dumps({NORMALIZE_KEY: steps}).encode() + b"\n"


def normalize_of_data(folders: Sequence[Path]) -> NormalizeConfig | None:
    """Returns what the texts of some shard folders went through; None: nothing, or what is not the same for all."""
    found = [steps for folder in folders for steps in _of_folder(folder)]
    different = [steps for number, steps in enumerate(found) if steps not in found[:number]]
    if len(different) > 1:
        log.warning("inputs were normalised in different ways: what the model reads later is taken as it is")
    return different[0] if len(different) == 1 else None


def _of_folder(folder: Path) -> list[NormalizeConfig | None]:
    """Returns the steps of each input of a shard folder."""
    file = folder / _IDENTITY
    try:
        return [_parse(steps) for steps in _by_input(json.loads(file.read_text(encoding="utf-8"))["options"]).values()]
    except FileNotFoundError:  # re-sharded tokens of another system, or an address without it
        return [None]
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s): what the model reads later is taken as it is", file, error)
        return [None]


def _by_input(options: dict[str, Any]) -> dict[str, dict[str, Any] | None]:
    """Gathers the dotted keys `inputs.N.normalize.KEY` of each input; `inputs.N.normalize` alone is a null."""
    found: dict[str, dict[str, Any] | None] = {}
    for key, value in options.items():
        root, number, name, *rest = [*key.split(".", 3), "", ""][:4]
        if root != "inputs":
            continue
        steps = found.setdefault(number, None)
        if name == NORMALIZE_KEY and rest[0]:
            found[number] = {**(steps or {}), rest[0]: value}
    return found


def _parse(steps: dict[str, Any] | None) -> NormalizeConfig | None:
    return None if steps is None else NormalizeConfig.model_validate(steps)
