"""Mamba-2: a layer whose state is a matrix for each head, in the place of attention.

    x -> input -> gates; values x, keys B and queries C -> short convolution, SiLU; steps
    steps -> dt = softplus(. + dt_bias), log decay g = -exp(a_log) dt
    state_t = exp(g_t) state_(t-1) + B_t dt_t x_t^T                               (the rule)
    state_t^T C_t + skip x_t -> times SiLU(gates) -> RMSNorm of each group -> output

Dao and Gu 2024 (Mamba-2), 6 and 7: heads of a group share B and C. State and convolution start anew
at each document of a row. Not here: kernels for a GPU.
"""

from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu, softplus

from pretrain.config.model import StackConfig
from pretrain.config.model.mixers.chunks import CHUNK
from pretrain.config.model.parts.attention import copies_of_heads
from pretrain.model.parts.attention import AttentionContext, AttentionOutput
from pretrain.model.parts.mixer_layer import MixerLayer
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


def _copy_groups(x: Tensor, dim: int, groups: int, copies: int) -> Tensor:
    """Repeats each of so many groups of a dimension, for the ranks among which its heads are."""
    return x.unflatten(dim, (groups, -1)).repeat_interleave(copies, dim).flatten(dim, dim + 1)


class Mamba2(MixerLayer):
    """Mamba-2 with short convolution, gates and norm.

    The rows of `input.weight` are those of gates, values, keys, queries and steps. Head n reads
    group n // (heads / groups) of keys and queries.

    Attributes:
        groups: Groups of all ranks.
        filters: Channels of values, keys and queries, of all ranks.
    """

    draws: ClassVar = {
        "a_log": lambda weight, generator: weight.uniform_(1.0, 16.0, generator=generator).log_(),
        "dt_bias": draw_step,
        "skip": draw_ones,
        "convolution.weight": draw_filter,
        "norm": draw_ones,
    }

    def __init__(self, config: StackConfig) -> None:
        sizes = config.mamba2.sizes(config.width, config.heads)
        super().__init__(sizes)
        self.groups = sizes.groups
        self.filters = sizes.rows
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
        gate_BTV, mixed_BTC, step_BTN = self.input(self.gather(x_BTD)).split(parts, dim=-1)
        if self.ranks(context) > 1:
            mixed_BTC, step_BTN = self._exchange(mixed_BTC, step_BTN)
            # A copy: a view would keep the whole product until the backward pass.
            gate_BTV = gate_BTV.contiguous()
        state_BNHV = None if cache is None or cache.state is None else cache.state[0]
        taps_BSC = behind_taps(mixed_BTC, sizes.kernel, cache)
        choose = partial(self._filters_here, context=context)
        mixed_BTC = silu(self.convolution(taps_BSC, documents_BS, mixed_BTC.shape[1], choose))
        # Sums of decays and states are exact under any precision.
        with torch.autocast(x_BTD.device.type, enabled=False):
            inputs, skipped_BTNV = self._read(mixed_BTC, step_BTN, context)
            before_B1 = None
            if documents_BS is not None:
                inputs = inputs._replace(documents_BT=documents_BS[:, sizes.kernel - 1 :])
                before_B1 = documents_BS[:, sizes.kernel - 2 : sizes.kernel - 1]
            result_BTNV, state_BNHV = state_space_rule(inputs, state_BNHV, before_B1, continues=cache is not None)
            result_BTV = (result_BTNV + skipped_BTNV).flatten(2)
        if cache is not None and state_BNHV is not None:
            cache.replace_state(x_BTD.shape[1], state_BNHV, taps_BSC[:, 1 - sizes.kernel :])
        if self.ranks(context) > 1:
            result_BTV = self.to_columns(result_BTV)
        gated_BTV = result_BTV * silu(gate_BTV.to(result_BTV.dtype))
        groups = gated_BTV.unflatten(-1, (sizes.groups, -1))
        normed_BTV = rms_norm(groups, groups.shape[-1:], eps=sizes.norm_eps).flatten(2)
        weight_V = self.of_matrices(self.norm).to(normed_BTV.dtype)
        return AttentionOutput(self.output((normed_BTV * weight_V).to(x_BTD.dtype)))

    def _read(
        self, mixed_BTC: Tensor, step_BTN: Tensor, context: AttentionContext
    ) -> tuple[StateSpaceInput, Tensor]:  # fmt: skip
        """Returns the input of the rule, and the values that are added to its result."""
        sizes = self.sizes
        ranks = self.ranks(context)
        exact = torch.promote_types(mixed_BTC.dtype, torch.float32)
        keys = sizes.rows[1] * self._copies(context) // ranks
        parts = (sizes.inner // ranks, keys, keys)
        values, keys_BTC, queries_BTC = mixed_BTC.to(exact).split(parts, dim=-1)
        q, k = (x.unflatten(-1, (-1, sizes.state_width)) for x in (queries_BTC, keys_BTC))
        v = values.unflatten(-1, (-1, sizes.head_width))
        a_log, dt_bias, skip = (
            self.of_heads(x, context).to(exact) for x in (self.a_log, self.dt_bias, self.skip)
        )  # fmt: skip
        step = softplus(step_BTN.to(exact) + dt_bias)
        inputs = StateSpaceInput(q, k, v * step[..., None], -a_log.exp() * step)
        return inputs, skip[:, None] * v

    def _copies(self, context: AttentionContext) -> int:
        return copies_of_heads(self.sizes.heads, self.sizes.groups, self.ranks(context))

    def _exchange(self, mixed_BtC: Tensor, step_BtN: Tensor) -> tuple[Tensor, Tensor]:
        """Exchanges values, keys, queries and steps of these columns for its heads of all columns."""
        sizes = self.sizes
        ranks = self.group.size()
        copies = copies_of_heads(sizes.heads, sizes.groups, ranks)
        values, keys, queries = mixed_BtC.split(sizes.rows, dim=-1)
        if copies > 1:
            keys, queries = (_copy_groups(x, 2, sizes.groups, copies) for x in (keys, queries))
        parts = (values, keys, queries, step_BtN)
        widths = tuple(x.shape[-1] for x in parts)
        both_BTC = self.to_heads(torch.cat(parts, dim=-1), widths)
        steps = sizes.heads // ranks
        mixed_BTC, step_BTN = both_BTC.split((both_BTC.shape[-1] - steps, steps), dim=-1)
        return mixed_BTC, step_BTN

    def _filters_here(self, whole: Tensor, context: AttentionContext) -> Tensor:
        """Returns what is of the channels of this rank's heads, and of the groups that they read."""
        sections = self.filters
        copies = self._copies(context)
        if copies > 1:
            values, *groups = whole.split(sections)
            groups = [_copy_groups(x, 0, self.groups, copies) for x in groups]
            whole = torch.cat((values, *groups))
            sections = (sections[0], copies * sections[1], copies * sections[2])
        return self.of_heads(whole, context, sections)
