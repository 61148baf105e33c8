"""Gated delta rule: a layer whose state is a matrix for each head, in the place of attention.

    x -> qkv_gate -> short convolution, SiLU -> queries and keys of norm 1, values; and gates
      -> rates -> log decay g = -exp(a_log) softplus(a + dt_bias), write strength beta = sigmoid(b)
    state_t = S + k_t beta_t (v_t - S^T k_t)^T,  where S = exp(g_t) state_(t-1)     (the rule)
    state_t^T q_t -> RMSNorm of each head, times SiLU(gate) -> output

Yang et al. 2024 (Gated DeltaNet), 3; chunked as by Yang et al. 2024 (DeltaNet), 3.2. State and
convolution start anew at each document of a row. Not here: kernels for a GPU.
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from pretrain.config.model import StackConfig
from pretrain.config.model.mixers.counted import CHUNK
from pretrain.model.parts.attention import AttentionContext, AttentionOutput
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
        q_BTNH: Queries, of norm 1 and scaled by 1 / sqrt(their width).
        k_BTNH: Keys, of norm 1.
        v_BTNH: Values, of another width.
        log_decay_BTN: Logarithm of the decay of the state before a token is written, at most 0.
        strength_BTN: Strength of the write of a token.
        documents_BT: Document of each token, one after another in a row. None: one a row.
    """

    q_BTNH: Tensor
    k_BTNH: Tensor
    v_BTNH: Tensor
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
    rows, length, heads, key_width = inputs.k_BTNH.shape
    chunk = min(CHUNK, length)
    q, k, v, log_decay, strength = (split_chunks(x, chunk) for x in inputs[:5])
    if state_BNKV is None:
        state_BNKV = k.new_zeros(rows, heads, key_width, v.shape[-1])
    pairs, reads, writes, remains = decay_chunks(log_decay, inputs.documents_BT, before_B1)
    written = k * strength[..., None]
    system = written @ k.mT * pairs
    inside = q @ k.mT * pairs
    # Values that are written, and what they lose of the state before the chunk.
    sides = torch.cat((v * strength[..., None], written * reads), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    fresh, lost = solved.split((v.shape[-1], key_width), dim=-1)
    # Chunks by one call: the gradient of each index would have the size of the row.
    chunks = [x.unbind(2) for x in (fresh, lost, q * reads, inside, k * writes, remains)]
    results = []
    for number, (fresh_c, lost_c, q_c, inside_c, k_c, remains_c) in enumerate(zip(*chunks, strict=True)):
        new = fresh_c - lost_c @ state_BNKV
        results.append(q_c @ state_BNKV + inside_c @ new)
        if continues or number + 1 < q.shape[2]:
            state_BNKV = state_BNKV * remains_c + k_c.mT @ new
    result_BTNV = torch.cat(results, dim=2).transpose(1, 2)[:, :length]
    return result_BTNV, state_BNKV if continues else None


class GatedDelta(nn.Module):
    """Gated delta rule with short convolution, output gate and norm (Gated DeltaNet, 3.4).

    The rows of `qkv_gate.weight` are those of query heads, key heads, value heads and gates; of
    `rates.weight` those of decays, then of write strengths, a row for each value head. Head n of
    values reads head n // (values / keys) of queries and keys. No biases but `dt_bias`.

    Attributes:
        fused: Rows of each matrix of the parameters that are several.
        draws: Initial values, as released (`Mixer`).
    """

    draws: ClassVar = {
        "a_log": draw_decay,
        "dt_bias": draw_step,
        "convolution.weight": draw_filter,
        "norm.weight": draw_ones,
    }

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        sizes = config.delta.sizes(config.width, config.heads)
        self.heads, self.value_heads = sizes.heads, sizes.value_heads
        self.key_width, self.value_width = sizes.key_width, sizes.value_width
        self.rows = sizes.rows
        self.kernel = sizes.kernel
        self.strongest = 2.0 if sizes.negative_eigenvalues else 1.0
        self.fused = {"qkv_gate": sizes.fused, "rates": (self.value_heads,) * 2}
        values = self.rows[-1]
        self.qkv_gate = nn.Linear(config.width, sum(sizes.fused), bias=False)
        self.convolution = ShortConvolution(sum(self.rows), self.kernel)
        self.rates = nn.Linear(config.width, 2 * self.value_heads, bias=False)
        self.a_log = nn.Parameter(torch.empty(self.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.norm = nn.RMSNorm(self.value_width, eps=sizes.norm_eps)
        self.output = nn.Linear(values, config.width, bias=False)

    def forward(self, x_BTD: Tensor, context: AttentionContext) -> AttentionOutput:
        """Mixes tokens of a document; `context.prepared` are documents of `prepare_documents`."""
        documents_BS: Tensor | None = context.prepared
        cache = context.cache
        qkv_BTC, gate_BTV = self.qkv_gate(x_BTD).split((sum(self.rows), self.rows[-1]), dim=-1)
        state_BNKV = None if cache is None or cache.state is None else cache.state[0]
        taps_BSC = behind_taps(qkv_BTC, self.kernel, cache)
        mixed_BTC = silu(self.convolution(taps_BSC, documents_BS))
        rates_BTN = self.rates(x_BTD)
        # Sums of decays and states are exact under any precision.
        with torch.autocast(x_BTD.device.type, enabled=False):
            inputs = self._read(mixed_BTC, rates_BTN)
            before_B1 = None
            if documents_BS is not None:
                inputs = inputs._replace(documents_BT=documents_BS[:, self.kernel - 1 :])
                before_B1 = documents_BS[:, self.kernel - 2 : self.kernel - 1]
            result_BTNV, state_BNKV = gated_delta_rule(
                inputs, state_BNKV, before_B1, continues=cache is not None
            )  # fmt: skip
        if cache is not None and state_BNKV is not None:
            cache.replace_state(x_BTD.shape[1], state_BNKV, taps_BSC[:, 1 - self.kernel :])
        # A copy: a view would keep the whole product until the backward pass.
        gate_BTNV = gate_BTV.contiguous().unflatten(-1, (self.value_heads, -1))
        normed_BTNV = self.norm(result_BTNV.to(self.norm.weight.dtype)).to(gate_BTNV.dtype)
        gated_BTNV = normed_BTNV * silu(gate_BTNV)
        return AttentionOutput(self.output(gated_BTNV.flatten(2)))

    def _read(self, mixed_BTC: Tensor, rates_BTN: Tensor) -> DeltaInput:
        exact = torch.promote_types(mixed_BTC.dtype, torch.float32)
        queries, keys, values = mixed_BTC.to(exact).split(self.rows, dim=-1)
        q, k = (x.unflatten(-1, (self.heads, -1)) for x in (queries, keys))
        q = _unit(q) * self.key_width**-0.5
        k = _unit(k)
        if self.value_heads != self.heads:
            q, k = (x.repeat_interleave(self.value_heads // self.heads, dim=2) for x in (q, k))
        decay, strength = rates_BTN.to(exact).chunk(2, dim=-1)
        log_decay = -self.a_log.to(exact).exp() * softplus(decay + self.dt_bias.to(exact))
        strength = self.strongest * strength.sigmoid()
        return DeltaInput(q, k, values.unflatten(-1, (self.value_heads, -1)), log_decay, strength)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(dim=-1, keepdim=True) + NORM_EPS).rsqrt()
