"""Tokenizers as transformers reads them: loaded, compared, and written as one tokenizer.json.

    folder -> load_released -> that of transformers; of a sentencepiece model, by its own rules
    folder -> read_released -> the tokenizer.json that encodes alike
    two tokenizers -> find_difference -> the first token or text that they encode otherwise

AutoTokenizer reads more than tokenizer.json: tokens of tokenizer_config.json and added_tokens.json,
and the rules of the class that a folder names. No code of a folder is run, and nothing is fetched.
"""

import logging
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.errors import DataError, install_fix
from pretrain.tokenizer.release_probe import check_patterns
from pretrain.tokenizer.sentencepiece_model import convert_sentencepiece
from pretrain.utils.foreign_files import name_vocabulary
from pretrain.utils.safe_read import MAX_TOKENIZER_BYTES

_log = logging.getLogger(__name__)

FILE = "tokenizer.json"
VOCABULARY_FILES = (FILE, "vocab.*", "merges.txt", "*.model", "*.spm")
SETTINGS_FILES = (
    "tokenizer_config.json",
    "tokenizer.*.json",  # of versions of transformers, by `fast_tokenizer_files`
    "special_tokens_map.json",
    "added_tokens.json",
    "target_vocab.json",
    "*.jinja",
)
PIECES = (".model", ".spm")
"""Ends of the names of sentencepiece models."""
_MARIAN_FILES = ("source.spm", "target.spm", "vocab.json")

PLAIN = (
    "", " ", "a", " a", "a ", "  a  b   c ", "a\nb\n\nc", "\n", " \n a", "\ta\t\tb", "a\r\nb",
    "It's 2017:  x=12345; 3.14, 007", "DON'T (a_b)... [it] isn't I'LL; a@b.c <p> # ## #### */",
    "aaaaaaaa--------========",
    "caf\u00e9 cafe\u0301 \u212b \ufb01 \u2460 \uff21 \uff76\uff9e e\u0323\u0302 \u00df",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0645\u0631 \u1112\u1161\u11ab",
    "\u4e2d\u6587\u3001\u65e5\u672c \ud55c\uae00",
    "\U0001f600\U0001f468\u200d\U0001f469",
    "\u00a0x\u3000y\u200bz\ufeff\u00ad \u2581a", "x\x00\x1b\x7f\ufffd\U0010fffd",
)  # fmt: skip
"""Texts without special tokens: white space, digits, case, accents, scripts, bytes."""
_MOST_NAMES = 500
"""Added tokens that are encoded within texts, of each end; the numbers of all are compared."""


@dataclass(frozen=True, slots=True)
class EncodingDifference:
    """A token, or a text, and what two tokenizers make of it."""

    text: str
    ours: str
    theirs: str


def find_difference(ours: Tokenizer, theirs: Any) -> EncodingDifference | None:
    """Returns the first token or text that two tokenizers encode otherwise; None: none is known.

    `theirs` is of transformers or of `tokenizers`. Compared are the numbers of all tokens, then
    texts with and without the tokens that begin and end them.
    """
    mine, their = ours.get_vocab(), theirs.get_vocab()
    if mine != their:
        differing = {name for name, _ in mine.items() ^ their.items()}
        name = min(differing, key=lambda one: (their.get(one, mine.get(one, 0)), one))
        return EncodingDifference(name, str(mine.get(name, "none")), str(their.get(name, "none")))
    difference = compare_texts(ours, theirs, probe_texts(ours))
    return difference or compare_texts(ours, theirs, ("", "a b"), whole=True)


def probe_texts(tokenizer: Tokenizer) -> list[str]:
    """Returns plain texts, and texts with the added tokens of a tokenizer."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    names = added if len(added) <= 2 * _MOST_NAMES else added[:_MOST_NAMES] + added[-_MOST_NAMES:]
    return [*PLAIN, *(text for name in names for text in (name, f"x {name} y{name}z "))]


def compare_texts(
    ours: Tokenizer, theirs: Any, texts: Iterable[str], *, whole: bool = False
) -> EncodingDifference | None:
    """Returns the first text that two tokenizers encode otherwise, `whole` with begin and end."""
    for text in texts:
        ours_ids, right = _encode(ours, text, whole), _encode(theirs, text, whole)
        if ours_ids != right:
            same = map(operator.eq, ours_ids, right)
            place = sum(1 for _ in takewhile(bool, same))
            return EncodingDifference(text, _shown(ours_ids, place), _shown(right, place))
    return None


def _encode(tokenizer: Any, text: str, whole: bool) -> list[int]:
    if isinstance(tokenizer, Tokenizer):
        return list(tokenizer.encode(text, add_special_tokens=whole).ids)
    options = {"add_special_tokens": whole, "truncation": False, "padding": False, "verbose": False}
    return list(tokenizer(text, **options)["input_ids"])


def _shown(ids: list[int], place: int, most: int = 12) -> str:
    start = max(0, place - most // 2)
    shown = ", ".join(map(str, ids[start : start + most]))
    return f"[{'..., ' if start else ''}{shown}{', ...' if len(ids) > start + most else ''}]"


@dataclass(frozen=True, slots=True)
class ReleasedTokenizer:
    """The tokenizer of a folder.

    `content` is a tokenizer.json that encodes as `theirs`, of transformers; None: there is none,
    for the `reason`. `theirs` is None where the folder has that file alone.
    """

    content: bytes | None
    theirs: Any
    reason: str = ""


def read_released(folder: Path) -> ReleasedTokenizer:
    """Reads a folder. Its tokenizer.json is kept to the byte where transformers encodes as it does.

    Raises: DataError: There is none, or it cannot be read (see `load_released`).
    """
    file = folder / FILE
    content = file.read_bytes() if file in list_tokenizer_files(folder) else None
    _check_patterns(folder)
    if content is not None and not any(_glob(folder, (*SETTINGS_FILES, "config.json"))):
        return ReleasedTokenizer(content, None)
    theirs = load_released(folder, own_code=content is not None)
    other = None if content is None else find_difference(_parse(content, file), theirs)
    if content is not None and other is None:
        return ReleasedTokenizer(content, theirs)
    backend = getattr(theirs, "backend_tokenizer", None)
    if backend is None:
        also = "" if other is None else f", and {_say(other, FILE, 'transformers')}"
        reason = f"its tokenizer, {type(theirs).__name__}, cannot be made one of `tokenizers`{also}"
        return ReleasedTokenizer(None, theirs, reason)
    if other is not None:
        _log.warning("%s: %s; the latter is used", folder, _say(other, FILE, "AutoTokenizer"))
    content = (backend.to_str(pretty=True) + "\n").encode()
    if (other := find_difference(_parse(content, folder), theirs)) is not None:
        return ReleasedTokenizer(
            None, theirs, f"no {FILE} encodes as transformers: {_say(other, 'it', 'transformers')}"
        )
    return ReleasedTokenizer(content, theirs)


def _say(found: EncodingDifference, ours: str, theirs: str) -> str:
    return f"{found.text!r} is {found.ours} in {ours} and {found.theirs} in {theirs}"


def _parse(content: bytes, where: Path) -> Tokenizer:
    """Returns a tokenizer without padding and truncation. Raises: DataError."""
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # `tokenizers` raises plain Exception and ValueError
        raise DataError(
            f"not a tokenizer: {error}", where=str(where), fix="give a tokenizer.json as `tokenizers` saves it"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def load_released(folder: Path, *, own_code: bool = False) -> Any:
    """Returns the tokenizer of a folder as transformers reads it, or sentencepiece its model.

    With `own_code`, a folder that names code of its own is read without it.

    Raises:
        DataError: There is none; files are missing or damaged; it needs a package that is not
            installed, or code of its own; its regular expressions take too much; or sentencepiece
            encodes otherwise.
    """
    where = str(folder)
    present = {path.name for path in _glob(folder, VOCABULARY_FILES)}
    if FILE not in present and (refusal := refusal_of_foreign(folder)) is not None:
        raise refusal
    if not present:
        raise DataError(
            f"has no tokenizer: no {', no '.join(VOCABULARY_FILES)}",
            where=where,
            fix=f"give a folder with a {FILE}",
        )
    # Missing files by name, where transformers would report a detail of its own.
    if present & {"source.spm", "target.spm"} and (missing := set(_MARIAN_FILES) - present):
        raise DataError(
            f"lacks {', '.join(sorted(missing))}",
            where=where,
            fix="fetch the folder again",
        )
    pieces = sorted(name for name in present if name.endswith(PIECES))
    if pieces and FILE not in present and find_spec("sentencepiece") is None:
        raise DataError(f"{pieces[0]} needs sentencepiece", where=where, fix=install_fix())
    _check_patterns(folder)
    theirs = _load(folder, own_code)
    model = str(getattr(theirs, "vocab_file", ""))
    backend = getattr(theirs, "backend_tokenizer", None)
    if FILE in present or not model.endswith(PIECES) or backend is None:
        return theirs
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=convert_sentencepiece(Path(model), backend, PLAIN),
        chat_template=theirs.chat_template,
        model_max_length=theirs.model_max_length,
        model_input_names=theirs.model_input_names,
        padding_side=theirs.padding_side,
        clean_up_tokenization_spaces=False,
        **theirs.special_tokens_map,
    )


def _check_patterns(folder: Path) -> None:
    for path in _glob(folder, (FILE, "tokenizer.*.json")):
        check_patterns(path.read_bytes(), str(path))


def _load(folder: Path, own_code: bool) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        options = {"local_files_only": True, "trust_remote_code": False}
        if own_code and b'"auto_map"' in _content(folder / "tokenizer_config.json"):
            text = "%s: its tokenizer has code of its own, which is not run: %s is used"
            _log.warning(text, folder, FILE)
            return PreTrainedTokenizerFast.from_pretrained(folder, **options)
        return AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # transformers and tokenizers raise nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        problem, fix = "its tokenizer cannot be read", "fetch the folder again"
        if isinstance(error, ImportError):
            problem, fix = "its tokenizer needs a package", "install the package"
        raise DataError(f"{problem}: {reason}", where=str(folder), fix=fix) from None


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _glob(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Returns the files of these names. Raises: DataError: One would block, or fill the memory."""
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    for path in paths:
        size = path.stat().st_size if path.is_file() else -1
        if not 0 <= size <= MAX_TOKENIZER_BYTES:
            too_large = f"larger than {MAX_TOKENIZER_BYTES:,} bytes"
            raise DataError(
                "not a regular file" if size < 0 else too_large,
                where=str(path),
                fix="give the folder of a tokenizer",
            )
    return paths


def list_tokenizer_files(folder: Path) -> list[Path]:
    """Returns every file that the tokenizer of a folder may consist of."""
    return _glob(folder, (*VOCABULARY_FILES, *SETTINGS_FILES))


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has a vocabulary, in any format."""
    return bool(_glob(folder, VOCABULARY_FILES))


def refusal_of_foreign(folder: Path) -> DataError | None:
    """Returns the error for a vocabulary that transformers cannot read rightly, with what to do."""
    for path in _glob(folder, ("*.model", "*.tiktoken", "tekken.json", "*.gguf")):
        if (foreign := name_vocabulary(path)) is not None:
            return DataError(
                foreign,
                where=str(path),
                fix=f"give the folder of a release with a {FILE}",
            )
    return None
