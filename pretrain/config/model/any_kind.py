"""Keys of `model:` of every kind: head, special tokens, vocabulary and length."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from pretrain.config.base import MAX_ROWS, MAX_WIDTH, Conflicts, OnResume, Section
from pretrain.config.model.stack import Activation
from pretrain.kinds.heads import HEADS, HeadRecord

if TYPE_CHECKING:
    HeadKind = str
else:
    HeadKind = Literal[tuple(HEADS)]


class HeadConfig(Section):
    """Output layer on the last hidden states."""

    kind: Annotated[HeadKind, OnResume.NEVER] = "lm"
    """`lm` scores the vocabulary, `labels` scores labels, `spans` each token as the first and as the
    last one of an answer, `choices` a text as the right one of several, `replaced` each token as
    one that was replaced (ELECTRA), `pixels` predicts those of each patch (MAE), `vectors` returns
    a vector of each text, `none` the hidden states."""
    transform: Annotated[bool, OnResume.NEVER] = False
    """Linear layer, activation and norm of the stack before the scores (BERT, ModernBERT); without
    the norm for `kind: replaced` (ELECTRA)."""
    activation: Annotated[Activation | None, OnResume.ALLOW] = None
    """Activation of `transform`. None: that of the stack's feed-forward layers."""
    bias: Annotated[bool, OnResume.NEVER] = False
    """Bias term of the scores."""
    scaled: Annotated[bool, OnResume.ALLOW] = False
    """Divide the hidden states by sqrt(D) first (T5 v1.0, whose tied embeddings are large)."""
    scale: Annotated[float, OnResume.ALLOW] = Field(default=1.0, gt=0)
    """Factor of the scores, before their soft cap (Granite, Cohere)."""
    soft_cap: Annotated[float | None, OnResume.ALLOW] = Field(default=None, gt=0)
    """Soft cap of the scores: `cap tanh(score / cap)` (Gemma 2, 3.2). None: no cap."""
    labels: Annotated[list[str], OnResume.NEVER] = Field(default_factory=list)
    """Label names, for `kind: labels`. Empty: taken from the data."""
    mean: Annotated[bool, OnResume.ALLOW] = False
    """For `kind: labels` and `vectors`: the mean over the tokens of a document in the place of its
    first token (of a decoder its last one); of an image, the mean over its patches."""
    learned_temperature: Annotated[bool, OnResume.NEVER] = False
    """For `kind: vectors`: divide the temperature of the loss by the exponential of a learned
    number, at first 0."""
    dropout: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, lt=1)
    """For `kind: labels`, `spans` and `choices`: dropout probability on the input of the scores."""

    @property
    def record(self) -> HeadRecord:
        """Record of the kind."""
        return HEADS[self.kind]

    @property
    def num_scores(self) -> int:
        """Scores of a head over something else than a vocabulary or pixels; 0 of labels not known yet."""
        return len(self.labels) if self.record.names_labels else self.record.num_scores

    @property
    def summarizes(self) -> bool:
        """True if a document has one output, at its first position."""
        return self.record.summarizes

    def _conflicts(self) -> Conflicts:
        if self.activation is not None and not self.transform:
            yield f"activation={self.activation} needs transform=true", "leave it out"
        has_dropout = self.dropout and not self.record.fine_tuned
        has_mean = self.mean and not self.record.averages
        if not self.record.names_labels and (self.labels or has_mean or has_dropout):
            yield f"labels, mean and dropout go with kind=labels, not {self.kind}", "leave them out"
        if self.learned_temperature and not self.record.pools:
            yield f"learned_temperature goes with kind=vectors, not {self.kind}", "leave it out"
        if not self.record.scales and (self.scaled or self.soft_cap or self.scale != 1.0):
            yield f"scaled, scale and soft_cap go with kind=lm, not {self.kind}", "leave them out"


class SpecialTokens(Section):
    """Ids of special tokens. None: that of the data's tokenizer, which may have none."""

    pad: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=0, le=MAX_ROWS)
    """Id of the padding token."""
    bos: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=0, le=MAX_ROWS)
    """Id of the token that begins a text."""
    eos: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=0, le=MAX_ROWS)
    """Id of the token that ends a text."""
    start: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=0, le=MAX_ROWS)
    """Id of the first input of the decoder in an encoder-decoder."""
    mask: Annotated[int | None, OnResume.ALLOW] = Field(default=None, ge=0, le=MAX_ROWS)
    """Id of the mask token that stands for a token to be predicted."""


class AnyKindConfig(Section):
    """Keys of every kind of model."""

    preset: Annotated[str | None, OnResume.FREE] = None
    """Name of `pretrain presets`, with the defaults of all other keys. None: no preset."""
    family: Annotated[str | None, OnResume.FREE] = None
    """`model_type` that an export tries first, where several represent the model exactly (XLM-R is a
    RoBERTa); of an imported model its own. None: the first of them."""
    head: HeadConfig = HeadConfig()
    vocab_size: Annotated[int | None, OnResume.NEVER] = Field(default=None, ge=1, le=MAX_ROWS)
    """Vocabulary size of both stacks, before padding. None: that of the tokenizer."""
    vocab_multiple: Annotated[int, OnResume.NEVER] = Field(default=128, ge=1, le=MAX_WIDTH)
    """Pad the embedding table to a multiple of this many rows (128 keeps tensor cores busy)."""
    max_seq_len: Annotated[int, OnResume.ALLOW] = Field(default=2048, ge=1, le=MAX_ROWS)
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
