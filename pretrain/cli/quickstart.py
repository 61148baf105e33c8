"""`pretrain quickstart`: a real run from nothing, stopped once on purpose.

    prepare  ->  train on two ranks, stopped by SIGTERM (exit code 75)
             ->  the same command continues  ->  generate  ->  report

Each step is a command of its own, printed as a user would type it. A second start continues what
it finds, as each command does.
"""

import time
from typing import Annotated

import typer
from typer import Option

from pretrain.cli.wish_commands.command_steps import CommandSteps
from pretrain.errors import EXIT_RESUME_ME, LaunchError

RECIPE = "quickstart"
VOCABULARY = 2048
# Most functions of the corpus are methods, and a token of a name holds the space before it.
PROMPT = "class Reader:\n    def"


def quickstart_command(
    chat: Annotated[bool, Option("--chat", help="To a model that answers questions.")] = False,
    minutes: Annotated[float | None, Option(min=1, help="Training with --chat. Default: 30.")] = None,
    ranks: Annotated[int | None, Option(min=1, help="CPU ranks with --chat. Default: 2.")] = None,
    gpu: Annotated[bool, Option("--gpu", help="Train with --chat on a GPU.")] = False,
) -> None:
    """Run the whole path in this folder: prepare, train on 2 CPU ranks, stop, resume, generate.

    It writes data/stdlib and runs/quickstart, from the source of Python's own standard library:
    nothing is downloaded. With --chat it teaches a model to answer, from documentation and made-up
    texts, in the folders chat-MINUTES*. The same command continues what was interrupted.

    Example: pretrain quickstart
    """
    if chat:
        from pretrain.cli.wish_commands.dialogue import Budget, run_dialogue

        if gpu and ranks is not None:
            raise typer.BadParameter("--ranks are of a CPU, and --gpu is one process: leave one out")
        run_dialogue(Budget(minutes or 30, 1 if gpu else ranks or 2, gpu))
        return
    if gpu or not minutes is ranks is None:
        raise typer.BadParameter("--minutes, --ranks and --gpu go with --chat")
    from pretrain.config.load import load_config
    from pretrain.run.folder import RunDir
    from pretrain.utils.units import clock_time

    began = time.monotonic()
    config = load_config(RECIPE)
    run = RunDir(config.folder)
    stop_at = config.checkpoint.every_steps
    steps = CommandSteps()
    steps.check(["prepare", "--output", str(config.data.path), "--vocab-size", str(VOCABULARY)])
    train = ["launch", "local", RECIPE, "--ranks", "2"]
    if run.newest_step() < stop_at:
        # A commit is never taken back, unlike the metrics of a run that was killed: no stale row.
        code = steps.run(train, stop=lambda: run.newest_step() >= stop_at)
        if code != EXIT_RESUME_ME:
            text = f"the stopped run ended with exit code {code}"
            raise typer.Exit(code) if code > 0 else LaunchError(text)
        if run.newest_step() <= stop_at:
            raise LaunchError(f"the stop left no checkpoint after that of step {stop_at}")
        committed = f"step {run.newest_step()} is committed, the same command continues"
        print(f'\n-- exit code {code}, "resume me": {committed}', flush=True)
    if run.newest_step() < config.train.steps:
        steps.check(train)
    else:
        print(f"\n-- {run.path} is finished; remove the folder to train it again", flush=True)
    # So small a model copies on and on: a rare token that is drawn once, and what it has said.
    drawn = ["--top-p", "0.9", "--repetition-penalty", "1.1"]
    steps.check(["generate", str(run.path), "--prompt", PROMPT, *drawn])
    page = run.path / "report.html"
    steps.check(["report", str(run.path), "--output", str(page)])
    print(f"\n-- the quickstart is over, after {clock_time(time.monotonic() - began)}. Curves and facts: {page}")
    print("-- now your own text: pretrain prepare --input FOLDER --output data/mine")
    print("   then a config: pretrain recipes cp quickstart mine.yaml, and data.path=data/mine", flush=True)
