"""Built-in configs by name: found from any folder, listed, and copied to begin with."""

from pathlib import Path

import pytest

from pretrain.config.load import load_config, load_section
from pretrain.config.prepare import PrepareConfig
from pretrain.config.recipes import PREPARE, RUNS, builtin_configs, copy_recipe, find_config, list_recipes
from pretrain.errors import ConfigError
from tests.repo.test_configs import start_of


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder without configs."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "name", ["quickstart", "quickstart.yaml", "run/quickstart", "configs/run/quickstart", "configs/run/quickstart.yaml"]
)
def test_a_recipe_is_found_by_its_name(name):
    assert load_config(name).run.name == "quickstart"


def test_a_name_is_that_of_a_recipe_of_the_command():
    assert find_config("chat").parent.name == "finetune"
    assert load_section(PrepareConfig, "chat").output == "data/chat"
    with pytest.raises(
        ConfigError, match=r"^nowhere_near: no such config file; check the path; `pretrain recipes` lists"
    ):
        load_config("nowhere_near")


@pytest.mark.parametrize("name", ["mine.yml", "mien", "{folder}/mine.yml"])
def test_a_file_of_nearly_that_name_is_suggested(tmp_path, name):
    Path("mine.yaml").write_text("seed: 1\n")
    name = name.format(folder=tmp_path)
    near = tmp_path / "mine.yaml" if Path(name).is_absolute() else "mine.yaml"
    with pytest.raises(ConfigError, match=rf"^{name}: no such config file; did you mean {near}\?$"):
        load_config(name)


@pytest.mark.parametrize("name", ["stdlib_t5", "prepare/stdlib_t5", "configs/prepare/stdlib_t5.yaml", "mine.yaml"])
def test_a_config_of_prepare_is_refused_for_a_run_in_one_line(name):
    Path("mine.yaml").write_text("output: data/mine\ninputs: [{path: a}]\nspilt: tail:0.1\nseed: 1\n")
    with pytest.raises(ConfigError, match=rf"^{name}: this is a config of `pretrain prepare`; use it there[^\n]*$"):
        load_config(name)


@pytest.mark.parametrize("name", ["quickstart", "configs/run/quickstart.yaml", "mine.yaml"])
def test_a_config_of_a_run_is_refused_for_prepare_in_one_line(name):
    Path("mine.yaml").write_text("include: configs/run/quickstart.yaml\n")
    with pytest.raises(ConfigError, match=rf"^{name}: this is a config of `pretrain train`; use it there[^\n]*$"):
        load_section(PrepareConfig, name, ["output=data/mine"])


@pytest.mark.parametrize("name", ["zero2", "engine/zero2", "configs/engine/zero2.yaml"])
def test_a_part_is_said_to_be_one(name):
    is_part = (
        rf"^{name}: this is a part, and no whole config; in a config of yours: `include: configs/engine/zero2.yaml`$"
    )
    for use in (load_config, lambda name: copy_recipe(name, None)):
        with pytest.raises(ConfigError, match=is_part):
            use(name)


def test_a_file_of_the_user_comes_first(tmp_path):
    (tmp_path / "quickstart.yaml").write_text("include: configs/run/quickstart.yaml\nrun: {name: mine}\n")
    assert load_config("quickstart").run.name == "mine"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("quikstart", "quickstart"),
        ("configs/run/quickstrat.yaml", "configs/run/quickstart.yaml"),
        ("lama_8b", "llama_8b"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(name, near):
    with pytest.raises(ConfigError, match=rf"^{name}: no such config file; did you mean {near}\?$"):
        load_config(name)
    with pytest.raises(ConfigError, match=rf"no such recipe; did you mean {near}\?$"):
        copy_recipe(name, None)


@pytest.mark.parametrize("recipe", list_recipes(RUNS), ids=lambda recipe: recipe.name)
def test_a_copy_is_the_same_config_but_for_the_name_of_its_run(recipe, tmp_path):
    start = start_of(recipe.path, tmp_path / "start")
    found, target = copy_recipe(recipe.name, Path("deep/copy.yaml"))
    assert (found, target) == (recipe, Path("deep/copy.yaml"))
    assert load_config(target, start) == load_config(recipe.path, [*start, "run.name=copy"])
    assert "../" not in target.read_text()
    if f"configs/{recipe.name}.yaml" in recipe.path.read_text():
        assert "pretrain" in target.read_text() and "deep/copy.yaml" in target.read_text()


def test_a_copy_has_the_name_of_the_recipe_and_replaces_nothing():
    assert copy_recipe("text", None)[1].read_bytes() == Path("text.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"^text.yaml: exists already; give another name: recipes cp text FILE"):
        copy_recipe("text", None)


def test_a_name_of_two_recipes_is_given_with_its_folder():
    with pytest.raises(ConfigError, match=r"^chat: several recipes; use finetune/chat or prepare/chat$"):
        copy_recipe("chat", None)
    recipe, target = copy_recipe("prepare/chat", None)
    assert (recipe.path, target) == (builtin_configs() / PREPARE[0] / "chat.yaml", Path("chat.yaml"))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("\u044d\u043a\u0441.yaml", "quickstart"),
        ("\u043c\u043e\u0439 q.yaml", "q"),
        ("my first.yaml", "my-first"),
        ("2024.yaml", "2024"),
        ("true.yaml", "true"),
        (f"{'a' * 80}.yaml", "a" * 64),
    ],
)
def test_the_run_of_a_copy_has_a_name_that_is_allowed_for_any_file(file, name):
    assert load_config(copy_recipe("quickstart", Path(file))[1]).run.name == name


@pytest.mark.parametrize(
    ("recipe", "file", "commands"),
    [
        ("vit_digits", None, ["pretrain train vit_digits.yaml", "pretrain evaluate runs/vit-digits"]),
        (
            "classify",
            "my cl.yaml",
            ["pretrain train 'my cl.yaml' init.from=PATH", "pretrain classify runs/my-cl --text"],
        ),
        (
            "run/multi30k",
            "m.yaml",
            ["average runs/m --last 10 --output models/m", "evaluate models/m --source"],
        ),
        ("instruction_lora", "l.yaml", ["init.from=runs/base", "pretrain export runs/l released/instructed"]),
    ],
)
def test_the_commands_of_the_header_of_a_copy_name_its_own_file_and_run(recipe, file, commands):
    _, target = copy_recipe(recipe, Path(file) if file else None)
    header = target.read_text()
    assert all(command in header for command in commands)
    if file is None:
        assert "run: {name: vit-digits}" in header


def test_a_file_is_no_recipe_and_is_copied_by_the_shell():
    Path("mine.yaml").write_text("seed: 1\n")
    for name in ("mine.yaml", "mine"):
        with pytest.raises(ConfigError, match=r"^mine.yaml: this is a file, not a recipe; copy it: cp mine.yaml FILE$"):
            copy_recipe(name, Path("other.yaml"))
