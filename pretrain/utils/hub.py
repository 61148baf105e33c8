"""Fetches files of a model on the Hugging Face hub, and uploads a folder to it.

    is_hub_name("owner/model") -> fetch_files("owner/model", ["config.json", "*.model"]) -> a folder
    open_repository("owner/model") -> push_folder(folder, "owner/model") -> its address

No code is run. Fetched files stay in the hub's own cache: a second call fetches nothing, and a call
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


def open_repository(name: str) -> None:
    """Makes a private repository of a model, unless it is there, before minutes of work for it.

    Raises:
        ConfigError: No name of a repository, no token, or no right to write there.
        LaunchError: The hub cannot be reached.
    """
    from huggingface_hub import create_repo, get_token

    if not is_hub_name(name):
        raise ConfigError(
            f"{name!r} is not the name of a repository",
            where="--push",
            fix="give OWNER/NAME, of letters, digits, -, _ and .",
        )
    if get_token() is None:
        raise ConfigError(
            "the hub needs a token",
            where=name,
            fix="set HF_TOKEN to one that may write, or run: hf auth login",
        )
    try:
        create_repo(name, private=True, exist_ok=True)
    except Exception as error:  # its own, and those of its network library
        raise _not_written(name, error) from error


def push_folder(folder: Path, name: str) -> str:
    """Uploads a folder to a repository; files that have arrived before are not sent again.

    Returns the address. Raises: ConfigError: No right to write there. LaunchError: It was
    interrupted, or the hub cannot be reached; the next call continues.
    """
    from huggingface_hub import upload_folder

    try:
        done = upload_folder(repo_id=name, folder_path=folder, commit_message="Upload of an export")
    except Exception as error:  # its own, those of its network library, and RuntimeError of threads
        raise _not_written(name, error) from error
    return str(done.commit_url).partition("/commit/")[0]


def _not_written(name: str, error: Exception) -> PretrainError:
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return ConfigError(_first_line(error), where="--push", fix="give OWNER/NAME")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401 and not isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(
            "the hub does not accept the token",
            where=name,
            fix="set HF_TOKEN to a valid one",
        )
    if status in (401, 403, 404):
        return ConfigError(
            "the token may not write to this repository",
            where=name,
            fix="check the owner, or take a token that may write",
        )
    return LaunchError(
        f"cannot be uploaded: {_first_line(error.__cause__ or error)}",
        where=name,
        fix="run it again: files that have arrived are not sent again",
    )


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().partition("\n")[0]


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
        return LaunchError(
            f"{nothing}, and the Hugging Face hub cannot be reached",
            where=name,
            fix="give a path, or try again",
        )
    return LaunchError(f"cannot be fetched: {_first_line(error)}", where=name, fix="try again")
