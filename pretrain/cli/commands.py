"""The table of commands, and the run of one.

Functions of commands import heavy modules when they run, so that `--help` answers at once. Errors of
`pretrain.errors` end a command with one line and their exit code, here and nowhere else; `--debug` adds
the traceback.
"""

import os
import signal
import sys
import traceback
from typing import Annotated, Any

import typer

from pretrain.cli.data import data_app, prepare_command
from pretrain.cli.doctor import doctor_command, drill_command
from pretrain.cli.evaluate import average_command, evaluate_command
from pretrain.cli.launch import launch_app
from pretrain.cli.model import (
    attention_command,
    export_command,
    generate_command,
    import_command,
    inspect_command,
)
from pretrain.cli.options import UsageError
from pretrain.cli.plan import plan_command
from pretrain.cli.run import (
    config_command,
    report_command,
    rollback_command,
    runs_command,
    train_command,
)
from pretrain.errors import EXIT_BUG, EXIT_OK, EXIT_USAGE, ConfigError, PretrainError
from pretrain.utils.log import redact
from pretrain.utils.process import discard_refused_stdout
from pretrain.utils.status_line import status_line

app = typer.Typer(
    name="pretrain",
    help="Pretrain Transformers, from raw text to a released checkpoint.\n\n"
    "Example: pretrain launch local configs/run/quickstart.yaml --ranks 2",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of `--help`: from text to a run, its watching, models, and machines.
app.command("prepare")(prepare_command)
app.command("config")(config_command)
app.command("train")(train_command)
app.command("plan")(plan_command)
app.add_typer(launch_app, name="launch")
app.command("runs")(runs_command)
app.command("report")(report_command)
app.add_typer(data_app, name="data")
app.command("import")(import_command)
app.command("export")(export_command)
app.command("average")(average_command)
app.command("evaluate")(evaluate_command)
app.command("inspect")(inspect_command)
app.command("drill")(drill_command)
app.command("doctor")(doctor_command)
app.command("rollback")(rollback_command)
app.command("generate")(generate_command)
app.command("attention")(attention_command)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    # `deepspeed` passes --local_rank to every program it starts; LOCAL_RANK is what we read.
    if debug:
        os.environ["PRETRAIN_DEBUG"] = "1"


def main() -> None:
    """Runs the command line and exits."""
    exit_code = run(sys.argv[1:])
    discard_refused_stdout()  # the exit code is settled
    if "torch" in sys.modules:
        from pretrain.dist import leave

        leave(exit_code)
    sys.exit(exit_code)


def run(arguments: list[str]) -> int:
    """Runs one command; returns its exit code."""
    text = os.environ.get("RANK", "")
    rank = int(text) if text.isdecimal() else 0
    try:
        try:
            result = app(arguments, prog_name="pretrain", standalone_mode=False)
        finally:
            status_line().close()  # an error is printed below it
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
        # typer turns every broken pipe into a silent 1; that of a server is a bug of ours like any other.
        if isinstance(ended.__context__, OSError):
            return _show_unexpected(ended.__context__, rank)
        raise
    except Exception as error:
        return _show_unexpected(error, rank)


def _show_usage(error: Any) -> int:
    """Prints an error of the command line; without arguments it is empty, and the help was printed."""
    text = error.format_message()
    if text:
        command = error.ctx.command_path if error.ctx else "pretrain"
        print(f"error: {command}: {text.rstrip('.')}; see `{command} --help`", file=sys.stderr)
    return EXIT_USAGE


def _show(error: PretrainError, rank: int) -> None:
    if os.environ.get("PRETRAIN_DEBUG"):
        traceback.print_exc()
    # Every rank reads the same config; one line about it is enough.
    if rank == 0 or not isinstance(error, ConfigError):
        place = f"rank {rank}: " if rank else ""
        for line in str(error).splitlines():
            print(redact(f"error: {place}{line}"), file=sys.stderr)


def _show_unexpected(error: Exception, rank: int) -> int:
    """Prints a traceback: it is our bug."""
    print(redact("".join(traceback.format_exception(error))), file=sys.stderr)
    kind = type(error).__name__
    print(f"error: rank {rank}: this is a bug in pretrain ({kind})", file=sys.stderr)
    return EXIT_BUG
