"""Name and shape of every parameter of a model, without its storage."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig
from pretrain.config.recurrent import AnyModelConfig
from pretrain.model import build_model


def parameter_shapes(config: AnyModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter by name, tied ones once; builds the model on the meta device for it."""
    model = build_model(config, PLAIN_ENGINE, torch.device("meta"))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


# What a family of Hugging Face models is: a config.json and named tensors, and how they correspond
# to ours.
#
#     config.json, names  -> read_config  -> ModelConfig  -> weights -> [Weight(ours, theirs), ...]
#     ModelConfig         -> write_config -> config.json
#
# A family is data and pure functions over a dict. It sees no tensor, no file and no model of
# transformers: `convert` does the arithmetic of one `Weight`, `read` and `write` stream over files.
# So a model of any size converts shard by shard.


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of ours, and the tensors of theirs that it is made of.

    Attributes:
        ours: Name of our parameter.
        theirs: (name, rows) of each tensor of theirs, stacked along dimension 0 in this order; rows are counted after
            transposing. A tensor of one dimension counts its elements.
        transposed: Theirs is [in, out] where ours is [out, in] (GPT-2's Conv1D).
        vocab: Dimension 0 is the vocabulary, `vocab_size` rows in theirs: padded with rows of zeros on import, cut on
            export.
        row: Theirs is [1, n] where ours is [n] (Marian's final_logits_bias).
    """

    ours: str
    theirs: tuple[tuple[str, int], ...]
    transposed: bool = False
    vocab: bool = False
    row: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type` of Hugging Face.

    Attributes:
        model_type: `model_type` of config.json.
        read_config: From config.json as published (old and new spellings; a key that is missing means the default that
            transformers documents for this model type) and the names of the tensors beside it, spelled as in `weights`,
            which tell whether there is a head or a pooler. Raises ConfigError naming key, value and reason where theirs
            is not exactly one of ours. `vocab_multiple` stays at its default.
        write_config: Inverse of `read_config`, best effort: an export is allowed where reading back gives the same
            config again. Without `architectures`, `model_type`, dtype and version, which the writer adds. Must not
            raise, nor may `weights` and `architecture`, for any config of ours: that it does not fit shows afterwards.
        architecture: Class that has exactly the tensors of `weights`: "LlamaForCausalLM", "BertModel".
        weights: Every parameter of ours, with names as `AutoModelFor*.save_pretrained` writes them. They have `prefix`
            even where `head.kind` is none; the writer then leaves it out, as `AutoModel.save_pretrained` does.
        aliases: Name of a tensor that theirs may hold twice (tied weights) -> its name in `weights`. Accepted on import
            where equal, not written.
        ignored: Patterns (`re.fullmatch`) of tensors that are not read unless `weights` names them: what carries no
            information (masks, inv_freq, position ids, sinusoidal tables), and what has no place here (next-sentence
            prediction, a pooler beside another head).
        renames: (pattern, replacement) of `re.sub`, applied to their names first: old spellings (`LayerNorm.gamma`).
        prefix: What names begin with under a head ("bert.", "transformer.", "model."). Where no name of a checkpoint
            begins so, it is a bare base model and every name is read as if it did.
    """

    model_type: str
    read_config: Callable[[dict[str, Any], frozenset[str]], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    architecture: Callable[[ModelConfig], str]
    weights: Callable[[ModelConfig], list[Weight]]
    aliases: Callable[[ModelConfig], dict[str, str]]
    ignored: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    prefix: str = ""


# The weights of a linear layer or norm, which theirs may hold in several parts.


def affine(ours: str, *theirs: tuple[str, int], bias: bool) -> list[Weight]:
    """Returns the entries of one module of ours.

    Args:
        ours: Name of our module.
        *theirs: Name and rows of each module of theirs, stacked in this order.
        bias: It has a bias beside its weight.
    """
    kinds = ("weight", "bias") if bias else ("weight",)
    return [Weight(f"{ours}.{kind}", tuple((f"{name}.{kind}", rows) for name, rows in theirs)) for kind in kinds]
