"""`model: {kind: recurrent}` -- RNN, LSTM or GRU of torch, as a baseline of the Transformer.

One stack is a language model, two are an encoder-decoder: without attention (Sutskever et al. 2014), with Bahdanau's
(2015) or with Luong's (2015). `ModelSection` is what `model:` may be: this, or a Transformer.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from pretrain.config.base import OnResume, Section
from pretrain.config.model import AnyKindConfig, HeadConfig, ModelConfig, StackConfig


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
