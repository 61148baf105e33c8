"""Packed rows of hybrids in transformers against each document alone: the table of docs/models.md, measured again."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from pretrain.families import FAMILIES
from tests.helpers.lent import lend
from tests.helpers.theirs import build_theirs
from tests.unit.interop.releases import TINY, tiny
from tests.unit.model.tiny import packed_batch

VOCAB = 61
LENGTHS = [9, 1, 20, 10]
DOCS = Path("docs/models.md").read_text()
WITHOUT_BOUNDS = ("mamba2",)
"""Families of transformers that take bounds of documents, and read none."""
HYBRIDS = sorted(name for name in FAMILIES if tiny(TINY[name]).last_stack.replaced_by)


def documented():
    """Difference of packed rows of transformers by the name of a family, as the page states it."""
    table = DOCS[DOCS.index("| `model_type` |") :].partition("\n\n")[0]
    return {name: float(number) for name, number in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", table, re.MULTILINE)}


def test_the_table_has_every_hybrid_and_the_version_that_was_measured():
    assert sorted(documented()) == HYBRIDS
    assert f"transformers {'.'.join(transformers.__version__.split('.')[:2])}" in DOCS


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_their_packed_rows_leak_as_the_table_says_and_ours_do_not(model_type, tmp_path):
    torch.manual_seed(0)
    theirs, ours, _ = lend(build_theirs(model_type), tmp_path)
    batch = packed_batch([LENGTHS], vocab_size=VOCAB)
    texts = batch.tokens_BT[0].split(LENGTHS)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    longest = max(LENGTHS)
    with torch.no_grad():
        alone = torch.cat([theirs(input_ids=text[None]).logits[0] for text in texts])
        packed = theirs(input_ids=batch.tokens_BT, position_ids=batch.positions_BT).logits[0]
        found = ours(batch).logits_BTV[0, :, :VOCAB]
        # What the collator of transformers gives besides: nothing without a CUDA package, or at all.
        bounds = {
            "input_ids": batch.tokens_BT, "position_ids": batch.positions_BT, "seq_idx": batch.documents_BT,
            "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest,
        }  # fmt: skip
        if model_type in WITHOUT_BOUNDS:
            assert torch.equal(theirs(**bounds).logits[0], packed)
        else:
            with pytest.raises(ValueError, match="can't keep packed sequences apart without `causal_conv1d`"):
                theirs(**bounds)
        padded = torch.stack([torch.nn.functional.pad(text, (longest - len(text), 0)) for text in texts])
        real = torch.arange(longest) >= longest - torch.tensor(LENGTHS)[:, None]
        positions = (real.cumsum(dim=1) - 1).clamp(min=0)
        left = theirs(input_ids=padded, attention_mask=real.long(), position_ids=positions).logits[real]
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(left, alone, rtol=1e-5, atol=1e-5)
    assert float((packed - alone).abs().max()) == pytest.approx(documented()[model_type], rel=0.1)
