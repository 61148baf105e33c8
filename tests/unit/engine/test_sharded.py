"""A model for stage 3, drawn and cut up parameter by parameter."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pretrain.config.engine import EngineConfig
from pretrain.engine.build import builds_sharded, fill_sharded
from pretrain.engine.deepspeed_engine import build_zero_state
from tests.helpers.fake_deepspeed import DTYPES, FakeAccelerator, FakeEngine, fake_deepspeed
from tests.helpers.thread_ranks import Ranks
from tests.unit.engine.toy import SHAPES, Toy, adamw, assemble, engine_config, names_of


class Tied(Toy):
    """With a parameter under two names, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.again = nn.Module()
        self.again.weight = self.wide
        self.bias.requires_grad = False


def drawn(name, shape):
    """As `torch.full`, another value for each."""
    return torch.full(shape, float(list(SHAPES).index(name)))


@pytest.fixture
def filled(monkeypatch):
    """Fills a model on every rank: the ranks, models, what was drawn in turn, and the most that was whole at once."""

    def fill(size, precision):
        ranks = Ranks(size)
        monkeypatch.setitem(sys.modules, "deepspeed", fake_deepspeed(ranks))

        def on_rank(world):
            with torch.device("meta"):
                model = Tied()
            before, calls, most = list(model.parameters()), [], 0

            def draw(name, shape):
                nonlocal most
                whole = sum(p.numel() for p in model.parameters() if not p.is_meta)
                calls.append((name, tuple(shape)))
                most = max(most, whole)
                value = drawn(name, shape)
                return value if value.any() else None

            fill_sharded(model, draw, engine_config(3, precision), FakeAccelerator(ranks), world)
            assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
            return SimpleNamespace(model=model, calls=calls, most=most)

        return ranks, ranks.run(on_rank)

    return fill


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_parameter_is_drawn_once_cut_and_keeps_its_identity(filled, size, precision):
    ranks, results = filled(size, precision)
    for result in results:
        assert result.calls == list(SHAPES.items())
        assert result.most == 0, "none is whole when the next is drawn"
        parameters = dict(result.model.named_parameters())
        assert [parameter.requires_grad for parameter in parameters.values()] == [True, True, True, False, True]
        assert {parameter.ds_tensor.dtype for parameter in parameters.values()} == {DTYPES[precision]}
        assert all(tuple(parameter.ds_shape) == SHAPES[name] for name, parameter in parameters.items())
        assert result.model.again.weight is result.model.wide

    def state_of(world):
        model = results[world.rank].model
        engine = FakeEngine(model, adamw(model, decay=0.0), ranks, 3, precision)
        return build_zero_state(engine, names_of(model), 3, world)

    saved = assemble(ranks.run(state_of))
    trained = [name for name in SHAPES if name != "bias"]
    assert {name for name, kind in saved if kind == "weight"} == set(trained)
    assert all(torch.equal(saved[name, "weight"], drawn(name, SHAPES[name])) for name in trained)


@pytest.mark.parametrize(
    ("kind", "stage", "expected"),
    [("deepspeed", 3, True), ("deepspeed", 2, False), ("deepspeed", 0, False), ("ddp", 0, False), ("single", 0, False)],
)
def test_only_stage_3_wants_a_model_without_storage(kind, stage, expected):
    assert builds_sharded(EngineConfig(kind=kind, zero_stage=stage)) == expected
