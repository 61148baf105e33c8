"""The tokenizer of a GGUF file: tokens, their types, merges, special tokens, chat template.

llama.cpp has its own tokenizers: a byte-level BPE, whose pre-tokenizer is chosen by a name, and the
BPE of SentencePiece (LLaMA 2), which has no merges: it joins the two neighbours whose token has the
highest score. A `tokenizer.json` is refused unless it is exactly one of them.
"""

from collections.abc import Mapping, Set
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from pretrain.config.model import SpecialTokens
from pretrain.errors import ConfigError
from pretrain.interop.release_files import CHAT_TEMPLATE
from pretrain.utils.safe_read import parse_json

_FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    ("bytes+words",): "gpt-2",
    ("digits", "bytes+words"): "smollm",
    (_WORDS % r"\p{N}{1,3}", "bytes"): "dbrx",
    (_WORDS % r"\p{N}", "bytes"): "qwen2",
}
"""Steps of a pre-tokenizer -> llama.cpp's name of it."""
_WITHOUT_MERGES = {"dbrx": "llama-bpe"}
"""The same where a word that is a token is not merged (`ignore_merges`)."""
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_PREFIXES = (
    ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, _SPACES]}, None, True),
    (_SPACES, None, False),
    (
        _SPACES,
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        False,
    ),
    (None, {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": False}, False),
)
"""Normalizer and pre-tokenizer of a SentencePiece BPE; whether a space is put before each text."""
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6
"""Types of tokens in GGUF."""


def _refused(what: str, fix: str = "export to hf") -> ConfigError:
    return ConfigError(f"llama.cpp does not encode as this tokenizer: {what}", where=_FILE, fix=fix)


def _step(state: dict[str, Any]) -> str:
    """Returns a step of a pre-tokenizer in the spelling of `_SPLITS`. Raises: ConfigError."""
    kind = state["type"]
    if kind == "ByteLevel":
        if state.get("add_prefix_space"):
            raise _refused("pre_tokenizer puts a space before a text")
        return "bytes+words" if state.get("use_regex", True) else "bytes"
    if kind == "Digits" and state.get("individual_digits"):
        return "digits"
    pattern = state.get("pattern", {}).get("Regex")
    is_whole = state.get("behavior") == "Isolated" and not state.get("invert")
    if kind == "Split" and is_whole and pattern:
        return str(pattern)
    raise _refused(f"pre_tokenizer has {kind}, {_known()}")


def _known() -> str:
    return "and only those of GPT-2, SmolLM, Llama 3 and Qwen 2 are known"


def _find_split(content: dict[str, Any]) -> str:
    """Returns llama.cpp's name of the pre-tokenizer. Raises: ConfigError."""
    state = content.get("pre_tokenizer") or {"type": "None"}
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    name = _SPLITS.get(tuple(map(_step, steps)))
    if name is not None and content["model"].get("ignore_merges"):
        name = _WITHOUT_MERGES.get(name)
    if name is None:
        raise _refused(f"pre_tokenizer is of no known model, {_known()}")
    return name


def _check_bpe(content: dict[str, Any]) -> None:
    """Raises ConfigError where a `tokenizer.json` is not a BPE without further steps."""
    model = content["model"]
    if model.get("type") != "BPE":
        text = f"its model is {model.get('type')}"
        raise _refused(f"{text}, and only BPE is exported, of bytes or with byte_fallback")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _refused(f"model.{key}={model[key]!r}")
    for token in content.get("added_tokens", ()):
        if flags := [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]:
            raise _refused(f"{flags[0]} of {token['content']!r}")


def _check_bytes(content: dict[str, Any], checks: bool) -> None:
    """Raises ConfigError where a BPE is not of bytes, or has further steps."""
    model = content["model"]
    normalizer = content.get("normalizer")
    if normalizer is not None and (checks or normalizer["type"] != "NFC"):
        same = "; --no-check exports it, and texts in NFC have the same tokens"
        is_nfc = normalizer["type"] == "NFC"
        raise _refused(
            f"it normalizes texts ({normalizer['type']})",
            f"export to hf{same if is_nfc else ''}",
        )
    if missing := set(pre_tokenizers.ByteLevel.alphabet()) - model["vocab"].keys():
        raise _refused(f"its vocabulary lacks {len(missing)} of the 256 bytes")


def _has_prefix(content: dict[str, Any]) -> bool:
    """Returns whether a space is put before each text. Raises: ConfigError: There are other steps."""
    for normalizer, pre_tokenizer, has_prefix in _PREFIXES:
        if (content.get("normalizer"), content.get("pre_tokenizer")) == (normalizer, pre_tokenizer):
            return has_prefix
    raise _refused("its normalizer and pre_tokenizer are not those of LLaMA 2 or Gemma")


def _score(content: dict[str, Any]) -> dict[str, float]:
    """Returns scores by which neighbours are joined in the order of the merges.

    A token is scored, not a pair: every pair of tokens that makes a token must be a merge, and those
    that make the same token must follow each other.

    Raises:
        ConfigError: There is a pair that is none, or a merge of the same token at another place; or
            an added token is found in normalized texts.
    """
    model = content["model"]
    vocab: dict[str, int] = model["vocab"]
    added = content.get("added_tokens", ())
    if missing := 256 - sum(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        raise _refused(f"its vocabulary lacks {missing} of the 256 bytes")
    if normalized := [token["content"] for token in added if token.get("normalized")]:
        raise _refused(f"{normalized[0]!r} is normalized before it is found")
    scores: dict[str, float] = {}
    merges = [tuple(one.split(" ", 1) if isinstance(one, str) else one) for one in model["merges"]]
    for token, _ in groupby(map("".join, merges)):
        if token in scores:
            raise _refused(f"merges that make {token!r} are at several places")
        scores[token] = -float(len(scores))
    _check_merged(vocab, vocab.keys() - {one["content"] for one in added}, set(merges))
    return scores


def _check_merged(vocab: Mapping[str, int], tokens: Set[str], merges: Set[tuple[str, ...]]) -> None:
    """Raises ConfigError where two tokens make a token and are not merged."""
    for token in tokens:
        for place in range(1, len(token)):
            first, second = token[:place], token[place:]
            if first in vocab and second in vocab and (first, second) not in merges:
                raise _refused(f"{first!r} and {second!r} are not merged, and make the token {token!r}")


def _of_bytes(content: dict[str, Any]) -> dict[str, Any]:
    pairs = content["model"]["merges"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    return {"ggml.model": "gpt2", "ggml.pre": _find_split(content), "ggml.merges": merges}


def _of_sentences(content: dict[str, Any], listed: list[tuple[str, int]]) -> dict[str, Any]:
    """Returns the keys of a SentencePiece BPE; marks the tokens of bytes. Raises: ConfigError."""
    scores = _score(content)
    model, has_prefix = content["model"], _has_prefix(content)
    for byte in range(256):
        listed[model["vocab"][f"<0x{byte:02X}>"]] = (f"<0x{byte:02X}>", _BYTE)
    unknown = model["vocab"].get(model.get("unk_token"))
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        # No neighbours make the others.
        "ggml.scores": [scores.get(text, -float(len(listed))) for text, _ in listed],
        "ggml.add_space_prefix": has_prefix,
        **({} if unknown is None else {"ggml.unknown_token_id": unknown}),
    }


def _find_ends(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the ids that inputs begin and end with. Raises: ConfigError: More than one."""
    text = "a"
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.encode(text).ids
    place = next(n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
    first, last = whole[:place], whole[place + len(plain) :]
    if len(first) > 1 or len(last) > 1:
        raise _refused(
            f"post_processor puts {len(first)} tokens before a text and {len(last)} after it",
        )
    return first, last


def read_vocabulary(
    files: Mapping[str, bytes], special: SpecialTokens, vocab_size: int, *, checks: bool = True
) -> dict[str, Any]:
    """Returns the keys of GGUF below `tokenizer.` of a `tokenizer.json`.

    Args:
        files: Contents of the tokenizer's files by name.
        special: Ids of the model.
        vocab_size: Rows of the model; ids that the tokenizer lacks are named, and never encoded.
        checks: Refuses a tokenizer that normalizes texts to NFC, which llama.cpp does not.

    Raises:
        ConfigError: llama.cpp would encode some text otherwise; there is no such file; it has more
            tokens than the model; or the model has no end of a text.
    """
    if _FILE not in files:
        raise ConfigError(f"llama.cpp needs a {_FILE}", where="tokenizer", fix="export to hf")
    content = parse_json(files[_FILE])
    _check_bpe(content)
    of_sentences = bool(content["model"].get("byte_fallback"))
    if not of_sentences:
        _check_bytes(content, checks)
    if special.eos is None:
        # llama.cpp would take the token of id 11, its default for this kind of tokenizer.
        raise _refused("special_tokens.eos is not known, and llama.cpp needs one")
    listed = _list_tokens(content, vocab_size)
    first, last = _find_ends(Tokenizer.from_buffer(files[_FILE]))
    bos = next(iter(first), special.bos)
    if last not in ([], [special.eos]):
        raise _refused(
            f"post_processor ends a text with {last[0]}, and special_tokens.eos is {special.eos}",
        )
    keys = _of_sentences(content, listed) if of_sentences else _of_bytes(content)
    keys |= {
        "ggml.tokens": [text for text, _ in listed],
        "ggml.token_type": [kind for _, kind in listed],
        "ggml.bos_token_id": special.eos if bos is None else bos,
        "ggml.eos_token_id": special.eos,
        "ggml.padding_token_id": special.eos if special.pad is None else special.pad,
        "ggml.add_bos_token": bool(first),
        "ggml.add_eos_token": bool(last),
    }
    template: Any = files.get(CHAT_TEMPLATE, b"").decode()
    template = template or parse_json(files.get(_SETTINGS, b"{}")).get("chat_template")
    if isinstance(template, list):  # by name; llama.cpp knows one
        template = {one["name"]: one["template"] for one in template}.get("default")
    if isinstance(template, str):
        keys["chat_template"] = template
    return keys


def _list_tokens(content: dict[str, Any], vocab_size: int) -> list[tuple[str, int]]:
    """Returns the text and the type of each id. Raises: ConfigError: An id is beyond the model."""
    tokens = {number: (text, _NORMAL) for text, number in content["model"]["vocab"].items()}
    for added in content.get("added_tokens", ()):
        tokens[added["id"]] = (added["content"], _CONTROL if added["special"] else _USER_DEFINED)
    if (largest := max(tokens)) >= vocab_size:
        raise _refused(f"it has the id {largest}, and the model {vocab_size} tokens")
    return [tokens.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(vocab_size)]
