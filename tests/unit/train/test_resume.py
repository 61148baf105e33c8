"""What may differ when a run is resumed: every key of the config has a class."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.checkpoint.state import TrainState
from pretrain.config.load import known_keys, load_config
from pretrain.errors import ConfigError
from pretrain.train.resume import CLASSES, check_config, check_data, class_of

STORED = "configs/run/quickstart.yaml"


def changed(*overrides: str):
    """The stored config with changes."""
    return load_config(STORED, ["optim.lr=0.5", "train.steps=120", *overrides])


def test_every_config_key_has_a_class():
    unclassified = [key for key in known_keys() if not any(key == n or key.startswith(f"{n}.") for n in CLASSES)]
    assert unclassified == []
    assert set(CLASSES.values()) == {"free", "warn", "refuse"}


def test_every_class_is_that_of_a_key_there_is():
    assert set(CLASSES) <= set(known_keys())


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("seed", "refuse"),
        ("data.lanes", "refuse"),
        ("data.path", "free"),
        ("batch.global_tokens", "refuse"),
        ("batch.micro", "free"),
        ("model.decoder.layers", "refuse"),
        ("model.vocab_size", "refuse"),
        ("objective.kind", "refuse"),
        ("optim.schedule.warmup_steps", "warn"),
        ("train.steps", "warn"),
        ("train.stop_after", "free"),
        ("engine.zero_stage", "free"),
        ("run.name", "free"),
    ],
)
def test_a_key_has_the_class_of_its_longest_prefix(key, expected):
    assert class_of(key) == expected


def test_the_same_config_passes_in_silence(caplog):
    check_config(changed(), changed())
    check_config(changed(), changed("engine.zero_stage=3", "batch.micro=4", "data.workers=2", "train.stop_after=3"))
    assert caplog.text == ""


def test_what_changes_the_meaning_is_refused_with_key_and_both_values():
    with pytest.raises(ConfigError) as caught:
        check_config(changed(), changed("seed=9", "model.decoder.layers=3", "optim.lr=1.0"))
    assert str(caught.value) == (
        "the run quickstart was started with another config (seed: 1234 -> 9, model.decoder.layers: 4 -> 3); "
        "use another run.name, or name the keys in resume.allow"
    )


@pytest.mark.parametrize("allow", ["[seed, model]", "[seed, model.decoder.layers]", "[seed, model.decoder]"])
def test_what_is_allowed_by_key_or_section_passes(allow):
    check_config(changed(), changed("seed=9", "model.decoder.layers=3", f"resume.allow={allow}"))


def test_what_is_allowed_is_no_more_than_what_is_named():
    with pytest.raises(ConfigError, match=r"\(seed: 1234 -> 9\)"):
        check_config(changed(), changed("seed=9", "model.decoder.layers=3", "resume.allow=[model, see, seed.x]"))


def test_what_changes_the_course_is_said(caplog):
    caplog.set_level(logging.WARNING)
    check_config(changed(), changed("optim.lr=1.0", "train.steps=99"))
    assert [record.getMessage() for record in caplog.records] == [
        "resuming with optim.lr changed from 0.5 to 1.0",
        "resuming with train.steps changed from 120 to 99",
    ]


def test_other_data_is_refused_unless_allowed():
    saved = TrainState(data_hash="a" * 64, tokenizer_hash="b" * 64)
    check_data(saved, saved, [])
    other_shards = TrainState(data_hash="c" * 64, tokenizer_hash="b" * 64)
    with pytest.raises(
        ConfigError, match=r"the token shards at data.path differ .*sha256 aaaaaaaaaaaa -> cccccccccccc"
    ):
        check_data(saved, other_shards, [])
    other_tokenizer = TrainState(data_hash="a" * 64, tokenizer_hash="c" * 64)
    with pytest.raises(ConfigError, match=r"the tokenizer at data.path differ.*pass resume.allow=\[data\]"):
        check_data(saved, other_tokenizer, ["seed"])
    check_data(saved, other_shards, ["data"])


def test_resuming_needs_no_torch():
    """So that a launcher may check it on a login node."""
    code = "import sys, pretrain.train.resume; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
