"""`model:` -- one or two Transformer stacks, embeddings and a head.

One stack is a GPT (decoder) or a BERT (encoder), two are a T5. Families differ only in these values: a preset
(`config/presets.py`) is plain data over them, and nothing in `model/` asks for a family's name.
"""

from typing import Literal

from pydantic import Field, model_validator

from pretrain.config.base import Section


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
        bias: Bias terms in every linear layer and LayerNorm.
        position: How order enters: learned embeddings, rotary, or not at all.
        rope_theta: Base period of the rotary embedding.
        dropout: Probability, after embeddings and each sub-layer, and on attention weights.
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
    bias: bool = False
    position: Literal["learned", "rotary", "none"] = "rotary"
    rope_theta: float = Field(default=10000.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads K, the default filled in."""
        return self.kv_heads or self.heads

    @property
    def per_head_width(self) -> int:
        """Head width H, the default filled in."""
        return self.head_width or self.width // self.heads

    @model_validator(mode="after")
    def _check(self) -> "StackConfig":
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}, or set head_width")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.num_kv_heads}")
        if self.position == "rotary" and self.per_head_width % 2:
            raise ValueError(f"rotary positions need an even head width, not {self.per_head_width}")
        return self


class ModelConfig(Section):
    """The model: its stacks, and what surrounds them.

    Attributes:
        preset: Name of an entry of `config/presets.py` that the other keys override; None: all keys are given.
        encoder: Bidirectional stack, or None.
        decoder: Causal stack, or None.
        vocab_size: Rows of the embedding table before padding. None: the tokenizer's.
        vocab_multiple: The table is padded to a multiple of this (128 keeps tensor cores busy).
        max_seq_len: Longest sequence; the size of a learned position table.
        tied_embeddings: The head uses the input embedding's weight.
        init_std: Standard deviation of the normal initialisation.
        init_scaled: Output projections of each residual branch start at `init_std / sqrt(2 layers)` (GPT-2, 2.3).
    """

    preset: str | None = None
    encoder: StackConfig | None = None
    decoder: StackConfig | None = None
    vocab_size: int | None = Field(default=None, ge=1)
    vocab_multiple: int = Field(default=128, ge=1)
    max_seq_len: int = Field(default=2048, ge=1)
    tied_embeddings: bool = False
    init_std: float = Field(default=0.02, gt=0)
    init_scaled: bool = True

    @property
    def padded_vocab_size(self) -> int:
        """Rows V of the embedding table. `vocab_size` must be known."""
        assert self.vocab_size is not None, "vocab_size is filled in from the tokenizer before the model is built"
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if self.encoder is None and self.decoder is None:
            raise ValueError("needs an encoder, a decoder, or a preset that has one")
        return self
