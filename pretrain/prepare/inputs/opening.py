"""An input file, open: its bytes as stored and uncompressed, and whether it is still the file that was listed."""

import os
from typing import BinaryIO, Self

from pretrain.errors import DataError
from pretrain.prepare.inputs.compressed import decompress
from pretrain.prepare.inputs.remote import stat_remote
from pretrain.prepare.inputs.remote_file import open_remote
from pretrain.prepare.sources import InputFile


class InputStream:
    """An open input file; leaving its `with` closes it.

    Attributes:
        file: Which.
        stored: Its bytes as stored; can seek.
        plain: The same, uncompressed; can seek only where nothing is compressed.
    """

    __slots__ = ("file", "plain", "stored")

    def __init__(self, file: InputFile) -> None:
        """Opens a file that was listed; see `open_input`."""
        self.file = file
        # A Path would cost as much as reading a small file does.
        self.stored: BinaryIO = open_remote(file) if file.is_remote else open(file.path, "rb")  # noqa: PTH123, SIM115
        self.plain = decompress(self.stored, file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stored.close()

    def check_unchanged(self) -> None:
        """Checks that this is still the file that was listed.

        Raises:
            DataError: It has changed.
            OSError: The file system or the server failed.
        """
        if self.file.is_remote:
            now = stat_remote(self.file.path)
            size, version = now.size, now.version
        else:
            status = os.fstat(self.stored.fileno())
            size, version = status.st_size, str(status.st_mtime_ns)
        if size != self.file.size or version != self.file.version:
            raise DataError(
                "the file changed while it was being prepared",
                where=self.file.shown,
                fix="wait until it is complete, then start again",
            )


def open_input(file: InputFile) -> InputStream:
    """Opens a file that was listed. Whoever reads it to the end must `check_unchanged` then.

    Raises:
        DataError: A local file that has changed since. A server is asked only in the end, as each question costs.
        OSError: The file system or the server failed; has the path as its filename.
    """
    stream = InputStream(file)
    if file.is_remote:
        return stream
    try:
        stream.check_unchanged()
    except BaseException:
        stream.stored.close()
        raise
    return stream
