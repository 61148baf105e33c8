"""Options of `pretrain generate`, and the decoding method that they select for a model."""

from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from pretrain.errors import ConfigError
from pretrain.generate.beam import Beams
from pretrain.generate.constraints import Codec, Constraints
from pretrain.generate.sampling import GREEDY, Sampling
from pretrain.generate.text import Method
from pretrain.model import LanguageModel

MAX_NEW_TOKENS = 128
TEMPERATURE = 0.8
CANDIDATES = 5
_OF_SAMPLING = ("temperature", "top_k", "top_p")
_OF_BEAMS = ("length_penalty", "early_stopping", "n_best")
_EARLY_STOPPING: dict[str, bool | Literal["never"]] = {"true": True, "false": False, "never": "never"}


class Defaults(Protocol):
    """How the makers of a model generate with it, where the command line says nothing else."""

    @property
    def num_beams(self) -> int:
        """Beams; 1: no beam search."""
        ...

    @property
    def length_penalty(self) -> float:
        """That of `Beams`."""
        ...

    @property
    def early_stopping(self) -> bool | Literal["never"]:
        """That of `Beams`."""
        ...

    @property
    def max_length(self) -> int | None:
        """Most tokens, those that a row begins with counted."""
        ...

    @property
    def max_new_tokens(self) -> int | None:
        """Most new tokens; goes before `max_length`."""
        ...

    @property
    def suppressed(self) -> tuple[int, ...]:
        """Ids that never come."""
        ...

    @property
    def forced_eos(self) -> int | None:
        """The last id of a text that has not ended before."""
        ...

    @property
    def eos(self) -> tuple[int, ...]:
        """Ids that end a text; empty: those of the codec."""
        ...

    @property
    def renormalize(self) -> bool:
        """That of `Constraints`."""
        ...

    @property
    def sees_prompt_whole(self) -> bool:
        """That of `Constraints`."""
        ...

    @property
    def kept(self) -> dict[str, Any]:
        """Other settings, as in generation_config.json: `do_sample`, `temperature`, `top_k`, `top_p` are looked at."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line as they were given; None: not given.

    Attributes:
        max_tokens: Most tokens to add.
        temperature: That of `Sampling`.
        top_k: That of `Sampling`; candidates of a mask.
        top_p: That of `Sampling`.
        beams: Beams; 1: no beam search.
        length_penalty: That of `Beams`.
        early_stopping: "true", "false" or "never".
        n_best: Texts to return.

    Raises:
        ConfigError: One out of its range, or two that do not go together.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    beams: int | None = None
    length_penalty: float | None = None
    early_stopping: str | None = None
    n_best: int | None = None

    def __post_init__(self) -> None:
        if self.early_stopping not in (None, *_EARLY_STOPPING):
            raise ConfigError(
                f"--early-stopping {self.early_stopping} is unknown", fix=f"use {', '.join(_EARLY_STOPPING)}"
            )
        draws = [] if self.temperature == 0 else self._given(_OF_SAMPLING)
        searches = [*(["beams"] if (self.beams or 1) > 1 else []), *self._given(_OF_BEAMS)]
        if draws and searches:
            drawing, searching = _flag(next(iter(draws))), _flag(searches[0])
            raise ConfigError(f"{searching} searches, {drawing} draws: only one can be", fix="leave one of them out")
        if self.beams == 1 and searches:
            raise ConfigError(f"{_flag(searches[0])} is not for --beams 1", fix="give --beams 4 or so")
        # Values out of range are refused here, before anything is loaded.
        Sampling(**self._given(_OF_SAMPLING))
        Beams(self.beams or self.n_best or 1, self.length_penalty or 0.0, num_return=self.n_best or 1)

    def _given(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def constraints(self, model: LanguageModel, codec: Codec, defaults: Defaults) -> Constraints:
        """Returns what may come, and where it ends."""
        length = defaults.max_new_tokens
        if length is None and defaults.max_length is not None and model.encoder is not None:
            length = defaults.max_length - 1  # the start token is counted there
        return Constraints(
            max_new_tokens=self.max_tokens or length or MAX_NEW_TOKENS,
            eos_ids=defaults.eos or codec.eos_ids,
            suppressed_ids=defaults.suppressed,
            forced_eos_id=defaults.forced_eos,
            renormalize=defaults.renormalize,
            sees_prompt_whole=defaults.sees_prompt_whole,
        )

    def method(self, model: LanguageModel, defaults: Defaults) -> Method:
        """Returns how to choose tokens.

        What was given goes before what the model's makers say. Where neither says anything, a decoder draws, and an
        encoder-decoder takes the best: its source leaves little to chance.

        Raises:
            ConfigError: A value outside its range, or one that only several beams have.
        """
        given = self._given(_OF_SAMPLING)
        num_beams = self.beams or (1 if given else defaults.num_beams)
        if num_beams > 1:
            stop = defaults.early_stopping if self.early_stopping is None else _EARLY_STOPPING[self.early_stopping]
            penalty = defaults.length_penalty if self.length_penalty is None else self.length_penalty
            return Beams(num_beams, penalty, stop, 1 if self.n_best is None else self.n_best)
        if lonely := self._given(_OF_BEAMS):
            raise ConfigError(f"{_flag(next(iter(lonely)))} needs several beams", fix="give --beams 4 or so")
        if not given and (self.beams == 1 or (model.encoder is not None and not defaults.kept.get("do_sample"))):
            return GREEDY
        return Sampling(**{"temperature": TEMPERATURE} | _makers_sampling(defaults.kept) | given)

    def candidates(self) -> int:
        """Returns how many candidates a mask gets.

        Raises:
            ConfigError: An option was given that means nothing where masks are filled.
        """
        others = self._given(tuple(field.name for field in fields(self) if field.name != "top_k"))
        if others:
            raise ConfigError(
                f"{_flag(next(iter(others)))} is for models that generate, this one fills masks", fix="leave it out"
            )
        return CANDIDATES if self.top_k is None else self.top_k


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _makers_sampling(settings: dict[str, Any]) -> dict[str, Any]:
    """How the makers of a model draw, if they do; theirs is a temperature of 1 where they name none."""
    if not settings.get("do_sample"):
        return {}
    named = {name: settings[name] for name in _OF_SAMPLING if isinstance(settings.get(name), int | float)}
    return {"temperature": 1.0} | named
