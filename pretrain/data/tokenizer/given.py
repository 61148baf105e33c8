"""A tokenizer that is given: a tokenizer.json, a folder of Hugging Face, or a name on its hub.

    tokenizer.json               as it is
    folder with a tokenizer.json that file
    other folder                 AutoTokenizer makes a fast one of it, out of a sentencepiece model say
    name                         its tokenizer files, and nothing else, are fetched; then as a folder

No code that lies beside a tokenizer is run, and nothing is unpickled.
"""

import re
from pathlib import Path

from tokenizers import AddedToken

from pretrain.config.prepare import TokenizerConfig
from pretrain.data.tokenizer.file import dump_tokenizer, parse_tokenizer, read_tokenizer_file
from pretrain.data.tokenizer.layout import fill_up
from pretrain.errors import DataError, LaunchError

_FILE = "tokenizer.json"
_HUB_FILES = ("config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
              "*.model", "*.spm")  # fmt: skip
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def read_given(config: TokenizerConfig) -> bytes:
    """Returns the content of the tokenizer.json of a config with `kind: given`.

    It is the given file to the byte, unless `special_tokens` or `vocab_multiple` add to it: at the end, in order, those
    that are not special tokens already.

    Raises:
        DataError: There is no tokenizer, or none that `tokenizers` can run.
        LaunchError: The hub cannot be reached.
    """
    assert config.path is not None
    content = _read(config.path)
    tokenizer = parse_tokenizer(content, config.path)
    before = dump_tokenizer(tokenizer)
    tokenizer.add_special_tokens([AddedToken(entry, special=True) for entry in config.special_tokens])
    fill_up(tokenizer, config.vocab_multiple)
    after = dump_tokenizer(tokenizer)
    return content if after == before else after


def _read(name: str) -> bytes:
    path = Path(name).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if path.exists() or path.suffix == ".json" or not _HUB_NAME.fullmatch(name):
        return read_tokenizer_file(path)
    return _read_folder(_fetch(name))


def _read_folder(folder: Path) -> bytes:
    if (folder / _FILE).is_file():
        return read_tokenizer_file(folder / _FILE)
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise nearly anything
        raise DataError(
            f"no tokenizer can be read from it: {_first_line(error)}",
            where=str(folder),
            fix=f"give a folder with a {_FILE}",
        ) from None
    fast = getattr(found, "backend_tokenizer", None)
    if fast is None:
        raise DataError(
            f"its tokenizer, {type(found).__name__}, cannot be made one of `tokenizers`",
            where=str(folder),
            fix=f"give a {_FILE}, or train one",
        )
    return dump_tokenizer(fast)


def _fetch(name: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise DataError(
            "no such file or folder, and no such model on the Hugging Face hub",
            where=name,
            fix="check it; a private or gated one needs HF_TOKEN",
        ) from None
    except Exception as error:  # its errors, those of the network library beneath it, and those of the disk
        raise LaunchError(
            f"no such file or folder, and it cannot be fetched from the Hugging Face hub: {_first_line(error)}",
            where=name,
            fix="give a path, or try again",
        ) from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
