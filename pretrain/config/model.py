"""`model:` -- one or two stacks, embeddings and a head; or `kind: recurrent`, a baseline of the Transformer.

One stack is a GPT (decoder) or a BERT (encoder), two are a T5. Families differ only in these
values: a preset is plain data over them, and no code in `model/` depends on a family.

A recurrent model of one stack is a language model, of two an encoder-decoder: without attention
(Sutskever et al. 2014), with Bahdanau's (2015) or with Luong's (2015).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from pretrain.config.base import OnResume, Section


class RotaryScaling(Section):
    """Scaling of rotary frequencies, for sequences longer than those of the original training."""

    kind: Annotated[Literal["linear", "llama3", "yarn"], OnResume.ALLOW]
    """`linear`: divide every frequency (Chen et al. 2023). `llama3` (Llama 3.1): divide low ones, keep
    high ones, interpolate between. `yarn` (Peng et al. 2023): likewise, and scale the scores."""
    factor: Annotated[float, OnResume.ALLOW] = Field(gt=0)
    """Divisor of the frequencies."""
    original_max_seq_len: Annotated[int, OnResume.ALLOW] = Field(default=8192, ge=1)
    """Sequence length of the original training in tokens; `llama3` and `yarn` only."""
    low_freq_factor: Annotated[float, OnResume.ALLOW] = Field(default=1.0, gt=0)
    """Wavelengths above `original_max_seq_len / low_freq_factor` are divided; `llama3` only."""
    high_freq_factor: Annotated[float, OnResume.ALLOW] = Field(default=4.0, gt=0)
    """Wavelengths below `original_max_seq_len / high_freq_factor` are kept; `llama3` only."""
    beta_slow: Annotated[float, OnResume.ALLOW] = Field(default=1.0, gt=0)
    """Dimensions of fewer turns in `original_max_seq_len` are divided; `yarn` only."""
    beta_fast: Annotated[float, OnResume.ALLOW] = Field(default=32.0, gt=0)
    """Dimensions of more turns in `original_max_seq_len` are kept; `yarn` only."""
    attention_factor: Annotated[float | None, OnResume.ALLOW] = Field(default=None, gt=0)
    """Factor of rotated queries and of keys; `yarn` only. None: `0.1 ln(factor) + 1`, at least 1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for below, above in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            low = getattr(self, below)
            high = getattr(self, above)
            if low >= high:
                raise ValueError(f"{below}={low} must be less than {above}={high}")
        return self


class StackConfig(Section):
    """One stack of Transformer blocks."""

    layers: Annotated[int, OnResume.NEVER] = Field(ge=1)
    """Number of blocks."""
    width: Annotated[int, OnResume.NEVER] = Field(ge=1)
    """Model width D."""
    heads: Annotated[int, OnResume.NEVER] = Field(ge=1)
    """Number N of query heads."""
    kv_heads: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1)
    """Number K of key-value heads; fewer than `heads` is grouped-query attention. None: `heads`."""
    head_width: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1)
    """Width H of one head. None: `width / heads`."""
    ff_width: Annotated[int, OnResume.NEVER] = Field(ge=1)
    """Hidden width F of the feed-forward layer."""
    activation: Annotated[Literal["gelu", "gelu_tanh", "silu", "relu"], OnResume.ALLOW] = "silu"
    """Non-linearity of the feed-forward layer."""
    gated: Annotated[bool, OnResume.NEVER] = True
    """Gated feed-forward layer with two input projections (SwiGLU, GeGLU)."""
    norm: Annotated[Literal["rms", "layer"], OnResume.NEVER] = "rms"
    """Normalization: RMSNorm (`rms`) or LayerNorm (`layer`)."""
    norm_eps: Annotated[float, OnResume.ALLOW] = Field(default=1e-5, gt=0)
    """Epsilon that is added to the variance."""
    norm_placement: Annotated[Literal["pre", "post"], OnResume.NEVER] = "pre"
    """Norm before each sub-layer (`pre`) or after its residual sum (`post`)."""
    input_norm: Annotated[bool, OnResume.NEVER] = False
    """Normalize the summed embeddings; pre-norm then has no norm before its first attention."""
    bias: Annotated[bool, OnResume.NEVER] = False
    """Bias terms in every linear layer and LayerNorm."""
    qkv_bias: Annotated[bool | None, OnResume.NEVER] = None
    """Bias terms in the query, key and value projections. None: same as `bias`."""
    qk_norm: Annotated[bool, OnResume.NEVER] = False
    """RMSNorm over the queries and keys of each head, before rotation."""
    scaled_attention: Annotated[bool, OnResume.ALLOW] = True
    """Divide attention scores by sqrt(H); false in T5."""
    position: Annotated[Literal["learned", "sinusoidal", "rotary", "relative", "none"], OnResume.NEVER] = "rotary"
    """`learned` or `sinusoidal` vectors added to the input, `rotary` embeddings, `relative` (a
    learned bias of the attention scores by distance, T5), or `none`."""
    sinusoid: Annotated[Literal["interleaved", "halves"], OnResume.ALLOW] = "interleaved"
    """Sine and cosine `interleaved` (Vaswani et al. 2017) or in two `halves` (Marian)."""
    rope_theta: Annotated[float, OnResume.ALLOW] = Field(default=10000.0, gt=0)
    """Base period of the rotary embeddings."""
    rope_local_theta: Annotated[float | None, OnResume.ALLOW] = Field(default=None, gt=0)
    """Base period in layers that have a window. None: `rope_theta`."""
    rope_scaling: RotaryScaling | None = None
    """Scaling of the rotary frequencies for longer sequences. None: no scaling."""
    relative_buckets: Annotated[int, OnResume.NEVER] = Field(default=32, ge=4)
    """Number of distance buckets of the relative bias."""
    relative_max_distance: Annotated[int, OnResume.ALLOW] = Field(default=128, ge=2)
    """Distance in tokens from which on all distances share a bucket."""
    window: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=1)
    """Keys that a query attends to on each visible side, its own included. None: all keys."""
    global_every: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=1)
    """Every n-th layer, starting with the first, has no window. None: all layers have it."""
    token_types: Annotated[int, OnResume.NEVER] = Field(default=0, ge=0)
    """Number of segment embeddings (BERT). 0: none."""
    dropout: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, lt=1)
    """Dropout probability after the embeddings and each sub-layer."""
    attention_dropout: Annotated[float | None, OnResume.ALLOW] = Field(default=None, ge=0, lt=1)
    """Dropout probability of attention weights. None: `dropout`."""

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads K, with the default."""
        return self.kv_heads or self.heads

    @property
    def per_head_width(self) -> int:
        """Head width H, with the default."""
        return self.head_width or self.width // self.heads

    @property
    def has_qkv_bias(self) -> bool:
        """True if query, key and value projections have a bias, with the default."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def attention_weight_dropout(self) -> float:
        """Dropout on attention weights, with the default."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer; None: all keys."""
        windows = [self.window] * self.layers
        if self.global_every is not None:
            # The first of each group of layers is global.
            windows[:: self.global_every] = [None] * len(windows[:: self.global_every])
        return tuple(windows)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_width is None and self.width % self.heads:
            sizes = f"width={self.width} must be a multiple of heads={self.heads}"
            raise ValueError(f"{sizes}, or set head_width")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.num_kv_heads}")
        if self.position == "rotary" and self.per_head_width % 2:
            width = self.per_head_width
            raise ValueError(f"rotary positions need an even head width, not {width}")
        if self.position == "sinusoidal" and self.width % 2:
            raise ValueError(f"sinusoidal positions need an even width, not {self.width}")
        if self.global_every is not None and self.window is None:
            raise ValueError(f"global_every={self.global_every} needs a window")
        # Half of the buckets have one distance each; the others share those up to the largest.
        if self.position == "relative" and self.relative_max_distance <= self.relative_buckets // 2:
            rule = f"must exceed half of relative_buckets={self.relative_buckets}"
            raise ValueError(f"relative_max_distance={self.relative_max_distance} {rule}")
        return self


class HeadConfig(Section):
    """Output layer on the last hidden states."""

    kind: Annotated[Literal["lm", "labels", "none"], OnResume.NEVER] = "lm"
    """`lm` scores the vocabulary, `labels` scores labels, `none` returns the hidden states."""
    transform: Annotated[bool, OnResume.NEVER] = False
    """Linear layer, activation and norm of the stack before the scores (BERT, ModernBERT)."""
    bias: Annotated[bool, OnResume.NEVER] = False
    """Bias term of the scores."""
    scaled: Annotated[bool, OnResume.ALLOW] = False
    """Divide the hidden states by sqrt(D) first (T5 v1.0, whose tied embeddings are large)."""
    soft_cap: Annotated[float | None, OnResume.ALLOW] = Field(default=None, gt=0)
    """Soft cap of the scores: `cap tanh(score / cap)` (Gemma 2, 3.2). None: no cap."""
    labels: Annotated[list[str], OnResume.NEVER] = Field(default_factory=list)
    """Label names, for `kind: labels`. Empty: taken from the data."""
    mean: Annotated[bool, OnResume.ALLOW] = False
    """For `kind: labels`: classify the mean over the tokens of a document, not its first token."""
    dropout: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, lt=1)
    """For `kind: labels`: dropout probability on the input of the scores."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind != "labels" and (self.labels or self.mean or self.dropout):
            what = "labels, mean and dropout go with kind=labels"
            raise ValueError(f"{what}, not {self.kind}; leave them out")
        if self.kind == "labels" and (self.scaled or self.soft_cap):
            raise ValueError("scaled and soft_cap go with kind=lm, not labels; leave them out")
        return self


class SpecialTokens(Section):
    """Ids of special tokens. None: that of the data's tokenizer, which may have none."""

    pad: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=0)
    """Id of the padding token."""
    bos: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=0)
    """Id of the token that begins a text."""
    eos: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=0)
    """Id of the token that ends a text."""
    start: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=0)
    """Id of the first input of the decoder in an encoder-decoder."""
    mask: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=0)
    """Id of the mask token that stands for a token to be predicted."""


class AnyKindConfig(Section):
    """Keys of every kind of model."""

    preset: Annotated[str | None, OnResume.FREE] = None
    """Name of `pretrain presets`, with the defaults of all other keys. None: no preset."""
    head: HeadConfig = HeadConfig()
    vocab_size: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1)
    """Vocabulary size of both stacks, before padding. None: that of the tokenizer."""
    vocab_multiple: Annotated[int, OnResume.NEVER] = Field(default=128, ge=1)
    """Pad the embedding table to a multiple of this many rows (128 keeps tensor cores busy)."""
    max_seq_len: Annotated[int, OnResume.ALLOW] = Field(default=2048, ge=1)
    """Longest sequence in tokens; the size of a learned position table."""
    tied_embeddings: Annotated[bool, OnResume.NEVER] = False
    """Share the weight of the head with the input embeddings."""
    special_tokens: SpecialTokens = SpecialTokens()

    @property
    def padded_vocab_size(self) -> int:
        """Rows V of the embedding table. `vocab_size` must be known."""
        assert self.vocab_size is not None, "fit_config fills in vocab_size"
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def shape(self) -> str:
        """Stacks of the model: `encoder`, `decoder`, or `encoder+decoder`."""
        return "+".join(name for name in ("encoder", "decoder") if getattr(self, name) is not None)


class ModelConfig(AnyKindConfig):
    """Stacks, embeddings and head of the model."""

    kind: Annotated[Literal["transformer"], OnResume.NEVER] = "transformer"
    """`transformer`, or `recurrent`, which has the other keys of this section."""
    encoder: StackConfig | None = None
    """Bidirectional stack. None: no encoder."""
    decoder: StackConfig | None = None
    """Causal stack; its blocks attend to the output of the encoder, if any. None: no decoder."""
    scaled_embeddings: Annotated[bool, OnResume.ALLOW] = False
    """Multiply the embeddings by sqrt(D) (Vaswani et al. 2017, 3.4)."""
    pooler: Annotated[bool, OnResume.NEVER] = False
    """Linear layer and tanh over the first position of a document, or over its mean (BERT)."""
    init: Annotated[Literal["normal", "xavier", "t5"], OnResume.WARN] = "normal"
    """Weight initialization. `normal`: normal distribution with `init_std`. `xavier`: uniform, with
    embeddings of standard deviation 1/sqrt(D) (Vaswani et al. 2017, as in tensor2tensor). `t5`: by
    fan-in, which compensates for unscaled attention (Raffel et al. 2020)."""
    init_std: Annotated[float, OnResume.WARN] = Field(default=0.02, gt=0)
    """Standard deviation of `normal`."""
    init_scaled: Annotated[bool, OnResume.WARN] = True
    """With `normal`: initialize the output projections of residual branches with `init_std / sqrt(2
    layers)` (GPT-2, 2.3); `sqrt(3 layers)` with cross-attention."""

    @property
    def num_scores(self) -> int:
        """Number of classes of the head, ids or labels, which must be known."""
        scores = len(self.head.labels) if self.head.kind == "labels" else self.vocab_size
        assert scores, "fit_config fills in vocab_size and labels"
        return scores

    @property
    def num_head_rows(self) -> int:
        """Rows of the weight of the head: `num_scores`, with a padded vocabulary."""
        return self.num_scores if self.head.kind == "labels" else self.padded_vocab_size

    @property
    def last_stack(self) -> StackConfig:
        """Stack before the head: the decoder, if there is one."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.encoder is None and self.decoder is None:
            raise ValueError("needs an encoder, a decoder, or a preset that has one")
        if self.encoder is not None and self.decoder is not None:
            widths = (self.encoder.width, self.decoder.width)
            if len(set(widths)) == 2:
                sizes = "encoder.width={} must equal decoder.width={}".format(*widths)
                raise ValueError(f"{sizes}: they share embeddings")
        head = self.head.kind
        if head != "lm" and self.tied_embeddings:
            raise ValueError(f"tied_embeddings=true needs head.kind=lm, not {head}; set it to false")
        if self.head.kind == "labels" and self.decoder is not None:
            raise ValueError("head.kind=labels needs a model of an encoder alone")
        if self.pooler and self.decoder is not None:
            raise ValueError("pooler=true needs a model of an encoder alone")
        return self


class RecurrentStackConfig(Section):
    """One stack of recurrent layers."""

    cell: Annotated[Literal["rnn", "lstm", "gru"], OnResume.NEVER] = "lstm"
    """`rnn` (Elman 1990), `lstm` (Hochreiter, Schmidhuber 1997) or `gru` (Cho et al. 2014)."""
    layers: Annotated[int, OnResume.NEVER] = Field(ge=1)
    """Number of layers."""
    width: Annotated[int, OnResume.NEVER] = Field(ge=1)
    """Width D of embeddings, states and outputs."""
    bidirectional: Annotated[bool, OnResume.NEVER] = False
    """Half of the width reads backwards; encoder only."""
    dropout: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, lt=1)
    """Dropout on embeddings, between layers and on outputs, not steps (Zaremba et al. 2014)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bidirectional and self.width % 2:
            raise ValueError(f"bidirectional=true needs an even width, not {self.width}")
        return self


class RecurrentConfig(AnyKindConfig):
    """Recurrent model; keys that a Transformer has, too, have the same meaning."""

    kind: Annotated[Literal["recurrent"], OnResume.NEVER]
    """`recurrent`."""
    encoder: RecurrentStackConfig | None = None
    """Stack that reads the source. None: a language model."""
    decoder: RecurrentStackConfig
    """Stack that predicts. Its initial state is the last state of the encoder, or zeros."""
    attention: Annotated[Literal["none", "bahdanau", "luong"], OnResume.NEVER] = "none"
    """`bahdanau`: additive attention of the state before a token; the cell reads its result and the
    token. `luong`: multiplicative attention of the state after the token. `none`: no attention."""
    score: Annotated[Literal["general", "dot"], OnResume.NEVER] = "general"
    """Score of `luong`: `general` has a matrix between the two states, `dot` has none."""
    input_feeding: Annotated[bool, OnResume.NEVER] = False
    """For `luong`: the cell also reads the last attentional vector (section 3.3 of the paper)."""

    @property
    def last_stack(self) -> RecurrentStackConfig:
        """The decoder."""
        return self.decoder

    @property
    def feeds_back(self) -> bool:
        """True if the cell reads the attention result, which makes the decoder sequential."""
        return self.attention == "bahdanau" or self.input_feeding

    @property
    def head_model(self) -> ModelConfig:
        """Transformer with the same embeddings and head, so that their code is shared."""
        # A stack of the least size that is valid; only its width is read.
        stack = StackConfig(layers=1, width=self.decoder.width, heads=1, ff_width=1, position="none")
        shared = ("head", "vocab_size", "vocab_multiple", "tied_embeddings")
        return ModelConfig(decoder=stack, **{name: getattr(self, name) for name in shared})

    @model_validator(mode="after")
    def _check(self) -> Self:
        encoder = self.encoder
        decoder = self.decoder
        if decoder.bidirectional:
            what = "decoder.bidirectional=true would show a decoder the tokens to predict"
            raise ValueError(f"{what}; leave it out")
        if encoder is None and self.attention != "none":
            raise ValueError(f"attention={self.attention} needs an encoder")
        for name in ("cell", "layers", "width") if encoder is not None else ():
            ours = getattr(encoder, name)
            other = getattr(decoder, name)
            if ours != other:
                values = f"encoder.{name}={ours} must equal decoder.{name}={other}"
                raise ValueError(f"{values}: the decoder begins with the encoder's last state")
        if self.attention != "luong" and (self.input_feeding or self.score != "general"):
            what = "score and input_feeding are for attention=luong"
            raise ValueError(f"{what}, not attention={self.attention}")
        if self.head != HeadConfig(bias=self.head.bias):
            what = "head.kind=lm is the only head of a recurrent model"
            raise ValueError(f"{what}, with head.bias as it may be")
        return self


AnyModelConfig = ModelConfig | RecurrentConfig

MODEL_SECTIONS: dict[str, type[Section]] = {"transformer": ModelConfig, "recurrent": RecurrentConfig}
"""Sections by `model.kind`."""


def parse_model(values: Any) -> AnyModelConfig:
    """Checks the values of `model:` against the section of its kind. Raises: ValueError."""
    if isinstance(values, AnyModelConfig):
        return values
    kind = values.get("kind", "transformer") if isinstance(values, dict) else "transformer"
    if not isinstance(kind, str) or kind not in MODEL_SECTIONS:
        raise ValueError(f"kind={kind} is unknown; use {' or '.join(MODEL_SECTIONS)}")
    checked = MODEL_SECTIONS[kind].model_validate(values)
    assert isinstance(checked, AnyModelConfig)
    return checked


def _by_kind(values: Any, handler: ValidatorFunctionWrapHandler) -> AnyModelConfig:
    """Reports the errors of the section of that kind only; a plain union reports those of both."""
    return parse_model(values)


ModelSection = Annotated[AnyModelConfig, WrapValidator(_by_kind)]
"""The type of `model:`."""
