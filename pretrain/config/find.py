"""Finds a config: a file of the user's, or one that comes with the package."""

from pathlib import Path

from pretrain.errors import ConfigError


def is_file(path: Path) -> bool:
    """Returns whether there is such a file; a name that no file can have is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def builtin_configs() -> Path:
    """Returns the folder of the configs that come with the package (a checkout's, or the wheel's copy)."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "configs", package / "configs"):
        if folder.is_dir():
            return folder
    raise ConfigError("the package's own configs are missing", where=str(package), fix="reinstall pretrain")


def find_config(source: str | Path) -> Path:
    """Returns `source` if it is a file, else the built-in config of that name (such as `configs/run/x.yaml`)."""
    path = Path(source)
    if is_file(path) or path.is_absolute() or ".." in path.parts:
        return path
    name = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    built_in = builtin_configs() / name
    return built_in if is_file(built_in) else path
