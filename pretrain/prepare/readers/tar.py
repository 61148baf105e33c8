"""Members of a tar, in order, read forward only, and nothing of it taken on trust.

Not tarfile's own reading: that takes a tar which was cut off between two members, or before its end mark, for a whole
one. Nothing is extracted: names are keys here, never paths.
"""

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from pretrain.errors import DataError

SKIP_BYTES = 2**20
MAX_NAME_BYTES = 2**20
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_NAMED_NEXT = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_PASSED_OVER = (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK, tarfile.DIRTYPE)


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in a tar.

    Attributes:
        name: Its name.
        size: Bytes.
        offset: Where its header begins in the tar, uncompressed.
    """

    name: str
    size: int
    offset: int


class TarMembers:
    """The regular files of an open tar."""

    def __init__(self, plain: BinaryIO, name: str) -> None:
        """Takes over an open tar, at its beginning; `name` is what it is called in errors."""
        self._plain, self._name = plain, name
        self.position = 0
        self._body_left = self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        """Yields the members; what is not read of one is passed over.

        Raises:
            DataError: A tar that is damaged or cut off, or a member that is no regular file.
        """
        overrides: dict[str, str] = {}
        while True:
            self._pass_over(self._body_left + self._padding)
            offset = self.position
            info = self._read_header()
            if info is None:
                return
            self._body_left, self._padding = info.size, -info.size % tarfile.BLOCKSIZE
            if info.type in _NAMED_NEXT:
                overrides |= self._read_overrides(info, offset)
                continue
            if info.type not in _REGULAR and info.type not in _PASSED_OVER:
                raise self._error(f"member {info.name!r} is not a regular file", offset, "make the tar without links")
            if info.type in _REGULAR:
                size = int(overrides.get("size", info.size))
                self._body_left, self._padding = size, -size % tarfile.BLOCKSIZE
                yield Member(overrides.get("path", info.name), size, offset)
            if info.type != tarfile.XGLTYPE:
                overrides = {}

    def read(self, num_bytes: int) -> bytes:
        """Reads up to `num_bytes` of the last member; empty at its end. Raises: DataError, where the tar is cut off."""
        wanted = min(num_bytes, self._body_left)
        data = self._plain.read(wanted)
        if len(data) < wanted:
            raise self._cut_off()
        self._body_left -= wanted
        self.position += wanted
        return data

    def open_body(self) -> BinaryIO:
        """Returns the last member as a file."""
        return cast(BinaryIO, io.BufferedReader(_Body(self), io.DEFAULT_BUFFER_SIZE))

    def _read_header(self) -> tarfile.TarInfo | None:
        """Reads a header; returns None at the end mark, after which there must be nothing."""
        block = self._plain.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            raise self._cut_off()
        if not any(block):
            while rest := self._plain.read(SKIP_BYTES):
                if rest.strip(b"\0"):
                    raise self._error("data after the end of the tar", self.position, "give joined tars one by one")
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise self._error(f"damaged, or not a tar: {error}", self.position, "copy the file again") from None
        self.position += tarfile.BLOCKSIZE
        if info.size < 0:
            raise self._error("damaged: a member of negative size", self.position, "copy the file again")
        return info

    def _read_overrides(self, info: tarfile.TarInfo, offset: int) -> dict[str, str]:
        """Reads a member that holds a long name, or the attributes, of the next."""
        if info.size > MAX_NAME_BYTES:
            raise self._error(f"a name or attributes of {info.size} bytes", offset, "make the tar anew")
        data = self.read(info.size)
        if info.type == tarfile.GNUTYPE_LONGNAME:
            return {"path": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
        try:
            found = dict(_pax_records(data))
            if int(found.get("size", 0)) < 0:
                raise ValueError("a negative size")
        except ValueError:
            raise self._error("damaged: malformed attributes", offset, "copy the file again") from None
        if any(key.startswith("GNU.sparse.") for key in found):
            raise self._error("a sparse member", offset, "make the tar without --sparse")
        return found

    def _pass_over(self, num_bytes: int) -> None:
        while num_bytes > 0:
            data = self._plain.read(min(num_bytes, SKIP_BYTES))
            if not data:
                raise self._cut_off()
            num_bytes -= len(data)
            self.position += len(data)

    def _cut_off(self) -> DataError:
        return self._error("the tar is cut off: it has no end mark", self.position, "copy the file again")

    def _error(self, what: str, offset: int, fix: str) -> DataError:
        return DataError(what, where=f"{self._name}@{offset}", fix=fix)


def _pax_records(data: bytes) -> Iterator[tuple[str, str]]:
    """Yields the attributes, each written as `LENGTH KEY=VALUE` and a line end. Raises: ValueError."""
    while data.strip(b"\0"):
        digits, _, _ = data.partition(b" ")
        length = int(digits)
        key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if not equals or data[length - 1 : length] != b"\n":
            raise ValueError("not an attribute")
        yield key.decode(), value.decode("utf-8", "surrogateescape")
        data = data[length:]


class _Body(io.RawIOBase):
    """The bytes of the last member."""

    def __init__(self, members: TarMembers) -> None:
        self._members = members

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._members.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
