"""The state of a drill outlives its process, and belongs to its settings."""

import json
from dataclasses import replace

import pytest

from pretrain.drill.drill_folder import DrillFolder, DrillSettings, Pace, open_state
from pretrain.errors import ConfigError

SETTINGS = DrillSettings(config="seed: 1\n", ranks=2, seed=0, target="rank", steps=20, every_steps=5)


@pytest.fixture
def folder(tmp_path):
    """The folder of a drill that has not begun."""
    return DrillFolder(tmp_path / "drill")


def test_a_drill_goes_on_where_it_was(folder):
    state = open_state(folder, SETTINGS)
    state.pace = Pace(1.0, 2.0, 3.0, 4.0)
    state.kills.append({"number": 0})
    state.problems.append("a process was left")
    state.save(folder)
    assert open_state(folder, SETTINGS) == state


@pytest.mark.parametrize(("name", "value"), [("ranks", 3), ("seed", 1), ("target", "all"), ("steps", 21)])
def test_other_settings_are_refused_by_name(folder, name, value):
    open_state(folder, SETTINGS).save(folder)
    message = f"begun with another {name} \\({getattr(SETTINGS, name)}, not {value}\\); give another --output"
    with pytest.raises(ConfigError, match=message):
        open_state(folder, replace(SETTINGS, **{name: value}))


def test_another_config_is_refused(folder):
    open_state(folder, SETTINGS).save(folder)
    with pytest.raises(ConfigError, match="begun with another config; give another --output"):
        open_state(folder, replace(SETTINGS, config="seed: 2\n"))


def test_a_folder_of_something_else_is_left_alone(folder):
    folder.path.mkdir()
    (folder.path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="exists and holds no drill"):
        open_state(folder, SETTINGS)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"settings": {}}), json.dumps({"settings": {"x": 1}})])
def test_a_damaged_state_is_one_line(folder, text):
    folder.path.mkdir()
    folder.state.write_text(text)
    with pytest.raises(ConfigError, match="the state of the drill cannot be read"):
        open_state(folder, SETTINGS)
