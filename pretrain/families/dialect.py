"""Decoders as tables: keys of config.json with their defaults, and names of tensors.

    keys       LLaMA's keys and defaults, those of a family where it spells or sets them otherwise
    modules    of a block: ours -> theirs, whose rows are stacked in their order; the rows follow
               from the sizes, and biases from `qkv_bias`, `output_bias`, `norm_bias` and `bias`
    read, write    what is no value under a key: a divisor for a factor, the norms of a flag

A family is a `Dialect` of its own, in a file of `decoders/`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pretrain.config.model import ModelConfig, StackConfig
from pretrain.families.config_json import (
    THEIR_ACTIVATIONS,
    Fields,
    Keys,
    build_config,
    by_holder,
    refusal,
    write_keys,
    write_tokens,
)
from pretrain.families.family import Family, Weight, affine, own_head, table
from pretrain.families.label_names import with_heads
from pretrain.families.mixer_keys import MixerTensors, of_layer
from pretrain.families.rotary_keys import (
    FULL,
    SLIDING,
    RopeKeys,
    longest,
    periodic_types,
    read_heads,
    read_layer_types,
    read_rope,
    write_layer_types,
    write_longest,
    write_rope,
)
from pretrain.families.sizes import Sizes
from pretrain.families.stack_tables import has_bias, stacked

_STACK: Keys = {
    "num_hidden_layers": ("layers", 32),
    "hidden_size": ("width", 4096),
    "num_attention_heads": ("heads", 32),
    "intermediate_size": ("ff_width", 11008),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
}
_MODEL: Keys = {
    "vocab_size": ("vocab_size", 32000),
    "max_position_embeddings": ("max_seq_len", 2048),
    "tie_word_embeddings": ("tied_embeddings", False),
    "initializer_range": ("init_std", 0.02),
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
LLAMA_MODULES: Mapping[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": QKV,
    "attention.output": ("self_attn.o_proj",),
    "feedforward_norm": ("post_attention_layernorm",),
    "feedforward.gate_up": GATE_UP,
    "feedforward.down": ("mlp.down_proj",),
}
"""Names of LLaMA's modules in a layer."""
QK_NORMS = {
    "attention.query_norm": ("self_attn.q_norm",),
    "attention.key_norm": ("self_attn.k_norm",),
}


_FEEDFORWARD = "feedforward."
"""Beginning of the names of the modules of a feed-forward layer."""
DENSE = {ours: LLAMA_MODULES[ours] for ours in ("feedforward.gate_up", "feedforward.down")}
"""Modules of a feed-forward layer where other layers have experts."""


def one_norm_modules(config: ModelConfig) -> dict[str, Any]:
    """Returns LLaMA's modules, without the second norm where both sub-layers read the first."""
    left_out = "feedforward_norm" if config.last_stack.parallel == "one_norm" else ""
    return {ours: theirs for ours, theirs in LLAMA_MODULES.items() if ours != left_out}


@dataclass(frozen=True, slots=True)
class Names:
    """Names of tensors outside of the layers, and of a layer with its number left out; a norm may have none."""

    prefix: str = "model."
    words: str = "model.embed_tokens.weight"
    layer: str = "model.layers.{}."
    norm: str = "norm"
    head: str = "lm_head"


_NAMES = Names()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The differences of one `model_type` from LLaMA, with the defaults of transformers.

    Attributes:
        name: Prefix of the class names; `base`: name of the class without a head, if another.
        spelled: LLaMA's key -> theirs. None: it has no such key.
        defaults: Those that differ from LLaMA's, by its keys.
        sizes: Models by name.
        labels: transformers has a class of labelled texts.
        answers: Prefix of the stack in its class of answers in texts. None: no such class.
        more: Further keys, of the stack; of `head.` and `model.` by such a beginning of our name.
        kv_heads: None: as many as query heads.
        head_width: None: `hidden_size` by heads, which with `fixed_heads` is the only width.
        divides: `hidden_size` is a multiple of the heads, even with a `head_dim`.
        tokens: Ids of special tokens.
        biases: Keys that its linear layers follow, of `attention_bias` and `mlp_bias`.
        built_in: Values of the stack that no key changes.
        windows: Layers that may have one: none, all, all if a flag is set (`flagged`), or those of
            `layer_types`, by default by Qwen's flags (`listed`), all but every n-th (n), or all but
            those whose number it accepts.
        missing: Further defaults.
        modules: Our modules of a block and theirs, of a config.
        further: Weights of a block that are no modules, with names within it.
        mixers: Tensors of the layers of other mixers than attention, by the mixer's name.
        order: Rows of ours in those of their projections of queries, keys and values (`Weight`), and
            of norms of these, which have as many rows as so many heads.
        joined_norms: Weights of a norm of queries or of keys are one tensor, [heads, width].
        refused: Keys with their only values, and the meaning of others.
        read: Further values by our names, spelled as in `more`; may change the keys.
        write: Keys for these.
        ignored: Further buffers.
        renames: Other spellings of names (`Family`).
    """

    model_type: str
    name: str
    base: str | None = None
    spelled: Mapping[str, str | None] = field(default_factory=dict)
    defaults: Mapping[str, float] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=dict)
    labels: bool = True
    answers: str | None = None
    more: Keys = field(default_factory=dict)
    kv_heads: int | None = None
    head_width: int | None = None
    fixed_heads: bool = False
    divides: bool = False
    tokens: Mapping[str, int | None] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    built_in: Mapping[str, Any] = field(default_factory=dict)
    windows: str | int | Callable[[int], bool] = "none"
    rope: RopeKeys | None = None
    missing: Mapping[str, Any] = field(default_factory=dict)
    names: Names = _NAMES
    modules: Callable[[ModelConfig], Mapping[str, Any]] = lambda config: LLAMA_MODULES
    further: Callable[[StackConfig], list[Weight]] = lambda stack: []
    mixers: Mapping[str, MixerTensors] = field(default_factory=dict)
    order: Callable[[StackConfig], tuple[int, ...]] = lambda stack: ()
    joined_norms: bool = False
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    read: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    ignored: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()

    def keys(self, keys: Keys) -> Keys:
        """Returns a table of LLaMA's as this family spells it."""
        by_key: dict[str, tuple[str, Any]] = {}
        for key, (ours, default) in keys.items():
            if (theirs := self.spelled.get(key, key)) is not None:
                by_key[theirs] = (ours, type(default)(self.defaults.get(key, default)))
        return by_key


def _read_biases(dialect: Dialect, fields: Fields) -> dict[str, bool | None]:
    keys = ("attention_bias", "mlp_bias")
    attention, feedforward = (key in dialect.biases and fields.flag(key, False) for key in keys)
    apart = None if attention == feedforward else attention
    return {"bias": feedforward, "qkv_bias": apart, "output_bias": apart}


def _read_windows(dialect: Dialect, fields: Fields, layers: int) -> dict[str, Any]:
    if dialect.windows == "none":
        return {}
    if dialect.windows == "all":
        return {"window": fields.optional_integer("sliding_window", 4096)}
    if not isinstance(dialect.windows, str):
        window = fields.optional_integer("sliding_window", 4096)
        if isinstance(dialect.windows, int):
            usual = periodic_types(fields, layers, dialect.windows)
        else:
            is_full = [window is None or dialect.windows(number) for number in range(layers)]
            usual = [FULL if full else SLIDING for full in is_full]
        return read_layer_types(fields, layers, window, usual)
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.optional_integer("sliding_window", 4096)
    if dialect.windows == "flagged":
        return {"window": window}
    full = fields.integer("max_window_layers", 28) if window else layers
    usual = [FULL if number < full else SLIDING for number in range(layers)]
    return read_layer_types(fields, layers, window, usual)


def _write_windows(dialect: Dialect, stack: StackConfig) -> dict[str, Any]:
    if dialect.windows == "none":
        return {}
    if dialect.windows == "all":
        return {"sliding_window": stack.window}
    slides = [window is not None for window in stack.windows]
    if not isinstance(dialect.windows, str):
        # Theirs divides by it in layers without one, too.
        return {"sliding_window": stack.window or 4096, **write_layer_types(stack)}
    if dialect.windows == "flagged":
        return {"use_sliding_window": stack.window is not None, "sliding_window": stack.window}
    return {
        "use_sliding_window": any(slides),
        "sliding_window": stack.window if any(slides) else None,
        "max_window_layers": slides.index(True) if any(slides) else stack.layers,
        **write_layer_types(stack),
    }


def _read_config(dialect: Dialect, values: dict[str, Any], names: frozenset[str]) -> ModelConfig:
    fields = Fields(dict(dialect.missing) | values)
    further = by_holder(dialect.read(fields) | fields.read(dialect.more))
    for key, (allowed, why) in dialect.refused.items():
        fields.only(key, allowed, why)
    model = fields.read(dialect.keys(_MODEL)) | further["model"]
    stack = fields.read(dialect.keys(_STACK)) | dict(dialect.built_in)
    if (dialect.fixed_heads or dialect.divides) and stack["width"] % stack["heads"]:
        why = f"transformers needs a multiple of num_attention_heads={stack['heads']}"
        raise refusal("hidden_size", stack["width"], why)
    kv_heads = dialect.kv_heads
    if dialect.spelled.get("num_key_value_heads", "") is not None:
        kv_heads = fields.optional_integer("num_key_value_heads", kv_heads)
    rope = read_rope(fields, model["max_seq_len"], dialect.rope)
    model["max_seq_len"] = longest(model["max_seq_len"], rope)
    stack |= read_heads(fields, stack, kv_heads, dialect.head_width)
    head_width = stack["head_width"] or stack["width"] // stack["heads"]
    share = rope.get("rope_fraction", 1.0)
    if int(share * head_width) % 2:
        why = f"{share * head_width:g} dimensions of a head have no pairs"
        raise refusal("partial_rotary_factor", share, why)
    usual = THEIR_ACTIVATIONS[dialect.built_in.get("activation", "silu")]
    key = dialect.spelled.get("hidden_act") or "hidden_act"
    stack["activation"] = fields.activation(key, usual)
    stack |= _read_biases(dialect, fields) if dialect.biases else {}
    stack |= rope | _read_windows(dialect, fields, stack["layers"]) | further[""]
    if dialect.fixed_heads and stack["head_width"] is not None:
        why = f"transformers needs {stack['width'] // stack['heads']}, hidden_size by heads"
        raise refusal("head_dim", stack["head_width"], why)
    is_stored = f"{dialect.names.head}.weight" in names
    has_head = model["tied_embeddings"] or is_stored or fields.claims(f"{dialect.name}ForCausalLM")
    return build_config(
        **model,
        decoder=stack,
        head={"kind": "lm", **further["head"]} if has_head else {"kind": "none"},
        special_tokens=fields.special_tokens(**dialect.tokens),
    )


def _write_config(dialect: Dialect, config: ModelConfig) -> dict[str, Any]:
    stack = config.last_stack
    values = {
        **write_keys(config, dialect.keys(_MODEL)),
        **write_longest(config),
        **write_keys(stack, dialect.keys(_STACK)),
        **write_tokens(config.special_tokens),
        dialect.spelled.get("hidden_act") or "hidden_act": THEIR_ACTIVATIONS[stack.activation],
        **write_rope(stack, dialect.rope),
        **_write_windows(dialect, stack),
        **{key: value for key, (value, _) in dialect.refused.items() if value is not None},
    }
    if dialect.spelled.get("num_key_value_heads", "") is not None:
        values["num_key_value_heads"] = stack.num_kv_heads
    if not dialect.fixed_heads:
        values["head_dim"] = stack.per_head_width
    if "attention_bias" in dialect.biases:
        values["attention_bias"] = stack.has_qkv_bias
    if "mlp_bias" in dialect.biases:
        values["mlp_bias"] = stack.bias
    holders = {"": stack, "head": config.head, "model": config}
    for key, (name, default) in dialect.more.items():
        holder, _, inner = name.rpartition(".")
        values |= write_keys(holders[holder], {key: (inner, default)})
    return values | dialect.write(config)


def _mixer_weights(
    mixer: MixerTensors,
    modules: Mapping[str, dict[str, int]],
    place: tuple[str, str],
    stack: StackConfig,
) -> list[Weight]:
    weights = [replace(one, **of_layer(place, one)) for one in mixer.weights(stack)]
    for ours, theirs in modules.items():
        if not ours.startswith("attention."):
            renamed = mixer.modules.get(ours)
            rows = theirs if renamed is None else stacked(ours, renamed, stack)
            weights += affine(*place, {ours: rows}, bias=has_bias(ours, stack))
    return weights


def _rows_of(modules: Mapping[str, Any], stack: StackConfig) -> dict[str, dict[str, int]]:
    return {
        ours: stacked(ours, theirs, stack) if isinstance(theirs, tuple) else theirs for ours, theirs in modules.items()
    }


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of the layers of a model.

    Attributes:
        modules: Modules of a layer with their rows; `dense`: where other layers have experts.
        further: Weights that are no modules, with names within a layer.
        order: Rows of queries, keys and values.
    """

    dialect: Dialect
    stack: StackConfig
    modules: dict[str, dict[str, int]]
    dense: dict[str, dict[str, int]]
    further: list[Weight]
    order: tuple[int, ...]

    @staticmethod
    def of(dialect: Dialect, config: ModelConfig) -> "LayerWeights":
        """Returns the weights of the layers of a model."""
        stack = config.last_stack
        modules = _rows_of(dialect.modules(config), stack)
        beside = {ours: rows for ours, rows in modules.items() if not ours.startswith(_FEEDFORWARD)}
        dense = beside | _rows_of(DENSE, stack)
        return LayerWeights(dialect, stack, modules, dense, dialect.further(stack), dialect.order(stack))

    def at(self, place: tuple[str, str], number: int) -> list[Weight]:
        """Returns the weights of the layer of a number, whose names begin with `place`, ours and theirs."""
        stack = self.stack
        mixer = self.dialect.mixers.get(stack.mixer_name(number))
        if mixer is not None:
            return _mixer_weights(mixer, self.modules, place, stack)
        is_dense = stack.experts is not None and not stack.has_experts(number)
        further = [one for one in self.further if not (is_dense and one.ours.startswith(_FEEDFORWARD))]
        weights = [replace(one, **of_layer(place, one)) for one in further]
        for ours, theirs in (self.dense if is_dense else self.modules).items():
            made = affine(*place, {ours: theirs}, bias=has_bias(ours, stack))
            is_turned = ours.startswith("attention.") and ours != "attention.output"
            weights += [self._turned(ours, theirs, one) for one in made] if is_turned else made
        return weights

    def _turned(self, ours: str, theirs: dict[str, int], weight: Weight) -> Weight:
        length, width = sum(theirs.values()), self.stack.per_head_width
        has_heads = self.dialect.joined_norms and ours.endswith("norm")
        shape = (length // width, width) if has_heads else None
        return replace(weight, order=self.order[:length], shape=shape)


def _weights(dialect: Dialect, config: ModelConfig) -> list[Weight]:
    stack, names = config.last_stack, dialect.names
    layers = LayerWeights.of(dialect, config)
    tensors = [table("embedding.weight", names.words, config.vocab_size)]
    for number in range(stack.layers):
        tensors += layers.at((f"decoder.blocks.{number}.", names.layer.format(number)), number)
    norm = {"norm": {names.norm: stack.width}} if names.norm else {}
    tensors += affine("decoder.", names.prefix, norm, bias=stack.has_norm_bias)
    if config.head.bias and config.head.record.scores_words:
        tensors.append(table("head.bias", f"{names.head}.bias", config.vocab_size))
    return tensors + own_head(config, f"{names.head}.weight")


def _architecture(dialect: Dialect, config: ModelConfig) -> str:
    if config.head.record.scores_words:
        return f"{dialect.name}ForCausalLM"
    return dialect.base or f"{dialect.name}Model"


def decoder_family(dialect: Dialect) -> Family:
    """Builds the family of a table."""
    names = dialect.names
    family = Family(
        model_type=dialect.model_type,
        read_config=partial(_read_config, dialect),
        write_config=partial(_write_config, dialect),
        architecture=partial(_architecture, dialect),
        weights=partial(_weights, dialect),
        aliases={f"{names.head}.weight": names.words},
        ignored=dialect.ignored,
        renames=dialect.renames,
        prefix=names.prefix,
        sizes=dialect.sizes,
    )
    return with_heads(family, dialect.answers) if dialect.labels else family
