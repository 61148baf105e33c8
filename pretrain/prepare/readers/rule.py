"""Rule by which an input is read, and errors that several readers share."""

from dataclasses import dataclass

from pretrain.config.prepare import DataKind, InputConfig
from pretrain.errors import DataError


def too_long(what: str, limit: int, where: str) -> DataError:
    """Builds the error of a line or document that is longer than the limit."""
    return DataError(
        f"{what} is longer than max_document_bytes={limit}",
        where=where,
        fix="raise it (--max-document-bytes, or max_document_bytes of the input), which costs memory, or cut the text",
    )


def decode(utf8: bytes, name: str, offset: int) -> str:
    """Decodes text that begins at byte `offset` of `name`. Raises: DataError, with the byte that is not UTF-8."""
    try:
        return utf8.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(error, name, offset) from None


def not_utf8(error: UnicodeDecodeError, name: str, offset: int) -> DataError:
    """Builds the error of bytes that are not UTF-8; what was decoded begins at byte `offset` of `name`."""
    byte = error.object[error.start]
    return DataError(
        f"invalid UTF-8: byte 0x{byte:02x} ({error.reason})",
        where=f"{name}@{offset + error.start}",
        fix="convert the file to UTF-8",
    )


@dataclass(frozen=True, slots=True)
class ReadRule:
    """Options of a reader for one input.

    Attributes:
        config: The input.
        kind: Kind of the documents.
        fields: Fields of records that filters ask for.
        skip_undecodable: Pass over a file that is not UTF-8 instead of failing; for the default corpus only.
    """

    config: InputConfig
    kind: DataKind = "text"
    fields: tuple[str, ...] = ()
    skip_undecodable: bool = False

    @property
    def limit(self) -> int:
        """Bytes that a document, and a line, may have."""
        return self.config.max_document_bytes

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Fields of a record that its document is made of."""
        config = self.config
        if self.kind == "text":
            return (config.text_field,)
        if self.kind == "pairs":
            return (config.source_field, config.target_field)
        if self.kind == "classes":
            return (config.text_field, config.label_field)
        if self.kind == "tags":
            return (config.words_field, config.tags_field)
        return (config.messages_field,) if config.messages_field else (config.prompt_field, config.response_field)
