"""`paired`: two files; the n-th line of the one is the source, that of the other the target."""

from collections.abc import Iterator

from pretrain.errors import DataError
from pretrain.prepare.documents import Document
from pretrain.prepare.inputs.opening import InputStream, open_input
from pretrain.prepare.readers.framing import Lines
from pretrain.prepare.readers.lines import line_text
from pretrain.prepare.readers.rule import ReadRule
from pretrain.prepare.sources import Slice


def read_paired(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the pairs of two files; a side, or both, may be empty. Memory: a line of each.

    Raises:
        DataError: Malformed text, or files of which one has more lines.
        OSError: The other file cannot be read.
    """
    pair = stream.file.pair
    assert pair is not None
    with open_input(pair) as other:
        sources = Lines.of_slice(stream, piece, rule.limit)
        targets = Lines.of_slice(other, Slice(pair, 0, pair.size), rule.limit)
        left, right = iter(sources), iter(targets)
        while True:
            source_line, target_line = next(left, None), next(right, None)
            if source_line is None or target_line is None:
                break
            source, _ = line_text(source_line, sources, stream.file.shown)
            target, utf8 = line_text(target_line, targets, pair.shown)
            yield Document(target, utf8, sources.consumed_bytes + targets.consumed_bytes, source=source)
        if source_line is not None or target_line is not None:
            longer = sources if target_line is None else targets
            place = longer.place()
            raise DataError(
                f"{stream.file.shown} has {sources.count_all()} lines, {pair.shown} {targets.count_all()}: "
                "this line has no pair",
                where=place,
                fix="give files that pair line by line",
            )
        other.check_unchanged()
