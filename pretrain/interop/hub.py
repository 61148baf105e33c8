"""Fetches a model from the Hugging Face hub, or takes a folder as it is.

Only what can be read is fetched: config, weights, tokenizer and generation settings, never code. Files stay in the
hub's own cache, so a second call fetches nothing, and a call without a network finds what is there.
"""

import errno
import re
from pathlib import Path

from pretrain.errors import ConfigError, DiskError, LaunchError, PretrainError
from pretrain.interop.files import CONFIG, GENERATION, PICKLED_WEIGHTS, TOKENIZER_FILES, WEIGHTS

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_ALWAYS = [CONFIG, GENERATION, *TOKENIZER_FILES]


def _patterns(name: str) -> list[str]:
    """Of weights in one file or in shards; a repository may hold the same weights in other layouts too."""
    stem, _, suffix = name.rpartition(".")
    return [name, f"{name}.index.json", f"{stem}-*-of-*.{suffix}"]


def fetch_release(name_or_dir: str) -> Path:
    """Returns the folder of a Hugging Face model.

    Args:
        name_or_dir: A folder, taken as it is; or a name on the hub, `owner/model`, which is fetched: safetensors, or
            where it has none the `.bin` files.

    Raises:
        ConfigError: Neither a folder nor a name; or the hub has no such model, or it needs leave that we lack.
        LaunchError: The hub cannot be reached, and the cache lacks the model.
        DiskError: No room for it.
    """
    path = Path(name_or_dir).expanduser()
    if name_or_dir and path.is_dir():
        return path
    if path.is_file() or not _ID.fullmatch(name_or_dir):
        raise ConfigError(
            f"{name_or_dir!r} is neither a folder nor a name on the Hugging Face hub", fix="check the path"
        )
    folder = _fetch(name_or_dir, [*_ALWAYS, *_patterns(WEIGHTS)])
    if not any(folder.glob("*.safetensors")):
        folder = _fetch(name_or_dir, [*_ALWAYS, *_patterns(PICKLED_WEIGHTS)])
    return folder


def _fetch(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # its errors, those of the network library beneath it, and those of the disk
        raise _translated(name, error) from error


def _translated(name: str, error: Exception) -> PretrainError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            "its owners ask for an agreement first", where=name, fix="accept it on the hub, set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return ConfigError("no such folder, and no such model on the hub", where=name, fix="check it, or set HF_TOKEN")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return DiskError(f"cannot be stored: {error.strerror}", where=name, fix="set HF_HOME to a folder with room")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return LaunchError(
            "no such folder, and the Hugging Face hub cannot be reached", where=name, fix="give a folder, or try again"
        )
    reason = (str(error) or type(error).__name__).strip().partition("\n")[0]
    return LaunchError(f"cannot be fetched: {reason}", where=name, fix="try again")
