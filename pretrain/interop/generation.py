"""Generation defaults of a release: generation_config.json, or in older folders keys of config.json.

folder -> load_generation_defaults -> GenerationDefaults -> to_json -> model.json, generation_config.json
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pretrain.config.model import SpecialTokens
from pretrain.errors import ConfigError
from pretrain.interop.fields import CONFIG, GENERATION, Fields, read_object

_SAMPLING: dict[str, Any] = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
_OTHER: dict[str, Any] = {
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "begin_suppress_tokens": None,
    "exponential_decay_length_penalty": None,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
}
"""Keys that change what is generated and that `generate` does not know, with the values that change nothing."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Settings of decoding, as transformers means them.

    Attributes:
        num_beams: Beams; 1 is greedy.
        length_penalty: Exponent of the length that a finished beam's score is divided by.
        early_stopping: True: done with `num_beams` finished beams; False: when no open beam is likely to do better;
            "never": when none can.
        max_length: Most tokens of a row, those that it begins with counted. None: not said.
        max_new_tokens: Most tokens without the prompt; precedes `max_length`.
        suppressed: Ids that are never generated.
        forced_eos: Id of the last token of a row that reaches its greatest length. None: whatever comes.
        eos: Ids that end a row, where that is said here; there may be several.
        renormalize: Probabilities sum to 1 again after `suppressed` are left out: it moves the scores of beams.
        sees_prompt_whole: A decoder reads its prompt in both directions; theirs has no such setting.
        kept: What `generate` does not read, by their key: written back, so that an export has it.
    """

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    max_length: int | None = None
    max_new_tokens: int | None = None
    suppressed: tuple[int, ...] = ()
    forced_eos: int | None = None
    eos: tuple[int, ...] = ()
    renormalize: bool = False
    sees_prompt_whole: bool = False
    kept: dict[str, Any] = field(default_factory=dict)

    def not_honoured(self) -> list[str]:
        """Returns the settings that would change the result and that `generate` does not know, as `key=value`."""
        return [f"{key}={value}" for key, value in self.kept.items() if key not in _SAMPLING]

    def to_json(self, special: SpecialTokens | None = None) -> dict[str, Any]:
        """Returns the keys of a generation_config.json; `read_generation_defaults` of it gives the same again.

        Args:
            special: Written too: theirs generates by the ids in this file, not by those in config.json.
        """
        tokens = special or SpecialTokens()
        eos: int | list[int] | None = list(self.eos) if len(self.eos) > 1 else next(iter(self.eos), tokens.eos)
        values: dict[str, Any] = {
            "num_beams": None if self.num_beams == 1 else self.num_beams,
            "length_penalty": None if self.length_penalty == 1.0 else self.length_penalty,
            "early_stopping": self.early_stopping or None,
            "max_length": self.max_length,
            "max_new_tokens": self.max_new_tokens,
            "suppress_tokens": list(self.suppressed) or None,
            "forced_eos_token_id": self.forced_eos,
            "renormalize_logits": self.renormalize or None,
            "sees_prompt_whole": self.sees_prompt_whole or None,
            "pad_token_id": tokens.pad,
            "bos_token_id": tokens.bos,
            "eos_token_id": eos,
            "decoder_start_token_id": tokens.start,
        }
        return {key: value for key, value in (values | self.kept).items() if value is not None}


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Reads the settings beside a released model; a folder that says nothing gives the defaults.

    Raises:
        CheckpointError: A file cannot be read, or is no JSON object.
        ConfigError: A value is not of its type.
    """
    file = next((folder / name for name in (GENERATION, CONFIG) if (folder / name).is_file()), None)
    if file is None:
        return GenerationDefaults()
    values = read_object(file)
    try:
        return read_generation_defaults(values)
    except ConfigError as error:
        raise ConfigError(error.what, where=str(file), fix=error.fix) from None


def read_generation_defaults(values: dict[str, Any]) -> GenerationDefaults:
    """Reads the keys of a generation_config.json, or of a config.json of the time before it.

    Raises:
        ConfigError: A value is not of its type.
    """
    # A null says nothing here.
    values = {key: value for key, value in values.items() if value is not None}
    fields = Fields(values)
    kept = {key: values[key] for key, default in (_SAMPLING | _OTHER).items() if values.get(key, default) != default}
    eos, bad_words = _ids(values, "eos_token_id"), values.get("bad_words_ids", [])
    if not isinstance(bad_words, list) or not all(isinstance(word, list) for word in bad_words):
        raise ConfigError(f"bad_words_ids={bad_words!r}: must be a list of lists of ids")
    if longer := [word for word in bad_words if len(word) > 1]:
        kept["bad_words_ids"] = longer
    # The end of a text is no bad word for theirs, although a list may hold it.
    single = {word[0] for word in bad_words if len(word) == 1} - set(eos)
    forced_eos = _ids(values, "forced_eos_token_id")
    if len(forced_eos) > 1:
        kept["forced_eos_token_id"] = list(forced_eos)
    return GenerationDefaults(
        num_beams=fields.integer("num_beams", 1),
        length_penalty=fields.number("length_penalty", 1.0),
        early_stopping=_early_stopping(fields),
        max_length=fields.optional_integer("max_length"),
        max_new_tokens=fields.optional_integer("max_new_tokens"),
        suppressed=tuple(sorted(single | set(_ids(values, "suppress_tokens")))),
        forced_eos=forced_eos[0] if len(forced_eos) == 1 else None,
        eos=eos,
        renormalize=fields.flag("renormalize_logits", False),
        sees_prompt_whole=fields.flag("sees_prompt_whole", False),
        kept=kept,
    )


def _early_stopping(fields: Fields) -> bool | Literal["never"]:
    return "never" if fields.values.get("early_stopping") == "never" else fields.flag("early_stopping", False)


def _ids(values: dict[str, Any], key: str) -> tuple[int, ...]:
    found = values.get(key, [])
    found = found if isinstance(found, list) else [found]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in found):
        raise ConfigError(f"{key}={values[key]!r}: must be an id or a list of ids")
    return tuple(found)
