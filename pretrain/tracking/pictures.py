"""Pictures that a run draws: `step-00001000.png` in a folder, one file a step."""

import contextlib
import re
from pathlib import Path

from pretrain.io import make_dir, write_file

_NAME = re.compile(r"step-(\d{8,})\.png")


class Pictures:
    """A folder of pictures, which is made with the first. One process owns it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, step: int, png: bytes) -> Path:
        """Writes the picture of a step, in place of an earlier one of that step. Raises: DiskError."""
        path = make_dir(self._folder) / f"step-{step:08d}.png"
        write_file(path, png)
        return path

    def rewind(self, step: int) -> None:
        """Removes the pictures after a step, as far as the disk lets them go: they are drawn once more."""
        for path in self._folder.glob("step-*.png"):
            match = _NAME.fullmatch(path.name)
            if match and int(match[1]) > step:
                with contextlib.suppress(OSError):
                    path.unlink()
