"""FlashAttention 3 in the place of torch's flash kernels: where, and with which engines; its kernels need a GPU."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from pretrain.config.engine import EngineConfig
from pretrain.model.build import activate_fa3, why_no_fa3


@pytest.fixture
def flash_attn_interface(monkeypatch):
    """A package of that name, with the operations by which torch knows FlashAttention 3."""
    library = torch.library.Library("flash_attn_3", "DEF")
    for name in ("fwd", "bwd"):
        library.define(f"{name}(Tensor q) -> Tensor")
    module = ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec("flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    yield
    restore_flash_attention_impl(_raise_warn=False)
    library._destroy()


HOPPER = (9, 0)


@pytest.mark.parametrize(
    ("capability", "engine", "dropout", "reason"),
    [
        (HOPPER, {}, False, None),
        ((8, 0), {}, False, "compute capability 9"),
        ((10, 0), {}, False, "compute capability 9"),
        (HOPPER, {"precision": "fp32"}, False, "16 bits"),
        (HOPPER, {"deterministic": True}, False, "engine.deterministic=true"),
        (HOPPER, {}, True, "no dropout"),
    ],
)
def test_flash_attention_3_runs_where_it_is_installed_and_can(
    flash_attn_interface, capability, engine, dropout, reason
):
    found = why_no_fa3(EngineConfig(**engine), capability, dropout=dropout)
    assert found is None if reason is None else reason in found


def test_flash_attention_3_needs_its_package_and_a_torch_that_trains_with_it(monkeypatch, request):
    assert "not installed" in why_no_fa3(EngineConfig(), HOPPER, dropout=False)
    request.getfixturevalue("flash_attn_interface")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert "needs torch 2.13" in why_no_fa3(EngineConfig(), HOPPER, dropout=False)


def test_flash_attention_3_is_activated_once_and_named_in_the_log(flash_attn_interface, caplog):
    with caplog.at_level("INFO", logger="pretrain"):
        activate_fa3()
        activate_fa3()
    assert current_flash_attention_impl() == "FA3"
    assert [record.message for record in caplog.records] == ["flash kernels: FlashAttention 3 of flash_attn_interface"]


def test_a_package_without_the_kernels_is_warned_of_and_torchs_own_run(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    activate_fa3()
    assert current_flash_attention_impl() is None
    assert "does not load: Module 'flash_attn_interface' does not expose FA3 forward kernels" in caplog.text
