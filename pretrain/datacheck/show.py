"""`pretrain data show`: rows of a shard folder or of a run's data as the model will see them, printed.

    CONFIG or RUN  ->  its config, under the options of the command line         |
    DIR            ->  the objective and packing that suit its kind, likewise    |  ->  rows  ->  ShownRow  ->  text

    train          ->  the samples from a position of the run on, of any source
    validation     ->  the rows of one source from a number on, in their fixed order

On a terminal documents alternate in colour; in a pipe the same words, plain. What colour says, words or braces say too.
Control characters are escaped: text of the web can hold what a terminal obeys.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.config.data import DataConfig
from pretrain.config.load import load_config, parse_section
from pretrain.config.objective import NEEDS
from pretrain.config.presets import expand_preset
from pretrain.config.run import RunConfig
from pretrain.config.yaml_nodes import LocatedTree
from pretrain.data.mixture import SOURCE_BITS, source_of
from pretrain.data.stream import SourceStreams, open_windows
from pretrain.datacheck.reading import PADDED_ROWS, choose_packing, open_data
from pretrain.datacheck.shown_rows import ShownDocument, ShownRow, SidePart, Stretch, describe_rows
from pretrain.errors import ConfigError, DataError
from pretrain.resolve import context_of_run, fit_config
from pretrain.rows import PairRows, TokenRows
from pretrain.run.folder import RunDir
from pretrain.shards.dataset import Dataset
from pretrain.shards.index import INDEX_NAME, LABELLED
from pretrain.shards.store import ShardStore, is_remote
from pretrain.tokenizer import load_tokenizer, special_tokens_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SPLITS = ("train", "validation")
DEFAULT_SEQ_LEN = 512
"""Tokens of a row of a shard folder, which has no config."""
OBJECTIVE_OF = {"text": "causal", "pairs": "seq2seq", "records": "supervised", "classes": "classify", "tags": "tag"}
"""Default objective of a shard folder, by its kind."""
MODEL_OF = {"decoder": "llama-tiny", "encoder": "bert-tiny", "encoder+decoder": "t5-v1.1-tiny"}
"""A model of each shape, which a config needs; rows depend on the shape alone."""
OPTION_OF: Mapping[str, str] = {
    "objective.kind": "--objective",
    "data.packing": "--packing",
    "batch.seq_len": "--seq-len",
    "batch.source_len": "--source-len",
    "seed": "--seed",
}
"""Options that set a key of a folder's config."""


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """Options of `pretrain data show` (its help describes them); None: the config's value, or the default."""

    position: int = 0
    rows: int = 2
    split: str = "train"
    source: str | None = None
    objective: str | None = None
    seq_len: int | None = None
    source_len: int | None = None
    packing: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"there is no split {self.split!r}", where="--split", fix=f"use {' or '.join(SPLITS)}")

    def overrides(self) -> dict[str, Any]:
        """Returns the keys of a config that they set."""
        values = {
            "batch.seq_len": self.seq_len,
            "batch.source_len": self.source_len,
            "data.packing": self.packing,
            "seed": self.seed,
        }
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RowsReport:
    """Rows of a split of `name`, from position `first` on, with the source (empty: one only) and number of each."""

    name: str
    split: str
    objectives: tuple[str, ...]
    first: int
    sources: tuple[str, ...]
    numbers: tuple[int, ...]
    rows: tuple[ShownRow, ...]
    document_mask: bool

    def facts(self) -> dict[str, Any]:
        """Returns all as JSON has it."""
        rows = [
            {"position": self.first + place, "source": self.sources[place] if self.sources else None, **asdict(row)}
            for place, row in enumerate(self.rows)
        ]
        return {"kind": "rows", "path": self.name, "split": self.split, "rows": rows}


def show(what: str, overrides: Sequence[str], choice: ReadingOptions) -> RowsReport:
    """Reads rows of a shard folder, a config or a run, and applies the objective. `overrides`, `a.b=c`, go to a config.

    Raises:
        ConfigError: Options that do not go together, or the tokenizer lacks a token that the objective needs.
        DataError: A shard is missing or damaged.
    """
    config = _config_of(what, overrides, choice)
    with open_data(DataConfig(path=what) if config is None else config.data) as (dataset, stores):
        config = fit_config(config or _folder_config(what, dataset, choice), dataset)
        context, tokenizer = context_of_run(config, dataset), load_tokenizer(dataset.tokenizer_path)
        rows = _read_rows(dataset, stores, config, choice)
        shown = describe_rows(rows, config.objective, context, tokenizer, dataset.index.labels)
    numbers = (rows.target if isinstance(rows, PairRows) else rows).sample_ids
    names: tuple[str, ...] = ()
    if config.data.mixture and choice.split == "train":
        names = tuple(dataset.sources[number].name for number in source_of(numbers).tolist())
        numbers = numbers & ((1 << (63 - SOURCE_BITS)) - 1)
    return RowsReport(
        name=what,
        split=choice.split,
        objectives=tuple(task.kind for task in config.objective.tasks),
        first=choice.position,
        sources=names,
        numbers=tuple(numbers.tolist()),
        rows=tuple(shown),
        document_mask=config.data.document_mask,
    )


def _read_rows(
    dataset: Dataset, stores: Sequence[ShardStore], config: RunConfig, choice: ReadingOptions
) -> TokenRows | PairRows:
    positions = range(choice.position, choice.position + choice.rows)
    batch_rows = config.batch.rows
    if choice.split == "train":
        return SourceStreams(dataset, stores, config.data, config.lengths, batch_rows, config.seed).read(positions)
    sources = {
        source.name: (source.index, store)
        for source, store in zip(dataset.sources, stores, strict=True)
        if "validation" in source.index.splits
    }
    if not sources:
        raise DataError("there is no split 'validation'", where=INDEX_NAME, fix="show --split train")
    name = choice.source or next(iter(sources))
    if name not in sources:
        raise ConfigError(
            f"{name!r} is no source with a validation split", where="--source", fix=f"use {', '.join(sources)}"
        )
    windows = open_windows(*sources[name], config.data, config.lengths, batch_rows)
    end = windows.num_windows()
    if choice.position >= end:
        raise ConfigError(f"there is no row {choice.position}, the split has {end}", fix="lower --position")
    return windows.read_windows(range(choice.position, min(positions.stop, end)))


def _config_of(what: str, overrides: Sequence[str], choice: ReadingOptions) -> RunConfig | None:
    """Returns the config of a run; None: `what` is a shard folder, or the address of one."""
    path = Path(what)
    run = RunDir(path)
    if is_remote(what) or (path.is_dir() and not run.config.is_file()):
        if overrides:
            raise ConfigError(f"{overrides[0]}: a shard folder has no config to lay this over", fix="leave it out")
        return None
    if choice.objective is not None:
        fix = f"lay objective.kind={choice.objective} over it"
        raise ConfigError("a config has an objective of its own", where="--objective", fix=fix)
    source = run.config if run.config.is_file() else what
    config = load_config(source, overrides)
    given = choice.overrides()
    if choice.seq_len is not None:  # the same rows a batch: the order of padded ones depends on it
        given["batch.global_tokens"] = config.batch.rows * choice.seq_len
    if not given:
        return config
    return load_config(source, [*overrides, *(f"{key}={value}" for key, value in given.items())])


def _folder_config(what: str, dataset: Dataset, choice: ReadingOptions) -> RunConfig:
    """Returns the config of a run that could read a shard folder."""
    kind = dataset.index.kind
    objective = choice.objective or OBJECTIVE_OF[kind]
    seq_len = choice.seq_len or DEFAULT_SEQ_LEN
    shapes = NEEDS[objective].shapes if objective in NEEDS else tuple(MODEL_OF)
    batch = {"seq_len": seq_len, "global_tokens": PADDED_ROWS * seq_len, "micro": 1, "source_len": choice.source_len}
    max_len = max(seq_len, choice.source_len or 0)
    head = {"head": {"kind": "labels"}, "tied_embeddings": False, "pooler": False} if kind in LABELLED else {}
    model: dict[str, Any] = expand_preset({"preset": MODEL_OF[shapes[0]], "max_seq_len": max_len, **head})
    has_start = special_tokens_of(load_tokenizer(dataset.tokenizer_path)).start is not None
    if choice.objective is None and kind == "pairs" and not has_start:
        # A run would be refused, but its data look the same.
        model["special_tokens"] = {"start": dataset.index.eos_id}
    values = {
        "run": {"name": "show"},
        "data": {
            "path": what,
            "packing": choice.packing or choose_packing(kind),
            "document_mask": objective != "ul2",
        },
        "batch": batch,
        "model": model,
        "objective": {"kind": objective},
        "optim": {"lr": 1e-3},
        "train": {"steps": 10**6},
        **({} if choice.seed is None else {"seed": choice.seed}),
    }
    return parse_section(RunConfig, LocatedTree(values, dict(OPTION_OF)), what)


# Rows on a terminal or in a pipe.
#
#     position 0   sample 17 of wiki   causal   512 tokens: 3 documents, 20 padding   489 targets
#     1          tokens 0-119, positions 0-119, began in an earlier row
#                | text ...
#     2          tokens 120-491, positions 0-371
#        learned | the {quick -> [MASK]} fox {jumps} over the {lazy -> pear} dog
#                  20 tokens of padding


COLOURS = ("cyan", "magenta")
"""Colours of documents in turn: legible on black and on white."""
STYLES = {"learned": "bold", "target": "bold", "context": "italic", "prefix": "italic"}
"""Style of a kind of stretch, beside the document's colour."""
IN_TEXT = ("text", "masked", "replaced", "kept", "labelled")
"""Kinds that follow each other in a line; others have lines of their own, with their name in the margin."""
TRUTH = "bold green"
"""Style of a hidden token."""
STANDS = "red"
"""Style of what the model reads in the place of a hidden token, and of a label."""
LEGENDS = {
    "masked": "{truth -> what stands there}: predicted; {truth}: predicted, and left as it is",
    "classify": "{first token: label of the document}",
    "tag": "{first token: label of its word}",
}
"""Meaning of the braces, by objective."""
LABEL_COLUMNS = 13
LEAST_COLUMNS = 20
"""Text is not wrapped into less."""
INDENT = " " * (LABEL_COLUMNS + 3)


def print_rows(shown: RowsReport, console: "Console") -> None:
    """Prints rows; in colour and wrapped where the console is a terminal."""
    from rich.text import Text

    if not shown.document_mask:
        console.print(Text("documents see each other: data.document_mask is off", style="bold"), soft_wrap=True)
    for objective in shown.objectives:
        if objective in LEGENDS:
            console.print(Text(LEGENDS[objective], style="bold"), soft_wrap=True)
    for place, row in enumerate(shown.rows):
        if place:
            console.print()
        console.print(Text(_headline(shown, place, row), style="bold reverse"), soft_wrap=True)
        for words in _facts(row):
            console.print(Text(INDENT + words, style="dim"), soft_wrap=True)
        for number, document in enumerate(row.documents):
            for line in _document_lines(row, number, document, console):
                console.print(line, soft_wrap=True)
        for words in _end(row):
            console.print(Text(INDENT + words, style="dim"), soft_wrap=True)


def _headline(shown: RowsReport, place: int, row: ShownRow) -> str:
    source = f" of {shown.sources[place]}" if shown.sources else ""
    what = "position" if shown.split == "train" else "row"
    tokens = f"{row.num_tokens:,} tokens"
    if row.num_source_tokens is not None:
        tokens = f"source {row.num_source_tokens:,} and target {row.num_tokens:,} tokens"
    padding = row.num_padding + (row.num_source_padding or 0)
    return (
        f"{what} {shown.first + place:,}   sample {shown.numbers[place]:,}{source}   {row.objective}   {tokens}: "
        f"{_count(len(row.documents), 'document')}, {padding:,} padding   {_count(row.num_targets, 'target')}"
    )


def _facts(row: ShownRow) -> Iterator[str]:
    if row.denoiser is not None:
        yield f"denoiser {row.denoiser}"
    if row.starts_with is not None and row.documents:
        yield f"the decoder reads {_printable(row.starts_with)} before each target"


def _end(row: ShownRow) -> Iterator[str]:
    if row.beyond is not None:
        yield f"the last token predicts {_printable(row.beyond)!r}"
    is_pair = row.num_source_padding is not None
    for place, count in (
        (" in the source row", row.num_source_padding),
        (" in the target row" if is_pair else "", row.num_padding),
    ):
        if count:
            yield f"{_count(count, 'token')} of padding{place}"


def _document_lines(row: ShownRow, number: int, document: ShownDocument, console: "Console") -> Iterator["Text"]:
    from rich.text import Text

    colour = COLOURS[number % len(COLOURS)]
    facts = []
    for name, part in (("source ", document.source), ("target ", document.target)):
        if part is not None:
            side = name if row.num_source_tokens is not None else ""
            places = _range("token", part.first, part.num_tokens)
            facts.append(f"{side}{places}, {_range('position', part.position, part.num_tokens)}")
    if number == 0 and row.starts_inside:
        facts.append("began in an earlier row")
    if document.goes_on:
        facts.append("goes on after this row")
    for place, line in enumerate(_fit(Text("; ".join(facts), style="dim"), console)):
        yield Text.assemble((f"{'' if place else number + 1:<{len(INDENT)}}", f"bold {colour}"), line)
    for part in (document.source, document.target):
        if part is not None:
            yield from _part_lines(part, colour, console)


def _part_lines(part: SidePart, colour: str, console: "Console") -> Iterator["Text"]:
    from rich.text import Text

    rule = "\u2502" if console.is_terminal else "|"
    for label, stretches in groupby(part.stretches, lambda stretch: "" if stretch.kind in IN_TEXT else stretch.kind):
        flow = _flow(list(stretches), f"{STYLES.get(label, '')} {colour}".strip())
        for place, line in enumerate(_fit(flow, console)):
            yield Text.assemble((f"{label if not place else '':>{LABEL_COLUMNS}} {rule} ", colour), line)


def _fit(text: "Text", console: "Console") -> list["Text"]:
    """Returns the lines of a text, as wide as there is room on a terminal."""
    lines = list(text.split("\n"))
    if not console.is_terminal:
        return lines
    room = max(console.width - len(INDENT), LEAST_COLUMNS)
    return [part for line in lines for part in line.wrap(console, room)]


def _flow(stretches: Sequence[Stretch], style: str) -> "Text":
    """Returns stretches one after another, hidden and labelled tokens in braces."""
    from rich.text import Text

    flow = Text()
    for stretch in stretches:
        if stretch.kind not in IN_TEXT or stretch.kind == "text":
            _append(flow, stretch, style)
            continue
        text = _printable(stretch.text)
        word = text.lstrip() or text  # the space before a word stays outside of the braces
        flow.append(text.removesuffix(word), style=style)
        flow.append("{", style="dim")
        flow.append(word, style=TRUTH if stretch.label is None else style)
        if stretch.stands is not None:
            flow.append(" -> ", style="dim")
            flow.append(_printable(stretch.stands), style=STANDS)
        if stretch.label is not None:
            flow.append(": ", style="dim")
            flow.append(_printable(stretch.label), style=STANDS)
        flow.append("}", style="dim")
    return flow


def _append(flow: "Text", stretch: Stretch, style: str) -> None:
    end = 0
    for low, high in stretch.special:
        flow.append(_printable(stretch.text[end:low]), style=style)
        flow.append(_printable(stretch.text[low:high]), style=f"{style} reverse")
        end = high
    flow.append(_printable(stretch.text[end:]), style=style)


def _range(what: str, first: int, count: int) -> str:
    return f"{what} {first}" if count == 1 else f"{what}s {first}-{first + count - 1}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s'[: number != 1]}"


def _printable(text: str) -> str:
    """Returns a text with its control characters escaped, but for line ends."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
