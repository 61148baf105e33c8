"""The coordinate check: slopes, verdicts over real steps, widths of a model, and what the command prints."""

import json

import numpy as np
import pytest

from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig
from pretrain.errors import ConfigError
from pretrain.scale.coordinates import LOGITS, CoordinateCheck, check_coordinates, draw_coordinates, widen
from tests.helpers.cli import run_warm
from tests.unit.model.tiny import encoder_config, tiny_config

SMALL = ["model.preset=llama-tiny", "model.max_seq_len=256", "optim.lr=3e-3", "engine.device=cpu"]
MUP = "optim.transfer={kind: mup, base_width: 64}"
WIDTHS = (32, 64, 128, 256)


def quickstart(*overrides: str):
    return load_config("configs/run/quickstart.yaml", [*SMALL, *overrides])


def made(*slopes: float) -> CoordinateCheck:
    """Sizes that are powers of the width: nothing at step 0, then one slope a layer."""
    widths = np.array(WIDTHS, dtype=np.float64)
    last = np.stack([3.0 * widths**slope for slope in slopes], axis=1)
    return CoordinateCheck(WIDTHS, ("a", "b", LOGITS), np.stack([np.zeros_like(last), last], axis=1))


@pytest.mark.parametrize(
    ("slopes", "layer", "is_flat"),
    [
        ((0.1, -0.05, -0.5), "a", True),
        ((0.1, -0.5, 0.0), "b", False),
        ((0.1, 0.0, 0.3), LOGITS, False),
    ],
)
def test_slopes_are_exponents_and_only_growth_counts_against_the_logits(slopes, layer, is_flat):
    check = made(*slopes)
    assert np.isnan(check.slopes()[0]).all()
    assert check.slopes()[1] == pytest.approx(slopes)
    assert (check.worst()[0], check.is_flat()) == (layer, is_flat)


def test_a_layer_that_diverged_is_not_flat():
    check = made(0.0, 0.0, 0.0)
    check.sizes[-1, -1, 1] = np.inf
    assert (check.worst()[0], check.is_flat()) == ("b", False)


@pytest.mark.parametrize("kind", [pytest.param("adamw", marks=pytest.mark.long), "muon"])
def test_activations_keep_their_size_under_mup_and_grow_without_it(kind):
    matrices = "null" if kind == "adamw" else "{lr: 3.0e-3, adjust_lr_fn: match_rms_adamw}"
    optim = [f"optim.kind={kind}", f"optim.muon={matrices}"]
    transferred = check_coordinates(quickstart(*optim, MUP), WIDTHS, 3)
    assert transferred.is_flat(), transferred.slopes()
    plain = check_coordinates(quickstart(*optim), WIDTHS, 3)
    assert plain.worst()[1] > 0.3, plain.slopes()
    # The width of the base is one of them, where the rule changes nothing.
    assert np.array_equal(transferred.sizes[1], plain.sizes[1])


def test_a_first_block_that_returns_its_values_is_measured_like_the_others():
    configs = [quickstart(f"model.decoder.value_residual={key}") for key in ("false", "true")]
    plain, shared = (check_coordinates(config, WIDTHS[:2], 0) for config in configs)
    assert shared.sizes.shape == plain.sizes.shape
    assert np.array_equal(shared.sizes[:, :, :2], plain.sizes[:, :, :2]), "the embedding and the block of the values"


def test_wider_models_have_more_heads_or_wider_ones():
    model = tiny_config(heads=4, kv_heads=2, width=64, ff_width=160)
    more = widen(model, 96, grows_heads=False).last_stack
    assert (more.heads, more.num_kv_heads, more.per_head_width, more.ff_width) == (6, 3, 16, 240)
    wider = widen(model, 96, grows_heads=True).last_stack
    assert (wider.heads, wider.num_kv_heads, wider.per_head_width, wider.ff_width) == (4, 2, 24, 240)
    assert widen(encoder_config(), 32, grows_heads=False).encoder.heads == 2
    tables = widen(tiny_config(heads=4, width=64, embedding_width=16), 96, grows_heads=False)
    assert tables.last_stack.embedding_width == 24
    with pytest.raises(ConfigError, match=r"--widths: 72 is no whole number of heads .*; use multiples of 16"):
        widen(model, 72, grows_heads=False)


def test_models_without_coordinates_are_refused():
    config = quickstart()
    labels = ModelConfig.model_validate(
        encoder_config().model_dump() | {"head": {"kind": "labels", "labels": ["a", "b"]}}
    )
    with pytest.raises(ConfigError, match=r"one stack with model.head.kind=lm; check such a model under"):
        check_coordinates(config.model_copy(update={"model": labels}), WIDTHS, 1)


def test_the_picture_is_the_same_each_time():
    assert draw_coordinates(made(0.0, 0.1, 0.2), "svg") == draw_coordinates(made(0.0, 0.1, 0.2), "svg")


def test_the_command_prints_a_table_and_facts_and_writes_a_picture(tmp_path):
    command = ["scale", "coordinates", "quickstart", *SMALL, MUP, "--widths", "32,64", "--steps", "1"]
    table = run_warm(*command, "--output", "c.svg", cwd=tmp_path)
    assert "width 64" in table.stdout and "flat: the largest slope after 1 step is" in table.stdout
    assert (tmp_path / "c.svg").read_bytes().startswith(b"<?xml")
    facts = json.loads(run_warm(*command, "--json", cwd=tmp_path).stdout)
    assert facts["widths"] == [32, 64] and np.array(facts["sizes"]).shape == (2, 2, 4)
    assert facts["slopes"][0][-1] is None and isinstance(facts["flat"], bool)
    refused = run_warm(*command[:-3], "32", cwd=tmp_path)
    assert refused.code == 64 and "needs two widths or more, each once, not 32" in refused.stderr
    refused = run_warm(*command[:-3], "32,32", cwd=tmp_path)
    assert refused.code == 64 and "needs two widths or more, each once, not 32,32" in refused.stderr
