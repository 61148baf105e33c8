"""What was done to the text that a model learned from, and must be done to whatever it reads later.

a run            what its data folder says (`normalize` of the inputs, in prepare.json)
a model folder   what its model.json says
Hugging Face     nothing: its tokenizer does all
"""

import json
import logging
from pathlib import Path
from typing import Any

from pretrain.artifact.what import What
from pretrain.checkpoint.layout import MODEL_FILE
from pretrain.config.load import load_config
from pretrain.config.prepare import NormalizeConfig
from pretrain.errors import CheckpointError, DataError

log = logging.getLogger(__name__)

NORMALIZE_KEY = "normalize"
"""In model.json: the steps, or nothing."""

_IDENTITY = "prepare.json"


def find_normalize(what: What) -> NormalizeConfig | None:
    """Returns what the training text of a model went through; None: nothing.

    Raises:
        CheckpointError: A model folder says something that is no such steps.
        DataError: The data folder of a run is not where it was, and only there it is written down.
    """
    if what.run is not None:
        paths = load_config(what.run.config, import_extensions=False).data.paths
        found = [steps for path in paths for steps in _of_data(path)]
    elif (file := what.path / MODEL_FILE).is_file():
        found = [_parse(json.loads(file.read_text(encoding="utf-8")).get(NORMALIZE_KEY), file)]
    else:
        return None
    different = [steps for number, steps in enumerate(found) if steps not in found[:number]]
    if len(different) > 1:
        log.warning("%s: its inputs were normalised in different ways; text is taken as it is", what.path)
    return different[0] if len(different) == 1 else None


def _of_data(path: str) -> list[NormalizeConfig | None]:
    """Returns the steps of each input of a shard folder."""
    if "://" in path:
        log.warning("%s is not looked at: if its text was normalised, normalise yours alike", path)
        return [None]
    if not Path(path).is_dir():
        raise DataError(
            "not here, and only there it is said how the run's text was normalised",
            where=path,
            fix="start the command where the run was started, or put the folder back",
        )
    file = Path(path) / _IDENTITY
    try:
        options = json.loads(file.read_text(encoding="utf-8"))["options"]
    except FileNotFoundError:
        return [None]
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s): text is taken as it is", file, error)
        return [None]
    return [_parse(steps, file) for steps in _by_input(options).values()]


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


def _parse(steps: dict[str, Any] | None, file: Path) -> NormalizeConfig | None:
    try:
        return None if steps is None else NormalizeConfig.model_validate(steps)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{NORMALIZE_KEY} is damaged: {reason}", where=str(file), fix="restore it") from None
