"""Mamba-2: a layer whose state is a matrix for each head, in the place of attention.

    x -> input -> gates; values x, keys B and queries C -> short convolution, SiLU; steps
    steps -> dt = softplus(. + dt_bias), log decay g = -exp(a_log) dt
    state_t = exp(g_t) state_(t-1) + B_t dt_t x_t^T                               (the rule)
    state_t^T C_t + skip x_t -> times SiLU(gates) -> RMSNorm of each group -> output

Dao and Gu 2024 (Mamba-2), 6 and 7: heads of a group share B and C. State and convolution start anew
at each document of a row. Not here: kernels for a GPU.
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu, softplus

from pretrain.config.model import StackConfig
from pretrain.config.model.mixers.counted import CHUNK
from pretrain.model.parts.attention import AttentionContext, AttentionOutput
from pretrain.model.parts.recurrence import decay_chunks, draw_ones, draw_step, split_chunks
from pretrain.model.parts.short_convolution import ShortConvolution, behind_taps, draw_filter


class StateSpaceInput(NamedTuple):
    """Input of the rule for T tokens, in fp32 or float64.

    Attributes:
        q_BTGH: Queries of each group (C).
        k_BTGH: Keys of each group (B).
        v_BTNV: Values of each head, times its step.
        log_decay_BTN: Logarithm of the decay of the state before a token is written, at most 0.
        documents_BT: Document of each token, one after another in a row. None: one a row.
    """

    q_BTGH: Tensor
    k_BTGH: Tensor
    v_BTNV: Tensor
    log_decay_BTN: Tensor
    documents_BT: Tensor | None = None


def state_space_rule(
    inputs: StateSpaceInput,
    state_BNHV: Tensor | None = None,
    before_B1: Tensor | None = None,
    *,
    continues: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Computes the rule chunk by chunk; cost is linear in T.

    Args:
        inputs: T tokens.
        state_BNHV: State before them. None: zeros.
        before_B1: Document of that state.
        continues: The row does, and the state after it is asked for.

    Returns:
        Results [B, T, N, V] and the state after the last token, or None.
    """
    rows, length, groups, key_width = inputs.k_BTGH.shape
    heads, value_width = inputs.v_BTNV.shape[2:]
    chunk = min(CHUNK, length)
    q, k, v, log_decay = (split_chunks(x, chunk) for x in inputs[:4])
    decays = decay_chunks(log_decay, inputs.documents_BT, before_B1)
    if state_BNHV is None:
        state_BNHV = k.new_zeros(rows, heads, key_width, value_width)
    # Heads of a group side by side: one product reads or writes all of their states.
    state = state_BNHV.unflatten(1, (groups, -1)).transpose(2, 3)  # [B, G, H, N / G, V]
    pairs = decays.pairs.unflatten(1, (groups, -1))
    inside = ((q @ k.mT)[:, :, None] * pairs).flatten(1, 2) @ v
    written = (v * decays.writes).unflatten(1, (groups, -1))
    remains, reads = (x.unflatten(1, (groups, -1)) for x in (decays.remains, decays.reads))
    # Chunks by one call: the gradient of each index would have the size of the row.
    chunks = zip(q.unbind(2), k.unbind(2), *(x.unbind(3) for x in (written, remains, reads)), strict=True)
    results = []
    for number, (q_c, k_c, written_c, remains_c, reads_c) in enumerate(chunks):
        read = (q_c @ state.flatten(3)).unflatten(3, state.shape[3:]).transpose(2, 3)
        results.append(read * reads_c)
        if continues or number + 1 < q.shape[2]:
            new = written_c.transpose(2, 3).flatten(3)
            state = state * remains_c.transpose(2, 3) + (k_c.mT @ new).view(state.shape)
    outside = torch.stack(results, dim=3).flatten(1, 2)
    result_BTNV = (inside + outside).flatten(2, 3).transpose(1, 2)[:, :length]
    return result_BTNV, state.transpose(2, 3).flatten(1, 2) if continues else None


class Mamba2(nn.Module):
    """Mamba-2 with short convolution, gates and norm.

    The rows of `input.weight` are those of gates, values, keys, queries and steps. Head n reads
    group n // (heads / groups) of keys and queries.

    Attributes:
        fused: Rows of each matrix of the parameters that are several.
        draws: Initial values, as released (`Mixer`).
    """

    draws: ClassVar = {
        "a_log": lambda weight, generator: weight.uniform_(1.0, 16.0, generator=generator).log_(),
        "dt_bias": draw_step,
        "skip": draw_ones,
        "convolution.weight": draw_filter,
        "norm": draw_ones,
    }

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        sizes = config.mamba2.sizes(config.width, config.heads)
        self.sizes = sizes
        self.fused = {"input": sizes.fused}
        self.a_log = nn.Parameter(torch.empty(sizes.heads))
        self.dt_bias = nn.Parameter(torch.empty(sizes.heads))
        self.skip = nn.Parameter(torch.empty(sizes.heads))
        self.input = nn.Linear(config.width, sum(sizes.fused), bias=sizes.bias)
        self.convolution = ShortConvolution(sum(sizes.rows), sizes.kernel, bias=sizes.filter_bias)
        self.norm = nn.Parameter(torch.empty(sizes.inner))
        self.output = nn.Linear(sizes.inner, config.width, bias=sizes.bias)

    def forward(self, x_BTD: Tensor, context: AttentionContext) -> AttentionOutput:
        """Mixes tokens of a document; `context.prepared` are documents of `prepare_documents`."""
        documents_BS: Tensor | None = context.prepared
        cache = context.cache
        sizes = self.sizes
        parts = (sizes.inner, sum(sizes.rows), sizes.heads)
        gate_BTV, mixed_BTC, step_BTN = self.input(x_BTD).split(parts, dim=-1)
        state_BNHV = None if cache is None or cache.state is None else cache.state[0]
        taps_BSC = behind_taps(mixed_BTC, sizes.kernel, cache)
        mixed_BTC = silu(self.convolution(taps_BSC, documents_BS))
        # Sums of decays and states are exact under any precision.
        with torch.autocast(x_BTD.device.type, enabled=False):
            exact = torch.promote_types(x_BTD.dtype, torch.float32)
            values, keys, queries = mixed_BTC.to(exact).split(sizes.rows, dim=-1)
            step_BTN = softplus(step_BTN.to(exact) + self.dt_bias.to(exact))
            v_BTNV = values.unflatten(-1, (sizes.heads, -1))
            q_BTGH, k_BTGH = (x.unflatten(-1, (sizes.groups, -1)) for x in (queries, keys))
            log_decay_BTN = -self.a_log.to(exact).exp() * step_BTN
            inputs = StateSpaceInput(q_BTGH, k_BTGH, v_BTNV * step_BTN[..., None], log_decay_BTN)
            before_B1 = None
            if documents_BS is not None:
                inputs = inputs._replace(documents_BT=documents_BS[:, sizes.kernel - 1 :])
                before_B1 = documents_BS[:, sizes.kernel - 2 : sizes.kernel - 1]
            result_BTNV, state_BNHV = state_space_rule(inputs, state_BNHV, before_B1, continues=cache is not None)
            result_BTNV = result_BTNV + self.skip.to(exact)[:, None] * v_BTNV
        if cache is not None and state_BNHV is not None:
            cache.replace_state(x_BTD.shape[1], state_BNHV, taps_BSC[:, 1 - sizes.kernel :])
        # A copy: a view would keep the whole product until the backward pass.
        gated_BTV = result_BTNV.flatten(2) * silu(gate_BTV.contiguous().to(exact))
        groups = gated_BTV.unflatten(-1, (sizes.groups, -1))
        normed_BTV = rms_norm(groups, groups.shape[-1:], eps=sizes.norm_eps).flatten(2)
        return AttentionOutput(self.output((normed_BTV * self.norm.to(exact)).to(x_BTD.dtype)))
