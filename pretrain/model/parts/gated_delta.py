"""Gated delta rule: a layer whose state is a matrix for each head, in the place of attention.

    x -> qkv -> short convolution, SiLU -> queries and keys of norm 1, values
      -> rates -> log decay g = -exp(a_log) softplus(a + dt_bias), write strength beta = sigmoid(b)
    state_t = S + k_t beta_t (v_t - S^T k_t)^T,  where S = exp(g_t) state_(t-1)     (the rule)
    state_t^T q_t -> RMSNorm of each head, times SiLU(gate(x)) -> output

Yang et al. 2024 (Gated DeltaNet), 3; chunked as by Yang et al. 2024 (DeltaNet), 3.2. State and
convolution start anew at each document of a row. Not here: kernels for a GPU.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from pretrain.config.model import StackConfig
from pretrain.model.kv_cache import CachePlace
from pretrain.model.parts.attention import AttentionContext, AttentionOutput

CHUNK = 64
"""Tokens that are computed at once; cost grows with it, and the number of steps falls."""

OUTSIDE = -1
"""Document of the tokens before a row, which are zeros."""

NORM_EPS = 1e-6
"""Added to the squared norm of a query or a key."""

DELTA_WEIGHTS = ("attention.a_log", "attention.dt_bias", "attention.convolution.weight")
"""Ends of the names of weights that `draw_delta` draws."""


class ShortConvolution(nn.Module):
    """Causal convolution of each channel over the last `kernel` tokens of a document, and SiLU.

    `weight` [channels, kernel] has the present token last.
    """

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel))

    def forward(self, taps_BSC: Tensor, documents_BS: Tensor | None) -> Tensor:
        """Mixes T tokens, behind `kernel - 1` earlier ones: [B, kernel - 1 + T, channels] to [B, T, channels]."""
        kernel = self.weight.shape[1]
        length = taps_BSC.shape[1] - kernel + 1
        weight_CK = self.weight.to(taps_BSC.dtype)
        sum_BTC = taps_BSC[:, kernel - 1 :] * weight_CK[:, -1]
        present_BT = None if documents_BS is None else documents_BS[:, kernel - 1 :]
        for place in range(kernel - 1):
            earlier_BTC = taps_BSC[:, place : place + length] * weight_CK[:, place]
            if documents_BS is not None:
                is_same_BT = documents_BS[:, place : place + length] == present_BT
                earlier_BTC = earlier_BTC * is_same_BT[..., None]
            sum_BTC = sum_BTC + earlier_BTC
        return silu(sum_BTC)


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
    inputs: DeltaInput, state_BNKV: Tensor | None = None, before_B1: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the rule chunk by chunk; cost is linear in T.

    Decays stay logarithms until they are differences within a document, so that none overflows.

    Args:
        inputs: T tokens.
        state_BNKV: State before them. None: zeros.
        before_B1: Document of that state.

    Returns:
        Results [B, T, N, V] and the state after the last token.
    """
    rows, length, heads, key_width = inputs.k_BTNH.shape
    chunk = min(CHUNK, length)
    q, k, v, log_decay, strength = (_chunks(x, chunk) for x in inputs[:5])
    if state_BNKV is None:
        state_BNKV = k.new_zeros(rows, heads, key_width, v.shape[-1])
    total = log_decay.cumsum(dim=-1)  # [B, N, C, L]
    allowed = torch.ones(chunk, chunk, dtype=torch.bool, device=k.device).tril()
    reads = total.exp()[..., None]
    writes = (total[..., -1:] - total).exp()[..., None]
    remains = total[..., -1].exp()[..., None, None]  # [B, N, C, 1, 1]
    if inputs.documents_BT is not None:
        documents, before = _chunk_documents(inputs.documents_BT, before_B1, chunk)
        allowed = allowed & (documents[..., :, None] == documents[..., None, :])
        continues = documents == before
        reads = reads * continues[..., None]
        writes = writes * (documents == documents[..., -1:])[..., None]
        remains = remains * continues[..., -1, None, None]
    pairs = (total[..., :, None] - total[..., None, :]).masked_fill(~allowed, -math.inf).exp()
    written = k * strength[..., None]
    system = written @ k.mT * pairs
    inside = q @ k.mT * pairs
    # Values that are written, and what they lose of the state before the chunk.
    sides = torch.cat((v * strength[..., None], written * reads), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    fresh, lost = solved.split((v.shape[-1], key_width), dim=-1)
    q = q * reads
    k = k * writes
    results = []
    for number in range(q.shape[2]):
        new = fresh[:, :, number] - lost[:, :, number] @ state_BNKV
        results.append(q[:, :, number] @ state_BNKV + inside[:, :, number] @ new)
        state_BNKV = state_BNKV * remains[:, :, number] + k[:, :, number].mT @ new
    return torch.cat(results, dim=2).transpose(1, 2)[:, :length], state_BNKV


def _chunks(x_BTN: Tensor, chunk: int) -> Tensor:
    """Returns [B, N, C, L] or [B, N, C, L, H], lengthened by zeros, which change no state."""
    more = -x_BTN.shape[1] % chunk
    if more:
        x_BTN = pad(x_BTN, (0, 0) * (x_BTN.dim() - 2) + (0, more))
    return x_BTN.transpose(1, 2).contiguous().unflatten(2, (-1, chunk))


def _chunk_documents(
    documents_BT: Tensor, before_B1: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns documents of tokens, [B, 1, C, L], and of the state before each chunk, [B, 1, C, 1]."""
    more = -documents_BT.shape[1] % chunk
    if more:  # the last document continues, and its state with it
        documents_BT = torch.cat((documents_BT, documents_BT[:, -1:].expand(-1, more)), dim=1)
    documents = documents_BT.unflatten(1, (-1, chunk))
    if before_B1 is None:
        before_B1 = documents_BT[:, :1]
    before = torch.cat((before_B1, documents[:, :-1, -1]), dim=1)
    return documents[:, None], before[:, None, :, None]


class GatedDelta(nn.Module):
    """Gated delta rule with short convolution, output gate and norm (Gated DeltaNet, 3.4).

    The rows of `qkv.weight` are those of query heads, key heads and value heads; of `rates.weight`
    those of decays, then of write strengths, a row for each value head. Head n of values reads head
    n // (values / keys) of queries and keys. No biases but `dt_bias`.

    Attributes:
        fused: Rows of each matrix of the parameters that are several.
    """

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.heads, self.value_heads = config.delta_heads
        self.key_width, self.value_width = config.delta_widths
        self.rows = config.delta_rows
        self.kernel = config.delta.kernel
        self.strongest = 2.0 if config.delta.negative_eigenvalues else 1.0
        self.fused = {"qkv": self.rows, "rates": (self.value_heads,) * 2}
        values = self.rows[-1]
        self.qkv = nn.Linear(config.width, sum(self.rows), bias=False)
        self.convolution = ShortConvolution(sum(self.rows), self.kernel)
        self.rates = nn.Linear(config.width, 2 * self.value_heads, bias=False)
        self.a_log = nn.Parameter(torch.empty(self.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.norm = nn.RMSNorm(self.value_width, eps=config.delta.norm_eps)
        self.gate = nn.Linear(config.width, values, bias=False)
        self.output = nn.Linear(values, config.width, bias=False)

    def forward(self, x_BTD: Tensor, context: AttentionContext) -> AttentionOutput:
        """Mixes tokens of a document; `context.prepared` are documents of `prepare_documents`."""
        documents_BS: Tensor | None = context.prepared
        cache = context.cache
        qkv_BTC = self.qkv(x_BTD)
        state_BNKV = None
        if cache is not None and cache.state is not None:
            state_BNKV, taps_BPC = cache.state
            taps_BSC = torch.cat((taps_BPC, qkv_BTC), dim=1)
        else:
            taps_BSC = pad(qkv_BTC, (0, 0, self.kernel - 1, 0))
        mixed_BTC = self.convolution(taps_BSC, documents_BS)
        rates_BTN = self.rates(x_BTD)
        # Sums of decays and states are exact under any precision.
        with torch.autocast(x_BTD.device.type, enabled=False):
            inputs = self._read(mixed_BTC, rates_BTN)
            before_B1 = None
            if documents_BS is not None:
                inputs = inputs._replace(documents_BT=documents_BS[:, self.kernel - 1 :])
                before_B1 = documents_BS[:, self.kernel - 2 : self.kernel - 1]
            result_BTNV, state_BNKV = gated_delta_rule(inputs, state_BNKV, before_B1)
        if cache is not None:
            cache.replace_state(x_BTD.shape[1], state_BNKV, taps_BSC[:, 1 - self.kernel :])
        gate_BTNV = self.gate(x_BTD).view_as(result_BTNV)
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


def prepare_documents(
    documents_BT: Tensor | None, cached_BS: Tensor | None, kernel: int, place: CachePlace
) -> Tensor | None:
    """Returns documents of `kernel - 1` tokens and of the T behind them, [B, kernel - 1 + T].

    Args:
        documents_BT: Documents as in `Batch`. None: a row is one.
        cached_BS: Documents of all cached tokens, these included. None: there is no cache.
        kernel: Tokens that a convolution reads.
        place: Place of the tokens in the cache.
    """
    if documents_BT is None:
        return None
    if cached_BS is None:
        return pad(documents_BT, (kernel - 1, 0), value=OUTSIDE)
    before_P = torch.arange(1 - kernel, 0, device=documents_BT.device)
    before_P = before_P + (place.offset if place.position_1 is None else place.position_1)
    # Before the first token there are zeros, of any document.
    before_BP = cached_BS.index_select(1, before_P.clamp(min=0))
    return torch.cat((before_BP, documents_BT), dim=1)


def draw_delta(name: str, weight: Tensor, generator: torch.Generator) -> None:
    """Draws decays and convolution as released: A in 0 to 16, steps of 0.001 to 0.1."""
    if name.endswith("a_log"):
        weight.uniform_(0.0, 16.0, generator=generator).clamp_(min=1e-6).log_()
    elif name.endswith("dt_bias"):
        step = weight.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        weight.copy_(step + torch.log(-torch.expm1(-step)))  # softplus gives the step again
    else:
        bound = weight.shape[1] ** -0.5
        weight.uniform_(-bound, bound, generator=generator)
