"""Pictures of a run: where they lie, and which there are."""

import contextlib
import re
from pathlib import Path

from pretrain.utils.io import make_dir, write_file

ATTENTION = "attention"

"""The folder in that of a run."""


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
        for drawn_at, path in list_pictures(self._folder):
            if drawn_at > step:
                with contextlib.suppress(OSError):
                    path.unlink()


def list_pictures(folder: Path) -> list[tuple[int, Path]]:
    """Returns the step and path of each picture in a folder, which need not be there, in order of steps."""
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*.png"))
    return sorted((int(match[1]), path) for match, path in matches if match)
