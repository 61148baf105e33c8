"""`finetune:` -- full fine-tuning or adapters, and shell patterns of parameter names."""

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from pretrain.config.base import Conflicts, OnResume, Section
from pretrain.errors import ConfigError


def matches(name: str, patterns: Collection[str]) -> bool:
    """Returns True if any pattern matches `name`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(key: str, patterns: Collection[str], names: Collection[str], what: str = "parameter") -> None:
    """Checks that each shell pattern of a key matches a name; `what` is the noun for one.

    Raises:
        ConfigError: A pattern matches none.
    """
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            in_blocks = [name for name in names if ".blocks." in name]
            examples = dict.fromkeys([*[*names][:1], *in_blocks[:1], *[*names][-1:]])
            fix = f"names are such as {', '.join(examples)}; all: pretrain inspect MODEL --tensors; * is any characters"
            if matches("head.weight", [pattern]) and "embedding.weight" in names:
                rest = [one for one in patterns if one != pattern and any(matches(name, [one]) for name in names)]
                working = ", ".join(dict.fromkeys([*rest, "embedding.weight"]))
                fix = f"the head is the embedding here (tied): {key}=[{working}]"
            raise ConfigError(f"{key}: {pattern!r} matches no {what}", fix=fix)


class FinetuneConfig(Section):
    """Full fine-tuning of the weights of `init.from`, or adapters."""

    kind: Annotated[Literal["full", "lora"], OnResume.NEVER] = "full"
    """`full`: train all weights except `init.freeze`. `lora`: train low-rank adapters of linear
    layers (Hu et al. 2022) and a new head only; checkpoints contain the trained weights."""
    rank: Annotated[int, OnResume.NEVER] = Field(default=8, ge=1)
    """Rank of the adapters."""
    alpha: Annotated[int, OnResume.NEVER] = Field(default=16, ge=1)
    """Scale of the adapters: their output is multiplied by `alpha / rank`."""
    dropout: Annotated[float, OnResume.WARN] = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the input of the adapters."""
    dora: Annotated[bool, OnResume.NEVER] = False
    """Divide each adapted matrix by the norms of its rows, and multiply it by trained ones that begin
    as those of the start (DoRA, Liu et al. 2024); for `kind: lora`."""
    quantize: Annotated[Literal["none", "nf4"], OnResume.NEVER] = "none"
    """Precision of the frozen matrices under adapters: `nf4` keeps them in 4 bits and computes in the
    dtype of the run (QLoRA, Dettmers et al. 2023); for `kind: lora`."""
    targets: Annotated[list[str], OnResume.NEVER] = Field(default=["*"], min_length=1)
    """Patterns of the linear layers in blocks that get an adapter, such as `*.attention.*`."""
    also: Annotated[list[str], OnResume.NEVER] = Field(default_factory=list)
    """Patterns of fully trained parameters besides the adapters, such as `embedding.weight`."""
    new_tokens: Annotated[Literal["frozen", "trained"], OnResume.FREE] = "frozen"
    """Tables with a row for each token, where the data have tokens that `init.from` lacks: `trained`
    puts them under `also`; for `kind: lora`."""

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return self.alpha / self.rank

    def _conflicts(self) -> Conflicts:
        for name in ("rank", "alpha", "dropout", "dora", "quantize", "targets", "also", "new_tokens"):
            if self.kind == "full" and self.differs(name):
                yield f"{name} goes with kind=lora, not full", "leave it out, or write finetune=null for full"
        if self.dora and self.quantize != "none":
            yield "dora takes norms of whole matrices, which quantize=nf4 does not keep", "leave one out"
