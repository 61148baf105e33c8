"""Cost of `pretrain prepare` beyond tokenising: reading, splitting, token shards on disk, against the encoder alone.

    python -m benchmarks.prepare [--quick] [--short] [--rounds N]

Every arm tokenises the same files of the standard library with the same byte-level BPE of 8192 tokens, one thread, the
tokenizer's cache empty at the start. That the shards hold the encoder's tokens is checked first. With --short the
documents are the paragraphs of these files, some 200 bytes each, in a .jsonl: what a document costs shows there.

    ours          files -> documents -> split -> tokens -> fsynced shards and records
    raw           `encode_batch_fast` of the texts, decoded beforehand and in memory; the encodings are dropped
    raw_pieces    the same of long texts in pieces, as ours has them: what is left is ours alone
    raw_ids       raw, and the ids taken out of the encodings, without which nothing can be done with them
    ours_two      ours over two processes, their start included; what counts is its wall time, on two idle cores. Where
                  other work shares these, half of its CPU time is what it would have taken
"""

import argparse
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np

from benchmarks.common import Timing, is_conclusive, measure, print_row, ratio
from pretrain.config.prepare import InputConfig, PrepareConfig, TokenizerConfig
from pretrain.preparation.input_parts import InputFile, InputPart, plan_part_bytes, plan_parts
from pretrain.preparation.inputs.listing import list_inputs, list_stdlib
from pretrain.preparation.output import TOKENIZER_NAME
from pretrain.preparation.part import start_tokenizing
from pretrain.preparation.part_record import load_records
from pretrain.preparation.pool import WorkerPool
from pretrain.preparation.readers.dispatch import read_slices
from pretrain.preparation.selection.judge import EvaluationTexts
from pretrain.preparation.split import SPLITS, parse_split
from pretrain.tokenizer.file import dump_tokenizer, load_tokenizer, tokenizer_hash
from pretrain.tokenizer.roles import eos_id
from pretrain.tokenizer.train import train_tokenizer
from pretrain.tokenizer.words import cut_text

VOCAB_SIZE = 8192
SPLIT = "hash:0.01"
RAW_BATCH_CHARS = 2**18
MUST, AIM, MUST_TWO = 0.93, 0.97, 1.7


def list_paragraphs(
    folder: Path, config: PrepareConfig, files: list[InputFile]
) -> tuple[list[InputFile], PrepareConfig]:
    """Writes the paragraphs of the files as records; returns their file, and the config that reads it."""
    path = folder / "paragraphs.jsonl"
    texts = (document.text for part in plan_parts(files, 2**30) for document in read_slices(config, part.slices))
    with path.open("w") as file:
        for text in texts:
            file.writelines(json.dumps({"text": one}) + "\n" for one in text.split("\n\n") if one)
    inputs = [InputConfig(path=str(path))]
    return list_inputs(inputs), config.model_copy(update={"inputs": inputs})


def run_ours(folder: Path, config: PrepareConfig, tokenizer: Path, parts: list[InputPart], processes: int) -> Path:
    """Writes the parts into a new folder below `folder`; returns it."""
    output = Path(tempfile.mkdtemp(dir=folder))
    shutil.copy(tokenizer, output / TOKENIZER_NAME)
    own = config.model_copy(update={"output": str(output)})
    start = partial(start_tokenizing, own, EvaluationTexts(), None)
    pool = WorkerPool(output, processes=processes)
    pool.write_parts(start, parts, tokenizer_hash(tokenizer), "tokenizing")
    return output


def run_raw(tokenizer: Path, texts: list[str], take_ids: bool) -> None:
    """Encodes the texts in batches of about as many characters as ours."""
    encoder = load_tokenizer(tokenizer)
    remaining = iter(texts)
    at_once = max(1, RAW_BATCH_CHARS * len(texts) // sum(map(len, texts)))
    while batch := list(islice(remaining, at_once)):
        encodings = encoder.encode_batch_fast(batch, add_special_tokens=False)
        if take_ids:
            for encoding in encodings:
                assert len(encoding.ids) == len(encoding)


def check_same_tokens(output: Path, config: PrepareConfig, tokenizer: Path, parts: list[InputPart]) -> int:
    """Compares the shards with the encoder, document by document; returns the number of tokens."""
    encoder = load_tokenizer(tokenizer)
    end = [eos_id(encoder)]
    num_tokens = 0
    records = load_records(output, parts, tokenizer_hash(tokenizer))
    rule = parse_split(SPLIT, 0)
    for part in parts:
        record = records[part.number]
        expected: dict[str, list[int]] = {name: [] for name in SPLITS}
        for document in read_slices(config, part.slices):
            for split, text in rule.divide(document.text, document.utf8):
                expected[split] += encoder.encode(text, add_special_tokens=False).ids + end
        for split, ids in expected.items():
            written: list[int] = []
            for shard in record.splits[split].shards:
                with tarfile.open(output / shard.name) as tar:
                    for member in tar.getmembers()[0::2]:
                        written += np.load(io.BytesIO(tar.extractfile(member).read())).tolist()  # type: ignore[union-attr]
            assert written == ids, f"{part.name} differs from the encoder in {split}"
            num_tokens += len(ids)
    return num_tokens


def report(timings: dict[str, list[Timing]], num_documents: int, num_bytes: int, num_tokens: int) -> None:
    """Prints rates, ratios and the row."""
    rates = {arm: num_bytes / 1e6 / float(np.median([run.cpu_s for run in runs])) for arm, runs in timings.items()}
    wall = {arm: num_bytes / 1e6 / float(np.median([run.wall_s for run in runs])) for arm, runs in timings.items()}
    ratios = {f"ours over {peer}": ratio(timings[peer], timings["ours"]) for peer in ("raw", "raw_pieces", "raw_ids")}
    aa = ratio(timings["ours"], timings["ours_again"])
    two = ratio(timings["ours"], timings["ours_two"], clock="wall_s")
    halves = [Timing(run.cpu_s / 2, run.wall_s) for run in timings["ours_two"]]
    two_idle = ratio(timings["ours"], halves)
    for arm, rate in rates.items():
        print(f"{arm:12s} {rate:6.2f} MB per CPU-second  {wall[arm]:6.2f} MB/s")
    for label, value in ratios.items():
        print(f"{label:22s} {value}")
    headline = ratios["ours over raw"].median
    verdict = "MISSED" if headline < MUST else "holds" if headline < AIM else "holds, aim reached"
    print(f"must be {MUST}, aim {AIM}: {verdict}; A/A {aa}{'' if is_conclusive(aa) else ' (inconclusive)'}")
    print(f"two processes over one, wall {two}, by half of the CPU time {two_idle}, must {MUST_TWO}")
    figures = {
        "unit": "MB of text per CPU-second",
        "num_documents": num_documents,
        "num_bytes": num_bytes,
        "num_tokens": num_tokens,
        "rates": {arm: round(rate, 3) for arm, rate in rates.items()},
        "rates_wall": {arm: round(rate, 3) for arm, rate in wall.items()},
        "ratios": {label: str(value) for label, value in ratios.items()},
        "two_processes_wall": str(two),
        "two_processes_by_half_of_cpu": str(two_idle),
        "aa": str(aa),
        "conclusive": is_conclusive(aa),
    }
    print_row("prepare", figures, ("numpy", "tokenizers"))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--short", action="store_true", help="a document is a paragraph, not a file")
    parser.add_argument("--rounds", type=int, help="by default 11, or 5 of --quick")
    options = parser.parse_args()
    rounds, keep = (5, 8) if options.quick else (11, 2)
    rounds = options.rounds or rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files, config = list_stdlib()[::keep], PrepareConfig(output="", split=SPLIT)
        if options.short:
            files, config = list_paragraphs(folder, config, files)
        # Equal parts, and an even number of them: two processes cannot share out nine evenly.
        parts = plan_parts(files, min(plan_part_bytes(files), -(-sum(file.size for file in files) // 16)))
        texts = [document.text for part in parts for document in read_slices(config, part.slices) if document.text]
        pieces = [piece for text in texts for piece in cut_text(text)]
        tokenizer = folder / "tokenizer.json"
        tokenizer.write_bytes(dump_tokenizer(train_tokenizer(texts, TokenizerConfig(vocab_size=VOCAB_SIZE))))
        num_tokens = check_same_tokens(run_ours(folder, config, tokenizer, parts, 1), config, tokenizer, parts)
        arms: dict[str, Callable[[], object]] = {
            "ours": partial(run_ours, folder, config, tokenizer, parts, 1),
            "ours_again": partial(run_ours, folder, config, tokenizer, parts, 1),
            "ours_two": partial(run_ours, folder, config, tokenizer, parts, 2),
            "raw": partial(run_raw, tokenizer, texts, False),
            "raw_pieces": partial(run_raw, tokenizer, pieces, False),
            "raw_ids": partial(run_raw, tokenizer, texts, True),
        }
        timings = measure(arms, rounds)
    report(timings, len(texts), sum(len(text.encode()) for text in texts), num_tokens)


if __name__ == "__main__":
    main()
