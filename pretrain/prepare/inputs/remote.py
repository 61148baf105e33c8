"""Remote inputs, through fsspec: http(s) URLs one by one; files, folders and globs of s3 and gs.

Credentials, endpoints and proxies are those that each system takes from its environment: AWS_* and ~/.aws, Google's
application default credentials, HTTPS_PROXY and ~/.netrc; FSSPEC_S3 and the like for what fsspec alone knows.
"""

import glob
from typing import Any
from urllib.parse import quote

from pretrain.errors import DataError
from pretrain.prepare.inputs.formats import KNOWN_SUFFIXES, require
from pretrain.prepare.inputs.local import Accepts
from pretrain.prepare.inputs.retry import call_remote
from pretrain.prepare.inputs.urls import scheme_of, shown
from pretrain.prepare.sources import InputFile

_PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs"}
_VERSION_KEYS = ("generation", "ETag", "etag", "Last-Modified", "LastModified", "updated")
CONNECT_TIMEOUT_S = 30
READ_TIMEOUT_S = 60


def filesystem(url: str) -> Any:
    """Returns the fsspec file system of a URL; the same object for the same scheme.

    Raises:
        LaunchError: The package that speaks the scheme is not installed.
    """
    scheme = scheme_of(url)
    require(_PACKAGES[scheme], "cloud", f"{scheme} URLs are read")
    import fsspec

    # A listing that is remembered would hide that a file has changed.
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme.startswith("http"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        options["client_kwargs"] = {"trust_env": True, "timeout": timeout}
        # Bytes must be those that are stored, and a signed URL must be sent as it is written.
        options["headers"] = {"Accept-Encoding": "identity"}
        options["encoded"] = "%" in url
    return fsspec.filesystem(scheme, **options)


def stat_remote(url: str) -> InputFile:
    """Looks up one file.

    Raises:
        DataError: The server does not say how large it is.
        IsADirectoryError: It is a folder.
        OSError: As `call_remote` does.
    """
    return _input_file(url, call_remote(url, lambda: filesystem(url).info(url)))


def find_remote(given: str, accepts: Accepts) -> list[InputFile]:
    """Returns the files that a URL names, sorted.

    Raises:
        DataError: No such file, a file named in full that is not accepted, or a server that fails.
        LaunchError: The package that speaks the scheme is not installed.
    """
    try:
        return _find(given, accepts)
    except FileNotFoundError:
        fix = "correct the URL" if given.startswith("http") else "correct the path"
        raise DataError("no such file or folder", where=shown(given), fix=fix) from None
    except OSError as error:
        fix = "mend that, or copy the files here first"
        raise DataError(f"cannot be read: {error.strerror or error}", where=shown(given), fix=fix) from error


def serves_ranges(file: InputFile) -> bool:
    """Whether reading may begin inside; an http server need not be able to.

    Raises:
        DataError: The server fails.
    """
    if not file.path.startswith("http") or file.size < 2:
        return True

    def probe() -> bool:
        with filesystem(file.path).open(file.path, "rb", size=file.size, cache_type="none") as remote:
            remote.seek(1)
            try:
                return len(remote.read(1)) == 1
            except ValueError:  # what fsspec raises when the whole file comes back
                return False

    try:
        return call_remote(file.path, probe)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=file.shown, fix="mend that") from error


def _find(given: str, accepts: Accepts) -> list[InputFile]:
    try:
        info = call_remote(given, lambda: filesystem(given).info(given))
    except FileNotFoundError:
        if given.startswith("http") or not glob.has_magic(given):
            raise
        found = call_remote(given, lambda: filesystem(given).glob(given, detail=True))
        # As on a disk, a wildcard stands for no hidden name.
        entries = [entry for name, entry in found.items() if "/." in given or "/." not in name]
        nested = [_below(given, entry) if entry["type"] == "directory" else [entry] for entry in entries]
        return _sorted(given, [entry for group in nested for entry in group], accepts)
    if info["type"] == "directory":
        return _sorted(given, _below(given, info), accepts)
    if not accepts(given):
        fix = f"give one of {KNOWN_SUFFIXES}, or say its format in a config"
        raise DataError("unsupported file type", where=shown(given), fix=fix)
    return [_input_file(given, info)]


def _below(given: str, folder: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what is stored below a folder, but for hidden files and the empty objects that mark folders."""
    root = folder["name"].rstrip("/") + "/"
    found = call_remote(given, lambda: filesystem(given).find(root, detail=True))
    names = {name: name.removeprefix(root) for name in found}
    shown_names = [name for name, rest in names.items() if "/." not in f"/{rest}" and not f"/{rest}".endswith("/")]
    return [found[name] for name in shown_names]


def _sorted(given: str, entries: list[dict[str, Any]], accepts: Accepts) -> list[InputFile]:
    urls = {f"{scheme_of(given)}://{entry['name']}": entry for entry in entries}
    ordered = sorted((url for url in urls if accepts(url)), key=lambda url: url.split("/"))
    return [_input_file(url, urls[url]) for url in ordered]


def _input_file(url: str, info: dict[str, Any]) -> InputFile:
    if info["type"] == "directory":
        raise IsADirectoryError(url)
    if info["size"] is None:
        raise DataError(
            "the server does not say how large the file is", where=shown(url), fix="download it, and give the copy"
        )
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "-")
    return InputFile(url, info["size"], quote(version, safe=""))
