"""A tiny model of the kinds of another: two layers, few heads and experts; switches stay."""

from typing import Any

from pydantic import ValidationError

from pretrain.config.engine import ParallelConfig
from pretrain.config.model import (
    AnyModelConfig,
    ModelConfig,
    RecurrentConfig,
    StackConfig,
    parse_model,
)
from pretrain.errors import ConfigError

ROWS, COLUMNS = 4, 32
"""Rows of a micro-batch, and their length."""
VOCABULARY = 256
_WINDOW = 8
_EXPERTS = 4
_RECURRENT_WIDTH = 64
_WITHOUT = {"dropout": 0.0, "attention_dropout": 0.0, "drop_path": 0.0, "value_embeddings": 0}
"""What compiled code draws otherwise, and what is numbered by layers."""


def tiny_model(config: AnyModelConfig, parallel: ParallelConfig) -> AnyModelConfig:
    """Returns the tiny model, which the ranks of `parallel` can share. Raises: ConfigError."""
    values: dict[str, Any] = config.model_dump(by_alias=True)
    values |= {"preset": None, "vocab_size": VOCABULARY, "special_tokens": {}}
    columns = COLUMNS * parallel.row_ranks
    if isinstance(config, RecurrentConfig):
        for name in ("encoder", "decoder"):
            if values[name]:
                values[name] |= {"width": _RECURRENT_WIDTH, "dropout": 0.0}
    else:
        values |= {
            "input": None,
            "multi_token": 0,
            "ngram_embeddings": 0,
            "generator_heads": 0,
            "pooler": False,
        }
        values["max_seq_len"] = columns
        scores_words = config.head.record.scores_words
        if not scores_words:
            values["head"] = {}
        for name in ("encoder", "decoder"):
            stack = getattr(config, name)
            values[name] = None if stack is None else _tiny_stack(stack, parallel)
        if config.input is not None and reads_two(config):  # of widths that only patches bridge
            values["encoder" if scores_words else "decoder"] = None
    try:
        return parse_model(values)
    except (ValidationError, ConfigError) as error:
        raise ConfigError(f"no tiny model of these kinds can be made: {_reason(error)}") from None


def _reason(error: ValidationError | ConfigError) -> str:
    return str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else error.what


def _tiny_stack(stack: StackConfig, parallel: ParallelConfig) -> dict[str, Any]:
    values: dict[str, Any] = stack.model_dump(by_alias=True) | _WITHOUT
    mixers = list(dict.fromkeys(stack.mixers or ()))
    layers = min(stack.layers, max(2, len(mixers)))
    kv_heads = min(stack.num_kv_heads, max(2, parallel.row_ranks))
    groups = stack.heads // stack.num_kv_heads
    sizes = [kv_heads * number for number in range(min(groups, 2), groups + 1)]
    heads = next((size for size in sizes if size % parallel.row_ranks == 0), sizes[-1])
    width = heads * stack.per_head_width
    values |= {
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_width": stack.per_head_width,
    }
    values |= {"width": width, "ff_width": 2 * width, "mixers": mixers or None}
    values["window"] = stack.window and min(stack.window, _WINDOW)
    values["embedding_width"] = stack.embedding_width and min(stack.embedding_width, width)
    values["global_first"] = min(stack.global_first, layers - 1)
    values["position"] = stack.position.removesuffix("_2d")  # of patches, which are left out
    for name in ("unrotated_layers", "global_layers"):
        values[name] = values[name] and [number for number in values[name] if number < layers]
    if stack.experts is not None:
        count = min(stack.experts.count, _EXPERTS * parallel.experts)
        few = {
            "count": count,
            "top_k": min(stack.experts.top_k, 2),
            "first": min(stack.experts.first, 1),
        }
        values["experts"] |= {**few, "groups": 1, "top_groups": 1, "width": width}
        values["experts"] |= {"shared_width": None, "balance": "none"}
        for name in ("balance_weight", "balance_rate"):
            del values["experts"][name]
    return values


def reads_two(config: AnyModelConfig) -> bool:
    """Returns whether a model has two stacks, and so rows of a source."""
    return isinstance(config, ModelConfig | RecurrentConfig) and None not in (
        config.encoder,
        config.decoder,
    )
