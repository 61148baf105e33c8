"""URLs among the inputs: which there are, and how they are written where others may read."""

import re
from urllib.parse import unquote, urlsplit

from pretrain.errors import DataError

REMOTE_SCHEMES = ("http", "https", "s3", "gs")
_REMOTE_PREFIXES = tuple(f"{scheme}://" for scheme in REMOTE_SCHEMES)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(::|://)")


def scheme_of(path: str) -> str:
    """Returns the scheme of a URL, or the empty string for a path.

    Raises:
        DataError: A URL of a kind that is not read.
    """
    match = _SCHEME.match(path)
    if match is None:
        return ""
    if match[2] == "://" and match[1] in (*REMOTE_SCHEMES, "file"):
        return match[1]
    raise DataError(
        f"URLs of {match[1]!r} are not read",
        where=shown(path),
        fix=f"use a path, or a URL of {', '.join(REMOTE_SCHEMES)} or file",
    )


def is_remote(path: str) -> bool:
    """Whether `path` is a URL that is read over a network."""
    return path.startswith(_REMOTE_PREFIXES)


def local_path(path: str) -> str:
    """Returns the path that a file: URL means; any other path as it is."""
    return unquote(urlsplit(path).path) if path.startswith("file://") else path


def name_of(path: str) -> str:
    """Returns what a path or URL ends in, by which its format goes: no query, no fragment."""
    if path.startswith(("http://", "https://")):
        path = unquote(urlsplit(path).path)
    return path.rpartition("/")[2]


def shown(path: str) -> str:
    """Returns `path` without what may be a secret in a URL: user and password, and the query of all but s3 and gs,
    where a question mark is part of a name."""
    if "://" not in path:
        return path
    scheme, _, rest = path.partition("://")
    place, slash, name = rest.partition("/")
    if scheme not in ("s3", "gs"):
        place, name = place.partition("?")[0], name.partition("?")[0].partition("#")[0]
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{name}"
