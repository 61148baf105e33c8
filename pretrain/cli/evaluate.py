"""`pretrain average` and `pretrain evaluate`."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from pretrain.cli.options import Device, Json, ModelPath


def average_command(
    whats: Annotated[list[Path], typer.Argument(metavar="RUN|CHECKPOINT...", help="A run, or several checkpoints.")],
    output: Annotated[Path, typer.Option(help="Model folder to write.")],
    last: Annotated[int | None, typer.Option(min=1, help="Average the N newest checkpoints.")] = None,
    as_json: Json = False,
) -> None:
    """Make a model folder of the mean weights of several checkpoints, to evaluate, export, or train on from.

    Example: pretrain average runs/multi30k --last 10 --output models/multi30k
    """
    import json
    from dataclasses import asdict

    from pretrain.artifact.average import average_checkpoints

    averaged = average_checkpoints(whats, last, output)
    if as_json:
        print(json.dumps({"kind": "model", "path": str(output), **asdict(averaged)}, indent=2))
        return
    for checkpoint in averaged.checkpoints:
        print(checkpoint)
    print(f"{output}: the mean of these {len(averaged.checkpoints)}, {averaged.arithmetic}")


def evaluate_command(
    model: ModelPath,
    data: Annotated[list[str] | None, typer.Option(help="Prepared data. Default: the run's.")] = None,
    split: Annotated[str, typer.Option(help="Split of the data: validation or train.")] = "validation",
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens per row. Default: the run's, or 1024.")] = None,
    source_len: Annotated[int | None, typer.Option(min=1, help="Pairs: tokens per source row.")] = None,
    source: Annotated[Path | None, typer.Option(help="Texts to translate, one per line; .gz too.")] = None,
    reference: Annotated[Path | None, typer.Option(help="Reference translations, line by line.")] = None,
    preprocessed: Annotated[
        bool, typer.Option("--preprocessed", help="Normalize both like the training text.")
    ] = False,
    beams: Annotated[
        str | None,
        typer.Option("--beams", "--beam", help="Beam sizes, such as 1,5; 1 is greedy. Default: the model's."),
    ] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Above 0 favours long translations.")] = None,
    early_stopping: Annotated[str | None, typer.Option(help="Beam search stops early: true, false, never.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of a translation or split.")] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per batch.")] = 8192,
    output: Annotated[Path | None, typer.Option(help="File for the translations.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval-harness, such as a,b.")] = None,
    task_path: Annotated[Path | None, typer.Option(help="Folder of task files (YAML), for --tasks.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Few-shot examples per question of a task.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Limit each task to its first N documents.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Model to compare with, by paired bootstrap.")] = None,
    resamples: Annotated[int, typer.Option(min=100, help="Bootstrap resamples.")] = 1000,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure a model: loss and scores on prepared data, BLEU and chrF of its translations, or tasks of lm-eval.

    Example: pretrain evaluate runs/multi30k --source test.en --reference test.de --beams 1,5
    """
    import json
    from dataclasses import asdict

    from pretrain.errors import ConfigError

    ways = [name for name, given in (("--data", data), ("--source", source), ("--tasks", tasks)) if given]
    if (source is None) != (reference is None) or len(ways) > 1:
        raise ConfigError("ambiguous evaluation target", fix="give --data, --tasks, or both --source and --reference")
    report: Any
    asked: Any
    from pretrain.evaluate.distributed import joined_ranks

    with _interruptible(), joined_ranks(device) as (world, device):
        if tasks is not None:
            from pretrain.evaluate.tasks import TaskChoice, evaluate_tasks

            names = tuple(name.strip() for name in tasks.split(",") if name.strip())
            asked = TaskChoice(names, task_path, num_fewshot, limit, batch_tokens)
            report = evaluate_tasks(model, asked, other=compare, resamples=resamples, device=device)
        elif source is None or reference is None:
            from pretrain.evaluate.corpus import CorpusOptions
            from pretrain.evaluate.held_out import evaluate_held_out

            asked = CorpusOptions(tuple(data or ()), split, seq_len, source_len, max_tokens, batch_tokens)
            report = evaluate_held_out(model, asked, other=compare, resamples=resamples, device=device)
        else:
            from pretrain.evaluate.translation import TranslationTask, evaluate_translation, parse_beams

            asked = TranslationTask(
                source=source,
                reference=reference,
                preprocessed=preprocessed,
                beams=parse_beams(beams),
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                max_tokens=max_tokens,
                batch_tokens=batch_tokens,
                resamples=resamples,
            )
            report = evaluate_translation(model, asked, other=compare, output=output, device=device)
    if world.is_main:
        try:
            print(json.dumps(report.facts(), indent=2) if as_json else "\n".join(report.lines()), flush=True)
        finally:  # kept even if printing fails
            _keep(report, {**asdict(asked), "resamples": resamples, "device": device, "ranks": world.size})


def _keep(report: Any, settings: dict[str, Any]) -> None:
    """Appends the result to the run folder."""
    from pretrain.evaluate.evaluation_log import keep_evaluation

    if report.subject is not None:
        keep_evaluation(report.subject, report.data, settings, report.facts())


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Says that it was interrupted: some versions of typer end a command without a word."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(128 + signal.SIGINT) from None
