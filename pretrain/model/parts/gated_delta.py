"""Gated delta rule: a layer whose state is a matrix for each head, in the place of attention.

    x -> qkv_gate -> short convolution, SiLU -> queries and keys of norm 1, values; and gates
      -> rates -> log decay g = -exp(a_log) softplus(a + dt_bias), write strength beta = sigmoid(b)
    state_t = S + k_t beta_t (v_t - S^T k_t)^T,  where S = exp(g_t) state_(t-1)     (the rule)
    state_t^T q_t -> RMSNorm of each head, times SiLU(gate) -> output

Yang et al. 2024 (Gated DeltaNet), 3; chunked as by Yang et al. 2024 (DeltaNet), 3.2. State and
convolution start anew at each document of a row. Not here: kernels for a GPU.
"""

from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from pretrain.config.model import StackConfig
from pretrain.config.model.mixers.chunks import CHUNK
from pretrain.model.parts.attention import AttentionContext, AttentionOutput
from pretrain.model.parts.mixer_layer import MixerLayer
from pretrain.model.parts.recurrence import (
    decay_chunks,
    draw_decay,
    draw_ones,
    draw_step,
    split_chunks,
)
from pretrain.model.parts.short_convolution import ShortConvolution, behind_taps, draw_filter

NORM_EPS = 1e-6
"""Added to the squared norm of a query or a key."""


class DeltaInput(NamedTuple):
    """Input of the gated delta rule for T tokens, in fp32 or float64.

    Attributes:
        q_BTGH: Queries of each group of heads, of norm 1 and scaled by 1 / sqrt(their width).
        k_BTGH: Keys of each group, of norm 1.
        v_BTNV: Values of each head, of another width.
        log_decay_BTN: Logarithm of the decay of the state before a token is written, at most 0.
        strength_BTN: Strength of the write of a token.
        documents_BT: Document of each token, one after another in a row. None: one a row.
    """

    q_BTGH: Tensor
    k_BTGH: Tensor
    v_BTNV: Tensor
    log_decay_BTN: Tensor
    strength_BTN: Tensor
    documents_BT: Tensor | None = None


def gated_delta_rule(
    inputs: DeltaInput,
    state_BNKV: Tensor | None = None,
    before_B1: Tensor | None = None,
    *,
    continues: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Computes the rule chunk by chunk; cost is linear in T.

    Args:
        inputs: T tokens.
        state_BNKV: State before them. None: zeros.
        before_B1: Document of that state.
        continues: The row does, and the state after it is asked for.

    Returns:
        Results [B, T, N, V] and the state after the last token, or None.
    """
    length, groups, key_width = inputs.k_BTGH.shape[1:]
    value_width = inputs.v_BTNV.shape[-1]
    chunk = min(CHUNK, length)
    q, k, v, log_decay, strength = (split_chunks(x, chunk) for x in inputs[:5])
    pairs, reads, writes, remains = decay_chunks(log_decay, inputs.documents_BT, before_B1)

    def of_heads(x: Tensor, factor: Tensor) -> Tensor:
        """Multiplies what is of groups by a factor of each head."""
        return (x[:, :, None] * factor.unflatten(1, (groups, -1))).flatten(1, 2)

    strength = strength[..., None]
    system = of_heads(k @ k.mT, pairs * strength)
    inside = of_heads(q @ k.mT, pairs)
    # Values that are written, and what they lose of the state before the chunk.
    sides = torch.cat((v * strength, of_heads(k, strength * reads)), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    fresh, lost = solved.split((value_width, key_width), dim=-1)
    # Chunks by one call: the gradient of each index would have the size of the row.
    chunks = [x.unbind(2) for x in (fresh, lost, of_heads(q, reads), inside, of_heads(k, writes), remains)]
    results = []
    for number, (fresh_c, lost_c, q_c, inside_c, k_c, remains_c) in enumerate(zip(*chunks, strict=True)):
        # Zeros before a row are no product.
        new = fresh_c if state_BNKV is None else fresh_c - lost_c @ state_BNKV
        result = inside_c @ new
        results.append(result if state_BNKV is None else q_c @ state_BNKV + result)
        if continues or number + 1 < q.shape[2]:
            written = k_c.mT @ new
            state_BNKV = written if state_BNKV is None else state_BNKV * remains_c + written
    result_BTNV = torch.cat(results, dim=2).transpose(1, 2)[:, :length]
    return result_BTNV, state_BNKV if continues else None


class GatedDelta(MixerLayer):
    """Gated delta rule with short convolution, output gate and norm (Gated DeltaNet, 3.4).

    The rows of `qkv_gate.weight` are those of query heads, key heads, value heads and gates; of
    `rates.weight` those of decays, then of write strengths, a row for each value head. Head n of
    values reads head n // (values / keys) of queries and keys. No biases but `dt_bias`.

    Attributes:
        filters: Channels of queries, keys and values, of all ranks.
    """

    draws: ClassVar = {
        "a_log": draw_decay,
        "dt_bias": draw_step,
        "convolution.weight": draw_filter,
        "norm.weight": draw_ones,
    }

    def __init__(self, config: StackConfig) -> None:
        sizes = config.delta.sizes(config.width, config.heads)
        super().__init__(sizes)
        self.filters = sizes.rows
        self.strongest = 2.0 if sizes.negative_eigenvalues else 1.0
        self.fused = {"qkv_gate": sizes.fused, "rates": (sizes.value_heads,) * 2}
        self.qkv_gate = nn.Linear(config.width, sum(sizes.fused), bias=False)
        self.convolution = ShortConvolution(sum(sizes.rows), sizes.kernel)
        self.rates = nn.Linear(config.width, 2 * sizes.value_heads, bias=False)
        self.a_log = nn.Parameter(torch.empty(sizes.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(sizes.value_heads))
        self.norm = nn.RMSNorm(sizes.value_width, eps=sizes.norm_eps)
        self.output = nn.Linear(sizes.rows[-1], config.width, bias=False)

    def forward(self, x_BTD: Tensor, context: AttentionContext) -> AttentionOutput:
        """Mixes tokens of a document; `context.prepared` are documents of `prepare_documents`."""
        documents_BS: Tensor | None = context.prepared
        cache = context.cache
        sizes = self.sizes
        ranks = self.ranks(context)
        channels = sum(sizes.rows)
        heads = sizes.value_heads
        x_BTD = self.gather(x_BTD)
        qkv_BTC, gate_BTV = self.qkv_gate(x_BTD).split((channels, sizes.rows[-1]), dim=-1)
        rates_BTN = self.rates(x_BTD)
        if ranks > 1:
            both_BTC = torch.cat((qkv_BTC, rates_BTN), dim=-1)
            both_BTC = self.to_heads(both_BTC, (*sizes.rows, heads, heads))
            qkv_BTC, rates_BTN = both_BTC.split((channels // ranks, 2 * heads // ranks), dim=-1)
            # A copy: a view would keep the whole product until the backward pass.
            gate_BTV = gate_BTV.contiguous()
        state_BNKV = None if cache is None or cache.state is None else cache.state[0]
        taps_BSC = behind_taps(qkv_BTC, sizes.kernel, cache)
        choose = partial(self.of_heads, context=context, sections=self.filters)
        mixed_BTC = silu(self.convolution(taps_BSC, documents_BS, qkv_BTC.shape[1], choose))
        # Sums of decays and states are exact under any precision.
        with torch.autocast(x_BTD.device.type, enabled=False):
            inputs = self._read(mixed_BTC, rates_BTN, context)
            before_B1 = None
            if documents_BS is not None:
                inputs = inputs._replace(documents_BT=documents_BS[:, sizes.kernel - 1 :])
                before_B1 = documents_BS[:, sizes.kernel - 2 : sizes.kernel - 1]
            result_BTNV, state_BNKV = gated_delta_rule(
                inputs, state_BNKV, before_B1, continues=cache is not None
            )  # fmt: skip
        if cache is not None and state_BNKV is not None:
            cache.replace_state(x_BTD.shape[1], state_BNKV, taps_BSC[:, 1 - sizes.kernel :])
        if ranks > 1:
            result_BTNV = self.to_columns(result_BTNV.flatten(2)).unflatten(-1, (heads, -1))
        gate_BTNV = gate_BTV.unflatten(-1, (heads, -1))
        normed_BTNV = self.norm(result_BTNV.to(self.norm.weight.dtype)).to(gate_BTNV.dtype)
        gated_BTNV = normed_BTNV * silu(gate_BTNV)
        return AttentionOutput(self.output(gated_BTNV.flatten(2)))

    def _read(self, mixed_BTC: Tensor, rates_BTN: Tensor, context: AttentionContext) -> DeltaInput:
        sizes = self.sizes
        ranks = self.ranks(context)
        exact = torch.promote_types(mixed_BTC.dtype, torch.float32)
        rows = [row // ranks for row in sizes.rows]
        queries, keys, values = mixed_BTC.to(exact).split(rows, dim=-1)
        q, k = (x.unflatten(-1, (-1, sizes.key_width)) for x in (queries, keys))
        q = _unit(q, sizes.key_width**-0.5)
        k = _unit(k, 1.0)
        decay, strength = rates_BTN.to(exact).chunk(2, dim=-1)
        a_log, dt_bias = (self.of_heads(x, context).to(exact) for x in (self.a_log, self.dt_bias))
        log_decay = -a_log.exp() * softplus(decay + dt_bias)
        strength = self.strongest * strength.sigmoid()
        v = values.unflatten(-1, (-1, sizes.value_width))
        return DeltaInput(q, k, v, log_decay, strength)


def _unit(x: Tensor, length: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (length * (norm.square() + NORM_EPS).rsqrt())
