"""`model.encoder`, `model.decoder` -- a stack of blocks, its positions and attention."""

import math
from collections import Counter
from typing import Annotated, Literal

from pydantic import Field

from pretrain.config.base import MAX_HEADS, MAX_LAYERS, MAX_ROWS, MAX_WIDTH, OFF, Conflicts, OnResume, Section
from pretrain.config.model.experts import ExpertsConfig
from pretrain.config.model.latent_attention import LatentConfig
from pretrain.config.model.rotary_scaling import RotaryScaling
from pretrain.kinds.mixers import (
    ATTENTION,
    MIXERS,
    Ability,
    ConvolutionConfig,
    DeltaConfig,
    Mamba2Config,
    Mixer,
    MixerName,
    MixerSection,
)

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2"]
"""Non-linearities by name."""

RowCount = Annotated[int, Field(ge=0, le=MAX_ROWS)]


class StackConfig(Section):
    """One stack of Transformer blocks."""

    layers: Annotated[int, OnResume.NEVER] = Field(ge=1, le=MAX_LAYERS)
    """Number of blocks."""
    width: Annotated[int, OnResume.NEVER] = Field(ge=1, le=MAX_WIDTH)
    """Model width D."""
    heads: Annotated[int, OnResume.NEVER] = Field(ge=1, le=MAX_HEADS)
    """Number N of query heads."""
    kv_heads: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1, le=MAX_HEADS)
    """Number K of key-value heads; fewer than `heads` is grouped-query attention. None: `heads`."""
    head_width: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1, le=MAX_WIDTH)
    """Width H of one head. None: `width / heads`."""
    latent: LatentConfig | None = None
    """Latent attention in place of projections of keys and values. None: grouped or multi-head."""
    mixers: Annotated[list[MixerName] | None, OnResume.NEVER] = Field(default=None, min_length=1)
    """Mixers of the first layers, repeated over all: `attention`, or, with a cost and a cache that
    do not grow with length, `delta`, the gated delta rule (Yang et al. 2024), `mamba2` (Dao and Gu
    2024), or `convolution`, short and gated (LFM 2). None: attention in each."""
    delta: DeltaConfig = DeltaConfig()
    """Sizes of the layers of `mixers` that are `delta`."""
    mamba2: Mamba2Config = Mamba2Config()
    """Sizes of the layers of `mixers` that are `mamba2`."""
    convolution: ConvolutionConfig = ConvolutionConfig()
    """Sizes of the layers of `mixers` that are `convolution`."""
    ff_width: Annotated[int, OnResume.NEVER] = Field(ge=0, le=MAX_WIDTH)
    """Hidden width F of the feed-forward layer. 0: blocks have none (Mamba 2)."""
    experts: ExpertsConfig | None = None
    """Mixture of experts in place of the feed-forward layer. None: a dense model."""
    activation: Annotated[Activation, OnResume.ALLOW] = "silu"
    """Non-linearity of the feed-forward layer; `quick_gelu` is `x sigmoid(1.702 x)`, `relu2` the square
    of ReLU (So et al. 2021, Primer)."""
    gated: Annotated[bool, OnResume.NEVER] = True
    """Gated feed-forward layer with two input projections (SwiGLU, GeGLU)."""
    gate_limit: Annotated[float | None, OnResume.ALLOW] = Field(default=None, gt=0)
    """Bound of both projections of a gated layer, of the gate from above only (gpt-oss). None: none."""
    gate_shift: Annotated[float, OnResume.ALLOW] = 0.0
    """Added to the projection that the gate multiplies, after the bound (gpt-oss: 1)."""
    norm: Annotated[Literal["rms", "layer", "unweighted"], OnResume.NEVER] = "rms"
    """Normalization: RMSNorm (`rms`), LayerNorm (`layer`), or that without weights (`unweighted`; OLMo, 3.1)."""
    norm_eps: Annotated[float, OnResume.ALLOW] = Field(default=1e-5, gt=0)
    """Epsilon that is added to the variance."""
    norm_placement: Annotated[Literal["pre", "post", "output", "sandwich"], OnResume.NEVER] = "pre"
    """Norm before each sub-layer (`pre`), after its residual sum (`post`), of its output, before
    the sum (`output`; OLMo 2, 2.2), or both before it and of its output (`sandwich`; Gemma 2)."""
    mixer_norm_placement: Annotated[Literal["pre", "output"] | None, OnResume.NEVER] = None
    """Place of the norms in layers whose mixer is not attention (OLMo Hybrid: `pre`, and `output`
    of attention). None: `norm_placement`."""
    norm_offset: Annotated[bool, OnResume.NEVER] = False
    """Scale what an RMSNorm divides by one plus its weight, which starts at 0 (Gemma)."""
    norm_bias: Annotated[bool | None, OnResume.NEVER] = None
    """Bias terms in LayerNorm. None: same as `bias`."""
    input_norm: Annotated[bool | Literal["both"], OnResume.NEVER] = False
    """Normalize the summed embeddings; pre-norm then has no norm before its first attention, but
    with `both` (mBART)."""
    bias: Annotated[bool, OnResume.NEVER] = False
    """Bias terms in every linear layer, those of experts and their router too, and in LayerNorm."""
    qkv_bias: Annotated[bool | None, OnResume.NEVER] = None
    """Bias terms in the query, key and value projections. None: same as `bias`."""
    output_bias: Annotated[bool | None, OnResume.NEVER] = None
    """Bias term in the output projection of attention. None: same as `bias`."""
    qk_norm: Annotated[bool | Literal["whole", "layer", "heads"], OnResume.NEVER] = False
    """RMSNorm over the queries and keys of each head, before rotation; `whole`: over those of all
    heads together (OLMoE, OLMo 2); `layer`: LayerNorm of each head, with a bias where norms have one
    (Phi); `heads`: LayerNorm with weights of each head, no bias (Command R+, StableLM 2)."""
    parallel: Annotated[bool | Literal["one_norm"], OnResume.NEVER] = False
    """Add attention and feed-forward layer of a block to the same input, which each reads by a norm
    of its own (GPT-NeoX), or both by `one_norm` (GPT-J, Cohere)."""
    residual_scale: Annotated[float, OnResume.ALLOW] = Field(default=1.0, gt=0)
    """Factor of the result of each sub-layer (Granite)."""
    residual_scalars: Annotated[bool, OnResume.NEVER] = False
    """Enter each layer but the first with `a x + b x0`: x is the stream, x0 the input of the first layer, a
    and b are learned scalars of each layer that start at 1 and 0 (modded-nanoGPT)."""
    value_residual: Annotated[bool, OnResume.NEVER] = False
    """Mix the values of each layer with those of the first, by two learned factors that start at 1/2
    (Zhou et al. 2024, ResFormer)."""
    value_embeddings: Annotated[int, OFF, OnResume.NEVER] = Field(default=0, ge=0, le=MAX_LAYERS)
    """Number n of further token embeddings, as wide as the values, that are mixed with those of the first n
    layers and, in the same order, of the last n, by learned factors (modded-nanoGPT). 0: none."""
    scaled_attention: Annotated[bool, OnResume.ALLOW] = True
    """Divide attention scores by sqrt(H); false in T5."""
    score_factor: Annotated[float | None, OnResume.ALLOW] = Field(default=None, gt=0)
    """Factor of the attention scores in place of 1/sqrt(H) (Gemma 2, Granite). None: no other."""
    score_cap: Annotated[float | None, OnResume.ALLOW] = Field(default=None, gt=0)
    """Soft cap of scaled scores of self-attention, `cap tanh(score / cap)` (Gemma 2). None: none."""
    attention_sinks: Annotated[bool, OnResume.NEVER] = False
    """A learned score of each head beside those of the keys, which takes a share of the weight and has
    no value (gpt-oss)."""
    attention_gate: Annotated[bool, OnResume.NEVER] = False
    """Multiply the result of self-attention by the sigmoid of a further projection of its input,
    before the output projection (Qwen3-Next)."""
    embedding_width: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1, le=MAX_WIDTH)
    """Width E of the tables of tokens, positions and token types, and of `input_norm`, whose sum a
    matrix with a bias maps to `width` (ELECTRA, Clark et al. 2020, 3.2). None: `width`."""
    position: Annotated[
        Literal["learned", "sinusoidal", "sinusoidal_2d", "rotary", "rotary_2d", "relative", "none"],
        OnResume.NEVER,
    ] = "rotary"
    """`learned` or `sinusoidal` vectors added to the input, `sinusoidal_2d` of the row and column
    of a patch, `rotary` embeddings, `rotary_2d` (half of the pairs turn by the column of a patch,
    half by its row), `relative` (a learned bias of the attention scores by distance, T5), or
    `none`."""
    position_offset: Annotated[Literal["pad"] | RowCount, OnResume.NEVER] = 0
    """Rows of a table of `learned` positions before that of the first token, which no token reads (BART:
    2). `pad`: as many as the id of padding and one more (RoBERTa)."""
    sinusoid: Annotated[Literal["interleaved", "halves"], OnResume.ALLOW] = "interleaved"
    """Sine and cosine `interleaved` (Vaswani et al. 2017) or in two `halves` (Marian)."""
    rope_theta: Annotated[float, OnResume.ALLOW] = Field(default=10000.0, gt=0)
    """Base period of the rotary embeddings."""
    rope_local_theta: Annotated[float | None, OnResume.ALLOW] = Field(default=None, gt=0)
    """Base period in layers that have a window. None: `rope_theta`."""
    rope_local_scaling: Annotated[bool, OnResume.ALLOW] = True
    """Apply `rope_scaling` in layers that have a window too; false in Gemma 3 and OLMo 3."""
    unrotated_layers: Annotated[list[int], OnResume.ALLOW] = Field(default_factory=list)
    """Numbers of layers whose queries and keys are not rotated, counted from 0 (SmolLM 3, NoPE).
    Those from `layers` on have no effect, so that a preset can be cut."""
    rope_fraction: Annotated[float, OnResume.ALLOW] = Field(default=1.0, gt=0, le=1)
    """Share of a head's width that is rotated, its first dimensions (GPT-NeoX); the rest has no position."""
    rope_scaling: RotaryScaling | None = None
    """Scaling of the rotary frequencies for longer sequences. None: no scaling."""
    relative_buckets: Annotated[int, OnResume.NEVER] = Field(default=32, ge=4, le=MAX_WIDTH)
    """Number of distance buckets of the relative bias."""
    relative_max_distance: Annotated[int, OnResume.ALLOW] = Field(default=128, ge=2, le=MAX_ROWS)
    """Distance in tokens from which on all distances share a bucket."""
    relative_shared: Annotated[bool, OnResume.NEVER] = True
    """All layers add one relative bias; false: each has its own (UMT5)."""
    window: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=1, le=MAX_ROWS)
    """Keys that a query attends to on each visible side, its own included. None: all keys."""
    global_every: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=1, le=MAX_LAYERS)
    """Every n-th layer, starting with the first, has no window. None: all layers have it."""
    global_first: Annotated[int, OnResume.ALLOW] = Field(default=0, ge=0, le=MAX_LAYERS)
    """Number of the first layer without a window, counted from 0; less than `global_every`."""
    global_layers: Annotated[list[int] | None, OnResume.ALLOW] = None
    """Numbers of the layers without a window, counted from 0, in place of `global_every`; those
    from `layers` on have no effect. None: by `global_every`."""
    token_types: Annotated[int, OFF, OnResume.NEVER] = Field(default=0, ge=0, le=MAX_WIDTH)
    """Number of segment embeddings (BERT). 0: none."""
    dropout: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, lt=1)
    """Dropout probability after the embeddings and each sub-layer."""
    attention_dropout: Annotated[float | None, OnResume.ALLOW] = Field(default=None, ge=0, lt=1)
    """Dropout probability of attention weights. None: `dropout`."""
    drop_path: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, lt=1)
    """Stochastic depth (Huang et al. 2016): probability with which a row skips a sub-layer of the
    last block in training; it grows linearly from 0 in the first block. What is kept is scaled."""
    layer_scale: Annotated[float | None, OnResume.NEVER] = Field(default=None, gt=0)
    """Initial value of a learned factor of each dimension of a sub-layer's result (Touvron et al.
    2021, CaiT, 2: 0.1 up to 18 layers, 1e-5 at 24, 1e-6 beyond). None: no factors."""

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads K, with the default."""
        return self.kv_heads or self.heads

    @property
    def per_head_width(self) -> int:
        """Head width H, with the default."""
        return self.head_width or self.width // self.heads

    @property
    def expert_width(self) -> int:
        """Hidden width F of one expert, or of the dense feed-forward layer."""
        return (self.experts.width if self.experts else None) or self.ff_width

    @property
    def shared_width(self) -> int:
        """Summed hidden width of the experts that every token passes; 0: there are none."""
        if self.experts is None:
            return 0
        return self.experts.shared_width or self.experts.shared * self.expert_width

    @property
    def rotary_width(self) -> int:
        """Dimensions of a head that rotary positions rotate."""
        if self.latent is not None:
            return self.latent.rope_width
        # Rounded down as in transformers, but for the last bits of a product: 0.58 * 100 is 58.
        return int(self.rope_fraction * self.per_head_width + 1e-6)

    @property
    def relative_tables(self) -> int:
        """Tables of relative biases: one, or one for each layer."""
        return 1 if self.relative_shared else self.layers

    @property
    def table_width(self) -> int:
        """Width E of the tables of tokens, positions and token types, with the default."""
        return self.embedding_width or self.width

    @property
    def is_rotary(self) -> bool:
        """True if queries and keys are rotated."""
        return self.position in ("rotary", "rotary_2d")

    def norms_attention(self, number: int) -> bool:
        """Returns whether a block has a norm for attention: `input_norm` may take its place."""
        return number > 0 or self.norm_placement != "pre" or self.input_norm is not True

    def drop_path_of(self, number: int) -> float:
        """Returns the probability with which a row skips a sub-layer of a block."""
        return self.drop_path * number / (self.layers - 1) if self.drop_path else 0.0

    @property
    def score_scale(self) -> float | None:
        """Factor of the attention scores; None: 1/sqrt(H)."""
        if not self.scaled_attention:
            return 1.0
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "yarn" or not scaling.score_mscale:
            return self.score_factor
        factor = 0.1 * scaling.score_mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
        return factor * factor * (self.score_factor or 1 / math.sqrt(self.per_head_width))

    @property
    def has_qkv_bias(self) -> bool:
        """True if query, key and value projections have a bias, with the default."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_output_bias(self) -> bool:
        """True if the output projection of attention has a bias, with the default."""
        return self.bias if self.output_bias is None else self.output_bias

    @property
    def has_norm_bias(self) -> bool:
        """True if norms have a bias, with the default."""
        return self.norm == "layer" and (self.bias if self.norm_bias is None else self.norm_bias)

    @property
    def has_qk_norm_bias(self) -> bool:
        """True if norms of queries and keys have a bias."""
        return self.qk_norm == "layer" and self.has_norm_bias

    def qk_norm_width(self, heads: int) -> int:
        """Returns the weights of a norm of queries or of keys, which have as many heads."""
        return self.per_head_width * (heads if self.qk_norm in ("whole", "heads") else 1)

    @property
    def attention_weight_dropout(self) -> float:
        """Dropout on attention weights, with the default."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer; None: all keys."""
        without: range | list[int] = self.global_layers or []
        if self.global_every is not None:
            without = range(self.global_first, self.layers, self.global_every)
        return tuple(None if number in without else self.window for number in range(self.layers))

    def mixer_name(self, number: int) -> str:
        """Returns the name of the mixer of a layer."""
        return ATTENTION if self.mixers is None else self.mixers[number % len(self.mixers)]

    def mixer(self, number: int) -> Mixer | None:
        """Returns the mixer of a layer in the place of attention; None: it is attention."""
        return MIXERS.get(self.mixer_name(number))

    def mixer_section(self, name: str) -> MixerSection:
        """Returns the sizes of the layers of a mixer."""
        section: MixerSection = getattr(self, name, None) or MIXERS[name].section()
        return section

    def mixer_kernel(self, number: int) -> int | None:
        """Returns the tokens that a convolution of a layer reads; None: it is attention."""
        name = self.mixer_name(number)
        return self.mixer_section(name).kernel if name in MIXERS else None

    def of_layer(self, number: int) -> "StackConfig":
        """Returns the values of a layer, whose norms may have a place of their own."""
        place = self.mixer_norm_placement
        if place in (None, self.norm_placement) or self.mixer(number) is None:
            return self
        return self.model_copy(update={"norm_placement": place})

    @property
    def replaced_by(self) -> dict[str, int]:
        """Numbers of layers of each mixer in the place of attention."""
        return dict(Counter(name for name in map(self.mixer_name, range(self.layers)) if name in MIXERS))

    @property
    def has_attention(self) -> bool:
        """True if the mixer of a layer is attention."""
        return sum(self.replaced_by.values()) < self.layers

    def lacking(self, ability: Ability) -> str:
        """Returns a mixer of the stack that lacks an ability, as `mixers=delta`; empty: none does."""
        names = self.replaced_by
        return next((f"mixers={name}" for name in names if ability not in MIXERS[name].supports), "")

    def has_experts(self, number: int) -> bool:
        """Returns whether a layer has experts."""
        return self.experts is not None and number >= self.experts.first

    def has_feedforward(self, number: int) -> bool:
        """Returns whether a layer has a feed-forward layer, or experts in its place."""
        return self.ff_width > 0 or self.has_experts(number)

    def value_table(self, number: int) -> int | None:
        """Returns the number of the value embedding of a layer, which two layers share; None: it has none."""
        from_last = number - (self.layers - self.value_embeddings)
        place = number if number < self.value_embeddings else from_last
        return place if place >= 0 else None

    def value_parts(self, number: int) -> int:
        """Returns how many values a layer mixes: its own, those from the first layer, an embedding."""
        return 1 + (self.value_residual and number > 0) + (self.value_table(number) is not None)

    def _conflicts(self) -> Conflicts:
        if self.head_width is None and self.width % self.heads:
            yield f"width={self.width} must be a multiple of heads={self.heads}, or set head_width"
        if self.experts is not None and self.experts.first >= self.layers:
            yield f"experts.first={self.experts.first} leaves no layer of {self.layers} with experts"
        if self.latent is not None:
            yield from self._latent_conflicts(self.latent)
        yield from self._mixer_conflicts()
        if self.heads % self.num_kv_heads:
            yield f"heads={self.heads} must be a multiple of kv_heads={self.num_kv_heads}"
        yield from self._rotation_conflicts()
        yield from self._layer_conflicts()
        yield from self._sublayer_conflicts()
        yield from self._feedforward_conflicts()
        yield from self._position_conflicts()

    def _mixer_conflicts(self) -> Conflicts:
        if self.mixers is not None and self.layers % len(self.mixers):
            repeats = f"mixers=[{', '.join(self.mixers)}] repeats every {len(self.mixers)} layers"
            yield (
                f"{repeats}, which does not divide layers={self.layers}",
                "change either, or write one mixer for each layer",
            )
        for name in MIXERS:
            if name not in self.replaced_by:
                if name in StackConfig.model_fields and self.differs(name):
                    sizes = f"{name} has the sizes of mixers={name}, and no layer is one"
                    yield sizes, "set mixers, or leave it out"
                continue
            for row in self.mixer_section(name).size_conflicts(self.width, self.heads):
                yield f"{name}.{row}" if isinstance(row, str) else (f"{name}.{row[0]}", row[1])
        if (place := self.mixer_norm_placement) is not None:
            yield from self._placement_conflicts(f"mixer_norm_placement={place}")
        for key in ("value_residual", "value_embeddings"):
            if (value := getattr(self, key)) and (mixers := self.lacking("values")):
                setting = f"{key}={str(value).lower()}"
                yield f"{setting} does not go with {mixers}", "leave one of them out"

    def _placement_conflicts(self, key: str) -> Conflicts:
        if not self.replaced_by:
            where = "is of layers of other mixers than attention"
            yield f"{key} {where}, and no layer is one", "leave it out"
        if self.norm_placement not in ("pre", "output"):
            yield f"{key} goes with norm_placement=pre or output, not {self.norm_placement}"
        for name in ("input_norm", "parallel"):
            if value := getattr(self, name):
                yield f"{key} does not go with {name}={str(value).lower()}", "leave one of them out"

    def _latent_conflicts(self, latent: LatentConfig) -> Conflicts:
        without_place = {
            f"position={self.position}": self.position != "rotary",
            f"rope_fraction={self.rope_fraction}": self.rope_fraction != 1.0,
            f"kv_heads={self.kv_heads}": self.kv_heads not in (None, self.heads),
            "bias=true": self.bias or self.has_qkv_bias or self.has_output_bias,
            "norm_offset=true": self.norm_offset,
            f"qk_norm={self.qk_norm}": self.qk_norm is not False,
            "attention_sinks=true": self.attention_sinks,
            "attention_gate=true": self.attention_gate,
            "value_residual=true": self.value_residual,
            f"value_embeddings={self.value_embeddings}": self.value_embeddings > 0,
        }
        for key, is_set in without_place.items():
            if is_set:
                yield f"latent attention does not go with {key}", "leave one of them out"
        if max(latent.rope_width, latent.value_width) > self.per_head_width or latent.rope_width % 2:
            yield (
                f"latent: rope_width={latent.rope_width}, an even number, and "
                f"value_width={latent.value_width} must be at most head_width={self.per_head_width}"
            )

    def _rotation_conflicts(self) -> Conflicts:
        for name in ("rope_fraction", "unrotated_layers", "rope_scaling"):
            if not self.is_rotary and self.differs(name):
                value = "" if name == "rope_scaling" else f"={getattr(self, name)}"
                yield f"{name}{value} needs position=rotary, not {self.position}"
        if self.rope_scaling is not None:
            yield from self._scaling_conflicts(self.rope_scaling)
        # A pair turns by one angle; of patches, as many pairs by the column as by the row.
        if self.position == "rotary_2d":
            yield from self._width_conflicts(4, "a head width that 4 divides", "a multiple of 4")
        elif self.position == "rotary":
            yield from self._width_conflicts(2, "an even head width", "an even number, 2 or more")

    def _scaling_conflicts(self, scaling: RotaryScaling) -> Conflicts:
        if scaling.kind == "dynamic" and self.rotary_width < 4:
            yield f"rope_scaling.kind=dynamic needs 4 rotated dimensions, not {self.rotary_width}"
        pairs = self.rotary_width // 2
        for name in ("short_factors", "long_factors"):
            count = len(getattr(scaling, name))
            if scaling.kind == "longrope" and count != pairs:
                yield f"rope_scaling.{name} are {count} numbers, for {pairs} pairs of dimensions"

    def _width_conflicts(self, divisor: int, head_width: str, dimensions: str) -> Conflicts:
        for name in ("rope_scaling", "rope_local_theta"):
            if self.position == "rotary_2d" and getattr(self, name) is not None:
                yield f"{name} goes with position=rotary, not rotary_2d", "leave it out"
        if self.rotary_width and self.rotary_width % divisor == 0:
            return
        width = self.per_head_width
        if self.rope_fraction == 1.0:
            yield f"{self.position} positions need {head_width}, not {width}"
        yield (
            f"rope_fraction={self.rope_fraction} rotates {self.rotary_width} of {width} dimensions of a head",
            f"choose one that gives {dimensions}",
        )

    def _layer_conflicts(self) -> Conflicts:
        if self.position == "sinusoidal" and self.width % 2:
            yield f"sinusoidal positions need an even width, not {self.width}"
        for name in ("residual_scalars", "value_residual"):
            if getattr(self, name) and self.layers == 1:
                yield f"{name}=true needs 2 layers or more"
        if self.drop_path and self.layers == 1:
            yield f"drop_path={self.drop_path} needs 2 layers or more: the first is never skipped"
        if 2 * self.value_embeddings > self.layers:
            yield (
                f"value_embeddings={self.value_embeddings} are for as many first and as many last "
                f"layers: use {self.layers // 2} or fewer with layers={self.layers}"
            )
        for name in ("global_every", "global_layers"):
            if getattr(self, name) is not None and self.window is None:
                yield f"{name}={getattr(self, name)} needs a window"
        if self.global_every is not None and self.global_layers is not None:
            yield "global_every and global_layers name the same layers", "leave one out"

    def _sublayer_conflicts(self) -> Conflicts:
        if self.norm_offset and self.norm != "rms":
            yield f"norm_offset=true is for norm=rms, not {self.norm}", "leave it out"
        if self.norm_offset and self.qk_norm in ("layer", "heads"):
            yield f"norm_offset=true is for RMSNorm, and qk_norm={self.qk_norm} is none", "leave one out"
        if self.input_norm == "both" and self.norm_placement != "pre":
            yield f"input_norm=both is for norm_placement=pre, not {self.norm_placement}", "use true"
        if self.norm_bias and self.norm != "layer":
            yield f"norm_bias=true is for norm=layer, not {self.norm}", "leave it out"
        if self.score_factor is not None and not self.scaled_attention:
            yield "score_factor and scaled_attention=false both scale scores", "leave one out"
        if self.parallel and self.norm_placement != "pre":
            yield f"parallel={self.parallel} needs norm_placement=pre, not {self.norm_placement}"

    def _feedforward_conflicts(self) -> Conflicts:
        if not self.gated and (self.gate_limit is not None or self.gate_shift):
            yield "gate_limit and gate_shift are for gated=true", "leave them out"
        if not self.expert_width and self.experts is not None:
            yield "ff_width=0 leaves experts without a width", "set experts.width"
        if not self.ff_width and self.parallel:
            yield f"ff_width=0 leaves nothing beside attention for parallel={self.parallel}", "leave one out"

    def _position_conflicts(self) -> Conflicts:
        if self.global_first >= (self.global_every or 1):
            yield f"global_first={self.global_first} must be less than global_every={self.global_every}"
        if self.position_offset and self.position != "learned":
            yield f"position_offset={self.position_offset} needs position=learned, not {self.position}"
        if self.position != "relative" and not self.relative_shared:
            yield f"relative_shared=false needs position=relative, not {self.position}"
        if self.embedding_width is not None and self.position == "sinusoidal":
            yield "embedding_width does not go with position=sinusoidal", "leave one out"
        # Half of the buckets have one distance each; the others share those up to the largest.
        if self.position == "relative" and self.relative_max_distance <= self.relative_buckets // 2:
            yield (
                f"relative_max_distance={self.relative_max_distance} must exceed half of "
                f"relative_buckets={self.relative_buckets}"
            )
