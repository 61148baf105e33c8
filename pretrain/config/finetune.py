"""Parameters by patterns of their names, as a shell has them: `decoder.blocks.0.*`."""

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import Field, model_validator

from pretrain.config.base import Section
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


# `finetune:` -- whether all of a model is trained on, or adapters beside its layers.


class FinetuneConfig(Section):
    """How the weights of `init.from` are trained on.

    Attributes:
        kind: `full`: all of them, but for those under `init.freeze`. `lora`: they stay as they are, and low-rank
            adapters beside linear layers are trained (Hu et al. 2022); a new head is trained too. Checkpoints then hold
            what is trained and nothing else.
        rank: Of an adapter.
        alpha: What adapters add is multiplied by `alpha / rank`.
        dropout: Probability, on what adapters read.
        targets: Patterns of the linear layers of the blocks that get one, such as `*.attention.*`. Default: all.
        also: Patterns of parameters that are trained in full beside the adapters, such as `embedding.weight`.
    """

    kind: Literal["full", "lora"] = "full"
    rank: int = Field(default=8, ge=1)
    alpha: int = Field(default=16, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: list[str] = Field(default=["*"], min_length=1)
    also: list[str] = Field(default_factory=list)

    @property
    def scale(self) -> float:
        """What the product of an adapter's matrices is multiplied by."""
        return self.alpha / self.rank

    @model_validator(mode="after")
    def _check(self) -> "FinetuneConfig":
        plain = FinetuneConfig.model_construct()
        for name in ("rank", "alpha", "dropout", "targets", "also"):
            if self.kind == "full" and getattr(self, name) != getattr(plain, name):
                raise ValueError(f"{name} goes with kind=lora, not full; leave it out")
        return self
