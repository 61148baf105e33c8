"""Rows in words: which documents, where, what of them is a target, and what they say."""

import numpy as np
import pytest

from pretrain.data.bin_stream import BinStream
from pretrain.data.shard_set import ShardSet
from pretrain.data.stream import TokenStream
from pretrain.data.tokenizer import load_tokenizer, train_bpe
from pretrain.report.data_rows import Stretch, describe_rows
from pretrain.rows import TokenRows
from tests.unit.report.data_folders import make_folder, make_texts

EOS = "<|endoftext|>"


def described(folder, documents, kind="text", seq_len=40, packing="bins", **options):
    """The first epoch of a folder in words."""
    index = make_folder(folder, documents, kind=kind)
    order = {"seq_len": seq_len, "lanes": 1, "block_samples": 1}
    if packing == "concat":
        stream = TokenStream(folder, index, "train", **order)
    else:
        source_len = seq_len if kind == "pairs" else None
        stream = BinStream(ShardSet(folder, index, "train"), source_len=source_len, **order)
    rows = stream.read(range(stream.order.epoch_start(1)))
    return rows, describe_rows(rows, load_tokenizer(folder / "tokenizer.json"), **options)


def said(document):
    return "".join(stretch.text for stretch in document.stretches)


def test_the_rows_of_an_epoch_say_the_corpus(tmp_path):
    texts = make_texts(10)
    _, shown = described(tmp_path / "data", texts, packing="concat")
    whole = "".join(said(document) for row in shown for document in row.documents)
    assert whole.startswith(f"{EOS}".join(texts) + EOS)


def test_places_positions_and_targets_are_those_of_the_batch(tmp_path):
    _, shown = described(tmp_path / "data", ["a" * 9, "b" * 60, "c" * 4], packing="concat")
    first, second = shown[:2]
    assert [(d.first, d.num_tokens, d.position, d.goes_on) for d in first.documents] == [
        (0, 10, 0, False),
        (10, 30, 0, True),
    ]
    assert (first.starts_inside, second.starts_inside) == (False, True)
    assert said(first.documents[0]) == "a" * 9 + EOS and said(first.documents[1]) == "b" * 30
    # The end of a document says nothing of the next; a row's last token is followed by the next row's first.
    assert (first.num_targets, first.num_padding, first.num_tokens) == (39, 0, 40)
    assert [(d.first, d.num_tokens, d.position) for d in second.documents] == [(0, 31, 0), (31, 5, 0), (36, 4, 0)]


def test_documents_that_see_each_other_have_positions_of_the_row(tmp_path):
    _, shown = described(tmp_path / "data", ["a" * 9, "b" * 60], packing="concat", document_mask=False)
    assert [d.position for d in shown[0].documents] == [0, 10]
    assert shown[0].num_targets == 40


def test_padding_belongs_to_no_document(tmp_path):
    rows, shown = described(tmp_path / "data", ["a" * 9, "b" * 50, "c" * 4])
    assert sorted(said(d) for row in shown for d in row.documents) == sorted(
        ["a" * 9 + EOS, "b" * 40, "b" * 10 + EOS, "c" * 4 + EOS]
    )
    for row, filled in zip(shown, np.minimum(rows.num_tokens, 40).tolist(), strict=True):
        assert row.num_padding == 40 - filled == 40 - sum(d.num_tokens for d in row.documents)
    (cut,) = [d for row in shown for d in row.documents if said(d) == "b" * 40]
    assert cut.goes_on


def test_what_is_learned_of_a_record_is_told_apart(tmp_path):
    record = [("ask ", False), ("answer", True), (" ask", False), ("answer", True)]
    _, (row,) = described(tmp_path / "data", [record], kind="records")
    (document,) = row.documents
    assert document.stretches == (
        Stretch("context", 4, "ask "),
        Stretch("learned", 6, "answer"),
        Stretch("context", 4, " ask"),
        Stretch("learned", 7, f"answer{EOS}"),
    )
    assert row.num_targets == 13


def test_a_pair_lies_side_by_side(tmp_path):
    pairs = [("abc", "defgh"), ("i", "jk")]
    _, (row,) = described(tmp_path / "data", pairs, kind="pairs")
    stretches = [[(s.kind, s.text, s.num_tokens) for s in document.stretches] for document in row.documents]
    assert stretches == [
        [("source", f"abc{EOS}", 4), ("target", f"defgh{EOS}", 6)],
        [("source", f"i{EOS}", 2), ("target", f"jk{EOS}", 3)],
    ]
    assert (row.num_padding, row.source_padding, row.num_targets) == (31, 34, 9)


def test_a_row_that_was_skipped_is_padding_alone():
    rows = TokenRows(np.zeros((1, 9), np.uint16), np.empty(0, np.int64), np.array([0]), np.array([5]))
    (row,) = describe_rows(rows, train_bpe(["ab"], 300))
    assert (row.documents, row.num_padding, row.num_targets) == ((), 8, 0)


def test_a_character_that_a_border_cuts_does_not_move_what_follows():
    """Three bytes of one character, the first not learned, the others learned."""
    tokenizer = train_bpe(["ab"], 300)
    ids = tokenizer.encode("a\u20acb").ids
    assert len(ids) == 5
    tokens = np.array([[*ids, 0]], np.uint16)
    learned = np.array([[False, False, True, True, True, True]])
    rows = TokenRows(tokens, np.array([0]), None, np.array([0]), learned)
    (row,) = describe_rows(rows, tokenizer)
    context, rest = row.documents[0].stretches
    assert (context.num_tokens, rest.num_tokens) == (2, 3)
    assert context.text.startswith("a") and rest.text.endswith("b")


@pytest.mark.parametrize("packing", ["concat", "bins"])
def test_targets_are_counted_as_the_loader_counts_them(tmp_path, packing):
    from pretrain.objective.causal import causal_rows

    rows, shown = described(tmp_path / "data", make_texts(30), packing=packing)
    assert sum(row.num_targets for row in shown) == causal_rows(rows, True).num_targets
