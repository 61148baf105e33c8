"""Generation defaults of a release: generation_config.json, or keys of an older config.json.

folder -> load_generation_defaults -> GenerationDefaults
       -> write_generation_defaults -> model.json, generation_config.json
"""

from pathlib import Path
from typing import Any, Literal

from pretrain.config.model import SpecialTokens
from pretrain.errors import ConfigError
from pretrain.interop.fields import CONFIG, GENERATION, Fields, read_object, write_tokens
from pretrain.types import GenerationDefaults

_KEPT: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "begin_suppress_tokens": None,
    "exponential_decay_length_penalty": None,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
}
"""Settings of sampling, and unsupported ones, with the values that change nothing."""


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
    try:
        return read_generation_defaults(values)
    except ConfigError as error:
        raise ConfigError(error.what, where=str(file), fix=error.fix) from None


def read_generation_defaults(values: dict[str, Any]) -> GenerationDefaults:
    """Reads a generation_config.json, or an older config.json. Raises: ConfigError."""
    # A null is the same as a missing key here.
    values = {key: value for key, value in values.items() if value is not None}
    fields = Fields(values)
    kept = {key: values[key] for key in _KEPT if values.get(key, _KEPT[key]) != _KEPT[key]}
    bad_words = values.get("bad_words_ids", [])
    if not isinstance(bad_words, list) or not all(isinstance(word, list) for word in bad_words):
        raise ConfigError(f"bad_words_ids={bad_words!r}: must be a list of lists of ids")
    if longer := [word for word in bad_words if len(word) > 1]:
        kept["bad_words_ids"] = longer
    eos = _ids(values, "eos_token_id")
    # transformers never suppresses the end of a text, although a list may have it.
    words = [word[0] for word in bad_words if len(word) == 1]
    single = set(_ids({"bad_words_ids": words}, "bad_words_ids")) - set(eos)
    forced_eos = _ids(values, "forced_eos_token_id")
    if len(forced_eos) > 1:
        kept["forced_eos_token_id"] = list(forced_eos)
    early: bool | Literal["never"] = "never"
    if values.get("early_stopping") != "never":
        early = fields.flag("early_stopping", False)
    return GenerationDefaults(
        num_beams=fields.integer("num_beams", 1),
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
        kept=kept,
    )


def _ids(values: dict[str, Any], key: str) -> tuple[int, ...]:
    found = values.get(key, [])
    found = found if isinstance(found, list) else [found]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in found):
        raise ConfigError(f"{key}={values[key]!r}: must be an id or a list of ids")
    return tuple(found)


def _texts(values: dict[str, Any], key: str) -> tuple[str, ...]:
    found = values.get(key, [])
    found = found if isinstance(found, list) else [found]
    if not all(isinstance(text, str) and text for text in found):
        raise ConfigError(f"{key}={values[key]!r}: must be a text or a list of texts")
    return tuple(found)


def write_generation_defaults(defaults: GenerationDefaults, special: SpecialTokens | None = None) -> dict[str, Any]:
    """Returns the keys of a generation_config.json, the inverse of `read_generation_defaults`.

    With `special` its ids are written too: transformers ignores those of config.json.
    """
    values: dict[str, Any] = {
        "num_beams": None if defaults.num_beams == 1 else defaults.num_beams,
        "length_penalty": None if defaults.length_penalty == 1.0 else defaults.length_penalty,
        "early_stopping": defaults.early_stopping or None,
        "max_length": defaults.max_length,
        "max_new_tokens": defaults.max_new_tokens,
        "suppress_tokens": list(defaults.suppressed) or None,
        "forced_eos_token_id": defaults.forced_eos,
        "repetition_penalty": None if defaults.repetition_penalty == 1.0 else defaults.repetition_penalty,
        "no_repeat_ngram_size": defaults.no_repeat_ngram_size or None,
        "stop_strings": list(defaults.stop_strings) or None,
        "renormalize_logits": defaults.renormalize or None,
        "sees_prompt_whole": defaults.sees_prompt_whole or None,
        **write_tokens(special or SpecialTokens(), "start"),
    }
    if defaults.eos:
        values["eos_token_id"] = list(defaults.eos) if len(defaults.eos) > 1 else defaults.eos[0]
    return {key: value for key, value in (values | defaults.kept).items() if value is not None}
