"""Rows in words: which documents, where, what of them is predicted, and what they say."""

import numpy as np

from pretrain.config.lengths import RowLengths
from pretrain.config.model import SpecialTokens
from pretrain.config.objective import ObjectiveConfig
from pretrain.data.bin_stream import BinStream
from pretrain.data.stream import TokenStream
from pretrain.datacheck.shown_rows import describe_rows
from pretrain.objective import RowContext
from pretrain.rows import TokenRows
from pretrain.shards.reader import ShardSet
from pretrain.tokenizer.file import load_tokenizer
from pretrain.tokenizer.roles import describe_vocabulary
from tests.helpers.tokenizers import train_bpe
from tests.unit.report.data_folders import make_folder, make_texts

EOS = "<|endoftext|>"
KINDS = {"text": "causal", "pairs": "seq2seq", "records": "supervised"}


def in_words(rows, tokenizer, kind="causal", document_mask=True):
    """Rows of one stack, or pairs."""
    eos = tokenizer.token_to_id(EOS)
    vocabulary = describe_vocabulary(tokenizer, SpecialTokens(eos=eos, start=eos))
    width = rows.tokens_BT.shape[1] - 1
    context = RowContext(0, vocabulary, RowLengths(width, width), 1, document_mask)
    return describe_rows(rows, ObjectiveConfig(kind=kind), context, tokenizer)


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
    return rows, in_words(rows, load_tokenizer(folder / "tokenizer.json"), KINDS[kind], **options)


def said(document):
    return "".join(stretch.text for stretch in document.target.stretches)


def brief(part):
    return [(stretch.kind, len(stretch.inputs), stretch.text) for stretch in part.stretches]


def test_the_rows_of_an_epoch_say_the_corpus(tmp_path):
    texts = make_texts(10)
    _, shown = described(tmp_path / "data", texts, packing="concat")
    whole = "".join(said(document) for row in shown for document in row.documents)
    assert whole.startswith(f"{EOS}".join(texts) + EOS)


def test_places_positions_and_targets_are_those_of_the_batch(tmp_path):
    _, shown = described(tmp_path / "data", ["a" * 9, "b" * 60, "c" * 4], packing="concat")
    first, second = shown[:2]
    assert [(d.target.first, d.target.num_tokens, d.target.position, d.goes_on) for d in first.documents] == [
        (0, 10, 0, False),
        (10, 30, 0, True),
    ]
    assert (first.starts_inside, second.starts_inside) == (False, True)
    assert said(first.documents[0]) == "a" * 9 + EOS and said(first.documents[1]) == "b" * 30
    # The end of a document says nothing of the next; a row's last token is followed by the next row's first.
    assert (first.num_targets, first.num_padding, first.num_tokens) == (39, 0, 40)
    places = [(d.target.first, d.target.num_tokens, d.target.position) for d in second.documents]
    assert places == [(0, 31, 0), (31, 5, 0), (36, 4, 0)]


def test_what_a_row_predicts_beyond_its_end_is_told(tmp_path):
    """Not at the end of a document, which predicts nothing of the next one."""
    _, (first, second) = described(tmp_path / "data", ["a" * 9, "b" * 60], packing="concat")
    assert (first.beyond, second.beyond) == ("b", EOS)
    _, (row, *_) = described(tmp_path / "other", ["a" * 39, "b" * 60], packing="concat")
    assert (row.beyond, row.num_targets) == (None, 39)


def test_documents_that_see_each_other_are_one_to_the_model(tmp_path):
    _, shown = described(tmp_path / "data", ["a" * 9, "b" * 60], packing="concat", document_mask=False)
    (document,) = shown[0].documents
    assert (document.target.first, document.target.num_tokens, document.target.position) == (0, 40, 0)
    assert said(document) == "a" * 9 + EOS + "b" * 30
    assert shown[0].num_targets == 40


def test_padding_belongs_to_no_document(tmp_path):
    rows, shown = described(tmp_path / "data", ["a" * 9, "b" * 50, "c" * 4])
    assert sorted(said(d) for row in shown for d in row.documents) == sorted(
        ["a" * 9 + EOS, "b" * 40, "b" * 10 + EOS, "c" * 4 + EOS]
    )
    for row, filled in zip(shown, np.minimum(rows.num_tokens_B, 40).tolist(), strict=True):
        assert row.num_padding == 40 - filled == 40 - sum(d.target.num_tokens for d in row.documents)
    (cut,) = [d for row in shown for d in row.documents if said(d) == "b" * 40]
    assert cut.goes_on


def test_what_is_learned_of_a_record_is_told_apart(tmp_path):
    record = [("ask ", False), ("answer", True), (" ask", False), ("answer", True)]
    _, (row,) = described(tmp_path / "data", [record], kind="records")
    (document,) = row.documents
    assert brief(document.target) == [
        ("context", 4, "ask "),
        ("learned", 6, "answer"),
        ("context", 4, " ask"),
        ("learned", 7, f"answer{EOS}"),
    ]
    assert row.num_targets == 13


def test_a_pair_lies_side_by_side(tmp_path):
    pairs = [("abc", "defgh"), ("i", "jk")]
    _, (row,) = described(tmp_path / "data", pairs, kind="pairs")
    sides = [(*brief(document.source), *brief(document.target)) for document in row.documents]
    assert sides == [
        (("source", 4, f"abc{EOS}"), ("target", 6, f"defgh{EOS}")),
        (("source", 2, f"i{EOS}"), ("target", 3, f"jk{EOS}")),
    ]
    assert (row.num_padding, row.num_source_padding, row.num_targets) == (31, 34, 9)
    assert (row.num_tokens, row.num_source_tokens, row.starts_with) == (40, 40, EOS)


def test_special_tokens_are_told_from_text_that_spells_them():
    """Places are of ids, not of words."""
    tokenizer = train_bpe(["ab"], 300)
    ids = [*tokenizer.encode(f"a{EOS}b").ids, tokenizer.token_to_id(EOS)]
    rows = TokenRows(np.array([[*ids, 0]], np.uint16), np.array([0]), np.array([0]), None)
    (row,) = in_words(rows, tokenizer)
    (stretch,) = row.documents[0].target.stretches
    assert stretch.text == f"a{EOS}b{EOS}"
    assert stretch.special == ((len(EOS) + 2, 2 * len(EOS) + 2),)


def test_a_row_that_was_skipped_is_padding_alone():
    rows = TokenRows(np.zeros((1, 9), np.uint16), np.array([5]), np.empty(0, np.int64), np.array([0]))
    (row,) = in_words(rows, train_bpe(["ab"], 300))
    assert (row.documents, row.num_padding, row.num_targets) == ((), 8, 0)


def test_a_character_that_a_border_cuts_does_not_move_what_follows():
    """Three bytes of one character, the first not learned, the others learned."""
    tokenizer = train_bpe(["ab"], 300)
    ids = tokenizer.encode("a\u20acb").ids
    assert len(ids) == 5
    tokens = np.array([[*ids, 0]], np.uint16)
    learned = np.array([[False, False, True, True, True, True]])
    rows = TokenRows(tokens, np.array([0]), np.array([0]), None, learned)
    (row,) = in_words(rows, tokenizer, "supervised")
    context, rest = row.documents[0].target.stretches
    assert (len(context.inputs), len(rest.inputs)) == (2, 3)
    assert context.text.startswith("a") and rest.text.endswith("b")
