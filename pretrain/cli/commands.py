"""The table of commands. Their functions import what is heavy when they run, so that `--help` answers at once."""

import os
from typing import Annotated

import typer

from pretrain.cli.data import data_app, prepare_command
from pretrain.cli.doctor import doctor_command, drill_command
from pretrain.cli.evaluate import average_command, evaluate_command
from pretrain.cli.launch import cancel_command, launch_app, logs_command, resubmit_command, status_command
from pretrain.cli.model import attention_command, export_command, generate_command, import_command, inspect_command
from pretrain.cli.plan import plan_command
from pretrain.cli.run import config_command, report_command, rollback_command, runs_command, train_command

app = typer.Typer(
    name="pretrain",
    help="Pretrain Transformers, from raw text to a released checkpoint.\n\n"
    "Example: pretrain launch local configs/run/quickstart.yaml --ranks 2",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("prepare")(prepare_command)
app.command("config")(config_command)
app.command("train")(train_command)
app.command("plan")(plan_command)
app.add_typer(launch_app, name="launch")
launch_app.command("status")(status_command)
launch_app.command("logs")(logs_command)
launch_app.command("cancel")(cancel_command)
launch_app.command("resubmit")(resubmit_command)
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
