"""Parameters by patterns of their names, as a shell has them: `decoder.blocks.0.*`."""

from collections.abc import Collection
from fnmatch import fnmatchcase

from pretrain.errors import ConfigError


def matches(name: str, patterns: Collection[str]) -> bool:
    """Returns whether any pattern is one of `name`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(key: str, patterns: Collection[str], names: Collection[str], what: str = "parameter") -> None:
    """Raises ConfigError where a pattern is one of no name.

    Args:
        key: Of the config that has the patterns.
        patterns: Each is to be one of a name at least.
        names: Not empty.
        what: That has names.
    """
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            first, *_, last = (*names, *names)
            raise ConfigError(
                f"{key}: {pattern!r} is the name of no {what}",
                fix=f"names are such as {first} and {last}; * stands for any characters",
            )
