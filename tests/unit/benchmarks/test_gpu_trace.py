"""Time of a traced step by category, and idle time between kernels."""

import gzip
import json

import pytest

from benchmarks.gpu_trace import category_of, summarize


def event(name, begin, length, kind="kernel", thread=7):
    """A span of a Chrome trace, in microseconds."""
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": length, "tid": thread}


def test_kernels_of_two_streams_are_counted_by_category_and_gaps_by_what_follows(tmp_path):
    events = [
        event("sm90_xmma_gemm_bf16", 1000, 4000),
        event("ncclDevKernel_AllGather_RING_LL", 2000, 5000, thread=8),  # overlaps, and ends 2,000 later
        event("flash_fwd_kernel", 9000, 1000),
        event("Memcpy HtoD", 10_000, 500, "gpu_memcpy"),
        event("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 14_500, 500),
        event("cudaStreamSynchronize", 9000, 3000, "cuda_runtime", thread=1),
        event("cudaLaunchKernel", 9000, 30, "cuda_runtime", thread=1),
        event("aten::mm", 900, 9000, "cpu_op", thread=1),
        {"ph": "i", "name": "an instant", "ts": 5},
    ]
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events[::-1]}, file)
    found = summarize(path, steps=2)
    assert found["ms"] == {"collectives": 2.5, "products": 2.0, "attention": 0.5, "copies": 0.25, "update": 0.25}
    assert (found["busy_ms"], found["idle_ms"], found["kernels"]) == (4.0, 3.0, 2)
    assert found["idle_before_ms"] == {"update": 2.0, "attention": 1.0}
    assert found["waits_ms"] == {"cudaStreamSynchronize": 1.5}
    assert found["longest_gaps"] == [
        [4.0, "Memcpy HtoD", "multi_tensor_apply_kernel<FusedAdamMathFunctor>"],
        [2.0, "ncclDevKernel_AllGather_RING_LL", "flash_fwd_kernel"],
    ]


def test_operators_of_a_cpu_count_without_those_that_they_call(tmp_path):
    events = [
        event("aten::matmul", 0, 1000, "cpu_op"),
        event("aten::mm", 100, 800, "cpu_op"),
        event("aten::empty", 200, 100, "cpu_op"),
        event("aten::copy_", 1500, 500, "cpu_op"),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = summarize(path, steps=1)
    assert found["ms"] == {"products": 0.7, "copies": 0.5, "other": 0.3}
    assert (found["busy_ms"], found["idle_ms"]) == (1.5, 0.5)


def test_a_trace_without_work_is_empty(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": []}))
    assert summarize(path, steps=2)["busy_ms"] == 0.0


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("triton_red_fused__to_copy_add_mul_rms_norm_3", "fused by torch.compile"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("Memset (Device)", "fills"),
        ("void at::native::reduce_kernel<512, 1, MeanOps>", "reductions"),
        ("something_else", "other"),
    ],
)
def test_a_kernel_has_the_category_of_its_first_pattern(name, category):
    assert category_of(name) == category
