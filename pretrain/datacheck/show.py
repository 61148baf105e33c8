"""`pretrain data show`: rows of a shard folder or of a run's data as the model will see them.

    CONFIG or RUN  ->  its config, and the options of the command line   |
    DIR            ->  the default objective and packing, and these too  |  ->  ShownRow  ->  text

    train          ->  the samples from a position of the run on, of any source
    validation     ->  the rows of one source from a number on, in their fixed order

On a terminal documents alternate in colour; in a pipe the same words come plain, and words or
braces say what colours do. Control characters are escaped: text of the web can command a terminal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from pretrain.config.data import DataConfig
from pretrain.config.load import load_config, parse_section
from pretrain.config.presets import expand_preset
from pretrain.config.run import RunConfig
from pretrain.config.yaml_nodes import LocatedTree
from pretrain.data.mixture import SOURCE_BITS, source_of
from pretrain.data.stream import SourceStreams, open_windows
from pretrain.datacheck.image_data import (
    CAPTIONS_MODEL,
    FOLDER_MODEL,
    FOLDER_POSITIONS,
    ROWS,
    ImagesReport,
    decode_captions,
    longest_caption,
)
from pretrain.datacheck.reading import PADDED_ROWS, open_data
from pretrain.datacheck.shown_rows import ShownDocument, ShownRow, Stretch, describe_rows
from pretrain.errors import ConfigError, DataError
from pretrain.kinds.objectives import OBJECTIVES, objective_of_data
from pretrain.objective.token_kinds import TokenKind
from pretrain.preparation.statistics import learned_share
from pretrain.resolve import context_of_run, fit_config
from pretrain.rows import TokenRows
from pretrain.run.folder import RunDir
from pretrain.shards.dataset import Dataset
from pretrain.shards.index import INDEX_NAME
from pretrain.shards.store import ShardStore, is_remote
from pretrain.tokenizer.file import load_tokenizer
from pretrain.tokenizer.roles import special_tokens_of
from pretrain.utils.log import printable
from pretrain.utils.units import plural

SPLITS = ("train", "validation")
DEFAULT_SEQ_LEN = 512
"""Row length of a shard folder, which has no config, in tokens."""
PRESET_BY_SHAPE = {"decoder": "llama-tiny", "encoder": "bert-tiny", "encoder+decoder": "t5-v1.1-tiny"}
"""Preset of each shape, as a model which a config needs; rows depend on the shape alone."""
KEY_BY_OPTION = {
    "objective": "objective.kind",
    "packing": "data.packing",
    "seq_len": "batch.seq_len",
    "source_len": "batch.source_len",
    "seed": "seed",
}
"""Key of a config that an option sets."""


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """Options of `pretrain data show`; None: the config's value, or the default."""

    position: int = 0
    rows: int | None = None
    split: str = "train"
    source: str | None = None
    objective: str | None = None
    seq_len: int | None = None
    source_len: int | None = None
    packing: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(
                f"there is no split {self.split!r}",
                where="--split",
                fix=f"use {' or '.join(SPLITS)}",
            )


@dataclass(frozen=True, slots=True)
class RowsReport:
    """Rows of `name`, with the source of each (empty: one only)."""

    name: str
    choice: ReadingOptions
    config: RunConfig
    sources: tuple[str, ...]
    rows: tuple[ShownRow, ...]
    learned: float | None = None  # share of the split's tokens that have a loss, of records

    @property
    def numbers(self) -> tuple[int, ...]:
        """Returns the number of each row in its source."""
        return tuple(row.sample_id & ((1 << (63 - SOURCE_BITS)) - 1) for row in self.rows)

    def facts(self) -> dict[str, Any]:
        """Returns the output of `--json`."""
        first = self.choice.position
        sources = self.sources or [None] * len(self.rows)
        rows = [
            {"position": first + place, "source": source, **asdict(row)}
            for place, (source, row) in enumerate(zip(sources, self.rows, strict=True))
        ]
        return {"kind": "rows", "path": self.name, "split": self.choice.split, "learned": self.learned, "rows": rows}


def show(what: str, overrides: Sequence[str], choice: ReadingOptions) -> RowsReport | ImagesReport:
    """Reads rows of a shard folder, or of a config or run with overrides, and applies the objective.

    Raises:
        ConfigError: Options contradict each other, or the objective needs a token that is missing.
        DataError: A shard is missing or damaged.
    """
    config = _config_of(what, overrides, choice)
    with open_data(DataConfig(path=what) if config is None else config.data) as (dataset, stores):
        config = fit_config(config or _folder_config(what, dataset, stores[0], choice), dataset)
        if dataset.index.has_images:
            rows = _read_rows(dataset, stores, config, choice, ROWS)
            captions = None
            if dataset.index.has_tokenizer:
                captions = decode_captions(rows, load_tokenizer(dataset.tokenizer_path))
            return ImagesReport(what, choice.split, choice.position, rows, dataset.index.labels, captions)
        context = context_of_run(config, dataset)
        tokenizer = load_tokenizer(dataset.tokenizer_path)
        rows = _read_rows(dataset, stores, config, choice, 2)
        shown = describe_rows(rows, config.objective, context, tokenizer, dataset.index.labels)
    names: tuple[str, ...] = ()
    if config.data.mixture and choice.split == "train":
        numbers = source_of(np.array([row.sample_id for row in shown])).tolist()
        names = tuple(dataset.sources[number].name for number in numbers)
    of_parts = OBJECTIVES[config.objective.kind].learns_parts
    learned = learned_share(Path(config.data.path or ""), choice.split) if of_parts else None
    return RowsReport(what, choice, config, names, tuple(shown), learned)


def _read_rows(
    dataset: Dataset, stores: Sequence[ShardStore], config: RunConfig, choice: ReadingOptions, usual: int
) -> TokenRows:
    """Reads as many rows as asked for; None: as `usual`."""
    positions = range(choice.position, choice.position + (choice.rows or usual))
    batch_rows = config.batch.rows
    if choice.split == "train":
        order = (config.data, config.lengths, batch_rows, config.seed)
        return SourceStreams(dataset, stores, *order).read(positions)
    sources = {
        source.name: (source.index, store)
        for source, store in zip(dataset.sources, stores, strict=True)
        if "validation" in source.index.splits
    }
    if not sources:
        raise DataError(
            "there is no split 'validation'",
            where=INDEX_NAME,
            fix="show --split train",
        )
    name = choice.source or next(iter(sources))
    if name not in sources:
        raise ConfigError(
            f"{name!r} is no source with a validation split",
            where="--source",
            fix=f"use {', '.join(sources)}",
        )
    windows = open_windows(*sources[name], config.data, config.lengths, batch_rows)
    end = windows.num_windows()
    if choice.position >= end:
        raise ConfigError(
            f"there is no row {choice.position}, the split has {end}",
            fix="lower --position",
        )
    return windows.read_windows(range(choice.position, min(positions.stop, end)))


def _config_of(what: str, overrides: Sequence[str], choice: ReadingOptions) -> RunConfig | None:
    """Returns the config of a run; None: `what` is a shard folder, or the address of one."""
    path = Path(what)
    run = RunDir(path)
    if is_remote(what) or (path.is_dir() and not run.config.is_file()):
        if overrides:
            raise ConfigError(
                "a shard folder has no config to lay this over",
                where=overrides[0],
                fix="leave it out",
            )
        return None
    if choice.objective is not None:
        raise ConfigError(
            "a config has an objective of its own",
            where="--objective",
            fix=f"lay objective.kind={choice.objective} over it",
        )
    source = run.config if run.config.is_file() else what
    config = load_config(source, overrides, extensions="require")
    options = {key: getattr(choice, name) for name, key in KEY_BY_OPTION.items()}
    keys = [f"{key}={value}" for key, value in options.items() if value is not None]
    if choice.seq_len is not None:  # the same rows a batch: the order of padded ones depends on it
        keys += [f"batch.global_tokens={config.batch.rows * choice.seq_len}", *config.even_steps()]
    return load_config(source, [*overrides, *keys], extensions="require") if keys else config


def _folder_config(what: str, dataset: Dataset, store: ShardStore, choice: ReadingOptions) -> RunConfig:
    """Returns the config of a run that could read a shard folder."""
    layout = dataset.index.layout
    kind = objective_of_data(dataset.index.kind)
    objective = choice.objective or kind
    usual = OBJECTIVES[kind]
    needs = OBJECTIVES.get(objective, usual)  # an unknown name is refused with the config
    seq_len = choice.seq_len or DEFAULT_SEQ_LEN
    if layout.images and not layout.captions:
        seq_len = FOLDER_POSITIONS
    if layout.captions and choice.seq_len is None:
        seq_len = longest_caption(store, dataset.index)
    values: dict[str, Any] = {
        "run": {"name": "show"},
        "data": {
            "path": what,
            "packing": choice.packing or layout.packing,
            "document_mask": not needs.one_text_a_row,
        },
        "batch": {
            "seq_len": seq_len,
            "source_len": choice.source_len,
            "global_tokens": PADDED_ROWS * seq_len,
            "micro": 1,
        },
        "model": _folder_model(dataset, choice, seq_len, needs.shapes[0], usual.head),
        "objective": {"kind": objective},
        "optim": {"lr": 1e-3},
        "train": {"steps": 10**6},
    }
    if needs.section is not None and needs.reference(needs.section()):
        values["init"] = {"from": "-"}  # a model that is not read
    if choice.seed is not None:
        values["seed"] = choice.seed
    options = {key: f"--{name.replace('_', '-')}" for name, key in KEY_BY_OPTION.items()}
    return parse_section(RunConfig, LocatedTree(values, options), what)


def _folder_model(dataset: Dataset, choice: ReadingOptions, seq_len: int, shape: str, head: str) -> dict[str, Any]:
    """Returns the section of a model that reads such rows."""
    layout = dataset.index.layout
    longest = max(seq_len, choice.source_len or 0)
    preset: dict[str, Any] = {"preset": PRESET_BY_SHAPE[shape], "max_seq_len": longest}
    if layout.has_labels:
        preset |= {"head": {"kind": head}, "tied_embeddings": False, "pooler": False}
    if layout.images:
        preset = CAPTIONS_MODEL | {"max_seq_len": seq_len} if layout.captions else FOLDER_MODEL
    model: dict[str, Any] = expand_preset(preset)
    if choice.objective is None and layout.has_source:
        tokenizer = load_tokenizer(dataset.tokenizer_path)
        if special_tokens_of(tokenizer).start is None:
            # A run would be refused, but its data look the same.
            model["special_tokens"] = {"start": dataset.index.eos_id}
    return model


# Rows on a terminal or in a pipe.
#     position 0   sample 17 of wiki   causal   512 tokens: 3 documents, 20 padding   489 targets
#     1          tokens 0-119, positions 0-119, began in an earlier row
#                | text ...
#     2          tokens 120-491, positions 0-371
#        learned | the {quick -> [MASK]} fox {jumps} over the {lazy -> pear} dog
#                  20 tokens of padding

COLOURS = ("cyan", "magenta")
"""Colours of documents in turn: legible on black and on white."""
STYLES = {"context": "italic", "prefix": "italic"}
STYLES |= dict.fromkeys(("learned", "target", "chosen", "rejected", "answer"), "bold")
"""Style of a kind of stretch, added to the document's colour."""
IN_TEXT = (TokenKind.TEXT, TokenKind.MASKED, TokenKind.REPLACED, TokenKind.KEPT, TokenKind.LABELLED)
"""Kinds that follow each other in a line; others have own lines, with their name in the margin."""
TRUTH = "bold green"
"""Style of a hidden token."""
STANDS = "red"
"""Style of the model's input in the place of a hidden token, and of a label."""
LABEL_COLUMNS = 13
LEAST_COLUMNS = 20
"""Least width to which text is wrapped."""
INDENT = " " * (LABEL_COLUMNS + 3)


def print_rows(shown: RowsReport, console: Console) -> None:
    """Prints rows; in colour and wrapped where the console is a terminal."""
    for line in _lines(shown, console):
        console.print(line, soft_wrap=True)


def _lines(shown: RowsReport, console: Console) -> Iterator[Text]:
    if shown.learned is not None:
        yield Text(f"{shown.learned:.1%} of the tokens of {shown.choice.split} are learned", "bold")
    if not shown.config.data.document_mask:
        yield Text("documents see each other: data.document_mask is off", style="bold")
    for task in shown.config.objective.tasks:
        if legend := OBJECTIVES[task.kind].legend:
            yield Text(legend, style="bold")
    for place, row in enumerate(shown.rows):
        if place:
            yield Text()
        yield Text(_headline(shown, place, row), style="bold reverse")
        if row.denoiser is not None:
            yield _note(f"denoiser {row.denoiser}")
        if row.starts_with is not None and row.documents:
            yield _note(f"the decoder reads {_shown(row.starts_with)} before each target")
        for number, document in enumerate(row.documents):
            yield from _document_lines(row, number, document, console)
        if row.beyond is not None:
            yield _note(f"the last token predicts {_shown(row.beyond)!r}")
        if row.num_source_padding:
            yield _note(f"{plural(row.num_source_padding, 'token')} of padding in the source row")
        if row.num_padding:
            side = "" if row.num_source_padding is None else " in the target row"
            yield _note(f"{plural(row.num_padding, 'token')} of padding{side}")


def _note(words: str) -> Text:
    return Text(INDENT + words, style="dim")


def _headline(shown: RowsReport, place: int, row: ShownRow) -> str:
    source = f" of {shown.sources[place]}" if shown.sources else ""
    noun = "position" if shown.choice.split == "train" else "row"
    tokens = f"{row.num_tokens:,} tokens"
    if row.num_source_tokens is not None:
        tokens = f"source {row.num_source_tokens:,} and target {row.num_tokens:,} tokens"
    padding = row.num_padding + (row.num_source_padding or 0)
    return (
        f"{noun} {shown.choice.position + place:,}   sample {shown.numbers[place]:,}{source}   "
        f"{row.objective}   {tokens}: {plural(len(row.documents), 'document')}, "
        f"{padding:,} padding   {plural(row.num_targets, 'target')}"
    )


def _document_lines(row: ShownRow, number: int, document: ShownDocument, console: Console) -> Iterator[Text]:
    """Yields number and places of a document, then its stretches with their names in the margin."""
    colour = COLOURS[number % len(COLOURS)]
    facts = "; ".join(_document_facts(row, number, document))
    for place, line in enumerate(_fit(Text(facts, style="dim"), console)):
        margin = f"{'' if place else number + 1:<{len(INDENT)}}"
        yield Text.assemble((margin, f"bold {colour}"), line)
    rule = "\u2502" if console.is_terminal else "|"
    parts = [part for part in (document.source, document.target) if part]
    stretches = [stretch for part in parts for stretch in part.stretches]
    for label, group in groupby(stretches, lambda one: "" if one.kind in IN_TEXT else one.kind):
        flow = Text()
        for stretch in group:
            _append(flow, stretch, f"{STYLES.get(label, '')} {colour}".strip())
        for place, line in enumerate(_fit(flow, console)):
            margin = f"{'' if place else label:>{LABEL_COLUMNS}} {rule} "
            yield Text.assemble((margin, colour), line)


def _document_facts(row: ShownRow, number: int, document: ShownDocument) -> Iterator[str]:
    for name, part in (("source ", document.source), ("target ", document.target)):
        if part is not None:
            side = name if row.num_source_tokens is not None else ""
            places = _range("token", part.first, part.num_tokens)
            yield f"{side}{places}, {_range('position', part.position, part.num_tokens)}"
    if number == 0 and row.starts_inside:
        yield "began in an earlier row"
    if document.goes_on:
        yield "continues after this row"


def _fit(text: Text, console: Console) -> list[Text]:
    """Returns the lines of a text, as wide as there is room on a terminal."""
    lines = list(text.split("\n"))
    if not console.is_terminal:
        return lines
    room = max(console.width - len(INDENT), LEAST_COLUMNS)
    return [part for line in lines for part in line.wrap(console, room)]


def _append(flow: Text, stretch: Stretch, style: str) -> None:
    """Appends a stretch: special tokens reversed, hidden and labelled tokens in braces."""
    if stretch.kind not in IN_TEXT or stretch.kind is TokenKind.TEXT:
        end = 0
        for low, high in stretch.special:
            flow.append(_shown(stretch.text[end:low]), style=style)
            flow.append(_shown(stretch.text[low:high]), style=f"{style} reverse")
            end = high
        flow.append(_shown(stretch.text[end:]), style=style)
        return
    text = _shown(stretch.text)
    word = text.lstrip() or text  # the space before a word stays outside of the braces
    flow.append(text.removesuffix(word), style=style)
    flow.append("{", style="dim")
    flow.append(word, style=TRUTH if stretch.label is None else style)
    for sign, beside in ((" -> ", stretch.stands), (": ", stretch.label)):
        if beside is not None:
            flow.append(sign, style="dim")
            flow.append(_shown(beside), style=STANDS)
    flow.append("}", style="dim")


def _range(what: str, first: int, count: int) -> str:
    return f"{what} {first}" if count == 1 else f"{what}s {first}-{first + count - 1}"


def _shown(text: str) -> str:
    return printable(text, keep="\n")
