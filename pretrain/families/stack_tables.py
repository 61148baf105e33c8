"""Encoders and models of two stacks as tables: keys of config.json with their defaults, and names of tensors.

    keys       theirs -> our name and the default: `width` of every stack, `encoder.layers` of one,
               `model.vocab_size`, `input.size` of patches
    stacks     modules of a layer and beside the layers: ours -> theirs, whose rows are stacked in
               their order; rows and biases follow from the config
    read, write, ends    what is no value under a key: heads and what ties them, windows, factors

Decoders since LLaMA have a richer table, `Dialect`, over the same functions.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.families.config_json import (
    THEIR_ACTIVATIONS,
    Fields,
    Keys,
    build_config,
    by_holder,
    write_keys,
    write_tokens,
)
from pretrain.families.family import Family, Weight, affine, table
from pretrain.families.rotary_keys import qkv_rows

Modules = Mapping[str, tuple[str, ...]]
"""Name of a module of ours -> modules of theirs."""


@dataclass(frozen=True, slots=True)
class StackNames:
    """Names of the tensors of one stack.

    Attributes:
        layers: Prefix of a layer, its number left out.
        block: Modules of a layer; those that a config has not are left out.
        before: Tables and modules before the layers, in the order of the files.
        after: Modules after them.
        transposed: Matrices of a layer are stored as [in, out].
    """

    layers: str
    block: Modules
    before: Mapping[str, str] = field(default_factory=dict)
    after: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One `model_type`, with the defaults of transformers.

    Attributes:
        name: Prefix of the class names; `scorer`: the rest of the class that scores ids.
        unit: Rest of the name of a class with another head; empty: none.
        keys: Keys of config.json; `defaults`: those that differ in this family.
        activation: Key of the activation, and its default. None: read by `read`.
        tokens: Ids of special tokens; `roles`: further ones that are written.
        built_in: Values that no key changes, spelled as in `keys`.
        fixed: Keys with their only values, and the meaning of others. `refused`: not written.
        read: Further values, of the names of the tensors and what is read already.
        write: Keys for these.
        words: Name of the embedding; `embeddings`: its weights, where it has others.
        stacks: Names of tensors by stack.
        ends: Weights after the stacks.
    """

    model_type: str
    name: str
    scorer: str = ""
    unit: Callable[[ModelConfig], str] = lambda config: ""
    keys: Keys
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation: tuple[str, str] | None = ("hidden_act", "gelu")
    tokens: Mapping[str, int | None] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    built_in: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    read: Callable[[Fields, frozenset[str], dict[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    words: str = ""
    embeddings: Callable[[ModelConfig], list[Weight]] | None = None
    stacks: Mapping[str, StackNames]
    ends: Callable[[ModelConfig], list[Weight]]

    def stack_of(self, config: ModelConfig, name: str) -> StackConfig | None:
        """Returns a stack of a model, of another family the one that is there."""
        if len(self.stacks) == 1:
            return config.last_stack if name == "decoder" else config.encoder or config.last_stack
        return config.encoder if name == "encoder" else config.decoder


def module_rows(ours: str, stack: StackConfig) -> tuple[int, ...]:
    """Returns the rows of the parts of a module."""
    queries, keys, values = qkv_rows(stack)
    rows: dict[str, tuple[int, ...]] = {
        "attention.qkv": (queries, keys, values),
        "attention.query_norm": (stack.qk_norm_width(stack.heads),),
        "attention.key_norm": (stack.qk_norm_width(stack.num_kv_heads),),
        "cross.query": (queries,),
        "cross.key_value": (keys, values),
        "feedforward.gate_up": (stack.ff_width, stack.ff_width),
        "feedforward.up": (stack.ff_width,),
        "input_norm": (stack.table_width,),
    }
    return rows.get(ours, (stack.width,))


def has_bias(ours: str, stack: StackConfig) -> bool:
    """Returns whether a module has a bias."""
    if ours.endswith("norm"):
        return stack.has_qk_norm_bias if ours.startswith("attention.") else stack.has_norm_bias
    of_attention = {"attention.qkv": stack.has_qkv_bias, "attention.output": stack.has_output_bias}
    return of_attention.get(ours, stack.bias)


def stacked(ours: str, theirs: tuple[str, ...], stack: StackConfig) -> dict[str, int]:
    """Returns the rows of modules of theirs that are one of ours, together or in its parts."""
    rows = module_rows(ours, stack)
    return dict(zip(theirs, rows if len(rows) == len(theirs) else (sum(rows),), strict=True))


def _block(place: tuple[str, str], names: StackNames, stack: StackConfig, number: int) -> list[Weight]:
    absent = {"feedforward.up" if stack.gated else "feedforward.gate_up"}
    if not stack.norms_attention(number):
        absent.add("attention_norm")
    weights = []
    for name, parts in names.block.items():
        if name not in absent:
            rows = {name: stacked(name, parts, stack)}
            turned = names.transposed and not name.endswith("norm")
            weights += affine(*place, rows, bias=has_bias(name, stack), transposed=turned)
    return weights


def _beside(
    name: str, modules: Mapping[str, str], stack: StackConfig, config: ModelConfig
) -> Iterator[Weight]:  # fmt: skip
    for ours, theirs in modules.items():
        if ours == "position" and stack.position == "relative":
            tables = (theirs.format(number) for number in range(stack.relative_tables))
            rows = tuple((one, stack.relative_buckets) for one in tables)
            yield Weight(f"{name}.position.weight", rows)
        elif ours == "position":
            length = config.first_position(name) + config.max_seq_len
            yield Weight(f"{name}.position.weight", ((theirs, length),))
        elif ours == "token_type":
            if stack.token_types:
                yield Weight(f"{name}.token_type.weight", ((theirs, stack.token_types),))
        elif ours != "expand" or stack.embedding_width is not None:
            rows_of = {ours: stacked(ours, (theirs,), stack)}
            yield from affine(f"{name}.", "", rows_of, bias=has_bias(ours, stack))


def stack_weights(
    name: str, names: StackNames, stack: StackConfig, config: ModelConfig
) -> list[Weight]:  # fmt: skip
    """Returns the weights of a stack, `encoder` or `decoder`."""
    weights = [*_beside(name, names.before, stack, config)]
    for number in range(stack.layers):
        place = f"{name}.blocks.{number}.", names.layers.format(number)
        weights += _block(place, names, stack, number)
    return [*weights, *_beside(name, names.after, stack, config)]


def _weights(family: Table, config: ModelConfig) -> list[Weight]:
    if family.embeddings is None:
        weights = [table("embedding.weight", family.words, config.vocab_size)]
    else:
        weights = family.embeddings(config)
    for name, names in family.stacks.items():
        if (stack := family.stack_of(config, name)) is not None:
            weights += stack_weights(name, names, stack, config)
    return weights + family.ends(config)


def _read_config(family: Table, values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(values)
    for key, (allowed, why) in {**family.refused, **family.fixed}.items():
        fields.only(key, allowed, why)
    values_read = fields.read(family.keys, family.defaults)
    if family.activation:
        values_read["activation"] = fields.activation(*family.activation)
    if family.tokens:
        values_read["model.special_tokens"] = fields.special_tokens(**family.tokens)
    values_read |= family.built_in
    values_read |= family.read(fields, names, values_read)
    parts = by_holder(values_read)
    sections = {name: parts[""] | parts[name] for name in family.stacks}
    if parts["input"]:
        sections["input"] = parts["input"]
    return build_config(**parts["model"], **sections)


def _write_config(family: Table, config: ModelConfig) -> dict[str, Any]:
    decoder = config.last_stack
    encoder = config.encoder or decoder
    # A MAE has sizes of its own for the decoder, as for further keys.
    stack = encoder
    if "encoder" not in family.stacks or ("decoder" in family.stacks and config.input is None):
        stack = decoder
    holders: dict[str, Any] = {"": stack, "encoder": encoder, "decoder": decoder}
    holders |= {"model": config, "input": config.input}
    keys: dict[str, Any] = {}
    for key, (name, default) in family.keys.items():
        holder, _, inner = name.rpartition(".")
        keys |= write_keys(holders[holder], {key: (inner, default)})
    if family.tokens:
        keys |= write_tokens(config.special_tokens, *family.roles)
    if family.activation:
        keys[family.activation[0]] = THEIR_ACTIVATIONS[stack.activation]
    keys |= {key: value for key, (value, _) in family.fixed.items()}
    return keys | family.write(config)


def _architecture(family: Table, config: ModelConfig) -> str:
    scorer = family.scorer if config.head.record.scores_words else ""
    return family.name + (family.unit(config) or scorer or "Model")


def table_family(family: Table, **differs: Any) -> Family:
    """Builds the family of a table; `differs` are further fields of `Family`."""
    return Family(
        model_type=family.model_type,
        read_config=partial(_read_config, family),
        write_config=partial(_write_config, family),
        architecture=partial(_architecture, family),
        weights=partial(_weights, family),
        **differs,
    )
