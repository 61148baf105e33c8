"""The tokenizer of a released model, read by transformers, and ours, written for transformers.

    folder -> load_hub_tokenizer -> HubTokenizer -> encode, decode, tokens
    tokenizer.json of `pretrain prepare` -> wrap_tokenizer_json -> files that AutoTokenizer reads

Nothing is fetched, and no code of the folder is run.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from pretrain.config.model import SpecialTokens
from pretrain.config.texts.templates import JINJA_KEY
from pretrain.errors import ConfigError, DataError
from pretrain.families.config_json import CONFIG
from pretrain.interop.release_files import CHAT_TEMPLATE
from pretrain.tokenizer.chat_template import ChatTemplate, ChatTemplateError, load_chat_template
from pretrain.tokenizer.release_probe import check_renderings
from pretrain.tokenizer.released import (
    PIECES,
    EncodingDifference,
    find_difference,
    has_tokenizer,
    list_tokenizer_files,
    load_released,
    read_released,
)
from pretrain.utils.safe_read import parse_json

_TOKENIZER = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_OTHER_TEMPLATES = "additional_chat_templates/*.jinja"
_VISIBLE = str.maketrans({" ": "\u2581", "\n": "\u21b5", "\t": "\u21e5"})
"""Symbols of white space in a displayed piece; the first is sentencepiece's own."""


class HubTokenizer:
    """A `Codec` over a tokenizer of transformers. Built by `load_hub_tokenizer`.

    Attributes:
        special_tokens: Ids that the tokenizer defines; CLS counts as BOS, and SEP as EOS, where it
            lacks that. The start token of a decoder is not the tokenizer's.
        has_chat_template: The release says how conversations are written.
        vocab_size: One more than the largest id.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        first = tokenizer.bos_token_id
        last = tokenizer.eos_token_id
        self.special_tokens = SpecialTokens(
            pad=tokenizer.pad_token_id,
            bos=tokenizer.cls_token_id if first is None else first,
            eos=tokenizer.sep_token_id if last is None else last,
            mask=tokenizer.mask_token_id,
        )
        self.mask_id: int | None = self.special_tokens.mask
        eos = self.special_tokens.eos
        self.eos_ids: tuple[int, ...] = () if eos is None else (eos,)
        self.vocab_size: int = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.has_chat_template = bool(tokenizer.chat_template)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._of_bytes = backend is not None and "ByteLevel" in repr(backend.decoder)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text with the special tokens of inputs, never truncated."""
        return list(self._tokenizer(text, truncation=False, verbose=False)["input_ids"])

    def encode_placed(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of `encode`, and their character spans, ascending; an added token's is empty."""
        coded = self._tokenizer(text, truncation=False, verbose=False, return_offsets_mapping=True)
        spans, after = [], 0
        for start, end in coded["offset_mapping"]:
            after = max(after, end)
            spans.append((start, end) if end else (after, after))
        return list(coded["input_ids"]), spans

    def encode_chat(self, turns: list[tuple[str, str]]) -> list[int]:
        """Returns the ids of a conversation by the release's chat template. Raises: ConfigError: It has none."""
        return self.encode_rendered(self.render_chat(turns))

    def render_chat(self, turns: list[tuple[str, str]], *, generation_prompt: bool = True) -> str:
        """Returns the text of a conversation by that template. Raises: ConfigError: It has none."""
        if not self.has_chat_template:
            raise ConfigError(
                "the tokenizer has no chat template",
                fix="write the prompt by hand, for `pretrain generate` without --chat",
            )
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            parts = self._chat_template.render(messages, generation_prompt=generation_prompt)
        except ChatTemplateError as error:
            raise ConfigError(
                str(error),
                fix="use other turns, or write the prompt by hand",
            ) from None
        return "".join(part.text for part in parts)

    def check_chat_template(self) -> None:
        """Renders a conversation, by transformers too.

        Raises: ConfigError: No Jinja. DataError: It takes too much, or they differ.
        """
        assert self._chat_template is not None

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        """The template that transformers chooses; spelled special tokens are meant, as there."""
        try:
            text = self._tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                f"the tokenizer's chat templates: {str(error).partition('.')[0]}",
                fix="write the prompt by hand",
            ) from None
        tokens = self._tokenizer.special_tokens_map
        named = {name: token for name, token in tokens.items() if isinstance(token, str)}
        value = {JINJA_KEY: text, **named}
        template = load_chat_template(value, special=())
        check_renderings(value, self._tokenizer, str(self._tokenizer.name_or_path), tools=(None,))
        return template

    def encode_rendered(self, text: str) -> list[int]:
        """Returns the ids of a text of the chat template, which has its special tokens."""
        options = {"truncation": False, "verbose": False, "add_special_tokens": False}
        return list(self._tokenizer(text, **options)["input_ids"])

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Returns the ids of two texts in one row, and the segment of each, 0 or 1."""
        options = {"truncation": False, "verbose": False, "return_token_type_ids": True}
        encoding = self._tokenizer(first, second, **options)
        return list(encoding["input_ids"]), list(encoding["token_type_ids"])

    def encode_target(self, text: str) -> list[int]:
        """Returns the ids of a translation: the target's language may have its own pieces."""
        return list(self._tokenizer(text_target=text, truncation=False, verbose=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def tokens(self, ids: list[int]) -> list[str]:
        """Returns the text of each id for display: white space is visible, bytes are decoded.

        A piece that ends within a character keeps the spelling of the vocabulary.
        """
        texts = []
        for piece in map(str, self._tokenizer.convert_ids_to_tokens(ids)):
            text = self._tokenizer.convert_tokens_to_string([piece]) if self._of_bytes else piece
            texts.append((piece if "\ufffd" in text else text).translate(_VISIBLE))
        return texts


def load_hub_tokenizer(folder: Path) -> HubTokenizer:
    """Loads the tokenizer of a folder. Raises: DataError (see `load_released`)."""
    return HubTokenizer(load_released(folder))


def tokenizer_files(folder: Path) -> list[tuple[str, bytes]]:
    """Returns name and content of every tokenizer file of a folder; none is no error.

    Their tokenizer.json encodes as transformers does, where one can. They work without the model's
    config.json: the tokenizer class that it implies is written into tokenizer_config.json where
    that does not name one.

    Raises: DataError: A file cannot be read, or transformers cannot read them.
    """
    if not has_tokenizer(folder):
        return []
    try:
        files = {path.name: path.read_bytes() for path in list_tokenizer_files(folder)}
        model = _object((folder / CONFIG).read_bytes()) if (folder / CONFIG).is_file() else {}
        paths = sorted(folder.glob(_OTHER_TEMPLATES))
        named = {path.stem: path.read_text("utf-8") for path in paths}
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read its tokenizer: {getattr(error, 'strerror', None) or error}",
            where=str(folder),
            fix="check its permissions",
        ) from error
    released = read_released(folder)
    settings = _object(files.get(_SETTINGS, b"{}"))
    if settings is not None:
        _list_templates(files, settings, named)
    has_pieces = _TOKENIZER not in files and any(name.endswith(PIECES) for name in files)
    if has_pieces and released.content is not None:
        # The class of a sentencepiece model would convert it otherwise.
        files[_SETTINGS] = _dump(_settings_of(released.theirs))
    elif settings is not None and (implied := _implied_class(model, settings)):
        files[_SETTINGS] = _dump(settings | {"tokenizer_class": implied})
    if released.content is not None:
        files[_TOKENIZER] = released.content
    return list(files.items())


def _list_templates(files: dict[str, bytes], settings: dict[str, Any], named: dict[str, str]) -> None:
    """Enters chat templates in the settings, in a list by name, for which no folder is needed."""
    if not named:
        return
    if CHAT_TEMPLATE in files:
        named = {"default": files.pop(CHAT_TEMPLATE).decode("utf-8", "replace"), **named}
    settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    files[_SETTINGS] = _dump(settings)


def _implied_class(model: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> str | None:
    """Returns the tokenizer class of a config.json or model type, if the settings name none."""
    if not model or settings.get("tokenizer_class"):
        return None
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    implied = model.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(str(model.get("model_type")))
    if isinstance(implied, tuple | list):
        # Up to transformers 4: the names of the slow class and of the fast one.
        implied = next(filter(None, implied), None)
    return implied


def _settings_of(theirs: Any) -> dict[str, Any]:
    """Returns a tokenizer_config.json beside the tokenizer.json of a sentencepiece model."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    names = ("model_max_length", "model_input_names", "chat_template")
    settings |= {name: getattr(theirs, name) for name in names if getattr(theirs, name)}
    return settings | theirs.special_tokens_map


def _object(content: bytes) -> dict[str, Any] | None:
    """Returns a JSON object; None for anything else, which transformers reports."""
    try:
        value = parse_json(content)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _dump(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def reads_otherwise(folder: Path) -> EncodingDifference | None:
    """Returns what AutoTokenizer encodes otherwise than the `tokenizer.json`, if there is one.

    transformers 5 keeps the vocabulary of some model types (qwen2) and builds the rest of the
    tokenizer by the rules of the released one, which changes an export with a tokenizer of ours.
    Raises: DataError.
    """
    file = folder / _TOKENIZER
    if not file.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()  # settings of a batch, which a release may have in its file
    tokenizer.no_truncation()
    return find_difference(tokenizer, load_released(folder))


def wrap_tokenizer_json(
    text: bytes,
    special: SpecialTokens,
    model_max_length: int | None = None,
    chat_template: str | list[dict[str, str]] | None = None,
    named: Mapping[str, str] = MappingProxyType({}),
    has_types: bool = False,
) -> list[tuple[str, bytes]]:
    """Returns names and contents of the files from which AutoTokenizer reads a tokenizer of ours.

    `text` is its `tokenizer.json`, which is not changed; `special` are ids of its tokens,
    `model_max_length` is the longest row of the model, `chat_template` of transformers; `named` are
    special tokens that it reads, such as `bos_token`; with `has_types`, the model tells two texts
    apart by their types.

    Raises:
        DataError: Not a tokenizer, or it has no token of one of these ids.
    """
    try:
        tokenizer = Tokenizer.from_buffer(text)
    except Exception as error:  # `tokenizers` raises plain Exception and ValueError
        raise DataError(
            f"not a tokenizer: {error}",
            where=_TOKENIZER,
            fix="give one of `tokenizers`",
        ) from None
    tokens: dict[str, str] = {}
    ids = special.model_dump(include={"pad", "bos", "eos", "mask"}, exclude_none=True)
    for name, number in ids.items():
        token = tokenizer.id_to_token(number)
        if token is None:
            raise DataError(
                f"has no token of the id special_tokens.{name}={number}",
                where=_TOKENIZER,
                fix="give the tokenizer that the model was trained with",
            )
        tokens[f"{name}_token"] = token
    tokens |= named
    if "eos_token" in tokens:  # a batch of texts needs one; padding is masked, so that any token will do
        tokens.setdefault("pad_token", tokens["eos_token"])
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokens,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    if has_types:  # not among those that a tokenizer of no family returns
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    if model_max_length is not None:
        settings["model_max_length"] = model_max_length
    return [
        (_TOKENIZER, text),
        (_SETTINGS, _dump(settings)),
        ("special_tokens_map.json", _dump(tokens)),
    ]
