"""Fetches files of a model on the Hugging Face hub.

    is_hub_name("owner/model") -> fetch_files("owner/model", ["config.json", "*.model"]) -> a folder

No code is run. Files stay in the hub's own cache, so that a second call fetches nothing, and a call
without a network finds them.
"""

import errno
import re
from collections.abc import Sequence
from pathlib import Path

from pretrain.errors import ConfigError, DiskError, LaunchError, PretrainError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


def is_hub_name(text: str) -> bool:
    """Returns whether a text could be the name of a model on the hub, `model` or `owner/model`."""
    return _NAME.fullmatch(text) is not None


def fetch_files(name: str, patterns: Sequence[str]) -> Path:
    """Returns a folder with the files of a model that match a pattern (`*`: any characters).

    Raises:
        ConfigError: The hub has no such model, or it is gated.
        LaunchError: The hub cannot be reached, and the cache lacks the model.
        DiskError: No room for it.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # its own, those of its network library, and those of the disk
        raise _translated(name, error) from error


def _translated(name: str, error: Exception) -> PretrainError:
    from huggingface_hub import errors

    nothing = "no such file or folder"
    if isinstance(error, errors.GatedRepoError):
        return ConfigError("gated model", where=name, fix="accept its licence on the hub and set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return ConfigError(f"{nothing}, and no such model on the hub", where=name, fix="check it, or set HF_TOKEN")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return DiskError(f"cannot be stored: {error.strerror}", where=name, fix="set HF_HOME to a folder with room")
    if isinstance(error, errors.LocalEntryNotFoundError):
        what = f"{nothing}, and the Hugging Face hub cannot be reached"
        return LaunchError(what, where=name, fix="give a path, or try again")
    reason = (str(error) or type(error).__name__).strip().partition("\n")[0]
    return LaunchError(f"cannot be fetched: {reason}", where=name, fix="try again")
