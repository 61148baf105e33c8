"""`model:` of `kind: recurrent` -- a baseline of the Transformer.

A model of one stack is a language model, of two an encoder-decoder: without attention
(Sutskever et al. 2014), with Bahdanau's (2015) or with Luong's (2015).
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pretrain.config.base import MAX_LAYERS, MAX_WIDTH, Conflicts, OnResume, SameKeys, Section
from pretrain.config.model.any_kind import AnyKindConfig, HeadConfig
from pretrain.config.model.stack import StackConfig
from pretrain.config.model.transformer import ModelConfig


class RecurrentStackConfig(Section):
    """One stack of recurrent layers."""

    cell: Annotated[Literal["rnn", "lstm", "gru"], OnResume.NEVER] = "lstm"
    """`rnn` (Elman 1990), `lstm` (Hochreiter, Schmidhuber 1997) or `gru` (Cho et al. 2014)."""
    layers: Annotated[int, OnResume.NEVER] = Field(ge=1, le=MAX_LAYERS)
    """Number of layers."""
    width: Annotated[int, OnResume.NEVER] = Field(ge=1, le=MAX_WIDTH)
    """Width D of embeddings, states and outputs."""
    bidirectional: Annotated[bool, OnResume.NEVER] = False
    """Half of the width reads backwards; encoder only."""
    dropout: Annotated[float, OnResume.ALLOW] = Field(default=0.0, ge=0, lt=1)
    """Dropout on embeddings, between layers and on outputs, not steps (Zaremba et al. 2014)."""

    def _conflicts(self) -> Conflicts:
        if self.bidirectional and self.width % 2:
            yield f"bidirectional=true needs an even width, not {self.width}"


class RecurrentConfig(AnyKindConfig):
    """Recurrent model; keys that a Transformer has, too, have the same meaning."""

    # Token ids alone, as of a Transformer without this key.
    input: ClassVar[None] = None
    captions: ClassVar[bool] = False

    kind: Annotated[Literal["recurrent"], OnResume.NEVER]
    """`recurrent`."""
    encoder: Annotated[RecurrentStackConfig | None, SameKeys("model.decoder")] = None
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

    def _conflicts(self) -> Conflicts:
        encoder = self.encoder
        decoder = self.decoder
        if decoder.bidirectional:
            yield "decoder.bidirectional=true would show a decoder the tokens to predict", "leave it out"
        if encoder is None and self.attention != "none":
            yield f"attention={self.attention} needs an encoder"
        for name in ("cell", "layers", "width") if encoder is not None else ():
            ours = getattr(encoder, name)
            other = getattr(decoder, name)
            if ours != other:
                yield (
                    f"encoder.{name}={ours} must equal decoder.{name}={other}: the decoder begins "
                    "with the encoder's last state"
                )
        if self.attention != "luong" and (self.input_feeding or self.score != "general"):
            yield f"score and input_feeding are for attention=luong, not attention={self.attention}"
        if self.head != HeadConfig(bias=self.head.bias):
            yield "head.kind=lm is the only head of a recurrent model, with head.bias as it may be"
