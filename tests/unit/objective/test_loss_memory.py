"""What the chunked cross-entropy holds, counted."""

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretrain.objective import loss as loss_module
from pretrain.objective.loss import linear_cross_entropy

POSITIONS, ROWS, VOCAB, WIDTH = 128, 256, 250, 8
CHUNK = 16 * ROWS


class Counted(TorchDispatchMode):
    """Notes the most elements that a result of any operation has, and the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.calls = 0, Counter[str]()

    @property
    def products(self) -> int:
        """Matrix products."""
        return sum(count for name, count in self.calls.items() if "mm" in name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(loss_module, "logits_of_chunk", lambda device: CHUNK)


@pytest.fixture
def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, WIDTH, generator=generator).requires_grad_() for size in (POSITIONS, ROWS))
    return hidden, weight, torch.randint(VOCAB, (POSITIONS,), generator=generator)


def keeping(kept: list[torch.Tensor]) -> AbstractContextManager[Any]:
    """Collects what autograd keeps."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-4, "soft_cap": 30.0}])
def test_no_step_makes_more_than_a_chunk_of_logits(inputs, options, autocast):
    with Counted() as counted:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            sums = linear_cross_entropy(*inputs, vocab_size=VOCAB, **options)
        sums.loss_sum.backward()
    assert counted.numel == CHUNK < POSITIONS * ROWS


@pytest.mark.parametrize("autocast", [False, True])
def test_kept_for_the_backward_pass_are_the_gradients_and_nothing_else(inputs, autocast):
    kept: list[torch.Tensor] = []
    with keeping(kept), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        linear_cross_entropy(*inputs, vocab_size=VOCAB, z_loss=1e-4, soft_cap=30.0)
    assert sorted(x.numel() for x in kept) == [POSITIONS * WIDTH, ROWS * WIDTH]
    assert {x.dtype for x in kept} == {torch.bfloat16 if autocast else torch.float32}
    assert sum(x.nbytes for x in kept) <= 4 * POSITIONS * ROWS / 8


def test_without_gradients_nothing_is_kept_and_the_logits_are_the_only_product(inputs):
    kept: list[torch.Tensor] = []
    with Counted() as counted, keeping(kept), torch.no_grad():
        linear_cross_entropy(*inputs, vocab_size=VOCAB)
    assert kept == []
    assert counted.products == counted.calls["exp_"] == POSITIONS * ROWS / CHUNK
    assert counted.calls["scatter_add_"] == 0, "the gradient of the logits"


def test_nothing_is_computed_twice(inputs):
    with Counted() as counted:
        linear_cross_entropy(*inputs, vocab_size=VOCAB).loss_sum.backward()
    assert counted.products == 3 * POSITIONS * ROWS / CHUNK
