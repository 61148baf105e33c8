"""Data sets of the Hugging Face hub, and folders that `datasets` saved: revision and files.

    pin_revision    hf://datasets/OWNER/NAME -> hf://datasets/OWNER/NAME@COMMIT, which never changes
    choose_files    the files of one split, of what a folder or an address has

At the address of a whole data set, files are chosen as `datasets` chooses them: by the `configs` in
the head of its README.md; else by the names of splits in paths, `train-00000-of-00002.parquet` or
`train/a.jsonl`; else all. A folder of `save_to_disk` names its files in state.json, and its splits
in dataset_dict.json. No code of a data set is run.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from pretrain.config.prepare import InputConfig
from pretrain.errors import ConfigError, DataError
from pretrain.prepare.inputs.remote_files import call_hub
from pretrain.utils.remote import filesystem

SCHEME = "hf://"
STATE_NAME = "state.json"
SPLITS_NAME = "dataset_dict.json"
INFO_NAMES = ("dataset_info.json", "dataset_infos.json", STATE_NAME, SPLITS_NAME)
README_NAME = "README.md"
DEFAULT_SPLIT = "train"
# Words for splits in paths, as `datasets` knows them.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}

_ADDRESS = re.compile(r"hf://datasets/[\w.-]+/[\w.-]+(@[^/]+)?(/.*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WHOLE = re.compile(r"hf://datasets/[^/]+/[^/]+/?")
_SHARD = re.compile(r"([\w.-]+?)-\d{5}-of-\d{5}\b")
_HEAD = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
# Returns the content of a small file.
Read = Callable[[str], bytes]

_FIX = "give one of these as dataset_split"


def pin_revision(url: str, begun: Callable[[str], str | None]) -> tuple[str, str, str]:
    """Returns the name of a repository with its revision, its commit, and the URL at that commit.

    `begun` returns the commit by which a name was read before, if it was. Raises: DataError.
    """
    from huggingface_hub import HfApi

    if _ADDRESS.fullmatch(url) is None:
        fix = "use hf://datasets/OWNER/NAME, or a path below it"
        raise DataError("not an address of a data set of the hub", where=url, fix=fix)
    found = call_hub(url, lambda: filesystem(url).resolve_path(url.removeprefix(SCHEME)))
    repository = f"{found.repo_type}s/{found.repo_id}"
    name = f"{repository}@{found.revision}"
    commit = found.revision if _COMMIT.fullmatch(found.revision) else begun(name)
    if commit is None:
        api = HfApi()
        which = {"repo_type": found.repo_type, "revision": found.revision}
        commit = call_hub(url, lambda: api.repo_info(found.repo_id, **which)).sha
    path = f"/{found.path_in_repo}" if found.path_in_repo else ""
    return name, commit, f"{SCHEME}{repository}@{commit}{path}"


def pin_inputs(
    inputs: Sequence[InputConfig], begun: Callable[[str], str | None]
) -> tuple[list[InputConfig], dict[str, str]]:
    """Returns inputs whose addresses of the hub name commits, and these by repository."""
    commits: dict[str, str] = {}

    def pinned(path: str) -> str:
        if not path.startswith(SCHEME):
            return path
        name, commit, url = pin_revision(path, begun)
        commits[name] = commit
        return url

    paths = [[pinned(path) for path in one.paths] for one in inputs]
    pairs = zip(inputs, paths, strict=True)
    return [one.model_copy(update={"path": own}) for one, own in pairs], commits


def choose_files(given: str, files: Sequence[str], config: InputConfig, read: Read) -> list[str] | None:
    """Returns the files of the split that an input asks for; None: they are no data set.

    Args:
        given: The path of the input.
        files: What it names, sorted.
        config: The input.
        read: Returns the content of a small file.

    Raises:
        ConfigError: No such subset or split, or several subsets to choose from.
        DataError: A damaged description.
    """
    if any(PurePosixPath(file).name == STATE_NAME for file in files):
        return _saved_files(given, files, config, read)
    if _WHOLE.fullmatch(given):
        return _hub_files(given, files, config, read)
    return None


def _saved_files(given: str, files: Sequence[str], config: InputConfig, read: Read) -> list[str]:
    """Returns the files of data sets that `save_to_disk` wrote, in their order."""
    split = config.dataset_split or DEFAULT_SPLIT
    roots = [file.removesuffix(f"/{SPLITS_NAME}") for file in files if file.endswith(f"/{SPLITS_NAME}")]
    found = []
    for state in (file for file in files if PurePosixPath(file).name == STATE_NAME):
        folder = state.rpartition("/")[0]
        root, _, name = folder.rpartition("/")
        if root in roots and name != split:
            continue
        described = _parse(state, read, json.loads)
        if described.get("_indices_data_files"):
            fix = "save it again by a newer version of datasets, which writes the selected rows"
            raise DataError("rows are selected by a table of indices", where=state, fix=fix)
        try:
            found += [f"{folder}/{entry['filename']}" for entry in described["_data_files"]]
        except (KeyError, TypeError):
            what = "not a state of a saved data set"
            raise DataError(what, where=state, fix="save it again") from None
    for root in roots:
        if not any(file.startswith(f"{root}/{split}/") for file in found):
            below = [file.removeprefix(f"{root}/") for file in files if file.startswith(f"{root}/")]
            splits = sorted({path.partition("/")[0] for path in below if "/" in path})
            raise ConfigError(_no_split(split, splits), where=given, fix=_FIX)
    for file in found:
        if file not in files:
            what = "a file of a saved data set is missing"
            raise DataError(what, where=file, fix="copy the folder again")
    return found


def _hub_files(given: str, files: Sequence[str], config: InputConfig, read: Read) -> list[str]:
    """Returns the files of a split of a data set of the hub."""
    root = given.rstrip("/") + "/"
    split = config.dataset_split or DEFAULT_SPLIT
    readme = f"{root}{README_NAME}"
    head = _HEAD.search(read(readme).decode("utf-8", "replace")) if readme in files else None
    described = _parse(readme, lambda _: head[1].encode(), yaml.safe_load) if head else {}
    configs = [one for one in described.get("configs") or () if isinstance(one, dict)]
    subsets = [one for one in configs if one.get("data_files")]
    if subsets:
        by_split = _patterns(given, subsets, config.subset)
        if split not in by_split:
            raise ConfigError(_no_split(split, list(by_split)), where=given, fix=_FIX)
        rules = by_split[split]
        return [file for file in files if any(one.fullmatch(file[len(root) :]) for one in rules)]
    if config.subset is not None:
        what = f"subset={config.subset}: README.md of this data set names none"
        raise ConfigError(what, where=given, fix=f"leave it out, or give a path below {root}")
    data = [file for file in files if not _is_about(file[len(root) :])]
    named = _by_names([file[len(root) :] for file in data])
    if not named and split == DEFAULT_SPLIT:
        return data
    if split not in named:
        raise ConfigError(_no_split(split, sorted(named)), where=given, fix=_FIX)
    return [root + file for file in named[split]]


def _patterns(given: str, subsets: list[dict[str, Any]], wanted: str | None) -> dict[str, list[re.Pattern[str]]]:
    """Returns the patterns of paths of one of the `configs`, by split."""
    from fsspec.utils import glob_translate

    names = [str(one.get("config_name", "default")) for one in subsets]
    named = list(zip(subsets, names, strict=True))
    chosen = [one for one, name in named if name == wanted]
    what = f"there is no subset {wanted!r}"
    if wanted is None:
        what = "several subsets, and none is the default"
        chosen = [one for one, name in named if one.get("default") or name == "default"]
        chosen = chosen or (subsets if len(subsets) == 1 else [])
    if not chosen:
        what = f"{what}; subsets: {', '.join(names[:20])}"
        raise ConfigError(what, where=given, fix="give one of these as subset")
    data_files = chosen[0]["data_files"]
    folder = str(chosen[0].get("data_dir") or "").strip("/")
    if not isinstance(data_files, list) or not all(isinstance(one, dict) for one in data_files):
        data_files = [{"split": DEFAULT_SPLIT, "path": data_files}]
    found: dict[str, list[re.Pattern[str]]] = {}
    for entry in data_files:
        paths = entry.get("path")
        for path in paths if isinstance(paths, list) else [paths]:
            full = f"{folder}/{path}" if folder else str(path).removeprefix("./")
            rules = found.setdefault(str(entry.get("split", DEFAULT_SPLIT)), [])
            rules.append(re.compile(glob_translate(full)))
    return found


def _by_names(paths: Sequence[str]) -> dict[str, list[str]]:
    """Returns the paths by the split that is named in them; empty: none is."""
    found: dict[str, list[str]] = {}
    for path in paths:
        if shard := _SHARD.search(PurePosixPath(path).name):
            found.setdefault(shard[1], []).append(path)
    for split, words in SPLIT_WORDS.items() if not found else ():
        rule = re.compile(rf"(?:^|[-._ 0-9/])(?:{'|'.join(words)})(?:[-._ 0-9/]|$)")
        if named := [path for path in paths if rule.search(path)]:
            found[split] = named
    return found


def _is_about(path: str) -> bool:
    """True for a file that describes a data set, or that `datasets` reads no data from."""
    name = PurePosixPath(path).name
    is_code = name.endswith((".md", ".py")) or name.startswith(("LICENSE", "requirements"))
    return is_code or name in INFO_NAMES


def _parse(path: str, read: Read, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    try:
        found = parse(read(path))
    except (ValueError, yaml.YAMLError) as error:
        what = f"damaged: {str(error).partition(chr(10))[0]}"
        raise DataError(what, where=path, fix="copy it again") from None
    return found if isinstance(found, dict) else {}


def _no_split(split: str, splits: Sequence[str]) -> str:
    return f"there is no split {split!r}; splits: {', '.join(splits[:20]) or 'none'}"
