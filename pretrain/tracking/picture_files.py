"""Picture files: formats, encoding of a figure, and the folder of a run's pictures."""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.errors import ConfigError
from pretrain.utils.io import make_dir, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = {".png": "png", ".svg": "svg", ".pdf": "pdf"}
_NO_DATE: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""Metadata without a time: the same figure gives the same bytes."""
ATTENTION = "attention"
"""Folder of pictures in a run folder."""
_NAME = re.compile(r"step-([0-9]{8,})\.png")


def check_format(path: Path) -> str:
    """Returns the format of a picture by its suffix. Raises: ConfigError."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(
            f"--output {path.name}: no picture format is called {path.suffix!r}",
            fix=f"use {', '.join(FORMATS)}",
        )
    return FORMATS[path.suffix.lower()]


@contextlib.contextmanager
def plain_style(**settings: Any) -> Iterator[None]:
    """Applies matplotlib's defaults and `settings`, and no matplotlibrc of the user."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a matplotlibrc of the user would change the picture
        # A fixed salt: ids in an SVG are random otherwise.
        matplotlib.rcParams.update({"svg.hashsalt": "pretrain"} | settings)
        yield


def encode_figure(figure: "Figure", image_format: str) -> bytes:
    """Returns a figure as a file, the same bytes each time. Call it within `plain_style`."""
    content = io.BytesIO()
    figure.savefig(content, format=image_format, metadata=_NO_DATE[image_format])
    return content.getvalue()


class Pictures:
    """A folder of pictures, made with the first one. One process owns it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, step: int, png: bytes) -> Path:
        """Writes the picture of a step, in place of an earlier one. Raises: DiskError."""
        path = make_dir(self._folder) / f"step-{step:08d}.png"
        write_file(path, png)
        return path

    def rewind(self, step: int) -> None:
        """Removes the pictures after a step, which are drawn again, as far as the disk allows."""
        for drawn_at, path in list_pictures(self._folder):
            if drawn_at > step:
                with contextlib.suppress(OSError):
                    path.unlink()


def list_pictures(folder: Path) -> list[tuple[int, Path]]:
    """Returns step and path of each picture in a folder, if there is one, in order of steps."""
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*.png"))
    return sorted((int(match[1]), path) for match, path in matches if match)
