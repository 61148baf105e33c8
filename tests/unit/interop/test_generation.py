"""Settings of decoding: read from either file, honoured or named, and the same to transformers after an export."""

import json

import pytest

from pretrain.config.model import SpecialTokens
from pretrain.errors import CheckpointError, ConfigError
from pretrain.interop.generation import (
    load_generation_defaults,
    read_generation_defaults,
    write_generation_defaults,
)
from pretrain.types import GenerationDefaults

# As opus-mt has them.
OPUS = {
    "bad_words_ids": [[80034]], "bos_token_id": 0, "decoder_start_token_id": 80034, "eos_token_id": 0,
    "forced_eos_token_id": 0, "max_length": 512, "num_beams": 4, "pad_token_id": 80034, "renormalize_logits": True,
    "transformers_version": "4.32.0.dev0",
}  # fmt: skip


def test_the_settings_of_a_translator_are_read():
    found = read_generation_defaults(OPUS)
    assert found == GenerationDefaults(
        num_beams=4, max_length=512, suppressed=(80034,), forced_eos=0, eos=(0,), renormalize=True, stated=found.stated
    )
    assert found.stated.keys() == {key for key in OPUS if not key.endswith("version") and key.count("token") != 1} | {
        "forced_eos_token_id"
    }


def test_a_folder_is_read_from_its_newer_file_first(tmp_path):
    assert load_generation_defaults(tmp_path) == GenerationDefaults()
    # Folders from before generation_config.json have these keys in config.json.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "marian", "num_beams": 6, "max_length": None}))
    assert load_generation_defaults(tmp_path) == GenerationDefaults(num_beams=6, stated={"num_beams": 6})
    (tmp_path / "generation_config.json").write_text(json.dumps(OPUS))
    assert load_generation_defaults(tmp_path).num_beams == 4


@pytest.mark.parametrize(
    "values",
    [
        {},
        OPUS,
        {"num_beams": 5, "length_penalty": 0.6, "early_stopping": True, "max_new_tokens": 9, "suppress_tokens": [3, 1]},
        {"early_stopping": "never", "eos_token_id": [128001, 128008], "do_sample": True, "temperature": 0.6},
        {"no_repeat_ngram_size": 3, "forced_bos_token_id": 7, "bad_words_ids": [[1], [2, 3]], "length_penalty": 2},
        {"forced_eos_token_id": [1, 2], "repetition_penalty": 1.2, "eos_token_id": None},
        {"sees_prompt_whole": True},
        {"stop_strings": ["\n\n", "END"]},
        # Defaults of transformers, and ours, that a release states.
        {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "num_beams": 1, "max_length": 20},
        {"repetition_penalty": 1.0, "length_penalty": 1.0, "early_stopping": False, "no_repeat_ngram_size": 0},
        {"top_k": 0, "typical_p": 1.0, "num_return_sequences": 1, "renormalize_logits": False, "min_length": 0},
    ],
)
def test_what_is_written_is_read_again_and_means_the_same_to_transformers(values):
    import transformers

    defaults = read_generation_defaults(values)
    written = json.loads(json.dumps(write_generation_defaults(defaults)))
    assert read_generation_defaults(written) == defaults
    settings = {key: value for key, value in values.items() if not key.endswith(("token_id", "_version"))}
    assert {key: written[key] for key in settings} == settings
    theirs = transformers.GenerationConfig.from_dict(written)
    assert read_generation_defaults(json.loads(theirs.to_json_string())) == defaults


def test_ids_of_the_model_are_written_beside_the_settings():
    special = SpecialTokens(pad=5, bos=1, eos=2, start=5)
    ids = {"pad_token_id": 5, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 5}
    assert write_generation_defaults(GenerationDefaults(), special) == ids
    # Several ends of a text are more than the model's own.
    assert write_generation_defaults(GenerationDefaults(eos=(7, 8)), special)["eos_token_id"] == [7, 8]


def test_a_bad_word_that_ends_a_text_is_no_bad_word():
    assert read_generation_defaults({"bad_words_ids": [[2], [9]], "eos_token_id": 2}).suppressed == (9,)


def test_settings_that_change_the_result_and_are_not_known_are_named():
    values = {"encoder_no_repeat_ngram_size": 3, "bad_words_ids": [[1, 2]], "diversity_penalty": 0.0, "min_length": 0}
    named = ["encoder_no_repeat_ngram_size=3", "bad_words_ids=[[1, 2]]"]
    assert read_generation_defaults(values).not_honoured == tuple(named)
    draws = {"do_sample": True, "typical_p": 0.9, "num_beams": 2}
    assert read_generation_defaults(draws).not_honoured == ("typical_p=0.9", "do_sample=True")
    assert read_generation_defaults(draws | {"do_sample": False}).not_honoured == ()
    # How to sample is said by the one who samples.
    assert read_generation_defaults({"do_sample": True, "temperature": 0.6, "top_p": 0.9}).not_honoured == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "1"}, r"generation_config.json: temperature='1': must be a number"),
        ({"do_sample": 0}, r"generation_config.json: do_sample=0: must be true or false"),
        ({"num_beams": "4"}, r"generation_config.json: num_beams='4': must be an integer"),
        ({"eos_token_id": "2"}, r"generation_config.json: eos_token_id='2': must be an id or a list of ids"),
        ({"bad_words_ids": [3]}, r"generation_config.json: bad_words_ids=\[3\]: must be a list of lists"),
        ({"early_stopping": 1}, r"generation_config.json: early_stopping=1: must be true or false"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_file(tmp_path, values, message):
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message):
        load_generation_defaults(tmp_path)


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config.json: not a JSON object"):
        load_generation_defaults(tmp_path)
