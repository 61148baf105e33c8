"""The compiler of torch is imported by what compiles; what it would exempt computes the same without it."""

import pytest
import torch
from torch import nn

from pretrain.model import lazy_compiler
from pretrain.model.lazy_compiler import UnsetWeights, deferred_decorators, running_eagerly


@pytest.fixture(params=[False, True], ids=["absent", "loaded"])
def is_loaded(request, monkeypatch) -> bool:
    """Whether anything has imported the compiler."""
    monkeypatch.setattr(lazy_compiler, "_COMPILER", "sys" if request.param else "no.compiler")
    return request.param


def test_an_exempt_function_of_torch_meets_the_compiler_only_where_there_is_one(is_loaded):
    calls = []

    def plain():
        calls.append("plain")

    def exempt():
        calls.append("exempt")
        getattr(plain, "__dynamo_disable", plain)()

    exempt.__wrapped__ = plain
    lazy_compiler._defer(exempt)
    getattr(plain, "__dynamo_disable")()
    assert calls == (["exempt", "plain"] if is_loaded else ["plain"])


def test_decorators_of_a_library_import_the_compiler_when_what_they_decorate_is_called(monkeypatch):
    monkeypatch.setattr(lazy_compiler, "_COMPILER", "no.compiler")
    decorated = []

    def note(function, **options):
        decorated.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr(torch.compiler, "disable", note)
    with deferred_decorators():

        @torch.compile(dynamic=True)
        def twice(value):
            return 2 * value

        @torch.compiler.disable
        def half(value):
            return value / 2

    assert torch.compile is torch.compiler.disable is note
    assert half(3) == 1.5
    assert decorated == []
    assert [twice(3), twice(4), twice.__name__] == [6, 8, "twice"]
    assert decorated == [("twice", {"dynamic": True})]
    monkeypatch.setattr(lazy_compiler, "_COMPILER", "sys")
    assert half(3) == 1.5
    assert decorated[1:] == [("half", {})]


def test_a_stance_is_taken_only_where_something_may_be_compiled(is_loaded, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.compiler, "set_stance", taken.append)
    running_eagerly()
    assert taken == (["force_eager"] if is_loaded else [])


def test_modules_are_built_and_get_storage_without_a_draw():
    before = torch.get_rng_state()
    with torch.device("meta"), UnsetWeights():
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4), nn.LayerNorm(4)).to(torch.bfloat16)
    with UnsetWeights():
        model.to_empty(device="cpu")
    assert [(tuple(p.shape), p.dtype, p.device.type) for p in model.parameters()] == [
        (shape, torch.bfloat16, "cpu") for shape in [(5, 3), (4, 3), (4,), (4,), (4,)]
    ]
    assert torch.equal(torch.get_rng_state(), before)
