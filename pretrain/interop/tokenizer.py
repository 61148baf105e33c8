"""The tokenizer of a released model, read by transformers from a folder, and ours wrapped so that it can be read so.

    folder -> load_hub_tokenizer -> HubTokenizer -> encode, decode, tokens
    tokenizer.json of `pretrain prepare` -> wrap_tokenizer_json -> files that AutoTokenizer reads

Nothing is fetched, and no code that lies in the folder is run.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.config.model import SpecialTokens
from pretrain.errors import DataError
from pretrain.interop.fields import CONFIG, TOKENIZER_FILES

_TOKENIZER, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_MARIAN_FILES = ("source.spm", "target.spm", "vocab.json")
_VISIBLE = str.maketrans({" ": "\u2581", "\n": "\u21b5", "\t": "\u21e5"})
"""What stands for white space in a displayed piece; the first is sentencepiece's own."""

_PROBE = "It's 2017:  x=12345; caf\u00e9 e\u0301 \u212b\n\n\tDON'T (a_b)... "
"""Text that pre-tokenizers and normalizers treat differently: digits, white space, case, accents, punctuation."""


class HubTokenizer:
    """Text to the ids that a model reads, and back. Built by `load_hub_tokenizer`.

    Args:
        tokenizer: One of transformers.

    Attributes:
        special_tokens: Ids that the tokenizer knows; a text begins with its CLS where it has no BOS, and ends with its
            SEP where it has no EOS. What the decoder of an encoder-decoder begins with is not the tokenizer's to say.
        eos_ids: Ids that end a text: one, or none.
        mask_id: Id that stands for a token to be predicted; None: there is none.
        vocab_size: One more than the largest id.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.special_tokens = SpecialTokens(
            pad=tokenizer.pad_token_id,
            bos=tokenizer.cls_token_id if bos is None else bos,
            eos=tokenizer.sep_token_id if eos is None else eos,
            mask=tokenizer.mask_token_id,
        )
        self.mask_id: int | None = self.special_tokens.mask
        self.eos_ids: tuple[int, ...] = () if self.special_tokens.eos is None else (self.special_tokens.eos,)
        self.vocab_size: int = max(tokenizer.get_vocab().values(), default=-1) + 1
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._of_bytes = backend is not None and "ByteLevel" in repr(backend.decoder)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text with the special tokens that the model's inputs have: CLS and SEP, </s>, BOS.

        Never truncated; the caller knows what fits.
        """
        return list(self._tokenizer(text, truncation=False, verbose=False)["input_ids"])

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Returns the ids of two texts in one row, and the segment of each: 0 or 1 where the model tells them apart."""
        found = self._tokenizer(first, second, truncation=False, verbose=False, return_token_type_ids=True)
        return list(found["input_ids"]), list(found["token_type_ids"])

    def encode_target(self, text: str) -> list[int]:
        """Returns the ids of what a translator is to say: in the target's language, where the tokenizer has two."""
        return list(self._tokenizer(text_target=text, truncation=False, verbose=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def tokens(self, ids: list[int]) -> list[str]:
        """Returns what each id stands for, to be looked at: white space is visible, bytes are text again.

        A piece that ends within a character keeps the spelling of the vocabulary.
        """
        return [self._shown(str(piece)) for piece in self._tokenizer.convert_ids_to_tokens(ids)]

    def _shown(self, piece: str) -> str:
        text = str(self._tokenizer.convert_tokens_to_string([piece])) if self._of_bytes else piece
        return (piece if "\ufffd" in text else text).translate(_VISIBLE)


def load_hub_tokenizer(folder: Path) -> HubTokenizer:
    """Loads the tokenizer of a folder: fast, of sentencepiece models (Marian), or a `tokenizer.json` alone.

    Raises:
        DataError: There is none; files are missing or damaged; it needs a package that is not installed, or code of its
            own.
    """
    _check_files(folder)
    from transformers import AutoTokenizer

    try:
        return HubTokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except ImportError as error:
        raise DataError(
            f"its tokenizer needs a package: {_first_line(error)}", where=str(folder), fix="install the package"
        ) from None
    except Exception as error:  # transformers and tokenizers raise nearly anything
        raise DataError(
            f"its tokenizer cannot be read: {_first_line(error)}", where=str(folder), fix="fetch the folder again"
        ) from None


def _check_files(folder: Path) -> None:
    """Says what is missing, where transformers would name a detail of its own."""
    present = {name for name in TOKENIZER_FILES if (folder / name).is_file()}
    if not present:
        fix = "give the folder of a model with its tokenizer"
        raise DataError(f"has no tokenizer: no {', no '.join(TOKENIZER_FILES[:5])}, ...", where=str(folder), fix=fix)
    if present & {"source.spm", "target.spm"} and (missing := set(_MARIAN_FILES) - present):
        raise DataError(f"lacks {', '.join(sorted(missing))}", where=str(folder), fix="fetch the folder again")
    of_sentencepiece = sorted(name for name in present if name.endswith((".spm", ".model")))
    if of_sentencepiece and _TOKENIZER not in present and find_spec("sentencepiece") is None:
        raise DataError(
            f"{of_sentencepiece[0]} needs sentencepiece", where=str(folder), fix="install it: pip install sentencepiece"
        )


def _first_line(error: BaseException) -> str:
    """The first line of an error that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def tokenizer_files(folder: Path) -> list[tuple[str, bytes]]:
    """Returns name and content of every tokenizer file of a folder; none is no error.

    They make a tokenizer without the model's config.json beside them: the class that it implies is written into
    tokenizer_config.json where that does not name one.

    Raises:
        DataError: A file cannot be read.
    """
    try:
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
        described = (folder / CONFIG).read_bytes() if (folder / CONFIG).is_file() else b"{}"
    except OSError as error:
        raise DataError(
            f"cannot read its tokenizer: {error.strerror or error}", where=str(folder), fix="check its permissions"
        ) from error
    settings, model = _object(files.get(_SETTINGS, b"{}")), _object(described)
    if files and settings is not None and not settings.get("tokenizer_class") and (implied := _implied_class(model)):
        files[_SETTINGS] = _dump(settings | {"tokenizer_class": implied})
    return list(files.items())


def _implied_class(model: dict[str, Any] | None) -> str | None:
    """Returns the tokenizer class that transformers takes for a config.json, if it knows any."""
    if not model:
        return None
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    known = model.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(str(model.get("model_type")))
    # One name, or up to transformers 4 the names of the slow class and of the fast one.
    return next((name for name in ([known] if isinstance(known, str) else known or ()) if name), None)


def _object(content: bytes) -> dict[str, Any] | None:
    """A JSON object, or None where it is something else: what reads the file says so."""
    try:
        value = json.loads(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _dump(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def reads_as_written(folder: Path) -> bool:
    """Whether AutoTokenizer encodes text as the folder's `tokenizer.json` does.

    transformers 5 keeps the vocabulary of some model types (qwen2) and builds the rest of the tokenizer by the rules of
    the released one, so that an export with a tokenizer of our own is read as another.

    Raises:
        DataError: The tokenizer cannot be read.
    """
    expected = Tokenizer.from_file(str(folder / _TOKENIZER)).encode(_PROBE).ids
    return load_hub_tokenizer(folder).encode(_PROBE) == expected


def wrap_tokenizer_json(
    text: bytes, special: SpecialTokens, model_max_length: int | None = None
) -> list[tuple[str, bytes]]:
    """Makes the files that AutoTokenizer reads of a `tokenizer.json`, and returns their names and contents.

    Args:
        text: The tokenizer, as `tokenizers` saves it; it stays as it is.
        special: Ids of its special tokens.
        model_max_length: Longest row of the model. None: not said.

    Raises:
        DataError: Not a tokenizer, or it has no token of one of these ids.
    """
    try:
        tokenizer = Tokenizer.from_buffer(text)
    except Exception as error:  # `tokenizers` raises plain Exception and ValueError
        raise DataError(f"not a tokenizer: {error}", where=_TOKENIZER, fix="give one of `tokenizers`") from None
    names = {"pad": special.pad, "bos": special.bos, "eos": special.eos, "mask": special.mask}
    found = {name: number for name, number in names.items() if number is not None}
    tokens = {f"{name}_token": tokenizer.id_to_token(number) for name, number in found.items()}
    for name, number in found.items():
        if tokens[f"{name}_token"] is None:
            raise DataError(
                f"has no token of the id special_tokens.{name}={number}",
                where=_TOKENIZER,
                fix="give the tokenizer that the model was trained with",
            )
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **({} if model_max_length is None else {"model_max_length": model_max_length}),
        **tokens,
    }
    return [(_TOKENIZER, text), (_SETTINGS, _dump(settings)), ("special_tokens_map.json", _dump(tokens))]
