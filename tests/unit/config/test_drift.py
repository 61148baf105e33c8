"""Every key of the config has a class, and the difference of two configs names every key."""

import pytest

from pretrain.config.base import on_resume
from pretrain.config.fields import walk_fields
from pretrain.config.load import dump_config, load_config
from pretrain.config.resumption import changed_keys, class_of, without_places

QUICKSTART = "configs/run/quickstart.yaml"
MIXTURE = (
    "data={path: null, mixture: [{name: web, path: a, weight: 3.0}, {name: books, path: b, weight: 1.0}], "
    "curriculum: [{tokens: 100, weights: {web: 1.0, books: 2.0}}]}"
)


def leaf_keys() -> set[str]:
    """Every key that has a value of its own, in every kind of model, and in lists."""
    return {field.key for field in walk_fields(repeats=True) if not field.subsections}


def test_every_field_with_a_value_says_what_a_resumption_allows():
    """A new field needs an annotation: what does a changed value mean for a resumed run?"""
    annotated = {field.key: on_resume(field.info) is not None for field in walk_fields(repeats=True)}
    assert {key for key, is_annotated in annotated.items() if is_annotated} == leaf_keys()


def test_a_key_of_both_kinds_of_model_has_one_class():
    rules: dict[str, set[str]] = {}
    for field in walk_fields(repeats=True):
        rules.setdefault(field.key, set()).add(str(on_resume(field.info)))
    assert {key: found for key, found in rules.items() if len(found) > 1} == {}


def test_the_keys_are_those_of_every_part_of_the_schema():
    parts = {
        "model.encoder.cell",
        "model.decoder.rope_scaling.factor",
        "model.input_feeding",
        "data.mixture.weight",
        "data.curriculum.tokens",
        "objective.ul2.denoisers.mode",
        "objective.mixture.ul2.denoisers.mode",
        "optim.muon.lr",
        "optim.adafactor.min_scale",
        "engine.offload_params",
        "init.from",
    }
    assert parts <= leaf_keys()


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("seed", "allow"),
        ("data.lanes", "allow"),
        ("data.path", "free"),
        ("data.mixture[1].path", "free"),
        ("data.mixture[1].weight", "allow"),
        ("data.workers", "free"),
        ("batch.global_tokens", "allow"),
        ("batch.micro", "warn"),
        ("model.decoder.layers", "never"),
        ("model.vocab_size", "never"),
        ("model.decoder.rope_theta", "allow"),
        ("objective.mixture[0].ul2.denoisers[2].mode", "allow"),
        ("optim.kind", "never"),
        ("optim.schedule.warmup_steps", "warn"),
        ("train.steps", "warn"),
        ("train.stop_after", "free"),
        ("engine.zero_stage", "warn"),
        ("engine.device", "free"),
        ("run.name", "free"),
    ],
)
def test_a_key_has_the_class_of_what_it_does(key, expected):
    assert class_of(key) == expected


def test_changed_keys_are_leaves_with_both_values():
    old = load_config(QUICKSTART)
    assert changed_keys(old, old) == {}
    new = load_config(QUICKSTART, ["optim.lr=2.0", "model.decoder.layers=5", "extend=[json]", "init.from=x"])
    assert changed_keys(old, new) == {
        "extend": ([], ["json"]),
        "model.decoder.layers": (4, 5),
        "optim.lr": (old.optim.lr, 2.0),
        "init.from": (None, "x"),
    }


def test_changes_in_lists_are_named_by_their_places():
    old = load_config(QUICKSTART, [MIXTURE])
    new = load_config(
        QUICKSTART, [MIXTURE.replace("3.0", "5.0").replace("books: 2.0", "books: 4.0").replace("path: b", "path: c")]
    )
    assert changed_keys(old, new) == {
        "data.mixture[0].weight": (3.0, 5.0),
        "data.mixture[1].path": ("b", "c"),
        "data.curriculum[0].weights": ({"web": 1.0, "books": 2.0}, {"web": 1.0, "books": 4.0}),
    }
    one = changed_keys(load_config(QUICKSTART), old)
    assert one["data.path"][1] is None and one["data.mixture[0].name"] == (None, "web")
    assert {"data.mixture[1].repeat", "data.curriculum[0].tokens"} <= one.keys()


def test_a_section_that_is_not_there_has_no_values():
    old = load_config(QUICKSTART)
    scaling = "{kind: linear, factor: 2.0}"
    new = load_config(QUICKSTART, [f"model.decoder.rope_scaling={scaling}"])
    changes = changed_keys(old, new)
    assert changes["model.decoder.rope_scaling.factor"] == (None, 2.0)
    assert all(key.startswith("model.decoder.rope_scaling.") and pair[0] is None for key, pair in changes.items())
    assert changed_keys(new, old) == {key: (pair[1], pair[0]) for key, pair in changes.items()}


@pytest.mark.parametrize("other", ["bert_quickstart", "t5_quickstart", "multi30k", "multi30k_recurrent"])
def test_every_difference_of_two_recipes_has_a_class(other, tmp_path):
    new = load_config(f"configs/run/{other}.yaml")
    changes = changed_keys(load_config(QUICKSTART), new)
    assert {class_of(key) for key in changes} == {"free", "warn", "allow", "never"}
    assert {without_places(key) for key in changes} <= leaf_keys()
    (tmp_path / "dumped.yaml").write_text(dump_config(new))
    assert changed_keys(new, load_config(tmp_path / "dumped.yaml")) == {}
