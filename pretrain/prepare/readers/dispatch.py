"""Reads slices of input files of any format into documents."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pretrain.config.prepare import DataKind, InputConfig
from pretrain.errors import DataError
from pretrain.prepare.filters import Document
from pretrain.prepare.input_parts import Slice
from pretrain.prepare.inputs.opening import open_input
from pretrain.prepare.normalize import build_normalizers, normalize_document
from pretrain.prepare.readers import READERS
from pretrain.prepare.readers.rule import ReadRule


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads documents.

    Attributes:
        inputs: Inputs that `list_inputs` listed. Empty: the default corpus, whose files are skipped
            where they are not UTF-8, as no user chose them.
        kind: Kind of the documents.
        fields: Fields of records to keep, for filters.
    """

    inputs: tuple[InputConfig, ...] = ()
    kind: DataKind = "text"
    fields: tuple[str, ...] = ()

    def read(self, slices: Iterable[Slice]) -> Iterator[Document]:
        """Yields the documents of `slices` in order.

        Raises:
            DataError: Malformed input, or a file that changed since it was listed.
            OSError: The file system or a server failed; has the file as its filename.
        """
        rules = self._rules()
        finishers = [_finisher(rule.config) for rule in rules]
        for piece in slices:
            with open_input(piece.file) as stream:
                try:
                    documents = READERS[piece.file.format](stream, piece, rules[piece.file.input])
                    yield from finishers[piece.file.input](documents)
                except (DataError, OSError) as error:
                    # A file that is being written reads as a malformed one; say what is the matter.
                    stream.check_unchanged()
                    if isinstance(error, OSError) and error.filename is None:
                        raise OSError(error.errno, error.strerror or str(error), piece.file.shown) from error
                    raise
                stream.check_unchanged()

    def _rules(self) -> list[ReadRule]:
        if not self.inputs:
            return [ReadRule(InputConfig(), skip_undecodable=True)]
        return [ReadRule(config, self.kind, self.fields) for config in self.inputs]


def _finisher(config: InputConfig) -> Callable[[Iterator[Document]], Iterator[Document]]:
    """Returns what is done with the documents of an input once they are read."""
    if config.normalize is None and config.split is None:
        return lambda documents: documents
    both = None if config.normalize is None else build_normalizers(config.normalize)

    def finish(documents: Iterator[Document]) -> Iterator[Document]:
        for document in documents:
            document.split = config.split
            yield document if both is None else normalize_document(document, *both)

    return finish
