"""A token of the model must have the same number in the data; the data may have further ones."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrain.artifact.lora import check_tokens
from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import DataError
from pretrain.tokenizer.file import dump_tokenizer, read_given
from pretrain.tokenizer.train import train_tokenizer


def written(folder, text, **options):
    """A tokenizer.json of the characters of a text."""
    folder.mkdir()
    file = folder / "tokenizer.json"
    file.write_bytes(dump_tokenizer(train_tokenizer([text], TokenizerConfig(kind="char", **options))))
    return file


def model_with(file):
    files = [] if file is None else [("tokenizer.json", Path(file).read_bytes())]
    return SimpleNamespace(path=Path("base"), load_tokenizer_files=lambda: files)


def test_the_same_tokens_with_others_after_them_are_taken(tmp_path):
    base = written(tmp_path / "base", "abc")
    given = TokenizerConfig(kind="given", path=str(base), special_tokens=["<|im_start|>"])
    (tmp_path / "more.json").write_bytes(read_given(given).content)
    check_tokens(model_with(base), base)
    check_tokens(model_with(base), tmp_path / "more.json")
    with pytest.raises(
        DataError, match=r"<\|im_start\|>' has the number \d+ in base and none in .*, and 0 others differ"
    ):
        check_tokens(model_with(tmp_path / "more.json"), base)


def test_another_number_is_refused_with_the_token_and_what_to_do(tmp_path):
    base, other = written(tmp_path / "base", "abc"), written(tmp_path / "other", "bcd")
    with pytest.raises(DataError, match=r"not that of base: 'a' has the number \d+ in base and none in ") as caught:
        check_tokens(model_with(base), other)
    assert "prepare them with tokenizer: {kind: given, path: base}, or say init.check_tokenizer=false" in str(
        caught.value
    )


def test_a_model_without_a_tokenizer_fits_any(tmp_path):
    check_tokens(model_with(None), written(tmp_path / "data", "abc"))
