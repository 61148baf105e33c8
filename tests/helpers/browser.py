"""A real headless browser, where there is one: pictures of a page, and its elements after its script has run.

On Debian: apt install chromium.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.helpers.waiting import LIMIT_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--no-first-run", "--virtual-time-budget=3000")  # fmt: skip
"""As root there is no sandbox; containers have little /dev/shm; the budget is in the page's time, not the clock's."""


def find_browser() -> str | None:
    """Returns the program; None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _run(page: Path, address: str, *flags: str) -> subprocess.CompletedProcess:
    browser = find_browser()
    assert browser is not None, "ask find_browser first"
    with tempfile.TemporaryDirectory() as profile:
        url = f"{page.resolve().as_uri()}#{address}"
        command = [browser, *FLAGS, f"--user-data-dir={profile}", "--enable-logging=stderr", *flags, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)


def dump(page: Path, address: str = "") -> tuple[str, list[str]]:
    """Returns the elements of a page, opened with `#address`, as HTML, and what its console said."""
    done = _run(page, address, "--dump-dom")
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def take_picture(page: Path, output: Path, width: int, height: int) -> None:
    """Writes a PNG of the top of a page in a window of that size."""
    _run(page, "", f"--window-size={width},{height}", f"--screenshot={output.resolve()}")
