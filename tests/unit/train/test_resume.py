"""What may differ when a run is resumed, and how it is said."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.checkpoint.state import TrainState
from pretrain.config.load import load_config
from pretrain.errors import ConfigError, DataError
from pretrain.train.resume import check_config, check_data, check_order

STORED = "configs/run/quickstart.yaml"


def changed(*overrides: str):
    """The stored config with changes."""
    return load_config(STORED, ["optim.lr=0.5", "train.steps=120", *overrides])


def messages(caplog) -> list[tuple[int, str]]:
    """Level and text of what was logged."""
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_the_same_config_passes_in_silence(caplog):
    caplog.set_level(logging.INFO)
    check_config(changed(), changed())
    assert caplog.text == ""


def test_what_is_free_is_told_in_one_message(caplog):
    caplog.set_level(logging.INFO)
    check_config(changed(), changed("data.workers=2", "train.stop_after=3", "checkpoint.keep=5"))
    assert messages(caplog) == [
        (
            logging.INFO,
            "resuming with a config that differs from the run's so far:\n"
            "    free    data.workers: 1 -> 2\n"
            "    free    train.stop_after: None -> 3\n"
            "    free    checkpoint.keep: 2 -> 5",
        )
    ]


def test_every_change_is_shown_by_class_in_one_warning(caplog):
    caplog.set_level(logging.INFO)
    allow = "resume.allow=[model.decoder.dropout, seed]"
    check_config(changed(), changed("optim.lr=1.0", "data.prefetch=8", "seed=9", "model.decoder.dropout=0.2", allow))
    assert messages(caplog) == [
        (
            logging.WARNING,
            "resuming with a config that differs from the run's so far:\n"
            "    allowed seed: 1234 -> 9\n"
            "    allowed model.decoder.dropout: 0.0 -> 0.2\n"
            "    warn    optim.lr: 0.5 -> 1.0\n"
            "    free    data.prefetch: 4 -> 8\n"
            "    free    resume.allow: [] -> ['model.decoder.dropout', 'seed']",
        )
    ]


def test_what_changes_the_meaning_is_refused_with_all_keys_and_what_to_add():
    with pytest.raises(ConfigError) as caught:
        check_config(changed(), changed("seed=9", "data.lanes=2", "optim.lr=1.0"))
    assert str(caught.value) == (
        "the run quickstart was started with another config (on purpose only: seed: 1234 -> 9, data.lanes: 64 -> 2); "
        "use another run.name, or add resume.allow=[seed,data.lanes]"
    )


def test_what_is_to_be_added_works_as_it_is_printed():
    changes = ["seed=9", "data.lanes=2", "resume.allow=[objective]", "objective.z_loss=0.1", "batch.global_tokens=2048"]
    with pytest.raises(ConfigError) as caught:
        check_config(changed(), changed(*changes))
    override = str(caught.value).rpartition("or add ")[2]
    assert override == "resume.allow=[objective,seed,data.lanes,batch.global_tokens]"
    check_config(changed(), changed(*changes, override))


def test_sources_of_a_mixture_are_allowed_without_their_places():
    mixture = "data={path: null, mixture: [{name: web, path: a, weight: 1.0}, {name: books, path: b, weight: %s}]}"
    old, new = changed(mixture % 1.0), changed(mixture % 2.0)
    with pytest.raises(
        ConfigError, match=r"data.mixture\[1\].weight: 1.0 -> 2.0.*add resume.allow=\[data.mixture.weight\]"
    ):
        check_config(old, new)
    check_config(old, changed(mixture % 2.0, "resume.allow=[data.mixture.weight]"))


@pytest.mark.parametrize("allow", ["[]", "[model]", "[model.decoder.layers]"])
def test_what_the_checkpoints_depend_on_is_never_allowed(allow):
    with pytest.raises(ConfigError) as caught:
        check_config(changed(), changed("model.decoder.layers=3", f"resume.allow={allow}"))
    assert str(caught.value) == (
        "the run quickstart was started with another config (never: model.decoder.layers: 4 -> 3); "
        "use another run.name, or restore model.decoder.layers"
    )
    with pytest.raises(ConfigError, match=r"or restore model.decoder.layers and add resume.allow=\[seed\]"):
        check_config(changed(), changed("model.decoder.layers=3", "seed=9"))


@pytest.mark.parametrize("allow", ["[seed, data]", "[seed, data.lanes]"])
def test_what_is_allowed_by_key_or_section_passes(allow):
    check_config(changed(), changed("seed=9", "data.lanes=2", f"resume.allow={allow}"))


def test_what_is_allowed_is_no_more_than_what_is_named():
    with pytest.raises(ConfigError, match=r"\(on purpose only: seed: 1234 -> 9\)"):
        check_config(changed(), changed("seed=9", "data.lanes=2", "resume.allow=[data, see, seed.x]"))


def test_a_run_that_has_saved_nothing_may_change_in_every_way(caplog):
    check_config(changed(), changed("model.decoder.layers=3", "seed=9"), has_saved=False)
    assert messages(caplog) == [
        (
            logging.WARNING,
            "starting over, as nothing was saved, with a config that differs from the run's so far:\n"
            "    never   model.decoder.layers: 4 -> 3\n"
            "    allow   seed: 1234 -> 9",
        )
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
    check_data(saved, other_tokenizer, ["data.path"])


def test_other_samples_than_were_to_come_are_refused_unless_the_order_may_change(caplog):
    saved = TrainState(step=7, next_digest=f"{5:016x}")
    check_order(saved, 5, [])
    check_order(saved, None, [])  # the run is complete
    check_order(TrainState(step=7), 6, [])  # of a version that did not know, or a run that leaves others out
    check_order(saved.leaving_out(((8, 16),)), 6, [])
    check_order(saved.leaving_out(()), 5, [])
    what = (
        r"the samples of step 8 are not those .* \(digest 0{15}5 -> 0{15}6\); go on with the data, config and version"
    )
    for allow in ([], ["optim.lr"]):
        with pytest.raises(DataError, match=what):
            check_order(saved, 6, allow)
    assert not caplog.records
    check_order(saved, 6, ["data.lanes"])
    assert "the samples of step 8 are not those" in caplog.text


def test_resuming_needs_no_torch():
    """So that a launcher may check it on a login node."""
    code = "import sys, pretrain.train.resume; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
