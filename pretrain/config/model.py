"""`model:` -- one or two Transformer stacks, embeddings and a head.

One stack is a GPT (decoder) or a BERT (encoder), two are a T5. Families differ only in these values: a preset
(`config/presets/`) is plain data over them, and nothing in `model/` asks for a family's name.
"""

from typing import Literal

from pydantic import Field, model_validator

from pretrain.config.base import Section


class RotaryScaling(Section):
    """Rotary frequencies changed to read further than a model was first trained.

    Attributes:
        kind: `linear` divides every frequency (Chen et al. 2023); `llama3` divides the slow ones, keeps the fast ones
            and blends between (Llama 3.1).
        factor: Divisor.
        original_max_seq_len: Length of the first training; `llama3` only.
        low_freq_factor: Wavelengths above `original_max_seq_len / low_freq_factor` are divided; `llama3` only.
        high_freq_factor: Wavelengths below `original_max_seq_len / high_freq_factor` are kept; `llama3` only.
    """

    kind: Literal["linear", "llama3"]
    factor: float = Field(gt=0)
    original_max_seq_len: int = Field(default=8192, ge=1)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> "RotaryScaling":
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be less than high_freq_factor={self.high_freq_factor}"
            )
        return self


class StackConfig(Section):
    """One stack of Transformer blocks.

    Attributes:
        layers: Number of blocks.
        width: Model width D.
        heads: Query heads N.
        kv_heads: Key-value heads K; fewer than `heads` is grouped-query attention. None: as many as `heads`.
        head_width: Width of one head H. None: `width / heads`.
        ff_width: Hidden width F of the feed-forward layer.
        activation: Its non-linearity.
        gated: Two input projections, one gating the other (SwiGLU, GeGLU).
        norm: RMSNorm or LayerNorm.
        norm_eps: Added to the variance.
        norm_placement: Before each sub-layer (pre) or after its residual sum (post).
        input_norm: A norm over the summed embeddings. A pre-norm stack then has none before its first attention.
        bias: Bias terms in every linear layer and LayerNorm.
        qkv_bias: Those of the query, key and value projections. None: as `bias`.
        qk_norm: RMSNorm over each head's query and key, before rotation.
        scaled_attention: Scores are divided by sqrt(H); T5 does not.
        position: How order enters: learned or sinusoidal vectors added to the input, rotary, a learned bias of the
            scores by relative distance (T5), or not at all.
        sinusoid: Layout of the sinusoidal table: sine and cosine interleaved (the paper) or in two halves (Marian).
        rope_theta: Base period of the rotary embedding.
        rope_local_theta: The same in the layers that have a window. None: as `rope_theta`.
        rope_scaling: Change of the rotary frequencies; None: none.
        relative_buckets: Distances that the relative bias tells apart.
        relative_max_distance: Distances from here on share a bucket.
        window: A query sees keys fewer than this many positions away, on each side that it sees. None: all.
        global_every: Every n-th layer, from the first, has no window. None: all layers have it.
        token_types: Rows of a table of segment embeddings (BERT); 0: none.
        dropout: Probability, after embeddings and each sub-layer.
        attention_dropout: The same on attention weights. None: as `dropout`.
    """

    layers: int = Field(ge=1)
    width: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    head_width: int | None = Field(default=None, ge=1)
    ff_width: int = Field(ge=1)
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = "silu"
    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = Field(default=1e-5, gt=0)
    norm_placement: Literal["pre", "post"] = "pre"
    input_norm: bool = False
    bias: bool = False
    qkv_bias: bool | None = None
    qk_norm: bool = False
    scaled_attention: bool = True
    position: Literal["learned", "sinusoidal", "rotary", "relative", "none"] = "rotary"
    sinusoid: Literal["interleaved", "halves"] = "interleaved"
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_local_theta: float | None = Field(default=None, gt=0)
    rope_scaling: RotaryScaling | None = None
    relative_buckets: int = Field(default=32, ge=4, multiple_of=4)
    relative_max_distance: int = Field(default=128, ge=2)
    window: int | None = Field(default=None, ge=1)
    global_every: int | None = Field(default=None, ge=1)
    token_types: int = Field(default=0, ge=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float | None = Field(default=None, ge=0, lt=1)

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads K, the default filled in."""
        return self.kv_heads or self.heads

    @property
    def per_head_width(self) -> int:
        """Head width H, the default filled in."""
        return self.head_width or self.width // self.heads

    @property
    def has_qkv_bias(self) -> bool:
        """Whether query, key and value projections have a bias, the default filled in."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def attention_weight_dropout(self) -> float:
        """Dropout on attention weights, the default filled in."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer; None where it sees everything."""
        every = self.global_every
        return tuple(None if every is not None and i % every == 0 else self.window for i in range(self.layers))

    @model_validator(mode="after")
    def _check(self) -> "StackConfig":
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}, or set head_width")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.num_kv_heads}")
        if self.position == "rotary" and self.per_head_width % 2:
            raise ValueError(f"rotary positions need an even head width, not {self.per_head_width}")
        if self.position == "sinusoidal" and self.width % 2:
            raise ValueError(f"sinusoidal positions need an even width, not {self.width}")
        if self.global_every is not None and self.window is None:
            raise ValueError(f"global_every={self.global_every} needs a window")
        if self.position == "relative" and self.relative_max_distance <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_max_distance={self.relative_max_distance} must exceed half of "
                f"relative_buckets={self.relative_buckets}"
            )
        return self


class HeadConfig(Section):
    """What reads the last hidden states.

    Attributes:
        kind: `lm` scores the vocabulary; `labels` labels; `none`: the model ends with hidden states.
        transform: A linear layer, the stack's activation and its norm come first (BERT, ModernBERT).
        bias: The scores have a bias.
        scaled: Hidden states are divided by sqrt(D) first (T5 v1.0, whose tied embeddings are large).
        soft_cap: Scores s become `cap tanh(s / cap)` (Gemma 2, 3.2). None: they are not bounded.
        labels: Of kind `labels`: their names. None: those of the data.
        mean: Of kind `labels`: what is read of a document is the mean over its tokens, not its first.
        dropout: Of kind `labels`: probability, on what the scores are made of.
    """

    kind: Literal["lm", "labels", "none"] = "lm"
    transform: bool = False
    bias: bool = False
    scaled: bool = False
    soft_cap: float | None = Field(default=None, gt=0)
    labels: list[str] = Field(default_factory=list)
    mean: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> "HeadConfig":
        if self.kind != "labels" and (self.labels or self.mean or self.dropout):
            raise ValueError(f"labels, mean and dropout go with kind=labels, not {self.kind}; leave them out")
        if self.kind == "labels" and (self.scaled or self.soft_cap):
            raise ValueError("scaled and soft_cap go with kind=lm, not labels; leave them out")
        return self


class SpecialTokens(Section):
    """Ids of the tokens that mean something to training or decoding. None: the model has no such token.

    Attributes:
        pad: Fills rows.
        bos: Begins a text.
        eos: Ends one.
        start: First input of the decoder of an encoder-decoder.
        mask: Stands for a token to be predicted.
    """

    pad: int | None = Field(default=None, ge=0)
    bos: int | None = Field(default=None, ge=0)
    eos: int | None = Field(default=None, ge=0)
    start: int | None = Field(default=None, ge=0)
    mask: int | None = Field(default=None, ge=0)


class ModelConfig(Section):
    """The model: its stacks, and what surrounds them.

    Attributes:
        kind: `transformer`; the other kind is in `recurrent.py`.
        preset: Name of an entry of `config/presets/` that the other keys override; None: all keys are given.
        encoder: Bidirectional stack, or None.
        decoder: Causal stack, or None; with an encoder, each block attends to the encoder's output too.
        head: What reads the last hidden states.
        vocab_size: Rows of the embedding table before padding, shared by both stacks. None: the tokenizer's.
        vocab_multiple: The table is padded to a multiple of this (128 keeps tensor cores busy).
        max_seq_len: Longest sequence; the size of a learned position table.
        tied_embeddings: The head uses the input embedding's weight.
        scaled_embeddings: Embeddings are multiplied by sqrt(D) (Vaswani et al. 2017, 3.4).
        pooler: A linear layer and tanh over a document's first position, or its mean, for tasks about documents (BERT).
        init: `normal` with `init_std`; `xavier` uniform, with embeddings of std 1/sqrt(D) (Vaswani et al. 2017, as in
            tensor2tensor); `t5`: by fan-in, which makes up for unscaled attention (Raffel et al. 2020).
        init_std: Standard deviation of `normal`.
        init_scaled: In `normal`, output projections of each residual branch start at `init_std / sqrt(2 layers)`
            (GPT-2, 2.3); at `init_std / sqrt(3 layers)` in a decoder that reads an encoder.
        special_tokens: Ids with a meaning.
    """

    kind: Literal["transformer"] = "transformer"
    preset: str | None = None
    encoder: StackConfig | None = None
    decoder: StackConfig | None = None
    head: HeadConfig = HeadConfig()
    vocab_size: int | None = Field(default=None, ge=1)
    vocab_multiple: int = Field(default=128, ge=1)
    max_seq_len: int = Field(default=2048, ge=1)
    tied_embeddings: bool = False
    scaled_embeddings: bool = False
    pooler: bool = False
    init: Literal["normal", "xavier", "t5"] = "normal"
    init_std: float = Field(default=0.02, gt=0)
    init_scaled: bool = True
    special_tokens: SpecialTokens = SpecialTokens()

    @property
    def padded_vocab_size(self) -> int:
        """Rows V of the embedding table. `vocab_size` must be known."""
        assert self.vocab_size is not None, "vocab_size is filled in from the tokenizer before the model is built"
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def num_scores(self) -> int:
        """What the head tells apart: ids or labels. `head.labels`, or `vocab_size`, must be known."""
        if self.head.kind == "labels":
            assert self.head.labels, "labels are filled in from the data before the model is built"
            return len(self.head.labels)
        assert self.vocab_size is not None, "vocab_size is filled in from the tokenizer before the model is built"
        return self.vocab_size

    @property
    def num_head_rows(self) -> int:
        """Rows of the head's weight: as `num_scores`, the vocabulary padded."""
        return self.num_scores if self.head.kind == "labels" else self.padded_vocab_size

    @property
    def shape(self) -> str:
        """Stacks that the model has: `encoder`, `decoder`, or `encoder+decoder`."""
        return "+".join(name for name in ("encoder", "decoder") if getattr(self, name) is not None)

    @property
    def last_stack(self) -> StackConfig:
        """The stack whose output the head reads: the decoder where there is one."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if self.encoder is None and self.decoder is None:
            raise ValueError("needs an encoder, a decoder, or a preset that has one")
        if self.encoder is not None and self.decoder is not None and self.encoder.width != self.decoder.width:
            raise ValueError(
                f"encoder.width={self.encoder.width} must equal decoder.width={self.decoder.width}: "
                "they share embeddings"
            )
        if self.head.kind != "lm" and self.tied_embeddings:
            raise ValueError(f"tied_embeddings=true needs head.kind=lm, not {self.head.kind}; set it to false")
        if self.head.kind == "labels" and self.decoder is not None:
            raise ValueError("head.kind=labels needs a model of an encoder alone")
        if self.pooler and self.decoder is not None:
            raise ValueError("pooler=true needs a model of an encoder alone")
        return self
