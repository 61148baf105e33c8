"""Every YAML under configs/ is a config that loads, or a part of one."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from pretrain.config import recipes
from pretrain.config.load import dump_config, load_config, load_section
from pretrain.config.prepare import PrepareConfig
from pretrain.config.presets import expand_preset
from pretrain.config.yaml_nodes import read_with_includes, read_yaml
from pretrain.preparation.split import parse_split
from pretrain.tokenizer.train import check_tokenizer
from tests.repo.source import ROOT, name

CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
RECIPES = [path for path in CONFIGS if path.parent.name in ("run", "finetune")]
PREPARE = [path for path in CONFIGS if path.parent.name == "prepare"]
PARTS = [path for path in CONFIGS if path not in (*RECIPES, *PREPARE) and path.parent.name != "reproduce"]


def test_there_are_recipes_and_parts():
    assert RECIPES
    assert PREPARE
    assert PARTS
    assert list((ROOT / "configs").rglob("*.yml")) == []


@pytest.mark.parametrize(
    "recipe", recipes.list_recipes((*recipes.RUNS, *recipes.PREPARE, *recipes.PARTS)), ids=lambda recipe: recipe.name
)
def test_the_first_line_of_a_config_is_its_summary(recipe):
    assert recipe.path.read_text().startswith("# ")
    assert recipe.summary.endswith((".", "`."))
    if recipe.name.startswith("run/"):
        assert re.search(r"; .*(seconds|minutes|hours|days)", recipe.summary), "size; devices, time"


STARTS = {
    "supervised": "llama-5m",
    "dpo": "llama-5m",
    "kto": "llama-5m",
    "causal": "llama-5m",
    "seq2seq": "t5-tiny",
    "classify": "bert-tiny",
    "tag": "bert-tiny",
    "answers": "bert-tiny",
    "choices": "bert-tiny",
    "contrastive": "bert-tiny",
}
"""A model that a recipe under finetune/ may start from, by its objective."""


def start_of(path: Path, folder: Path) -> list[str]:
    """Overrides by which a recipe starts from a model folder, where it takes its model from one."""
    if path.parent.name != "finetune":
        return []
    preset = STARTS[read_with_includes(path).values["objective"]["kind"]]
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps({"model": expand_preset({"preset": preset})}))
    return [f"init.from={folder}"]


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_a_recipe_loads_and_its_resolved_form_loads_as_the_same(path, tmp_path):
    config = load_config(path, start_of(path, tmp_path / "start"))
    resolved = tmp_path / "config.yaml"
    resolved.write_text(dump_config(config))
    assert load_config(resolved) == config
    assert dump_config(load_config(resolved)) == resolved.read_text()


@pytest.mark.parametrize("path", PREPARE, ids=name)
def test_a_config_of_prepare_loads_and_what_it_says_of_tokenizer_and_split_can_be(path):
    config = load_section(PrepareConfig, path)
    check_tokenizer(config.tokenizer)
    parse_split(config.split, config.seed)


@pytest.mark.parametrize("path", PARTS, ids=name)
def test_a_part_fits_into_a_recipe(path, tmp_path):
    """Laid over a recipe of AdamW, a part gives a config that loads and that has the part's values."""
    whole = tmp_path / "whole.yaml"
    whole.write_text(f"include: [{ROOT / 'configs/run/llama_1b.yaml'}, {path}]\n")
    resolved = load_config(whole).model_dump(by_alias=True)
    assert_covers(resolved, read_yaml(path).values)


def assert_covers(values: dict, part: dict) -> None:
    """Every leaf of `part` is in `values`."""
    for key, value in part.items():
        if isinstance(value, dict):
            assert_covers(values[key], value)
        else:
            assert values[key] == value, key


def test_the_wheel_carries_the_configs_to_where_they_are_looked_for():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]["configs"] == "pretrain/configs"
    assert recipes.builtin_configs() == ROOT / "configs"
