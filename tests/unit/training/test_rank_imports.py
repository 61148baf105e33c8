"""Imports before ranks are forked."""

import pytest

from pretrain.config.engine import EngineConfig
from pretrain.kinds.optimizers import OPTIMIZERS
from pretrain.training import rank_imports


@pytest.mark.parametrize(
    ("kind", "world_size", "chosen"), [("auto", 1, "single"), ("auto", 2, "ddp"), ("ddp", 2, "ddp")]
)
def test_what_is_imported_is_of_the_engine_that_so_many_ranks_have(monkeypatch, kind, world_size, chosen):
    class Config:
        engine = EngineConfig(kind=kind, zero_stage=0, precision="bf16", gradients="compute")
        optim = type("Optim", (), {"kind": next(iter(OPTIMIZERS))})

    engines, modules = [], []
    monkeypatch.setattr(rank_imports, "import_packages", engines.append)
    monkeypatch.setattr(rank_imports.importlib, "import_module", modules.append)
    rank_imports.import_for_ranks(Config(), world_size)
    assert [engine.kind for engine in engines] == [chosen]
    assert set(rank_imports._LATER[chosen]) <= set(modules)
