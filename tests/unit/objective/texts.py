"""Rows of random texts for the tests of objectives, and the vocabulary that they are of."""

import numpy as np
import torch

from pretrain.config.data import BatchConfig
from pretrain.config.lengths import row_lengths
from pretrain.config.objective import ObjectiveConfig
from pretrain.objective import RowContext
from pretrain.rows import TokenRows, Vocabulary
from pretrain.types import Batch

PAD, EOS, UNK = 0, 1, 2
NAMED = {"[NLU]": 3, "[NLG]": 4, "[S2S]": 5, "<|fim_prefix|>": 6, "<|fim_suffix|>": 7, "<|fim_middle|>": 8}
FIRST_WORD, FIRST_SENTINEL, SIZE = 10, 199, 200  # <extra_id_0> is the last id, the others lie below it
SENTINELS = tuple(range(FIRST_SENTINEL, FIRST_SENTINEL - 60, -1))
WORDS = range(FIRST_WORD, SENTINELS[-1])
VOCABULARY = Vocabulary(
    SIZE,
    eos=EOS,
    special=~np.isin(np.arange(SIZE), WORDS),
    pad=PAD,
    start=PAD,
    sentinels=SENTINELS,
    named=NAMED,
)


def stream_of(num_tokens: int, *, seed: int = 0, longest: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Documents of 1 to `longest` tokens, the last of each EOS: all tokens, and where documents start."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(WORDS.start, WORDS.stop, num_tokens)
    starts = np.cumsum(np.append(0, rng.integers(1, longest + 1, num_tokens)))
    starts = starts[starts < num_tokens]
    tokens[starts[1:] - 1] = EOS
    return tokens, starts


def rows_of(num_rows: int, row_len: int, *, seed: int = 0, longest: int = 30) -> TokenRows:
    """Consecutive rows of such a stream: each of a token more, the first of the next row."""
    tokens, starts = stream_of(num_rows * row_len + 1, seed=seed, longest=longest)
    first = np.arange(num_rows)[:, None] * row_len
    is_start = np.isin(np.arange(len(tokens)), starts)
    columns = first + np.arange(row_len + 1)
    return TokenRows(
        tokens[columns].astype(np.uint16), 1000 * seed + np.arange(num_rows), np.flatnonzero(is_start[columns]), None
    )


def context_of(seq_len: int, *, num_stacks: int = 2, document_mask: bool = False, seed: int = 7, **objective: object):
    """An objective, and what its rows need, for `seq_len` tokens that the model reads."""
    config = ObjectiveConfig.model_validate(objective)
    lengths = row_lengths(config, BatchConfig(global_tokens=seq_len, seq_len=seq_len, micro=1), num_stacks)
    return config, RowContext(seed, VOCABULARY, lengths, num_stacks, document_mask)


def put_back(source: list[int], target: list[int]) -> list[int]:
    """What was corrupted: each sentinel of the source replaced by what follows it in the target; no ends, no modes."""
    spans: dict[int, list[int]] = {}
    for token in target:
        if token in SENTINELS:
            assert token not in spans, "each sentinel comes once"
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    assert [token for token in source if token in SENTINELS] == list(spans), "the same sentinels in the same order"
    assert list(spans) == list(SENTINELS[: len(spans)]), "from the first on, none left out"
    return [token for place in source for token in spans.get(place, [place])]


def logits_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Scores of the real vocabulary."""
    with torch.no_grad():
        return model(batch).logits_BTV[..., :SIZE]
