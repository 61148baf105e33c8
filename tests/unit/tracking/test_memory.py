"""Memory of a rank."""

import mmap

import pytest
import torch

from pretrain.tracking.meter import memory_metrics


def test_on_a_cpu_it_is_what_the_process_has_in_memory():
    before = memory_metrics(torch.device("cpu"))["memory_bytes"]
    with mmap.mmap(-1, 2**26) as block:  # of the kernel: what an allocator kept is no growth
        block.write(b"1" * 2**26)
        grown = memory_metrics(torch.device("cpu"))["memory_bytes"] - before
    assert grown > 0.9 * 2**26


@pytest.mark.gpu
def test_on_cuda_it_is_the_peak_of_tensors_and_of_the_allocator():
    device = torch.device("cuda", torch.cuda.current_device())
    held = memory_metrics(device)["memory_bytes"]
    tensor = torch.empty(int(held) + 2**28, dtype=torch.uint8, device=device)
    size = tensor.numel()
    del tensor
    found = memory_metrics(device)
    assert found["memory_reserved_bytes"] >= found["memory_bytes"] >= size
