"""Tiny models of the kinds of others, and which runs check their stack."""

import pytest

from pretrain.config.engine import ParallelConfig
from pretrain.config.load import load_config
from pretrain.config.model import parse_model
from pretrain.config.presets import PRESETS, expand_preset
from pretrain.dist import World
from pretrain.plan.params import count_parameters
from pretrain.training.health import self_check
from pretrain.training.health.tiny_model import VOCABULARY, tiny_model


def test_there_is_a_tiny_model_of_every_kind():
    for name in PRESETS:
        whole = parse_model(expand_preset({"preset": name}))
        tiny = tiny_model(whole, ParallelConfig())
        assert count_parameters(tiny) < 60e6, name
        assert (tiny.kind, tiny.vocab_size, tiny.tied_embeddings) == (whole.kind, VOCABULARY, whole.tied_embeddings)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [("llama3-70b", {"tensor": 8, "sequence": 2}), ("gpt2-124m", {"sequence": 4}), ("mixtral-8x7b", {"experts": 8})],
)
def test_ranks_can_share_a_tiny_model(name, parallel):
    shared = ParallelConfig(**parallel)
    tiny = tiny_model(parse_model(expand_preset({"preset": name})), shared).decoder
    assert tiny.kv_heads % shared.tensor == 0 and tiny.ff_width % shared.tensor == 0
    assert tiny.heads % shared.row_ranks == 0
    assert tiny.experts is None or tiny.experts.count % shared.experts == 0


@pytest.mark.parametrize(
    ("asked", "device", "per_node", "wanted"),
    [
        ("auto", "cpu", 4, False),
        ("auto", "cpu", 2, True),
        ("auto", "cuda", 4, True),
        ("on", "cpu", 4, True),
        ("off", "cuda", 2, False),
    ],
)
def test_runs_on_gpus_or_several_nodes_check_their_stack(monkeypatch, asked, device, per_node, wanted):
    monkeypatch.setattr(self_check, "pick_device", lambda engine: device)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
    config = load_config("configs/run/quickstart.yaml", [f"run.self_check={asked}"])
    assert self_check.is_wanted(config, World(0, 4, 0)) is wanted
