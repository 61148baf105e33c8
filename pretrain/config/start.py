"""Reads the model of `init.from`, over which the keys of `model:` are laid.

    run, or a checkpoint of one   config.yaml
    model folder                  model.json
    Hugging Face folder           config.json

Read before validation, and only where `model:` names neither a preset nor a stack's layers: a resolved config holds its
whole model and needs no other folder.
"""

import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.config.yaml_nodes import merge, read_yaml
from pretrain.errors import ConfigError

_OWN_HEAD = ("head", "tied_embeddings")


def _of_run(folder: Path) -> dict[str, Any]:
    return dict(read_yaml(folder / "config.yaml").values["model"])


def _of_model_folder(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "model.json").read_text(encoding="utf-8"))["model"])


def _of_release(folder: Path) -> dict[str, Any]:
    # `interop` is a layer above and needs torch: found by its name, for the one kind of folder that needs it.
    open_release = pkgutil.resolve_name("pretrain.interop.release:open_release")
    return dict(open_release(folder).config.model_dump(mode="json"))


_READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "model.json": _of_model_folder,
    "config.yaml": _of_run,
    "config.json": _of_release,
}
"""Readers of the values of `model:`, by the file that identifies a folder."""


def names_a_model(model: dict[str, Any]) -> bool:
    """Returns whether a `model:` section defines a model: by a preset, or by stacks with layers."""
    stacks = (model.get("encoder"), model.get("decoder"))
    return model.get("preset") is not None or any(isinstance(s, dict) and "layers" in s for s in stacks)


def lay_over_start(model: dict[str, Any], start: str) -> dict[str, Any]:
    """Lays the keys of a `model:` section over the model of `init.from`.

    A head of another kind replaces that of the start. The end-of-text token is taken from the data.

    Raises:
        ConfigError: There is no model at `start`.
    """
    base = _read(Path(start))
    base = {key: value for key, value in base.items() if key != "preset"}
    base["special_tokens"] = {**(base.get("special_tokens") or {}), "eos": None}
    kind, given = (base.get("head") or {}).get("kind", "lm"), model.get("head")
    if isinstance(given, dict) and given.get("kind", kind) != kind:
        base = {key: value for key, value in base.items() if key not in _OWN_HEAD}
    return merge(base, model)


def _read(folder: Path) -> dict[str, Any]:
    folders = (folder, folder.resolve().parent.parent)  # of a checkpoint the run
    for place in folders if (folder / "manifest.json").is_file() else (folder,):
        for name, read in _READERS.items():
            if (place / name).is_file():
                try:
                    return read(place)
                except (OSError, ValueError, KeyError, TypeError) as error:
                    raise ConfigError(f"init.from: no model can be read: {error}", where=str(place / name)) from None
    raise ConfigError(
        f"init.from={folder}: no run, checkpoint, model folder or Hugging Face folder is there",
        fix="check the path, or name a model.preset",
    )
