"""`pretrain prepare` as a command: its progress, and what it ends with."""

import contextlib
import json
import sys
from collections.abc import Iterator

from pretrain.config.prepare import PrepareConfig
from pretrain.prepare.convert.convert import CONVERSION_NAME, convert_tokens
from pretrain.prepare.convert.job import ConvertOptions
from pretrain.prepare.prepare import prepare_share
from pretrain.prepare.progress import Progress, progress_bar
from pretrain.prepare.share import parse_share
from pretrain.shards.index import SplitIndex


def run_prepare(config: PrepareConfig, part: str, processes: int | None) -> str:
    """Prepares one share, `i/n`, of a config; returns what to print. Raises: As `prepare_share`."""
    share = parse_share(part)
    with _shown() as progress:
        index = prepare_share(config, share, progress, processes=processes)
    if index is None:
        return f"{config.output}: part {share} is done; the last one to finish writes the index"
    return _summarize(config.output, index.splits)


def run_convert(options: ConvertOptions, processes: int | None) -> str:
    """Re-shards the tokens of another system; returns what to print. Raises: As `convert_tokens`."""
    with _shown() as progress:
        index = convert_tokens(options, progress, processes=processes)
    proof = json.loads((options.output / CONVERSION_NAME).read_text())["after"]
    summary = _summarize(str(options.output), index.splits)
    return f"{summary}\nsha256 of all tokens, before and after: {proof['sha256']}"


@contextlib.contextmanager
def _shown() -> Iterator[Progress]:
    """Shows progress; after Ctrl-C, says what became of it."""
    try:
        with progress_bar() as progress:
            yield progress
    except KeyboardInterrupt:
        print("interrupted; finished parts are kept: the same command goes on", file=sys.stderr)
        raise


def _summarize(folder: str, splits: dict[str, SplitIndex]) -> str:
    train, validation = splits["train"], splits.get("validation")
    held_out = f", {validation.num_tokens:,} validation tokens" if validation else ""
    documents = sum(split.num_documents for split in splits.values())
    tokens = sum(split.num_tokens for split in splits.values())
    bytes_per_token = sum(split.num_bytes_text for split in splits.values()) / tokens
    return (
        f"{folder}: {train.num_tokens:,} training tokens{held_out}, {documents:,} documents, "
        f"{bytes_per_token:.2f} bytes per token"
    )
