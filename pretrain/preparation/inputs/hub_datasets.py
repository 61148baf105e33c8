"""Data sets of the Hugging Face hub, and folders that `datasets` saved: revision and files.

    pin_revision    hf://datasets/OWNER/NAME -> hf://datasets/OWNER/NAME@COMMIT, which never changes
    choose_files    the files of one split, of what a folder or an address has

At the address of a whole data set, files are chosen as `datasets` chooses them: by the `configs` in
the head of its README.md; else by the names of splits in paths, `train-00000-of-00002.parquet` or
`train/a.jsonl`; else all. A folder of `save_to_disk` names its files in state.json, and its splits
in dataset_dict.json. No code of a data set is run, and what it says of itself is read strictly, in
time that grows with its length: a stranger wrote it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from pathlib import PurePosixPath
from typing import Any

from pretrain.config.prepare import InputConfig
from pretrain.config.yaml_nodes import parse_yaml, short
from pretrain.errors import ConfigError, DataError
from pretrain.preparation.inputs.remote_files import call_hub
from pretrain.utils.remote import filesystem
from pretrain.utils.safe_read import MAX_RECORD_BYTES, parse_json

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
_SHARD = re.compile(r"(?<![\w.-])([\w.-]+?)-\d{5}-of-\d{5}\b")
Read = Callable[[str, int], bytes]
"""Returns the first bytes of a file, at most as many as are asked for."""

MAX_HEAD_BYTES = 2**20
MAX_PATTERNS = 1000
"""Most patterns with wildcards of a split, each of which is tried on all files."""
MAX_PATTERN_CHARS = 1000
_SEVERAL = "**"  # folders, or none

_FIX = "give one of these as dataset_split"


def pin_revision(url: str, begun: Callable[[str], str | None]) -> tuple[str, str, str]:
    """Returns the name of a repository with its revision, its commit, and the URL at that commit.

    `begun` returns the commit by which a name was read before, if it was. Raises: DataError.
    """
    from huggingface_hub import HfApi

    if _ADDRESS.fullmatch(url) is None:
        raise DataError(
            "not an address of a data set of the hub",
            where=url,
            fix="use hf://datasets/OWNER/NAME, or a path below it",
        )
    resolved = call_hub(url, lambda: filesystem(url).resolve_path(url.removeprefix(SCHEME)))
    repository = f"{resolved.repo_type}s/{resolved.repo_id}"
    name = f"{repository}@{resolved.revision}"
    commit = resolved.revision if _COMMIT.fullmatch(resolved.revision) else begun(name)
    if commit is None:
        api = HfApi()
        which = {"repo_type": resolved.repo_type, "revision": resolved.revision}
        commit = call_hub(url, lambda: api.repo_info(resolved.repo_id, **which)).sha
    path = f"/{resolved.path_in_repo}" if resolved.path_in_repo else ""
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
    return [one.model_copy(update={"path": address}) for one, address in pairs], commits


def choose_files(given: str, files: Sequence[str], config: InputConfig, read: Read) -> list[str] | None:
    """Returns the files of the split that an input asks for; None: they are no data set.

    Args:
        given: The path of the input.
        files: What it names, sorted.
        config: The input.
        read: Reads a file.

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
    chosen: list[str] = []
    for file in files:
        folder, _, name = file.rpartition("/")
        root, _, of_split = folder.rpartition("/")
        if name == STATE_NAME and (root not in roots or of_split == split):
            chosen += _files_of_state(file, read)
    for root in roots:
        if not any(file.startswith(f"{root}/{split}/") for file in chosen):
            raise ConfigError(_no_split(split, _folders_below(root, files)), where=given, fix=_FIX)
    listed = set(files)
    if missing := [file for file in chosen if file not in listed]:
        raise DataError(
            "a file of a saved data set is missing",
            where=missing[0],
            fix="copy the folder again",
        )
    return chosen


def _files_of_state(state: str, read: Read) -> list[str]:
    """Returns the files of one saved data set by its state. Raises: DataError."""
    described = _read_state(state, read)
    if described.get("_indices_data_files"):
        raise DataError(
            "rows are selected by a table of indices",
            where=state,
            fix="save it again by a newer version of datasets, which writes the selected rows",
        )
    try:
        names = [entry["filename"] for entry in described["_data_files"]]
        if not all(isinstance(name, str) and len(name) <= MAX_PATTERN_CHARS for name in names):
            raise TypeError
    except (KeyError, TypeError):
        raise DataError(
            "not a state of a saved data set",
            where=state,
            fix="save it again",
        ) from None
    folder = state.rpartition("/")[0]
    return [f"{folder}/{name}" for name in names]


def _folders_below(root: str, files: Sequence[str]) -> list[str]:
    below = [file.removeprefix(f"{root}/") for file in files if file.startswith(f"{root}/")]
    return sorted({path.partition("/")[0] for path in below if "/" in path})


def _hub_files(given: str, files: Sequence[str], config: InputConfig, read: Read) -> list[str]:
    """Returns the files of a split of a data set of the hub."""
    root = given.rstrip("/") + "/"
    split = config.dataset_split or DEFAULT_SPLIT
    readme = f"{root}{README_NAME}"
    names = [file.removeprefix(root) for file in files]
    subsets = _read_subsets(readme, read) if readme in files else []
    if subsets:
        by_split = _patterns(given, readme, subsets, config.subset)
        if split not in by_split:
            raise ConfigError(_no_split(split, list(by_split)), where=given, fix=_FIX)
        return [root + name for name in _matching(names, readme, by_split[split])]
    if config.subset is not None:
        raise ConfigError(
            f"subset={config.subset}: README.md of this data set names none",
            where=given,
            fix=f"leave it out, or give a path below {root}",
        )
    data = [name for name in names if not _is_about(name)]
    by_split = _by_names(data)
    if not by_split and split == DEFAULT_SPLIT:
        by_split[split] = data
    if split not in by_split:
        raise ConfigError(_no_split(split, sorted(by_split)), where=given, fix=_FIX)
    return [root + name for name in by_split[split]]


def _read_subsets(readme: str, read: Read) -> list[dict[str, Any]]:
    """Returns those `configs` in the head of a README that name files. Raises: DataError."""
    content = read(readme, MAX_HEAD_BYTES)
    first, *lines = content.decode("utf-8", "replace").splitlines() or [""]
    if first.rstrip() != "---":
        return []
    marks = [number for number, line in enumerate(lines) if line.rstrip() == "---"]
    if not marks:
        if len(content) == MAX_HEAD_BYTES:
            raise _bad_card(readme, f"the head has no end within {MAX_HEAD_BYTES:,} bytes")
        return []
    try:
        described, _ = parse_yaml("\n".join(["", *lines[: marks[0]]]), readme)
    except ConfigError as error:
        raise _bad_card(error.where, error.what) from None
    configs = (described.get("configs") if isinstance(described, dict) else None) or []
    if not isinstance(configs, list) or not all(isinstance(one, dict) for one in configs):
        raise _bad_card(readme, "configs is no list of subsets")
    return [one for one in configs if one.get("data_files")]


def _patterns(given: str, readme: str, subsets: list[dict[str, Any]], wanted: str | None) -> dict[str, list[str]]:
    """Returns the patterns of paths of a subset, by split. Raises: ConfigError, DataError."""
    subset = _choose_subset(given, readme, subsets, wanted)
    data_files = subset["data_files"]
    folder = _text_of(readme, subset, "data_dir", "").strip("/")
    if not isinstance(data_files, list) or not all(isinstance(one, dict) for one in data_files):
        data_files = [{"split": DEFAULT_SPLIT, "path": data_files}]
    patterns: dict[str, list[str]] = {}
    for entry in data_files:
        paths = entry.get("path")
        for path in paths if isinstance(paths, list) else [paths]:
            if not isinstance(path, str):
                raise _bad_card(readme, f"data_files has {short(path)} where a path is expected")
            full = f"{folder}/{path}" if folder else path.removeprefix("./")
            patterns.setdefault(_text_of(readme, entry, "split", DEFAULT_SPLIT), []).append(full)
    return patterns


def _choose_subset(given: str, readme: str, subsets: list[dict[str, Any]], wanted: str | None) -> dict[str, Any]:
    """Returns the subset of a name; of None the default, or the only one. Raises: ConfigError, DataError."""
    names = [_text_of(readme, one, "config_name", "default") for one in subsets]
    problem = f"there is no subset {wanted!r}"
    if wanted is None:
        problem = "several subsets, and none is the default"
        if len(subsets) == 1:
            return subsets[0]
    for subset, name in zip(subsets, names, strict=True):
        is_default = bool(subset.get("default")) or name == "default"
        if name == wanted or (wanted is None and is_default):
            return subset
    raise ConfigError(
        f"{problem}; subsets: {_listed(names)}",
        where=given,
        fix="give one of these as subset",
    )


def _matching(names: Sequence[str], readme: str, patterns: list[str]) -> list[str]:
    exact, rules = _sort_patterns(readme, patterns)
    return [name for name in names if name in exact or any(rule.matches(name) for rule in rules)]


def _text_of(readme: str, values: dict[str, Any], key: str, default: str) -> str:
    """Returns a name, which may look like a number. Raises: DataError."""
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, str | int | float):
        raise _bad_card(readme, f"{key}: {short(value)} is no name")
    return str(value)


def _sort_patterns(readme: str, patterns: list[str]) -> tuple[set[str], list["PathPattern"]]:
    """Returns the paths among patterns, and the patterns with wildcards. Raises: DataError."""
    wild = [one for one in patterns if any(char in one for char in "*?[")]
    if len(wild) > MAX_PATTERNS or any(len(one) > MAX_PATTERN_CHARS for one in wild):
        limits = f"{MAX_PATTERNS} patterns with wildcards of {MAX_PATTERN_CHARS} characters"
        raise _bad_card(readme, f"data_files has more than {limits}")
    joined = [one for one in wild for part in one.split("/") if _SEVERAL in part != _SEVERAL]
    if joined:
        raise _bad_card(readme, f"{short(joined[0])}: ** stands for whole folders")
    return set(patterns).difference(wild), [PathPattern.of(one) for one in wild]


@dataclass(frozen=True, slots=True)
class PathPattern:
    """A pattern of paths as fsspec reads it, matched a component at a time.

    One regular expression for all of it would try each way to divide a path among its wildcards.
    """

    rules: tuple[re.Pattern[str] | None, ...]  # of components; None: `**`

    @staticmethod
    def of(pattern: str) -> "PathPattern":
        """Reads a pattern such as `en/**/part-*.parquet`."""
        rules = (None if one == _SEVERAL else re.compile(translate(one)) for one in pattern.split("/"))
        return PathPattern(tuple(rules))

    def matches(self, path: str) -> bool:
        """True if the pattern matches a whole path. Each rule is tried once on each component."""
        places = set(self._after(0))  # rules that the next component may have to fulfil
        for part in path.split("/"):
            places = {after for place in places for after in self._steps(place, part)}
        return len(self.rules) in places

    def _steps(self, place: int, part: str) -> Iterator[int]:
        if place == len(self.rules):
            return
        rule = self.rules[place]
        if rule is None:
            yield place
        if rule is None or (part and rule.fullmatch(part)):
            yield from self._after(place + 1)

    def _after(self, place: int) -> Iterator[int]:
        """Yields a place, and those behind it that `**` leads to by no folder, the last rule excepted."""
        yield place
        while place < len(self.rules) - 1 and self.rules[place] is None:
            place += 1
            yield place


def _by_names(paths: Sequence[str]) -> dict[str, list[str]]:
    """Returns the paths by the split that is named in them; empty: none is."""
    files_by_split: dict[str, list[str]] = {}
    for path in paths:
        if shard := _SHARD.search(PurePosixPath(path).name):
            files_by_split.setdefault(shard[1], []).append(path)
    for split, words in SPLIT_WORDS.items() if not files_by_split else ():
        rule = re.compile(rf"(?:^|[-._ 0-9/])(?:{'|'.join(words)})(?:[-._ 0-9/]|$)")
        if named := [path for path in paths if rule.search(path)]:
            files_by_split[split] = named
    return files_by_split


def _is_about(path: str) -> bool:
    """True for a file that describes a data set, or that `datasets` reads no data from."""
    name = PurePosixPath(path).name
    is_code = name.endswith((".md", ".py")) or name.startswith(("LICENSE", "requirements"))
    return is_code or name in INFO_NAMES


def _read_state(state: str, read: Read) -> dict[str, Any]:
    """Returns the state of a saved data set. Raises: DataError."""
    try:
        content = read(state, MAX_RECORD_BYTES + 1)
        if len(content) > MAX_RECORD_BYTES:
            raise ValueError(f"more than {MAX_RECORD_BYTES:,} bytes")
        value = parse_json(content)
    except ValueError as error:
        raise DataError(f"damaged: {error}", where=state, fix="copy it again") from None
    return value if isinstance(value, dict) else {}


def _bad_card(where: str, what: str) -> DataError:
    return DataError(
        what,
        where=where,
        fix="give the paths of files, which asks no README.md: .../data/*.parquet",
    )


def _no_split(split: str, splits: Sequence[str]) -> str:
    return f"there is no split {split!r}; splits: {_listed(splits) or 'none'}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name[:80] for name in names[:20])
