"""Options of `pretrain generate`, and the decoding method that they select for a model."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from pretrain.errors import ConfigError
from pretrain.generation.beam import Beams
from pretrain.generation.constraints import Codec, Constraints
from pretrain.generation.sampling import GREEDY, Sampling
from pretrain.generation.stop_strings import check_stops, split_special
from pretrain.generation.text import ImageCodec, Method
from pretrain.model import LanguageModel
from pretrain.types import GenerationDefaults

MAX_NEW_TOKENS = 128
TEMPERATURE = 0.8
CANDIDATES = 5
_SAMPLING = ("temperature", "top_k", "top_p")
_BEAMS = ("length_penalty", "early_stopping", "n_best")
_REPEATS = ("repetition_penalty", "no_repeat_ngram_size")
_EARLY_STOPPING: dict[str, bool | Literal["never"]] = {"true": True, "false": False, "never": "never"}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line as they were given; None: not given.

    Most are those of `Sampling`, `Beams` and `Constraints`; `top_k` is also the number of
    candidates of a mask. Raises: ConfigError, for an option out of its range, or two that exclude
    each other.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    beams: int | None = None
    length_penalty: float | None = None
    early_stopping: str | None = None  # "true", "false" or "never"
    n_best: int | None = None  # number of texts to return
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    stop: tuple[str, ...] | None = None  # texts that end a row, in place of the release's own

    def __post_init__(self) -> None:
        if self.early_stopping not in (None, *_EARLY_STOPPING):
            raise ConfigError(
                f"--early-stopping {self.early_stopping} is unknown",
                fix=f"use {', '.join(_EARLY_STOPPING)}",
            )
        draws = [] if self.temperature == 0 else list(self._given(_SAMPLING))
        searches = [*(["beams"] if (self.beams or 1) > 1 else []), *self._given(_BEAMS)]
        if draws and searches:
            raise ConfigError(
                f"{_flag(searches[0])} searches, {_flag(draws[0])} draws: only one can be",
                fix="leave one of them out",
            )
        if self.beams == 1 and searches:
            raise ConfigError(f"{_flag(searches[0])} is not for --beams 1", fix="give --beams 4 or so")
        check_stops(self.stop or ())
        # Values out of range are refused here, before anything is loaded.
        Sampling(**self._given(_SAMPLING))
        Constraints(0, **self._given(_REPEATS))
        num_return = self.n_best or 1
        Beams(self.beams or num_return, self.length_penalty or 0.0, num_return=num_return)

    def _given(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def constraints(self, model: LanguageModel, codec: Codec | ImageCodec, defaults: GenerationDefaults) -> Constraints:
        """Returns the limits on tokens and length."""
        length = self.max_tokens or defaults.max_new_tokens
        of_row = defaults.max_length if length is None else None
        stops = defaults.stop_strings if self.stop is None else self.stop
        special: tuple[int, ...] = ()
        if stops:  # names of special tokens are tokens
            special, stops = split_special(codec.encode_rendered, codec.decode, stops)
        return Constraints(
            max_new_tokens=length or of_row or MAX_NEW_TOKENS,
            max_length=of_row,
            eos_ids=tuple(dict.fromkeys((*(defaults.eos or codec.eos_ids), *special))),
            stop_strings=stops,
            suppressed_ids=defaults.suppressed,
            forced_eos_id=defaults.forced_eos,
            renormalize=defaults.renormalize,
            sees_prompt_whole=defaults.sees_prompt_whole,
            **{name: getattr(defaults, name) for name in _REPEATS} | self._given(_REPEATS),
        )

    def method(self, model: LanguageModel, defaults: GenerationDefaults) -> Method:
        """Returns the decoding method by options, then by the defaults of the release.

        Where neither says, a decoder draws, and an encoder-decoder is greedy: its source leaves
        little to chance.

        Raises: ConfigError, for a value outside its range, or that needs several beams.
        """
        sampling = self._given(_SAMPLING)
        num_beams = self.beams or (1 if sampling else defaults.num_beams)
        if num_beams > 1:
            early, penalty = defaults.early_stopping, self.length_penalty
            if self.early_stopping is not None:
                early = _EARLY_STOPPING[self.early_stopping]
            if penalty is None:
                penalty = defaults.length_penalty
            return Beams(num_beams, penalty, early, 1 if self.n_best is None else self.n_best)
        if lonely := self._given(_BEAMS):
            raise ConfigError(
                f"{_flag(next(iter(lonely)))} needs several beams",
                fix="give --beams 4 or so",
            )
        released = defaults.stated
        draws = released.get("do_sample", model.encoder is None)
        if not sampling and (self.beams == 1 or not draws):
            return GREEDY
        values: dict[str, Any] = {"temperature": TEMPERATURE}
        if released.get("do_sample"):  # as transformers, where a release names none of them
            values = {"temperature": 1.0, "top_k": 50}
        values |= {name: released[name] for name in _SAMPLING if name in released}
        return Sampling(**values | sampling)

    def candidates(self) -> int:
        """Returns the number of candidates of a mask. Raises: ConfigError, for other options."""
        options = self._given(tuple(field.name for field in fields(self) if field.name != "top_k"))
        if options:
            raise ConfigError(
                f"{_flag(next(iter(options)))} is for models that generate, this one fills masks",
                fix="leave it out",
            )
        return CANDIDATES if self.top_k is None else self.top_k


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
