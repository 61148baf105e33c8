"""`sdpa`: which way it chooses for a mask, and what dropout, autocast, recomputation and compilation do to it."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pretrain.model import backends
from pretrain.model.backends import backend as backend_module
from pretrain.model.backends.backend import DistanceBias, MaskSize, document_runs, find_segments
from pretrain.model.backends.sdpa import Calls, OneCall, SdpaAttention
from pretrain.types import AttentionMask
from tests.unit.model.masks import CPU, INTERLEAVED, LENGTHS, MASKS, NEEDS, RUNS, attend, inputs


def prepare(name, **options):
    mask, queries, keys = MASKS[name]
    return SdpaAttention(NEEDS).prepare(mask, MaskSize(3, queries, keys, CPU), **options)


@pytest.mark.parametrize("name", ["dense causal", "bidirectional", "window that hides nothing"])
def test_what_the_kernel_knows_is_one_call_without_a_mask(name):
    assert prepare(name).direct == OneCall(is_causal=MASKS[name][0].causal)


def test_packed_documents_and_padding_are_calls_without_a_mask(monkeypatch):
    monkeypatch.setattr(backends.sdpa, "CALL_PAIRS", 0)
    packed = prepare("packed causal").direct
    assert isinstance(packed, Calls)
    assert packed.query_lengths == packed.key_lengths == (3, 1, 4, 8, 1, 4, 1, 2)
    assert packed.key_pieces == tuple(range(8))
    padded, source = prepare("padded causal").direct, prepare("packed sources").direct
    assert isinstance(padded, Calls) and isinstance(source, Calls)
    assert padded.query_lengths == padded.key_lengths == (8, 3, 5, 5, 3)
    assert padded.key_pieces == (0, 1, None, 3, None)
    # Of the third row's sources, that of document 0 has no target, and document 4 has no source.
    assert source.query_lengths == (1, 2, 2, 5, 2, 2, 1)
    assert source.key_lengths == (3, 1, 4, 8, 1, 4, 1, 2)
    assert source.key_pieces == (0, 1, 2, 3, 5, 6, None)


@pytest.mark.parametrize("name", MASKS)
def test_no_mask_of_all_pairs_is_made_but_for_the_queries_of_a_step(name, monkeypatch):
    monkeypatch.setattr(backends.sdpa, "CALL_PAIRS", 0)
    mask, queries, _ = MASKS[name]
    direct = prepare(name).direct
    if isinstance(direct, OneCall) and direct.allowed is not None:
        assert queries == 1 or mask.query_offset > 0


def rows_of_documents(length, queries):
    return AttentionMask(causal=True, documents_BT=(torch.arange(queries) // length).expand(2, -1))


@pytest.mark.parametrize(
    ("length", "lengths"),
    # CALL_PAIRS is about 70 x 70 pairs.
    [(2, (70, 70, 70, 46)), (12, (60, 60, 60, 60, 16)), (36, (36,) * 6 + (40,)), (64, (64,) * 4)],
)
def test_neighbouring_short_documents_share_a_call(length, lengths):
    mask = rows_of_documents(length, 256)
    direct = SdpaAttention(NEEDS).prepare(mask, MaskSize(2, 256, 256, CPU)).direct
    assert isinstance(direct, Calls)
    assert direct.query_lengths == direct.key_lengths == lengths * 2
    assert [allowed is not None for allowed in direct.allowed] == [size > length for size in lengths] * 2
    q, k, v, *_ = inputs(256, 256, rows=2)
    torch.testing.assert_close(attend("sdpa", mask, q, k, v), attend("eager", mask, q, k, v), rtol=1e-12, atol=1e-12)


def test_short_documents_with_a_bias_share_a_tile():
    mask, values = rows_of_documents(2, 256), inputs(256, 256)[4]
    blocks = SdpaAttention(NEEDS).prepare(mask, MaskSize(2, 256, 256, CPU), DistanceBias(values)).blocks
    assert [len(tile.queries) for tile in blocks.tiles] == [70, 70, 70, 46] * 2
    q, k, v, *_ = inputs(256, 256, rows=2)
    mixed, expected = (attend(name, mask, q, k, v, values) for name in ("sdpa", "eager"))
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)


def test_short_rows_of_short_documents_share_a_mask():
    direct = SdpaAttention(NEEDS).prepare(rows_of_documents(4, 128), MaskSize(2, 128, 128, CPU)).direct
    assert isinstance(direct, OneCall) and direct.allowed is not None


def test_rows_of_one_document_each_are_one_call():
    mask = AttentionMask(causal=True, documents_BT=torch.zeros(3, 8, dtype=torch.int32))
    prepared = SdpaAttention(NEEDS).prepare(mask, MaskSize(3, 8, 8, CPU))
    assert prepared.direct == OneCall(is_causal=True)


def test_a_step_of_decoding_reads_the_keys_in_its_window_only():
    direct = prepare("one step with a window").direct
    assert direct.keys == (5, 8)
    assert direct.allowed is None


def test_a_tile_holds_the_keys_that_it_can_reach(monkeypatch):
    monkeypatch.setattr(backends.sdpa, "BLOCK", 3)
    blocks = prepare("window").blocks
    assert [(tile.queries, tile.keys) for tile in blocks.tiles] == [
        (range(3), range(3)),
        (range(3, 6), range(1, 6)),
        (range(6, 8), range(4, 8)),
    ]
    prefix = prepare("prefix").blocks
    assert [tile.keys for tile in prefix.tiles] == [range(6), range(6), range(8)]


def test_documents_are_found_where_they_are_runs():
    runs = document_runs(RUNS)
    assert runs is not None
    assert runs[0] == {0: range(3), 1: range(3, 4), 2: range(4, 8)}
    assert list(document_runs(RUNS.flip(1))[0].items()) == [(2, range(4)), (1, range(4, 5)), (0, range(5, 8))]
    assert document_runs(INTERLEAVED) is None


def test_a_source_as_long_as_its_target_pads_no_query():
    padded = find_segments(AttentionMask(causal=False, key_lengths_B=LENGTHS), MaskSize(3, 8, 8, CPU))
    assert [(segment.queries, segment.keys) for segment in padded] == [(range(8), range(n)) for n in (8, 3, 5)]


# On a GPU.


@pytest.mark.parametrize("name", MASKS)
def test_what_a_gpu_is_given_means_the_same(name):
    mask, queries, keys = MASKS[name]
    q, k, v, *_ = inputs(queries, keys)
    size = MaskSize(3, queries, keys, CPU)
    mixed = SdpaAttention(NEEDS).attend(q, k, v, SdpaAttention(NEEDS)._prepare_gpu(mask, size, None))
    expected = attend("eager", mask, q, k, v)
    if name == "padded causal":  # Without a mask tensor: padding sees padding.
        real = torch.arange(8) < LENGTHS[:, None]
        mixed, expected = mixed[real], expected[real]
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)


def test_a_gpu_gets_no_mask_tensor_where_its_kernels_need_none():
    for name in ("dense causal", "bidirectional", "padded causal", "window that hides nothing", "a shorter source"):
        mask, queries, keys = MASKS[name]
        prepared = SdpaAttention(NEEDS)._prepare_gpu(mask, MaskSize(3, queries, keys, CPU), None)
        assert prepared.direct == OneCall(is_causal=mask.causal, cudnn=True)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_cudnn_serves_a_few_shapes_that_repeat_and_no_step_of_decoding(is_compiled, monkeypatch):
    """It plans for a second at each new shape; forwards go to the other kernels where shapes change."""
    meta, backend, calls = torch.device("meta"), SdpaAttention(NEEDS), []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def noted(*inputs, **options):
        calls.append(torch.backends.cuda.cudnn_sdp_enabled())
        return kernel(*inputs, **options)

    def noted_graph(graph, _):
        calls.append(not any("sdpa_kernel" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    if not is_compiled:
        monkeypatch.setattr(backend_module, "scaled_dot_product_attention", noted)

    def choose(plan, queries, keys):
        calls.clear()
        torch._dynamo.reset()
        q, k = (torch.empty(2, length, 4, 8, dtype=torch.bfloat16, device=meta) for length in (queries, keys))
        attend = torch.compile(backend.attend, backend=noted_graph, fullgraph=True) if is_compiled else backend.attend
        attend(q, k, k, plan)
        return calls

    causal = AttentionMask(causal=True)
    for length, has_cudnn in ((16, 1), (8, 1), (16, 1), (24, 1), (32, 1), (40, 0), (16, 1), (40, 0)):
        size = MaskSize(2, length, length, meta)
        assert choose(backend._prepare_gpu(causal, size, None), length, length) == [bool(has_cudnn)]
    step = backend.prepare(AttentionMask(causal=True, query_offset=15), MaskSize(2, 1, 16, meta))
    assert choose(step, 1, 16) == [False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


# Dropout, autocast, checkpoints, compilation.


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["dense causal", "window in documents", "padded", "prefix"])
def test_the_backward_pass_drops_the_same_weights(name, biased, monkeypatch):
    monkeypatch.setattr(backends.sdpa, "BLOCK", 3)
    mask, queries, keys = MASKS[name]
    q, k, v, _, values = inputs(queries, keys)
    leaves = [x.requires_grad_() for x in ((q, k, v, values) if biased else (q, k, v))]

    def seeded(*given):
        torch.manual_seed(7)
        return attend("sdpa", mask, *given, dropout=0.3)

    # Finite differences: right only if each forward and each backward pass drops what the seed says.
    assert torch.autograd.gradcheck(seeded, leaves, fast_mode=True)


def test_the_backward_pass_leaves_the_generator_alone():
    q, k, v = (x.requires_grad_() for x in inputs(8, 8)[:3])
    mixed = attend("sdpa", AttentionMask(causal=True), q, k, v, dropout=0.3)
    before = torch.get_rng_state()
    mixed.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_recomputed_block_drops_the_same_weights_and_gives_the_bias_its_gradient():
    q, k, v, upper, values = inputs(8, 8)
    leaves = [x.requires_grad_() for x in (q, k, v, values)]

    def run(q, k, v):
        return attend("sdpa", AttentionMask(causal=True, window=5), q, k, v, values, dropout=0.3)

    results = []
    for recomputed in (False, True):
        torch.manual_seed(3)
        mixed = checkpoint(run, q, k, v, use_reentrant=False) if recomputed else run(q, k, v)
        results.append(torch.autograd.grad(mixed, leaves, upper))
    assert all(torch.equal(found, expected) for found, expected in zip(*results, strict=True))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["dense causal", "packed causal", "window", "one step of decoding"])
def test_autocast_gives_bf16_and_gradients_in_fp32(name, biased):
    mask, queries, keys = MASKS[name]
    q, k, v, upper, values = (x.requires_grad_() for x in inputs(queries, keys, dtype=torch.float32))
    values = values if biased else None
    # Rotation leaves queries and keys in fp32, while values come from a product that autocast did in bf16.
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attend("sdpa", mask, q, k, v.bfloat16(), values)
    assert mixed.dtype == torch.bfloat16
    expected = attend("eager", mask, q, k, v, values)
    # bf16 has 8 bits: inputs of up to 4 are off by 1/128, and gradients sum a few such products.
    torch.testing.assert_close(mixed.float(), expected, rtol=3e-2, atol=3e-2)
    leaves = [x for x in (q, k, v, values) if x is not None]
    found = torch.autograd.grad(mixed, leaves, upper.bfloat16())
    for gradient, reference in zip(found, torch.autograd.grad(expected, leaves, upper), strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, reference, rtol=5e-2, atol=8e-2)


@pytest.mark.parametrize(
    ("dtype", "is_masked", "takes"),
    [(torch.bfloat16, False, True), (torch.bfloat16, True, False), (torch.float32, False, False)],
)
def test_groups_are_written_out_where_only_the_math_kernel_of_a_gpu_takes_them(monkeypatch, dtype, is_masked, takes):
    q, k, v = torch.randn(1, 8, 4, 16), torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 16)
    allowed = torch.zeros(8, 8) if is_masked else None
    expected = backend_module.call_kernel(q, k, v, allowed=allowed)
    gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=dtype)
    assert backend_module._takes_groups(gpu, allowed) == takes
    assert backend_module._takes_groups(q, allowed), "of a CPU"
    monkeypatch.setattr(backend_module, "_takes_groups", lambda *_: False)
    torch.testing.assert_close(backend_module.call_kernel(q, k, v, allowed=allowed), expected)


def test_a_compiled_block_is_compiled_once_for_all_packings():
    torch._dynamo.reset()
    backend, compiled = SdpaAttention(NEEDS), []

    def count(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=count)
    def block(q, k, v, prepared):
        return backend.attend(q * 2, k, v, prepared) + 1

    q, k, v, *_ = inputs(8, 8, rows=2)
    for seed in range(4):
        documents = torch.randint(2, (2, 8), generator=torch.Generator().manual_seed(seed)).cumsum(1)
        for window in (None, 2):
            mask = AttentionMask(causal=True, documents_BT=documents, window=window)
            prepared = backend.prepare(mask, MaskSize(2, 8, 8, CPU))
            expected = backend.attend(q * 2, k, v, prepared) + 1
            torch.testing.assert_close(block(q, k, v, prepared), expected, rtol=0, atol=0)
    # What comes before attention and what comes after it, with and without a window.
    assert len(compiled) <= 4
