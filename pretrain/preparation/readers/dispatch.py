"""Reads slices of input files of any format into documents.

A reader takes (stream, slice, rule) and yields documents in order. Its memory is bounded by the
longest document that is allowed. Malformed input is an error, as a silent hole in a corpus is found
months later, if ever; with `on_error: skip` of its input a bad item is left out, and counted. A
reader continues behind a bad record; where it cannot, the rest of the slice is one bad item.
"""

from collections.abc import Callable, Iterable, Iterator
from pkgutil import resolve_name

from pretrain.config.prepare import InputConfig, PrepareConfig
from pretrain.errors import DataError
from pretrain.kinds.formats import FORMATS
from pretrain.preparation.filters import BadInputError, Document
from pretrain.preparation.input_parts import Slice
from pretrain.preparation.inputs.opening import InputStream
from pretrain.preparation.normalize import build_normalizers, normalize_document
from pretrain.preparation.readers.records import ReadRule


def read_slices(config: PrepareConfig, slices: Iterable[Slice]) -> Iterator[Document]:
    """Yields the documents of `slices` in order, normalized; without inputs, of the default corpus.

    Raises:
        DataError: Malformed input, or a file that changed since it was listed.
        OSError: The file system or a server failed; has the file as its filename.
    """
    fields = tuple(config.filter.require)
    rules = [ReadRule(one, config.kind, fields) for one in config.inputs]
    # The default corpus may not be UTF-8.
    rules = rules or [ReadRule(InputConfig(on_error="skip"), config.kind)]
    finishers = [_build_finisher(rule.config) for rule in rules]
    for piece in slices:
        rule = rules[piece.file.input]
        finish = finishers[piece.file.input]
        with InputStream(piece.file) as stream:
            try:
                documents: Iterator[Document] = resolve_name(FORMATS[piece.file.format].read)(stream, piece, rule)
                yield from map(finish, documents) if finish else documents
            except (DataError, OSError) as error:
                # A file that is being written reads as malformed: report the change instead.
                stream.check_unchanged()
                if isinstance(error, BadInputError):
                    lost_bytes = stream.left_bytes(piece.stop)
                    yield rule.leave_out(error, lost_bytes, lost_bytes=lost_bytes)
                    continue
                if isinstance(error, OSError) and error.filename is None:
                    text = error.strerror or str(error)
                    raise OSError(error.errno, text, piece.file.shown) from error
                raise
            stream.check_unchanged()


def _build_finisher(config: InputConfig) -> Callable[[Document], Document] | None:
    """Builds the last step of reading a document, by the input: its split, and normalization."""
    if config.normalize is None and config.split is None:
        return None
    normalizers = None if config.normalize is None else build_normalizers(config.normalize)

    def finish(document: Document) -> Document:
        document.split = config.split
        return document if normalizers is None else normalize_document(document, *normalizers)

    return finish
