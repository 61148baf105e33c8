"""Runs one command: its errors become one line and an exit code here, and nowhere else.

Errors of `pretrain.errors` end a command with one line and their exit code; `--debug` shows the traceback too.
"""

import os
import signal
import sys
from typing import Any

import typer

from pretrain.cli.commands import app
from pretrain.cli.options import UsageError
from pretrain.errors import EXIT_BUG, EXIT_OK, EXIT_USAGE, ConfigError, PretrainError
from pretrain.utils.process import discard_refused_stdout


def main() -> None:
    """Runs the command line and exits."""
    exit_code = run(sys.argv[1:])
    discard_refused_stdout()  # the exit code is settled
    if "torch" in sys.modules:
        from pretrain.dist import leave

        leave(exit_code)
    sys.exit(exit_code)


def run(arguments: list[str]) -> int:
    """Runs one command; returns its exit code. Errors are printed here and nowhere else."""
    rank = _own_rank()
    try:
        result = app(arguments, prog_name="pretrain", standalone_mode=False)
        sys.stdout.flush()  # a refused result is an error here, not when the interpreter exits
        return result if isinstance(result, int) else EXIT_OK
    except UsageError as error:
        return _show_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except PretrainError as error:
        _show(error, rank)
        return error.exit_code
    except SystemExit as ended:
        # typer turns every broken pipe into a silent 1, that of a server too, which is a bug of ours like any other.
        if isinstance(ended.__context__, OSError):
            return _show_unexpected(ended.__context__, rank)
        raise
    except Exception as error:
        return _show_unexpected(error, rank)


def _own_rank() -> int:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def _show_usage(error: Any) -> int:
    """Prints what is wrong with the command line; it is empty where nothing was given, and the help was printed."""
    text = error.format_message()
    if text:
        command = error.ctx.command_path if error.ctx else "pretrain"
        print(f"error: {command}: {text.rstrip('.')}; see `{command} --help`", file=sys.stderr)
    return EXIT_USAGE


def _show(error: PretrainError, rank: int) -> None:
    from pretrain.utils.log import redact

    if os.environ.get("PRETRAIN_DEBUG"):
        import traceback

        traceback.print_exc()
    # Every rank reads the same config; one line about it is enough.
    if rank == 0 or not isinstance(error, ConfigError):
        place = f"rank {rank}: " if rank else ""
        for line in str(error).splitlines():
            print(redact(f"error: {place}{line}"), file=sys.stderr)


def _show_unexpected(error: Exception, rank: int) -> int:
    """A traceback: it is our bug."""
    import traceback

    from pretrain.utils.log import redact

    print(redact("".join(traceback.format_exception(error))), file=sys.stderr)
    print(f"error: rank {rank}: this is a bug in pretrain ({type(error).__name__})", file=sys.stderr)
    return EXIT_BUG
