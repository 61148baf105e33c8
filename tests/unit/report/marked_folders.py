"""Shard folders whose tokenizer has the special tokens that objectives need."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from pretrain.shards.index import DataIndex, write_index
from pretrain.tokenizer.file import dump_tokenizer, load_tokenizer, tokenizer_hash
from pretrain.tokenizer.roles import vocabulary_size
from tests.unit.report.data_folders import make_folder

SENTINELS = tuple(f"<extra_id_{number}>" for number in range(40))
MODES = ("[NLU]", "[NLG]", "[S2S]")
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
ALL = ("<pad>", "[MASK]", *MODES, *MARKS, *SENTINELS)


def make_marked_folder(folder: Path, documents: list, names: Sequence[str] = ALL, **options: Any) -> DataIndex:
    """Writes a folder as `make_folder` does, and gives its tokenizer further special tokens, behind the others."""
    index = make_folder(folder, documents, **options)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    (folder / "tokenizer.json").write_bytes(dump_tokenizer(tokenizer))
    sha256 = tokenizer_hash(folder / "tokenizer.json")
    index = replace(index, tokenizer_sha256=sha256, vocab_size=vocabulary_size(tokenizer))
    write_index(folder, index)
    return index
