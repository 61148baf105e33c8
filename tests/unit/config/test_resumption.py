"""What may differ when a run is resumed, and how it is said."""

import logging
from pathlib import Path

import pytest

from pretrain.config.load import dump_config, load_config
from pretrain.config.resumption import check_config, fill_from, is_allowed, keep_start
from pretrain.errors import ConfigError

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
            "    free    train.stop_after: null -> 3\n"
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


def test_effects_are_lines_of_the_same_warning(caplog):
    check_config(changed(), changed("optim.lr=1.0"), effects=["learning rate at step 3: 1 -> 2"])
    (text,) = [text for _, text in messages(caplog)]
    assert text.endswith("    warn    optim.lr: 0.5 -> 1.0\n    learning rate at step 3: 1 -> 2")


def test_what_changes_the_meaning_is_refused_with_all_keys_and_what_to_add():
    with pytest.raises(ConfigError) as caught:
        check_config(changed(), changed("seed=9", "data.lanes=2", "optim.lr=1.0"))
    assert str(caught.value) == (
        "the run quickstart was started with another config (on purpose only: seed: 1234 -> 9, data.lanes: 64 -> 2); "
        "pretrain train runs/quickstart/config.yaml continues it as it was; "
        "or use another run.name, or add resume.allow=[seed,data.lanes]"
    )


def test_what_is_to_be_added_works_as_it_is_printed():
    changes = ["seed=9", "data.lanes=2", "resume.allow=[objective]", "objective.z_loss=0.1", "batch.global_tokens=4096"]
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
        check_config(changed(), changed("model.decoder.layers=5", f"resume.allow={allow}"))
    assert str(caught.value) == (
        "the run quickstart was started with another config (never: model.decoder.layers: 4 -> 5); "
        "pretrain train runs/quickstart/config.yaml continues it as it was; "
        "or use another run.name, or restore model.decoder.layers"
    )
    with pytest.raises(ConfigError, match=r"or restore model.decoder.layers and add resume.allow=\[seed\]"):
        check_config(changed(), changed("model.decoder.layers=5", "seed=9"))


@pytest.mark.parametrize("allow", ["[seed, data]", "[seed, data.lanes]"])
def test_what_is_allowed_by_key_or_section_passes(allow):
    check_config(changed(), changed("seed=9", "data.lanes=2", f"resume.allow={allow}"))


def test_what_is_allowed_is_no_more_than_what_is_named():
    with pytest.raises(ConfigError, match=r"\(on purpose only: seed: 1234 -> 9\)"):
        check_config(changed(), changed("seed=9", "data.lanes=2", "resume.allow=[data]"))
    assert not is_allowed("seed", ["see", "seed.x"])


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("optim.lrr", "did you mean 'optim.lr'?"),
        ("data.mixture[0].weight", "did you mean 'data.mixture.weight'?"),
        ("-", "name keys or sections, such as optim.lr or data"),
    ],
)
def test_a_name_that_is_no_key_is_refused(name, fix):
    changed("resume.allow=[model.input_feeding, data.mixture.weight, optim]")
    with pytest.raises(ConfigError) as caught:
        changed(f"resume.allow=[data, '{name}']")
    assert caught.value.what == f"resume.allow: there is no key {name!r}"
    assert "resume.allow=" in caught.value.where and caught.value.fix == fix


def test_a_run_that_has_saved_nothing_may_change_in_every_way(caplog):
    check_config(changed(), changed("model.decoder.layers=5", "seed=9"), has_saved=False)
    assert messages(caplog) == [
        (
            logging.WARNING,
            "starting over, as nothing was saved, with a config that differs from the run's so far:\n"
            "    never   model.decoder.layers: 4 -> 5\n"
            "    allow   seed: 1234 -> 9",
        )
    ]


def with_model(config, **changes):
    """The config with some keys of its model changed."""
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def test_what_a_config_leaves_to_the_data_is_as_the_run_has_found_it(caplog):
    open_config = changed(
        "objective.kind=classify", "model={preset: bert-tiny, tied_embeddings: false, head: {kind: labels}}"
    )
    special = open_config.model.special_tokens.model_copy(update={"eos": 3, "pad": 1})
    head = open_config.model.head.model_copy(update={"labels": ["a", "b"]})
    stored = with_model(open_config, vocab_size=999, special_tokens=special, head=head)
    check_config(stored, fill_from(stored, open_config))
    assert not caplog.records
    for key, value in (("vocab_size", 7), ("special_tokens", special.model_copy(update={"pad": 2}))):
        with pytest.raises(ConfigError, match=rf"(never|on purpose only): model\.{key}"):
            check_config(stored, fill_from(stored, with_model(open_config, **{key: value})))
    others = open_config.model.head.model_copy(update={"labels": ["a", "c"]})
    with pytest.raises(ConfigError, match=r"model\.head\.labels"):
        check_config(stored, fill_from(stored, with_model(open_config, head=others)))


def test_a_start_from_a_run_stays_the_checkpoint_that_was_taken():
    stored = changed("init.from=runs/base/checkpoints/step-00000010")
    for again in ("runs/base", "runs/base/best", "./runs/base/"):
        assert keep_start(stored, changed(f"init.from={again}")) == stored
    for other in ("runs/other", "runs/base/checkpoints/step-00000020"):
        assert keep_start(stored, changed(f"init.from={other}")).init.from_ == other
    assert keep_start(stored, changed()).init.from_ is None


def test_a_vocabulary_that_grows_with_the_data_is_not_taken_for_another(caplog):
    start = changed("init.from=models/base")
    stored = with_model(start, vocab_size=1010)
    check_config(stored, fill_from(stored, with_model(start, vocab_size=1000)))
    tuned = changed("init.from=models/base", "finetune={kind: lora, new_tokens: trained}")
    tables = tuned.finetune.model_copy(update={"also": ["embedding.weight"]})
    stored = with_model(tuned, vocab_size=1010).model_copy(update={"finetune": tables})
    check_config(stored, fill_from(stored, with_model(tuned, vocab_size=1000)))
    assert not caplog.records


def test_a_run_that_was_moved_or_copied_is_continued_where_its_config_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = dump_config(changed("run={dir: runs, name: mine}"))
    for folder in ("runs/mine", "elsewhere/copied"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.yaml").write_text(content)
    copied = "elsewhere/copied/config.yaml"
    assert load_config(copied).folder == Path("runs/mine")  # the config of no run, such as one to start from
    for folder in ("runs/mine", "elsewhere/copied"):
        (tmp_path / folder / "run.json").write_text("{}")
    assert load_config("runs/mine/config.yaml").run.dir == "runs"
    assert load_config(copied).folder == Path("elsewhere/copied")
    assert load_config(tmp_path / copied).folder == tmp_path / "elsewhere/copied"
    assert load_config(copied, ["run.name=new"]).folder == Path("runs/new")
    assert load_config(copied, ["run.dir=others"]).folder == Path("others/mine")
    monkeypatch.chdir("elsewhere/copied")
    assert load_config("config.yaml").folder == tmp_path / "elsewhere/copied"
    assert load_config("../../runs/mine/config.yaml").folder == Path("../../runs/mine")


def test_a_run_whose_folder_has_no_name_for_a_run_is_read_but_not_continued(tmp_path):
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(changed()))
    (folder / "run.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"my run: the name of a run folder is its run.name, .*; rename the folder: l"
    ):
        load_config(folder / "config.yaml")
    assert load_config(folder / "config.yaml", extensions="ignore").run.name == "quickstart"
