"""Formats of other programs that run models."""

from pkgutil import resolve_name

from pretrain.errors import ConfigError
from pretrain.interop.runtimes.runtime import Exported, Runtime
from pretrain.kinds.runtimes import RUNTIMES

__all__ = ["Exported", "Runtime", "find_runtime"]


def find_runtime(to: str) -> Runtime:
    """Returns the program of `pretrain export --to`. Raises: ConfigError: There is none of this name."""
    if to not in RUNTIMES:
        raise ConfigError(f"--to {to} is not known", fix=f"use hf, {', '.join(RUNTIMES)}")
    runtime: Runtime = resolve_name(RUNTIMES[to])
    return runtime
