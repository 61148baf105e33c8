"""Generation defaults of a release: generation_config.json, or keys of an older config.json.

folder -> load_generation_defaults -> GenerationDefaults
       -> write_generation_defaults -> model.json, generation_config.json
"""

from pathlib import Path
from typing import Any, Literal

from pretrain.config.model import SpecialTokens
from pretrain.errors import ConfigError
from pretrain.families.config_json import CONFIG, TOKEN_KEYS, Fields, write_tokens
from pretrain.interop.release_files import GENERATION, read_object
from pretrain.types import GenerationDefaults

_UNSUPPORTED: dict[str, Any] = {
    "min_length": 0, "min_new_tokens": 0, "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1, "num_return_sequences": 1, "num_beam_groups": 1,
    "guidance_scale": 1, "penalty_alpha": 0, "diversity_penalty": 0, "token_healing": False,
    "forced_bos_token_id": None, "begin_suppress_tokens": None, "sequence_bias": None,
    "exponential_decay_length_penalty": None, "watermarking_config": None, "constraints": None,
    "force_words_ids": None, "dola_layers": None, "max_time": None,
}  # fmt: skip
"""Settings that change a text and are not supported, with the values that do not."""
_OF_DRAWS = {"typical_p": 1, "min_p": None, "top_h": None, "epsilon_cutoff": 0, "eta_cutoff": 0}
"""Those of draws."""
_SUPPORTED = (
    "do_sample", "temperature", "top_k", "top_p", "num_beams", "length_penalty", "early_stopping",
    "max_length", "max_new_tokens", "bad_words_ids", "suppress_tokens", "forced_eos_token_id",
    "repetition_penalty", "no_repeat_ngram_size", "renormalize_logits", "stop_strings",
    "sees_prompt_whole",
)  # fmt: skip
_NO_SETTINGS = (*TOKEN_KEYS.values(), "transformers_version", "_from_model_config")
"""Keys beside them: ids have places of their own."""


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Reads the settings of a released model; a folder without any gives the defaults.

    Raises:
        CheckpointError: A file cannot be read, or is no JSON object.
        ConfigError: A value has the wrong type.
    """
    file = next((folder / name for name in (GENERATION, CONFIG) if (folder / name).is_file()), None)
    if file is None:
        return GenerationDefaults()
    values = read_object(file)
    if file.name == CONFIG:  # of a model, which has keys of its own
        keys = {*_SUPPORTED, *_UNSUPPORTED, *_OF_DRAWS, "eos_token_id"}
        values = {key: value for key, value in values.items() if key in keys}
    try:
        return read_generation_defaults(values)
    except ConfigError as error:
        raise ConfigError(error.what, where=str(file), fix=error.fix) from None


def read_generation_defaults(values: dict[str, Any]) -> GenerationDefaults:
    """Reads a generation_config.json, or an older config.json. Raises: ConfigError."""
    # A null is the same as a missing key here.
    values = {key: value for key, value in values.items() if value is not None}
    fields = Fields(values)
    draws = fields.flag("do_sample", False)
    for key in ("temperature", "top_p"):
        fields.number(key, 1.0)
    fields.integer("top_k", 0)
    bad_words = _bad_words(values)
    eos = _ids(values, "eos_token_id")
    # transformers never suppresses the end of a text, although a list may have it.
    words = [word[0] for word in bad_words if len(word) == 1]
    single = set(_ids({"bad_words_ids": words}, "bad_words_ids")) - set(eos)
    forced_eos = _ids(values, "forced_eos_token_id")
    num_beams = fields.integer("num_beams", 1)
    ignored = _unsupported(values, bad_words, draws=draws)
    if len(forced_eos) > 1:
        ignored["forced_eos_token_id"] = list(forced_eos)
    if draws and num_beams > 1:
        ignored["do_sample"] = True  # beams that are drawn
    early: bool | Literal["never"] = "never"
    if values.get("early_stopping") != "never":
        early = fields.flag("early_stopping", False)
    return GenerationDefaults(
        num_beams=num_beams,
        length_penalty=fields.number("length_penalty", 1.0),
        early_stopping=early,
        max_length=fields.optional_integer("max_length"),
        max_new_tokens=fields.optional_integer("max_new_tokens"),
        suppressed=tuple(sorted(single | set(_ids(values, "suppress_tokens")))),
        forced_eos=forced_eos[0] if len(forced_eos) == 1 else None,
        eos=eos,
        renormalize=fields.flag("renormalize_logits", False),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        no_repeat_ngram_size=fields.integer("no_repeat_ngram_size", 0),
        stop_strings=_texts(values, "stop_strings"),
        sees_prompt_whole=fields.flag("sees_prompt_whole", False),
        stated={key: value for key, value in values.items() if key not in _NO_SETTINGS},
        not_honoured=tuple(f"{key}={value}" for key, value in ignored.items()),
    )


def _bad_words(values: dict[str, Any]) -> list[list[Any]]:
    words = values.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
        raise ConfigError(f"bad_words_ids={words!r}: must be a list of lists of ids")
    return words


def _unsupported(values: dict[str, Any], bad_words: list[list[Any]], *, draws: bool) -> dict[str, Any]:
    neutral = _UNSUPPORTED | (_OF_DRAWS if draws else {})
    ignored = {key: values[key] for key in neutral if values.get(key, neutral[key]) != neutral[key]}
    if longer := [word for word in bad_words if len(word) > 1]:
        ignored["bad_words_ids"] = longer
    return ignored


def _listed(values: dict[str, Any], key: str) -> list[Any]:
    value = values.get(key, [])
    return value if isinstance(value, list) else [value]


def _ids(values: dict[str, Any], key: str) -> tuple[int, ...]:
    numbers = _listed(values, key)
    if not all(type(number) is int for number in numbers):
        raise ConfigError(f"{key}={values[key]!r}: must be an id or a list of ids")
    return tuple(numbers)


def _texts(values: dict[str, Any], key: str) -> tuple[str, ...]:
    texts = _listed(values, key)
    if not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{key}={values[key]!r}: must be a text or a list of texts")
    return tuple(texts)


def write_generation_defaults(defaults: GenerationDefaults, special: SpecialTokens | None = None) -> dict[str, Any]:
    """Returns the keys of a generation_config.json, the inverse of `read_generation_defaults`.

    With `special` its ids are written too: transformers ignores those of config.json.
    """
    values: dict[str, Any] = write_tokens(special or SpecialTokens(), "start")
    if defaults.eos:
        values["eos_token_id"] = list(defaults.eos) if len(defaults.eos) > 1 else defaults.eos[0]
    values["sees_prompt_whole"] = defaults.sees_prompt_whole or None
    return {key: value for key, value in values.items() if value is not None} | defaults.stated
