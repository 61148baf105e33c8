"""The table of commands, and the run of one.

Functions of commands import heavy modules when they run, so that `--help` answers at once. Errors
of `pretrain.errors` end a command with one line and their exit code, here and nowhere else;
`--debug` adds the traceback.
"""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from pretrain import __version__
from pretrain.cli.attention_pictures import attention_command
from pretrain.cli.chat import chat_command
from pretrain.cli.data import data_app, prepare_command
from pretrain.cli.doctor import doctor_command, drill_command
from pretrain.cli.embed import embed_command
from pretrain.cli.evaluate import average_command, distill_command, evaluate_command
from pretrain.cli.launch import launch_app
from pretrain.cli.model import (
    classify_command,
    export_command,
    generate_command,
    import_command,
    inspect_command,
    serve_command,
)
from pretrain.cli.options import CommandGroup, UsageError
from pretrain.cli.plan import plan_command
from pretrain.cli.quickstart import quickstart_command
from pretrain.cli.recipes import presets_command, recipes_app
from pretrain.cli.released_runs import continue_command, release_command, verify_release_command
from pretrain.cli.run import (
    config_command,
    report_command,
    rollback_command,
    runs_command,
    train_command,
)
from pretrain.cli.scale import scale_app
from pretrain.cli.wish_commands.finetune import finetune_command
from pretrain.cli.wish_commands.new_models import pretrain_command, translate_command
from pretrain.cli.wish_commands.reproduce import reproduce_command
from pretrain.errors import EXIT_BUG, EXIT_OK, EXIT_USAGE, ConfigError, OutOfMemoryError, PretrainError
from pretrain.utils.log import printable, redact
from pretrain.utils.process import discard_refused_stdout
from pretrain.utils.status_line import status_line

app = CommandGroup(
    "Pretrain Transformers, from raw text to a released checkpoint.\n\n"
    "Example: pretrain launch local configs/run/quickstart.yaml --ranks 2",
    name="pretrain",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_PANELS: dict[str, dict[str, Any]] = {
    "Begin": {
        "quickstart": quickstart_command,
        "pretrain": pretrain_command,
        "translate": translate_command,
        "finetune": finetune_command,
    },
    "Prepare data": {"prepare": prepare_command, "data": data_app},
    "Train": {
        "presets": presets_command,
        "config": config_command,
        "plan": plan_command,
        "scale": scale_app,
        "train": train_command,
        "distill": distill_command,
        "recipes": recipes_app,
        "launch": launch_app,
    },
    "Follow runs": {"runs": runs_command, "report": report_command, "rollback": rollback_command},
    "Use models": {
        "generate": generate_command,
        "chat": chat_command,
        "classify": classify_command,
        "embed": embed_command,
        "evaluate": evaluate_command,
        "attention": attention_command,
        "inspect": inspect_command,
        "average": average_command,
        "import": import_command,
        "export": export_command,
        "serve": serve_command,
    },
    "Share runs": {
        "release": release_command,
        "continue": continue_command,
        "verify-release": verify_release_command,
        "reproduce": reproduce_command,
    },
    "Check machines": {"doctor": doctor_command, "drill": drill_command},
}
"""Commands in the order of `--help`; typer puts groups last in their panel."""

for panel, commands in _PANELS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"pretrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    extend: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="Import a module that a run or config names under extend."),
    ] = None,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    # `deepspeed` passes --local_rank to every program it starts; LOCAL_RANK is what we read.
    if debug:
        os.environ["PRETRAIN_DEBUG"] = "1"
    if extend:
        from pretrain.config.load import import_extensions

        import_extensions(extend, "--extend")


def main() -> None:
    """Runs the command line and exits."""
    exit_code = run(sys.argv[1:])
    discard_refused_stdout()  # the exit code is settled
    if "torch" in sys.modules or exit_code == 128 + signal.SIGINT:
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
        if shortage := OutOfMemoryError.of(error):
            _show(shortage, rank)
            return shortage.exit_code
        return _show_unexpected(error, rank)


def _show_usage(error: Any) -> int:
    """Prints an error of the command line; without arguments it is empty, and the help was printed."""
    text = _with_key(error) or error.format_message().removesuffix(" (Possible options: --help)")
    if text:
        command = error.ctx.command_path if error.ctx else "pretrain"
        print(f"error: {command}: {text.rstrip('.')}; see `{command} --help`", file=sys.stderr)
    return EXIT_USAGE


_MAIN_SECTIONS = {"", "run", "init", "data", "model", "batch", "train", "eval", "engine", "optim"}


def _with_key(error: Any) -> str:
    """Returns the text of an unknown option that is a key, or an option of another command."""
    option = getattr(error, "option_name", "")
    if not option or error.ctx is None:
        return ""
    command = error.ctx.command
    is_prepare = command.name == "prepare"
    if not (is_prepare or any(param.name == "overrides" for param in command.params)):
        return ""
    unknown = f"No such option: {option}"
    if option == "--ranks" and command.name == "plan":
        return f"{unknown}: write --gpus-per-node"
    owners = list(_commands_with(option, error.ctx.find_root().command))
    # `--ranks` is no profile.ranks: an option of a command is taken for the main keys only.
    if key := _key_of(option, "prepare" if is_prepare else "run", only_main=bool(owners)):
        after = " after a CONFIG" if is_prepare else ""
        return f"{unknown}: write {key}=VALUE{after}"
    launches = [owner for owner in owners if owner.startswith("launch ")]
    return f"{unknown}: `pretrain {launches[0]}` has it" if launches else ""


def _key_of(option: str, root: str, *, only_main: bool) -> str:
    """Returns the key of a config that an option is named like, one of the fewest sections; empty: there is none."""
    from pretrain.config.fields import ROOTS, known_keys

    name = option.lstrip("-").replace("-", "_")
    keys = [key for key in known_keys(ROOTS[root]) if f".{key}".endswith(f".{name}")]
    if only_main:
        keys = [key for key in keys if key.rpartition(".")[0] in _MAIN_SECTIONS]
    return min(keys, key=lambda key: key.count("."), default="")


def _commands_with(option: str, command: Any, path: str = "") -> Iterator[str]:
    """Yields the commands that have an option, as they are typed."""
    if any(option in param.opts for param in command.params):
        yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands_with(option, inner, f"{path} {name}".strip())


def _show(error: PretrainError, rank: int) -> None:
    if os.environ.get("PRETRAIN_DEBUG"):
        traceback.print_exc()
    # Every rank reads the same config; one line about it is enough.
    if rank == 0 or not isinstance(error, ConfigError):
        place = f"rank {rank}: " if rank else ""
        for line in filter(None, str(error).split("\n")):  # UnreadError has no message
            print(printable(redact(f"error: {place}{line}")), file=sys.stderr)


def _show_unexpected(error: Exception, rank: int) -> int:
    """Prints a traceback: it is our bug."""
    print(printable(redact("".join(traceback.format_exception(error))), keep="\n"), file=sys.stderr)
    kind = type(error).__name__
    print(f"error: rank {rank}: this is a bug in pretrain ({kind})", file=sys.stderr)
    return EXIT_BUG
