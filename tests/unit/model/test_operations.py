"""Operations that a training step dispatches, beside those of a plain GPT-2 of the same arithmetic.

Each costs some microseconds on the host, which a small model on a fast device waits for. Views are left out.
"""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig, StackConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.model import build_model, init_weights
from pretrain.objective import build_loss
from pretrain.types import Batch

WIDTH, HEADS, VOCAB_SIZE, SEQ_LEN, ROWS = 32, 2, 64, 16, 2
VIEWS = {
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze",
    "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "lift_fresh", "promote_types",
}  # fmt: skip


class Dispatched(TorchDispatchMode):
    """Counts what reaches a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function._schema.name.partition("::")[2]] += 1
        return function(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """Operations that are no views."""
        return sum(count for name, count in self.counts.items() if name not in VIEWS)


class PlainBlock(nn.Module):
    """A block as its formula has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x_BTD)).split(WIDTH, dim=2)
        q, k, v = (part.view(ROWS, SEQ_LEN, HEADS, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.output(mixed.transpose(1, 2).contiguous().view(ROWS, SEQ_LEN, WIDTH))
        return x_BTD + self.down(functional.gelu(self.up(self.norms[1](x_BTD))))


def count_plain(layers: int) -> int:
    """Operations of a step of the plain model, which is nanoGPT's but for its names."""
    tokens, positions = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(SEQ_LEN, WIDTH)
    blocks, norm = [PlainBlock() for _ in range(layers)], nn.LayerNorm(WIDTH)
    ids = torch.zeros(ROWS, SEQ_LEN, dtype=torch.int64)
    with Dispatched() as dispatched:
        x_BTD = tokens(ids) + positions(torch.arange(SEQ_LEN))
        for block in blocks:
            x_BTD = block(x_BTD)
        scores = functional.linear(norm(x_BTD), tokens.weight)
        functional.cross_entropy(scores.view(-1, VOCAB_SIZE), ids.view(-1)).backward()
    return dispatched.total


def count_ours(layers: int) -> int:
    """Operations of a step of ours, from its second on."""
    stack = StackConfig(
        layers=layers, width=WIDTH, heads=HEADS, ff_width=4 * WIDTH, activation="gelu", gated=False, norm="layer",
        bias=True, position="learned",
    )  # fmt: skip
    config = ModelConfig(decoder=stack, vocab_size=VOCAB_SIZE, max_seq_len=SEQ_LEN, tied_embeddings=True)
    model = build_model(config, PLAIN_ENGINE, torch.device("cpu"))
    init_weights(model, config, seed=0)
    loss = build_loss(ObjectiveConfig())
    ids = torch.zeros(ROWS, SEQ_LEN, dtype=torch.int64)
    batch = Batch(ids, ids)
    for _ in range(2):
        model.zero_grad()
        with Dispatched() as dispatched:
            (loss(model, batch).loss_sum / batch.num_targets()).backward()
    return dispatched.total


def test_a_block_dispatches_what_a_plain_one_does_and_a_step_few_operations_more():
    ours, plain = count_ours(3), count_plain(3)
    blocks = count_ours(5) - ours, count_plain(5) - plain
    assert blocks[0] <= blocks[1]
    assert ours - plain <= 18  # the loss with its sums of losses, targets and correct ones: 1.05 of 12 layers
