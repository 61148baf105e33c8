"""The copy in host memory: the same values whatever the blocks, and buffers that are used again."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain.checkpoint.snapshot import HostCopy
from tests.helpers.waiting import LIMIT_S


@given(st.integers(1, 9), st.lists(st.integers(0, 25), max_size=6))
def test_every_tensor_comes_back_whatever_the_size_of_a_block(block, lengths):
    tensors = [torch.randn(length) for length in lengths]
    copy = HostCopy(block)
    copy.take(tensors)
    expected = [tensor.clone() for tensor in tensors]
    copy.hold()
    for tensor in tensors:
        tensor.fill_(-1)
    copy.ready()
    for number, values in enumerate(expected):
        parts = [part.copy() for part in copy.parts(number)]
        assert np.array_equal(np.concatenate([*parts, np.empty(0, np.float32)]), values.numpy())
    content = b"".join(bytes(part.cast("B")) for part in copy.content())
    assert content == b"".join(values.numpy().tobytes() for values in expected)
    assert copy.num_bytes == len(content)


def test_on_a_cpu_a_thread_copies_and_what_changes_the_values_waits_for_it(monkeypatch):
    begun, may_copy = threading.Event(), threading.Event()
    real = HostCopy._copy

    def held(self, tensors):
        begun.set()
        assert may_copy.wait(LIMIT_S)
        real(self, tensors)

    monkeypatch.setattr(HostCopy, "_copy", held)
    copy, values = HostCopy(4), torch.arange(10.0)
    copy.take([values])
    assert begun.wait(LIMIT_S)
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(copy.hold)
        assert not update.done()
        may_copy.set()
        update.result(LIMIT_S)
    values.zero_()
    copy.take([torch.ones(10)])  # of a save that failed before it was read
    copy.ready()
    assert np.concatenate(list(copy.parts(0))).tolist() == [1.0] * 10


def test_buffers_are_made_once():
    copy = HostCopy(4)
    copy.take([torch.zeros(10)])
    first = [buffer.data_ptr() for buffer in copy._buffers]
    copy.take([torch.ones(3), torch.ones(7)])
    assert [buffer.data_ptr() for buffer in copy._buffers] == first


@pytest.mark.parametrize("num_elements", [10, 8, 3, 21])
def test_what_was_reserved_is_used_and_what_is_missing_is_added(num_elements):
    copy = HostCopy(4)
    copy.reserve(10, pinned=False)
    copy.take([torch.arange(num_elements, dtype=torch.float32)])
    copy.ready()
    assert np.concatenate(list(copy.parts(0))).tolist() == list(range(num_elements))
    kept = [buffer.data_ptr() for buffer in copy._buffers]
    copy.reserve(10, pinned=False)
    copy.take([torch.zeros(num_elements)])
    shared = min(num_elements, 10) // 4
    assert [buffer.data_ptr() for buffer in copy._buffers][:shared] == kept[:shared]
    assert sum(buffer.numel() for buffer in copy._buffers) == num_elements


def test_memory_that_cannot_be_reserved_is_an_error_of_the_copy(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of host memory")

    copy = HostCopy()
    monkeypatch.setattr(torch, "empty", fail)
    copy.reserve(10, pinned=False)
    with pytest.raises(RuntimeError, match="out of host memory"):
        copy.take([torch.zeros(10)])


def test_views_with_gradients_and_strides_are_copied():
    parameter = torch.nn.Parameter(torch.arange(8.0))
    copy = HostCopy()
    copy.take([parameter[2:5], torch.arange(8.0)[::2]])
    copy.ready()
    assert [part.tolist() for number in range(2) for part in copy.parts(number)] == [[2, 3, 4], [0, 2, 4, 6]]


@pytest.mark.gpu
def test_a_copy_from_a_gpu_is_of_the_values_before_what_was_queued_after_it():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    tensors = [torch.randn(50_000_000, device="cuda") for _ in range(3)]
    expected = [tensor.cpu() for tensor in tensors]
    copy = HostCopy()
    for _ in range(2):
        copy.take(tensors)
        copy.hold()
        for tensor in tensors:
            tensor.mul_(0)
        copy.ready()
        for number, values in enumerate(expected):
            assert np.array_equal(np.concatenate(list(copy.parts(number))), values.numpy())
        for tensor, values in zip(tensors, expected, strict=True):
            tensor.copy_(values)
    assert all(buffer.is_pinned() for buffer in copy._buffers)
