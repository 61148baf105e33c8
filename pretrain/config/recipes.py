"""Built-in configs, found by their names: recipes of runs and of `pretrain prepare`, and parts to include.

find_config      a file, else a recipe: `quickstart`, `run/quickstart`, `configs/run/quickstart.yaml`
list_recipes     all of them, with the summary that the first line of each file is
copy_recipe      one of them to a file of the user, its includes named so that they are found from there
"""

import difflib
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import ConfigError, install_fix
from pretrain.utils.io import write_file

RUNS = ("run", "finetune")
PREPARE = ("prepare",)
PARTS = ("data", "engine", "guard", "optim")
"""Folders of configs: complete ones of a run, of `pretrain prepare`, and parts of one."""


_RUN_NAME = re.compile(r"^(run: .*\bname: )([\w.-]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A built-in config."""

    name: str  # folder/short
    path: Path

    @property
    def short(self) -> str:
        """The name without its folder."""
        return self.path.stem

    @property
    def folder(self) -> str:
        """The folder, which says what the config is of."""
        return self.path.parent.name

    @property
    def summary(self) -> str:
        """The first line: subject, size and time."""
        with self.path.open(encoding="utf-8") as file:
            return file.readline().removeprefix("#").strip()


def is_file(path: Path) -> bool:
    """Returns True if the file exists; False for an invalid name, too."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def builtin_configs() -> Path:
    """Returns the folder of the package's configs: a checkout's, or the wheel's copy."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "configs", package / "configs"):
        if folder.is_dir():
            return folder
    raise ConfigError(
        "the package's own configs are missing",
        where=str(package),
        fix=install_fix(),
    )


def list_recipes(folders: Sequence[str]) -> list[Recipe]:
    """Returns the configs of some folders, by folder and name."""
    root = builtin_configs()
    return [
        Recipe(f"{folder}/{path.stem}", path) for folder in folders for path in sorted((root / folder).glob("*.yaml"))
    ]


def match_recipes(source: str | Path, folders: Collection[str]) -> list[Recipe]:
    """Returns the built-in configs of a name; the folder may be left out for those in `folders`."""
    key = Path(source).as_posix().removeprefix("configs/").removesuffix(".yaml")
    every = list_recipes((*RUNS, *PREPARE, *PARTS))
    exact = [recipe for recipe in every if recipe.name == key]
    return exact or [one for one in every if one.short == key and one.folder in folders]


def find_config(source: str | Path, folders: Sequence[str] = RUNS) -> Path:
    """Returns `source` if it is a file, with or without .yaml, else the built-in config of that name.

    Raises:
        ConfigError: There is none; names the nearest.
    """
    path = Path(source)
    for file in (path, Path(f"{source}.yaml")):
        if is_file(file):
            return file
    if path.is_absolute() or ".." in path.parts:
        return path
    matches = [one for one in match_recipes(source, folders) if one.folder in folders]
    if not matches:
        raise _unknown("no such config file", str(source), folders)
    return matches[0].path


def near_file(path: Path) -> Path | None:
    """Returns the YAML file of a folder that is most like one that is not there."""
    try:
        files = {file.stem: file for file in sorted(path.parent.iterdir()) if file.suffix in (".yaml", ".yml")}
    except (OSError, ValueError):
        return None
    near = difflib.get_close_matches(path.stem, files, n=1, cutoff=0.7)
    return files[near[0]] if near else None


def copy_recipe(name: str, target: Path | None) -> tuple[Recipe, Path]:
    """Writes a built-in config to a new file, by default one of its name. Raises: ConfigError."""
    matches = [one for one in match_recipes(name, (*RUNS, *PREPARE)) if one.folder not in PARTS]
    file = next((path for path in (Path(name), Path(f"{name}.yaml")) if is_file(path)), None)
    if not matches and file is not None:
        raise ConfigError(
            "this is a file, not a recipe",
            where=str(file),
            fix=f"copy it: cp {shlex.quote(str(file))} FILE",
        )
    if not matches:
        raise _unknown("no such recipe", name, (*RUNS, *PREPARE))
    if len(matches) > 1:
        raise ConfigError("several recipes", where=name, fix=f"use {' or '.join(one.name for one in matches)}")
    recipe = matches[0]
    target = target or Path(recipe.path.name)
    if target.exists():
        raise ConfigError("exists already", where=str(target), fix=f"give another name: recipes cp {name} FILE")
    target.parent.mkdir(parents=True, exist_ok=True)
    root = recipe.path.parent.parent.resolve()

    def named(file: re.Match[str]) -> str:
        return f"configs/{(recipe.path.parent / file.group()).resolve().relative_to(root).as_posix()}"

    place = shlex.quote(str(target))
    text = recipe.path.read_text(encoding="utf-8").replace(f"configs/{recipe.name}.yaml", place)
    if (run := _RUN_NAME.search(text)) and target.stem != recipe.short:
        # Else the copy would go on with the run of the recipe.
        new = re.sub("[^A-Za-z0-9._-]+", "-", target.stem).strip("-._")[:64] or run[2]
        # In quotes: `2024` would be a number.
        text = _RUN_NAME.sub(lambda match: f'{match[1]}"{new}"', text)
        # The commands of the header name folders of the run.
        made = rf"\b(runs|models|released)/{re.escape(run[2])}(?![\w.-])"
        text = re.sub(made, rf"\1/{new}", text)
    include = re.compile(r"^include: .*$", re.MULTILINE)
    text = include.sub(lambda line: re.sub(r"(?<![\w./])[\w./]+\.yaml", named, line.group()), text)
    write_file(target, text.encode())
    return recipe, target


def wrong_command(source: str, command: str) -> ConfigError:
    """Returns the error about a config that is one of another command."""
    return ConfigError(
        f"this is a config of `pretrain {command}`",
        where=source,
        fix="use it there, or name another config",
    )


def _unknown(what: str, name: str, folders: Sequence[str]) -> ConfigError:
    """Returns the error about a name that none of these configs has: its command, or the nearest name."""
    for one in match_recipes(name, (*RUNS, *PREPARE, *PARTS)):
        if one.folder in PARTS:
            return ConfigError(
                "this is a part, and no whole config",
                where=name,
                fix=f"in a config of yours: `include: configs/{one.name}.yaml`",
            )
        return wrong_command(name, "prepare" if one.folder in PREPARE else "train")
    if "=" in name:
        return ConfigError(
            "an override without a config before it",
            where=name,
            fix="name a YAML file, or a recipe of `pretrain recipes`, first",
        )
    if file := near_file(Path(name)):
        return ConfigError(what, where=name, fix=f"did you mean {file}?")
    by_name = {recipe.short: recipe for recipe in list_recipes(folders)}
    near = difflib.get_close_matches(Path(name).stem, by_name, n=1, cutoff=0.7)
    if not near:
        return ConfigError(what, where=name, fix="check the path; `pretrain recipes` lists the built-in ones")
    nearest = f"configs/{by_name[near[0]].name}.yaml" if "/" in name else near[0]
    return ConfigError(what, where=name, fix=f"did you mean {nearest}?")
