"""The file of a tokenizer, tokenizer.json: written, read, or taken from a folder or a hub.

    tokenizer.json               as it is
    folder with a tokenizer.json that file
    model folder                 that of its `tokenizer`
    other folder                 AutoTokenizer converts it, such as from a sentencepiece model
    name                         its tokenizer files, and no others, are fetched; then as a folder

No code in the folder of a tokenizer is run, and nothing is unpickled.
"""

import hashlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from pretrain.config.prepare import TokenizerConfig
from pretrain.config.texts.templates import (
    JINJA_KEY,
    OF_TOKENIZER,
    SPECIAL_KEY,
    Template,
    check_template,
)
from pretrain.errors import ConfigError, DataError, LaunchError
from pretrain.run.folder import RunDir
from pretrain.tokenizer.roles import KNOWN_BOS, separator_ids, special_ids, special_tokens_of, start_id
from pretrain.tokenizer.special_tokens import add_special, encode_plain_text, fill_up
from pretrain.utils.hub import fetch_files, is_hub_name
from pretrain.utils.safe_read import parse_json, read_json


def dump_tokenizer(tokenizer: Tokenizer) -> bytes:
    """Returns the content of the tokenizer's `tokenizer.json`."""
    return (tokenizer.to_str(pretty=True) + "\n").encode()


def parse_tokenizer(content: bytes, where: str) -> Tokenizer:
    """Returns the tokenizer of a `tokenizer.json` from `where`. Raises: DataError."""
    try:
        tokenizer = Tokenizer.from_buffer(content)
        if tokenizer.post_processor is not None:
            _check_template(parse_json(tokenizer.post_processor.__getstate__()))
        return tokenizer
    except Exception as error:  # `tokenizers` raises plain Exception and ValueError
        fix = "give a tokenizer.json as `tokenizers` saves it"
        raise DataError(f"not a tokenizer: {error}", where=where, fix=fix) from error


def _check_template(processor: dict[str, Any]) -> None:
    """Raises ValueError for a template that names what it does not have: `tokenizers` panics when it encodes."""
    for part in processor.get("processors", ()):  # of a Sequence
        _check_template(part)
    if processor["type"] != "TemplateProcessing":
        return
    for kind, sequences in (("single", "A"), ("pair", "AB")):
        for piece in processor[kind]:
            ((what, entry),) = piece.items()
            known = sequences if what == "Sequence" else processor["special_tokens"]
            if entry["id"] not in known:
                raise ValueError(f"post_processor.{kind} names {entry['id']}, which it does not have")


def read_tokenizer_file(path: Path) -> bytes:
    """Returns the content of a file. Raises: DataError, where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        what = f"cannot read the tokenizer: {error.strerror or error}"
        raise DataError(what, where=str(path), fix="give a tokenizer.json") from error


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a `tokenizer.json` for plain text. Raises: DataError."""
    return encode_plain_text(parse_tokenizer(read_tokenizer_file(path), str(path)))


def tokenizer_hash(path: Path) -> str:
    """Returns the sha256 of the file, hex: the identity of a vocabulary."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


_FILE = "tokenizer.json"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_HUB_FILES = (
    "config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*.jinja",
)  # fmt: skip
_VOCABULARY_FILES = ("vocab.*", "merges.txt", "*.model", "*.spm")


def read_given(config: TokenizerConfig) -> bytes:
    """Returns the content of the tokenizer.json of a config with `kind: given`.

    It is the given file to the byte, unless `special_tokens` or `vocab_multiple` append tokens,
    its end-of-document token is not marked special, or `begin` is not what its post-processor
    does.

    Raises:
        DataError: There is no tokenizer, or none that `tokenizers` can run.
        ConfigError, LaunchError, DiskError: The hub refuses it (see `fetch_files`).
    """
    assert config.path is not None
    try:
        place = _find(config.path)
        content = _read_folder(place) if place.is_dir() else read_tokenizer_file(place)
    except (DataError, LaunchError) as error:
        fix = f"{error.fix} (--tokenizer, or tokenizer.path of a config)"
        raise type(error)(error.what, where=error.where, fix=fix) from error
    if config.begin is not None:
        content = fit_start(content, config.begin, config.path)
    tokenizer = parse_tokenizer(content, config.path)
    before = dump_tokenizer(tokenizer)
    names = [*config.special_tokens]
    if (eos := named_eos(config)) is not None and tokenizer.token_to_id(eos) is not None:
        names.append(eos)
    # Those that are special keep how they take the white space around them (Phi-3).
    add_special(tokenizer, [name for name in names if name not in special_ids(tokenizer)])
    fill_up(tokenizer, config.vocab_multiple)
    after = dump_tokenizer(tokenizer)
    return content if after == before else after


def fit_start(content: bytes, begins: bool, where: str) -> bytes:
    """Returns a tokenizer.json whose post-processor begins a text with its start token, or with none.

    It is `content` to the byte where that is so. Where nothing `begins` a text, other forms (BERT,
    T5) stay.

    Raises: DataError: Not a tokenizer. ConfigError: It has no start token.
    """
    tokenizer = parse_tokenizer(content, where)
    if begins == (start_id(tokenizer) is not None):
        return content
    tokenizer.post_processor = None
    if begins:
        bos = special_tokens_of(tokenizer).bos
        if bos is None:
            what = f"tokenizer.begin=true: the tokenizer has no start token, such as {', '.join(KNOWN_BOS[:3])}"
            raise ConfigError(what, where=where, fix="name one in tokenizer.special_tokens, or leave begin out")
        name = tokenizer.id_to_token(bos)
        pair = [name, "$A", f"{name}:1", "$B:1"]
        tokenizer.post_processor = processors.TemplateProcessing([name, "$A"], pair, [(name, bos)])
    return dump_tokenizer(tokenizer)


def fit_documents(content: bytes, eos: int, where: str) -> bytes:
    """Returns a tokenizer.json whose post-processor begins, joins and ends texts as `prepare` does.

    This is for documents with labels, answers or choices. It is `content` to the byte where that is
    so, as of BERT and RoBERTa. `eos` ends a document. Raises: DataError: Not a tokenizer.
    """
    tokenizer = parse_tokenizer(content, where)
    bos = special_tokens_of(tokenizer).bos
    begin, between = [] if bos is None else [bos], separator_ids(tokenizer) or [eos]
    text = tokenizer.encode("a", add_special_tokens=False).ids
    alone, joined = [*begin, *text, eos], [*begin, *text, *between, *text, eos]
    if (tokenizer.encode("a").ids, tokenizer.encode("a", "a").ids) == (alone, joined):
        return content
    names = {number: str(tokenizer.id_to_token(number)) for number in (*begin, *between, eos)}
    first, last = [[names[number] for number in part] for part in (begin, between)]
    single, pair = [*first, "$A", names[eos]], [*first, "$A", *last, "$B:1", f"{names[eos]}:1"]
    special = [(name, number) for number, name in names.items()]
    tokenizer.post_processor = processors.TemplateProcessing(single, pair, special)
    return dump_tokenizer(tokenizer)


def named_eos(config: TokenizerConfig) -> str | None:
    """Returns the end-of-document token that a config, or the folder of its given tokenizer, names; None: none.

    Raises: DataError, ConfigError, LaunchError, DiskError: as `read_given`.
    """
    if config.eos is not None or config.path is None or not (folder := _find(config.path)).is_dir():
        return config.eos
    for name in _SETTINGS:
        if not (folder / name).is_file():
            continue
        try:
            token = parse_json(read_tokenizer_file(folder / name)).get("eos_token")
            found = token["content"] if isinstance(token, dict) else token
        except (ValueError, AttributeError, KeyError) as error:
            what = f"cannot be read: {type(error).__name__}: {error}"
            raise DataError(what, where=str(folder / name), fix="fetch the folder again") from None
        if isinstance(found, str):
            return found
    return None


def own_template(path: str) -> Template | None:
    """Returns the template of conversations of a given tokenizer's run or folder; None: none.

    Raises: DataError: It cannot be read. ConfigError, LaunchError, DiskError: as `read_given`.
    """
    folder = _find(path)
    of_run = RunDir(folder).normalize
    if of_run.is_file():
        try:
            return check_template(read_json(of_run).get("template"))
        except (OSError, ValueError, AttributeError) as error:
            what = f"cannot be read: {type(error).__name__}: {error}"
            raise DataError(what, where=str(of_run), fix="restore it, or name a template") from None
    # Without these there is none, and transformers takes seconds to import.
    has_files = any((folder / name).is_file() for name in (_SETTINGS[0], "chat_template.jinja"))
    return OF_TOKENIZER if has_files and _load_theirs(folder).chat_template else None


def resolve_template(template: Template, config: TokenizerConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """Returns a chat template with its text and the special tokens that it reads, those of a given tokenizer.

    `tokenizer` is the given one with what the config adds. Raises: ConfigError: There is no such
    template. DataError: The folder or file cannot be read.
    """
    special = "\n".join(sorted(name for name in special_ids(tokenizer) if name.strip()))
    if isinstance(template, dict):
        return {**template, SPECIAL_KEY: special}
    assert config.path is not None
    place = _find(config.path)
    if place.is_dir():
        theirs = _load_theirs(place)
        tokens = {name: token for name, token in theirs.special_tokens_map.items() if isinstance(token, str)}
    else:
        theirs = None
        known = special_tokens_of(tokenizer).model_dump(include={"pad", "bos", "eos"}, exclude_none=True)
        tokens = {f"{name}_token": str(tokenizer.id_to_token(number)) for name, number in known.items()}
    if template != OF_TOKENIZER:
        text = read_tokenizer_file(Path(template).expanduser()).decode()
    elif theirs is None or not theirs.chat_template:
        what = "template=tokenizer: the tokenizer has no chat template"
        if theirs is None:
            what = "template=tokenizer: a file of a tokenizer has no chat template"
        fix = "give the folder of a model that chats, a .jinja file, chatml, or a text for each role"
        raise ConfigError(what, where=config.path, fix=fix)
    else:
        text = theirs.get_chat_template()
    return {JINJA_KEY: text, **tokens, SPECIAL_KEY: special}


def _find(name: str) -> Path:
    """Returns the file or folder of a given tokenizer; a model of the hub is fetched."""
    path = Path(name).expanduser()
    # A model folder has it in `tokenizer`, and a checkpoint beside its run's.
    places = [path, path / "tokenizer"]
    if (path / "manifest.json").is_file():
        places.append(path.resolve().parent.parent)
    if (found := next(filter(_has_tokenizer, places), None)) is not None:
        return found
    if path.exists() or path.suffix == ".json" or not is_hub_name(name):
        return path
    return fetch_files(name, [*_HUB_FILES, *_VOCABULARY_FILES])


def _has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has a vocabulary, in any format."""
    return any(True for name in (_FILE, *_VOCABULARY_FILES) for _ in folder.glob(name))


def _read_folder(folder: Path) -> bytes:
    if (folder / _FILE).is_file():
        return read_tokenizer_file(folder / _FILE)
    found = _load_theirs(folder)
    fast = getattr(found, "backend_tokenizer", None)
    if fast is None:
        what = f"its tokenizer, {type(found).__name__}, cannot be made one of `tokenizers`"
        raise DataError(what, where=str(folder), fix=f"give a {_FILE}, or train one")
    return dump_tokenizer(fast)


def _load_theirs(folder: Path) -> Any:
    """Returns the tokenizer of a folder as transformers reads it. Raises: DataError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        what = f"no tokenizer can be read from it: {reason}"
        if not _has_tokenizer(folder):
            what = f"has no tokenizer files: no {_FILE}, no {', no '.join(_VOCABULARY_FILES)}"
        raise DataError(what, where=str(folder), fix=f"give a folder with a {_FILE}") from None
