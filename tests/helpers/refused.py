"""Commands that are refused: the config of a tiny run to spoil, and what a refusal must look like."""

import shutil
from pathlib import Path

from tests.helpers.cli import Result

CONFIG = """
seed: 7
run: {name: run}
data: {path: data, lanes: 1, block_samples: 16}
model: {preset: llama-tiny, max_seq_len: 32, decoder: {width: 32, heads: 4, kv_heads: 2, ff_width: 48}}
batch: {global_tokens: 128, seq_len: 32, micro: 2}
optim: {lr: 1e-3}
train: {steps: 4}
engine: {kind: single, zero_stage: 0, precision: fp32, device: cpu}
checkpoint: {every_steps: 2}
tracking: {wandb: off}
"""


def fill_folder(folder: Path, config: str, shards: Path) -> Path:
    """Makes a working folder of a config, `a.yaml`, and a copy of shards, `data`."""
    (folder / "a.yaml").write_text(config)
    shutil.copytree(shards, folder / "data")
    return folder


def error_line(result: Result, code: int) -> str:
    """Returns the one error line of a command that must have ended with `code`, and without a traceback."""
    assert result.code == code, result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.errors) == 1, result.stderr
    return result.errors[0]


def check_refused(result: Result, code: int, *words: str) -> None:
    """The command ended with `code` and one error line that has these words in order."""
    line = error_line(result, code)
    position = 0
    for word in words:
        position = line.find(word, position)
        assert position >= 0, f"{word!r} is not in {line!r}, or not in this order"


def visible(folder: Path) -> set[str]:
    """What is in a folder, without locks."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.exists() else set()


def truncate_shard(folder: Path) -> None:
    """Takes the last bytes of a shard."""
    shard = next((folder / "data/train").glob("*.tar"))
    shard.write_bytes(shard.read_bytes()[:-512])
