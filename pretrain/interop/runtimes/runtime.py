"""A program that runs models, and the models of ours that it computes exactly.

    ModelConfig, family -> Runtime.check -> nothing, or ConfigError naming the key
    Hugging Face folder -> Runtime.convert -> the files that the program reads
    those files, tokens -> Runtime.scores -> logits, for the comparison of an export

A rule is a key of `choose.facts` with the values that the program computes. A converter does not
say that it leaves a key out, so every family here was compared with ours by tests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from pretrain.config.model import ModelConfig
from pretrain.errors import ConfigError, LaunchError, install_fix
from pretrain.families.family import Family
from pretrain.interop.choose import facts

Rules = dict[str, tuple[Any, ...]]
"""Key of `choose.facts` -> values that a runtime computes; None: absent, or null."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A Hugging Face folder to convert, with the model that it was made of.

    Attributes:
        folder: Files: `config.json`, weights, and the tokenizer's, if any.
        name: Name of the export.
        config: `vocab_size` filled in.
        model_type: Family of the folder.
        files: Contents of the tokenizer's files by name.
        dtype: fp32 or bf16.
        checks: Refuses a tokenizer that encodes some texts otherwise.
        suppressed: Tokens that never come in texts of the model, by its generation settings.
    """

    folder: Path
    name: str
    config: ModelConfig
    model_type: str
    files: Mapping[str, bytes]
    dtype: str
    checks: bool = True
    suppressed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Runtime:
    """A program that reads one format of models.

    Attributes:
        name: The spelling of its makers.
        packages: Imported by the conversion; an extra of the name of the format installs them.
        dtypes: Dtypes of weights.
        families: Rules by `model_type`; other families are refused.
        check: Raises ConfigError for what rules cannot tell: before anything is written.
        convert: Writes the files of a model to a folder.
        runner: Package that `scores` imports.
        scores: Logits [B, T, V] of the files of a folder for token ids [B, T], which both stacks read; hidden
            states without a head; or log-probabilities [B, T - 1] of tokens given those before.
        use: Lines of the model card.
    """

    name: str
    packages: tuple[str, ...]
    dtypes: tuple[str, ...]
    families: Mapping[str, Rules]
    check: Callable[[Exported], None]
    convert: Callable[[Exported, Path], None]
    runner: str
    scores: Callable[[Path, ModelConfig, Tensor], Tensor]
    use: Callable[[ModelConfig], str]

    def require(self, extra: str, dtype: str) -> None:
        """Checks packages and dtype. Raises: LaunchError, naming what is missing; ConfigError."""
        if missing := [name for name in self.packages if find_spec(name) is None]:
            raise LaunchError(f"--to {extra} needs {', '.join(missing)}", fix=install_fix(extra))
        if dtype not in self.dtypes:
            raise ConfigError(
                f"dtype={dtype!r} is not exported for {self.name}",
                fix=f"use {' or '.join(self.dtypes)}",
            )

    def check_model(self, config: ModelConfig, family: Family) -> None:
        """Checks that the program computes a model exactly. Raises: ConfigError, naming the key."""
        fix = "export to hf, which has every key"
        rules = self.families.get(family.model_type)
        if rules is None:
            families = ", ".join(sorted(self.families))
            raise ConfigError(
                f"{family.model_type} is not exported for {self.name}, only {families}",
                where="model",
                fix=fix,
            )
        values = facts(config)
        for key, allowed in rules.items():
            if (value := values.get(key)) not in allowed:
                only = " or ".join("null" if one is None else str(one) for one in allowed)
                raise ConfigError(
                    f"{key}={value}: {self.name} computes {only} in a {family.model_type}",
                    where="model",
                    fix=fix,
                )
