"""`pretrain average`, `pretrain distill` and `pretrain evaluate`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from pretrain.cli.completion import complete_run
from pretrain.cli.options import Device, Json, ModelPath, count_from, print_json
from pretrain.errors import ConfigError
from pretrain.utils.log import printable
from pretrain.utils.units import size

Retrieval = Annotated[
    tuple[Path, Path, Path] | None,
    Option(metavar="CORPUS QUERIES QRELS", help="Vectors: documents to find (BEIR)."),
]
Prefixes = Annotated[tuple[str, str], Option(metavar="QUERY DOCUMENT", help="Vectors: put before texts.")]


def average_command(
    whats: Annotated[
        list[Path], Argument(metavar="RUN|CHECKPOINT...", help="Checkpoints, or a run.", autocompletion=complete_run)
    ],
    output: Annotated[Path, Option(help="Model folder to write.")],
    last: Annotated[int | None, Option(min=1, help="Average the N newest checkpoints.")] = None,
    as_json: Json = False,
) -> None:
    """Make a model folder of the mean weights of checkpoints, to evaluate, export, or start from.

    Example: pretrain average runs/multi30k --last 10 --output models/multi30k
    """
    from pretrain.utils.io import check_new_folder

    check_new_folder(output)  # before seconds of imports
    from pretrain.artifact.average import average_checkpoints

    averaged = average_checkpoints(whats, last, output)
    if as_json:
        print_json({"kind": "model", "path": str(output), **asdict(averaged)})
        return
    for checkpoint in averaged.checkpoints:
        print(checkpoint)
    print(f"{output}: the mean of these {len(averaged.checkpoints)}, {averaged.arithmetic}")


def distill_command(
    teacher: Annotated[Path, Argument(metavar="TEACHER", help="A run, checkpoint, model or Hugging Face folder.")],
    data: Annotated[Path, Option(help="Prepared data; the scores come beside its shards.")],
    top_k: Annotated[int, Option(min=1, help="Largest scores of each token.")] = 64,
    temperature: Annotated[float, Option(help="Of objective.distill, for the mass of the others.")] = 1.0,
    seq_len: Annotated[int | None, Option(min=2, help="Tokens of a window. Default: 1024.")] = None,
    batch_tokens: Annotated[int, Option(min=1, help="Tokens per batch.")] = 8192,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Write the largest scores of a teacher for each token of prepared data, to learn from them.

    Example: pretrain distill runs/teacher --data data/stdlib --top-k 64
    """
    from pretrain.evaluation.distill import DistillOptions, distill
    from pretrain.evaluation.distributed import joined_ranks

    # Ranks of torchrun or srun share the shards.
    with joined_ranks(device) as (world, own_device):
        options = DistillOptions(top_k, temperature, seq_len, batch_tokens)
        facts = distill(teacher, data, options, world, own_device)
    if not world.is_main:
        return
    if as_json:
        print_json({"path": str(data), **facts})
        return
    tokens, each = f"{facts['tokens']:,} tokens", f"{facts['bytes_per_token']:.0f} bytes each"
    print(f"{data}: scores of {tokens}, {size(facts['bytes'])}, {each}")


def evaluate_command(
    model: ModelPath,
    data: Annotated[list[str] | None, Option(help="Prepared data. Default: the run's.")] = None,
    split: Annotated[str, Option(help="Split of the data: validation or train.")] = "validation",
    seq_len: Annotated[int | None, Option(min=1, help="Default: the run's, or 1024.")] = None,
    source_len: Annotated[int | None, Option(min=1, help="Pairs: tokens per source row.")] = None,
    source: Annotated[Path | None, Option(help="Texts to translate, a line each.")] = None,
    reference: Annotated[Path | None, Option(help="Reference translations, line by line.")] = None,
    preprocessed: Annotated[bool, Option("--preprocessed", help="Normalize both texts.")] = False,
    beams: Annotated[
        str | None,
        Option("--beams", "--beam", help="Such as 1,5; 1 is greedy. Default: the model's."),
    ] = None,
    length_penalty: Annotated[float | None, Option(help="Above 0: longer translations.")] = None,
    early_stopping: Annotated[str | None, Option(help="Beam search: true, false, never.")] = None,
    repetition_penalty: Annotated[float | None, Option(help="Above 1: fewer repeated tokens.")] = None,
    no_repeat_ngram_size: Annotated[int | None, Option(min=0, help="N-grams that come once only.")] = None,
    max_tokens: Annotated[int | None, Option(parser=count_from(1), help="Limit of an output or split.")] = None,
    batch_tokens: Annotated[int, Option(min=1, help="Tokens per batch.")] = 8192,
    output: Annotated[Path | None, Option(help="File for the translations, or the wrong answers.")] = None,
    questions: Annotated[Path | None, Option(help="Questions (.jsonl) with one right answer each.")] = None,
    plain: Annotated[bool, Option("--plain", help="--questions as lines, without a template.")] = False,
    retrieval: Retrieval = None,
    sts: Annotated[Path | None, Option(help="Vectors: scored pairs of sentences.")] = None,
    prefixes: Prefixes = ("", ""),
    width: Annotated[int | None, Option(min=1, help="First dimensions of vectors.")] = None,
    tasks: Annotated[str | None, Option(help="Tasks of lm-eval-harness, such as a,b.")] = None,
    task_path: Annotated[Path | None, Option(help="Folder of --tasks (YAML).")] = None,
    num_fewshot: Annotated[int | None, Option(min=0, help="Few-shot examples.")] = None,
    limit: Annotated[int | None, Option(min=1, help="First N documents of a task.")] = None,
    chat: Annotated[bool, Option("--chat", help="Questions of --tasks are a user's turns.")] = False,
    compare: Annotated[Path | None, Option(help="Model for a paired bootstrap.")] = None,
    resamples: Annotated[int, Option(min=100, help="Bootstrap resamples.")] = 1000,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure a model: loss and scores on data, exact answers, BLEU and chrF of translations, or tasks of lm-eval.

    Example: pretrain evaluate runs/multi30k --source test.en --reference test.de --beams 1,5
    """

    _check_target(data, source, reference, tasks, questions, (retrieval, sts), chat=chat, plain=plain)
    # Each way of measuring has options and a report of its own.
    report: Any
    asked: Any
    from pretrain.evaluation.distributed import joined_ranks

    # Ranks of torchrun or srun share the work; one process is a group of its own.
    with joined_ranks(device) as (world, device):
        if tasks is not None:
            from pretrain.evaluation.tasks import TaskChoice, evaluate_tasks

            names = tuple(name.strip() for name in tasks.split(",") if name.strip())
            asked = TaskChoice(names, task_path, num_fewshot, limit, chat, batch_tokens)
            report = evaluate_tasks(model, asked, other=compare, resamples=resamples, device=device)
        elif questions is not None:
            from pretrain.evaluation.exact_answers import ExactChoice, evaluate_exact

            asked = ExactChoice(questions, plain, max_tokens, batch_tokens)
            report = evaluate_exact(model, asked, other=compare, resamples=resamples, output=output, device=device)
        elif retrieval or sts:
            from pretrain.evaluation.retrieval import RetrievalChoice, measure_retrieval

            asked = RetrievalChoice(retrieval, sts, *prefixes, width)
            report = measure_retrieval(model, asked, compare, resamples, device)
        elif source is None or reference is None:
            from pretrain.evaluation.corpus import CorpusOptions
            from pretrain.evaluation.held_out import evaluate_held_out

            folders = tuple(data or ())
            asked = CorpusOptions(folders, split, seq_len, source_len, max_tokens, batch_tokens)
            report = evaluate_held_out(model, asked, other=compare, resamples=resamples, device=device)
        else:
            from pretrain.evaluation.translation import TranslationTask, evaluate_translation, parse_beams

            asked = TranslationTask(
                source, reference, preprocessed, parse_beams(beams), length_penalty, early_stopping,
                repetition_penalty, no_repeat_ngram_size, max_tokens, batch_tokens, resamples,
            )  # fmt: skip
            report = evaluate_translation(model, asked, other=compare, output=output, device=device)
    if world.is_main:
        settings = {"resamples": resamples, "device": device, "ranks": world.size}
        _show_and_keep(report, asdict(asked) | settings, as_json)


def _check_target(
    data: list[str] | None,
    source: Path | None,
    reference: Path | None,
    tasks: str | None,
    questions: Path | None,
    vectors: Sequence[Any],
    *,
    chat: bool,
    plain: bool,
) -> None:
    """Checks that options name one way of measuring. Raises: ConfigError."""
    fix = "give --data, --tasks, --questions, --retrieval, --sts, or both --source and --reference"
    if (source is None) != (reference is None):
        option, missing = ("--reference", "--source") if source is None else ("--source", "--reference")
        raise ConfigError(f"{option} needs {missing}, which is missing", fix=fix)
    if sum(map(bool, (data, source, tasks, questions, *vectors))) > 1:
        raise ConfigError("ambiguous evaluation target", fix=fix)
    if chat and tasks is None:
        raise ConfigError("--chat is for --tasks", fix="leave it out: prepared data have their template")
    if plain and questions is None:
        raise ConfigError("--plain is for --questions", fix="leave it out")


def _show_and_keep(report: Any, settings: dict[str, Any], as_json: bool) -> None:
    """Prints a report, and keeps it in the folder of the model, even if printing fails."""
    try:
        text = json.dumps(report.facts(), indent=2) if as_json else printable("\n".join(report.lines()), keep="\n")
        print(text, flush=True)
    finally:
        from pretrain.evaluation.evaluation_log import keep_evaluation

        if report.subject is not None:
            keep_evaluation(report.subject, report.data, settings, report.facts())
