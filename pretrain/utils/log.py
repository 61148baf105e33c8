"""Rank-aware logging on the standard `logging` module.

    setup_logging(rank, ...)  ->  rank 0: stderr (through rich on a terminal) and its file; other
                                  ranks: their file
    quiet_libraries()         ->  removes the handlers of libraries; their warnings come to ours
    redact(text)              ->  values of secret environment variables and wandb keys become ***
    printable(text)           ->  control characters become escapes, which a terminal does not obey

Code logs with `logging.getLogger(__name__)`. Every line that a handler of ours writes is redacted
and printable, tracebacks too. A closed or broken stderr never raises: the run continues without
it, see `pretrain.utils.process`. Nor does a full disk: lines are missing in the file then. Metrics
are not logged here, see `pretrain.tracking`.
"""

import contextlib
import logging
import netrc
import os
import re
import sys
import warnings
from pathlib import Path

from pretrain.utils.io import disk_errors
from pretrain.utils.process import guard_stderr
from pretrain.utils.status_line import in_notebook, status_line, stderr_console

OWN_LOGGERS = ("pretrain", "pretrain_launch")
NOISY_LIBRARIES = ("DeepSpeed", "accelerate", "torch", "transformers", "webdataset")
WANDB_HOST = "api.wandb.ai"

_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_WANDB_KEY = re.compile(r"\bwandb_v\d+_\w+")
# Shorter values ("1", "true") are switches such as TOKENIZERS_PARALLELISM, and appear in any text.
_SHORTEST_SECRET = 8


def netrc_login(host: str) -> tuple[str, str] | None:
    """Returns user and password of `host` in the user's netrc file, or None."""
    path = os.environ.get("NETRC") or Path("~/.netrc").expanduser()
    try:
        entry = netrc.netrc(str(path)).authenticators(host)
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return None
    return (entry[0], entry[2]) if entry else None


def _secrets() -> list[str]:
    """Returns the values to hide, longest first: one may contain another."""
    values = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    values.add((netrc_login(WANDB_HOST) or ("", ""))[1])
    return sorted((value for value in values if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)


def redact(text: str, secrets: list[str] | None = None) -> str:
    """Replaces every secret in `text` by `***`: the environment's, unless given (50 us)."""
    for secret in _secrets() if secrets is None else secrets:
        text = text.replace(secret, "***")
    return _WANDB_KEY.sub("***", text)


def printable(text: str, keep: str = "") -> str:
    """Escapes the control characters of a text, but for those to keep.

    Names, reasons and tensors of a run or a model of others may hold sequences that set a
    terminal's title or clipboard, or hide a line.
    """
    return "".join(c if c in keep or c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class _RedactingFormatter(logging.Formatter):
    """Redacts the finished line, and makes it printable: arguments, tracebacks and stack dumps too."""

    def __init__(self, pattern: str, date_format: str | None = None) -> None:
        super().__init__(pattern, date_format)
        self._hidden = _secrets()

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact(super().format(record), self._hidden), keep="\n\t")


class _StderrHandler(logging.StreamHandler):
    """Writes to the current `sys.stderr`."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _is_line(record: logging.LogRecord) -> bool:
    """Returns whether a record is a line of the terminal; a phase goes to its status line instead."""
    if getattr(record, "is_phase", False):
        status_line().enter(redact(record.getMessage()))
        return False
    return True


def _stderr_handler() -> logging.Handler:
    if not sys.stderr.isatty() or in_notebook():
        handler: logging.Handler = _StderrHandler()
        handler.setFormatter(_RedactingFormatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
        return handler
    from rich.logging import RichHandler

    console = stderr_console()
    # rich's own tracebacks would print source lines past the formatter, and so past redaction.
    handler = RichHandler(console=console, rich_tracebacks=False, show_path=False, log_time_format="%H:%M:%S")
    handler.setFormatter(_RedactingFormatter("%(message)s"))
    handler.addFilter(_is_line)
    return handler


class _FileHandler(logging.FileHandler):
    """Drops lines that the disk refuses, reports that once, and writes again when there is room."""

    _has_said = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, or drops it where the disk refuses, and marks the gap."""
        try:
            if self.stream is None:
                self.stream = self._open()
                self.stream.write("\n(lines are missing here: the disk refused them)\n")
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is logging's)
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        stream = self.stream
        self.stream = None
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
        if not self._has_said:
            self._has_said = True
            text = f"{self.baseFilename}: cannot be written: {error.strerror}"
            print(redact(f"{text}; lines are missing there until it can be"), file=sys.stderr, flush=True)


def _file_handler(log_file: Path, rank: int, world_size: int) -> logging.Handler:
    with disk_errors("open the log file", log_file):
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = _FileHandler(log_file, encoding="utf-8")
    place = f"rank {rank}/{world_size}"
    handler.setFormatter(_RedactingFormatter(f"%(asctime)s {place} %(levelname)s %(name)s: %(message)s"))
    return handler


def setup_logging(rank: int, world_size: int, log_file: Path | None = None) -> None:
    """Sends log records to the handlers of this rank. Calling it again replaces these.

    Rank 0 writes to stderr, and appends to `log_file` as well if there is one. Other ranks write to
    their file only; before the run folder is known (`log_file` None) their errors go to stderr, so
    that none is lost. Raises: DiskError: The file cannot be opened.
    """
    guard_stderr()
    handlers = [] if log_file is None else [_file_handler(log_file, rank, world_size)]
    if rank == 0 or log_file is None:
        handlers.append(_stderr_handler())
        handlers[-1].setLevel(logging.NOTSET if rank == 0 else logging.ERROR)
    root = logging.getLogger()
    for handler in list(root.handlers):
        if getattr(handler, "installed_by_pretrain", False):
            root.removeHandler(handler)
            handler.close()
    for handler in handlers:
        handler.installed_by_pretrain = True  # type: ignore[attr-defined]
        root.addHandler(handler)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(True)
    # requests filters it, unless another thread restores the filters of before meanwhile.
    warnings.filterwarnings("ignore", message="SOCKS support in urllib3")
    quiet_libraries()


def _is_news(record: logging.LogRecord) -> bool:
    """Leaves out DeepSpeed's warning of optimizers other than its own: ours are tested at every stage."""
    return "untested optimizer" not in record.getMessage()


def quiet_libraries(*libraries: str) -> None:
    """Sends warnings of noisy libraries, and of others, through our handlers instead of theirs; drops the rest.

    DeepSpeed and torch give their loggers stream handlers of their own when they are imported
    (DeepSpeed's writes to stdout, where `--json` output belongs), on every rank. So call this again
    after importing them. Loggers that the user turned on with TORCH_LOGS stay as they are.
    """
    noisy = (*NOISY_LIBRARIES, *libraries)
    for name in list(logging.root.manager.loggerDict):
        library = name.partition(".")[0]
        if library not in noisy or (library == "torch" and "TORCH_LOGS" in os.environ):
            continue
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                logger.removeHandler(handler)
                logger.propagate = True
    for name in noisy:
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.WARNING))
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    # torchao says that kernels for other GPUs do not load, and torch that torchao calls what is deprecated.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # torch's profiler writes to stderr by itself, on a machine without a GPU an error of each trace.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Says of every compiled block with selective checkpointing that it has a policy.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
