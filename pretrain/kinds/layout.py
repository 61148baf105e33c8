"""Record of a layout of data: fields of a record, documents, rows. One file each in `kinds/layouts/`."""

from dataclasses import dataclass
from typing import Literal

# Columns of a shard's table (shards/writer.py, shards/image_writer.py).
TOKEN_COLUMNS = 6
BESIDE_COLUMNS = TOKEN_COLUMNS + 2  # with a value for each token
SOURCE_COLUMNS = 2 * TOKEN_COLUMNS
IMAGE_COLUMNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Entry of the registry; heavy parts are named `module:function` and imported at their use."""

    # Records of an input.
    document: str = "pretrain.preparation.readers.records:build_text"
    """`build(record, input_config, consumed_bytes) -> Document`; raises RecordError."""
    pieces: str = "pretrain.preparation.text_pieces:text_pieces"
    """`divide(document, split_rule) -> list[TextPiece]`, one a span."""
    fields: tuple[str, ...] = ()  # options of an input that name the fields of a record
    optional: tuple[str, ...] = ()  # likewise, of fields that may be absent
    library_format: str = ""  # by which Python's library is read without inputs; empty: not at all
    cuts_texts: bool = False  # `max_text_tokens` applies
    filtered: bool = False  # filters of texts judge it
    normalized: bool = True  # `normalize` of an input may change its texts
    begun: bool = False  # begins with the start token of a given tokenizer, where texts do in its released model

    # Documents in shards.
    running_text: bool = False  # may be cut anywhere: a text continues in the next row
    has_source: bool = False  # a source beside each document, the target
    loss_mask: bool = False  # 1 where a token is a target
    two_sides: bool = False  # two answers to a prompt; the second has REJECTED in its mask
    judged: bool = False  # wanted, or not; all tokens of the latter have REJECTED in their mask
    labelled: bool = False  # a label for each token
    labels_words: bool = False  # labels are of words, not of the whole document
    names_labels: bool = False  # the index names the labels
    most_mark: int = 0  # largest mark of a token (rows.py), in the place of labels; 0: there are none
    many_choices: bool = False  # several documents, together
    images: bool = False  # an image is one document, and counts as one token
    captions: bool = False  # their texts are in a sidecar
    table_columns: int = TOKEN_COLUMNS
    length_columns: int = 1  # of the lengths of its documents

    # Rows.
    whole: bool = False  # a document is in a row whole, or not at all
    beginning: bool = False  # of a longer document only the beginning is in a row
    too_long: str = ""
    """Treatment of documents longer than a row. Empty: a text continues in the next row."""
    no_targets: str = ""
    """Reason and remedy of rows without a target. Empty: they follow from the objective."""

    @property
    def has_tokenizer(self) -> bool:
        """True if the data have tokens: all but images without captions."""
        return self.captions or not self.images

    @property
    def leaves_out(self) -> bool:
        """True if documents longer than a row are in none."""
        return self.has_source or self.whole

    @property
    def has_labels(self) -> bool:
        """True if tokens have labels, or marks in their place."""
        return self.labelled or self.most_mark > 0

    @property
    def packing(self) -> Literal["concat", "bins"]:
        """Default packing: `concat` for text and images, and `bins` for documents that must not be cut."""
        return "concat" if self.running_text or self.images else "bins"
