"""Errors of malformed input that several readers have in common."""

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
