"""The file of a tokenizer, tokenizer.json: written, read, or taken from a folder or a hub.

    tokenizer.json               as it is
    folder                       one that encodes as transformers does: its own, or made of it
    model folder                 that of its `tokenizer`
    name                         its tokenizer files, and no others, are fetched; then as a folder

No code in the folder of a tokenizer is run, and nothing is unpickled.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from pretrain.config.prepare import TokenizerConfig
from pretrain.config.texts.templates import (
    JINJA_KEY,
    OF_TOKENIZER,
    SPECIAL_KEY,
    TOOLS_KEY,
    Template,
    check_template,
)
from pretrain.errors import ConfigError, DataError, LaunchError
from pretrain.run.folder import RunDir
from pretrain.tokenizer.release_probe import check_patterns, check_renderings
from pretrain.tokenizer.released import (
    FILE,
    PIECES,
    SETTINGS_FILES,
    VOCABULARY_FILES,
    ReleasedTokenizer,
    compare_texts,
    has_tokenizer,
    load_released,
    read_released,
)
from pretrain.tokenizer.roles import KNOWN_BOS, separator_ids, special_ids, special_tokens_of, start_id
from pretrain.tokenizer.special_tokens import add_special, encode_plain_text, fill_up
from pretrain.utils.foreign_files import name_vocabulary
from pretrain.utils.hub import fetch_files, is_hub_name
from pretrain.utils.safe_read import MAX_TOKENIZER_BYTES, parse_json, read_bounded, read_json


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
        raise DataError(
            f"not a tokenizer: {error}",
            where=where,
            fix="give a tokenizer.json as `tokenizers` saves it",
        ) from error


def _check_template(processor: dict[str, Any]) -> None:
    """Raises ValueError for a template that names what it does not have: `tokenizers` panics when it encodes."""
    for part in processor.get("processors", ()):  # of a Sequence
        _check_template(part)
    if processor["type"] != "TemplateProcessing":
        return
    for kind, sequences in (("single", "A"), ("pair", "AB")):
        for piece in processor[kind]:
            ((what, entry),) = piece.items()
            names = sequences if what == "Sequence" else processor["special_tokens"]
            if entry["id"] not in names:
                raise ValueError(f"post_processor.{kind} names {entry['id']}, which it does not have")


def read_tokenizer_file(path: Path) -> bytes:
    """Returns the content of a file. Raises: DataError, where it cannot be read."""
    try:
        return read_bounded(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer: {error.strerror or error}", where=str(path), fix="give a tokenizer.json"
        ) from error


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a `tokenizer.json` for plain text. Raises: DataError."""
    return encode_plain_text(parse_tokenizer(read_tokenizer_file(path), str(path)))


def tokenizer_hash(path: Path) -> str:
    """Returns the sha256 of the file, hex: the identity of a vocabulary."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


_OF_PROCESSOR = "chat_template.json"


@dataclass(frozen=True, slots=True)
class GivenTokenizer:
    """A tokenizer.json with what a config adds, and the name of its end-of-document token.

    `theirs` is that of transformers; None: of a file, or of a folder with that file alone.
    """

    content: bytes
    eos: str | None
    theirs: Any = None


def read_given(config: TokenizerConfig) -> GivenTokenizer:
    """Reads the tokenizer of a config with `kind: given`.

    The content is that of the file, or of `read_released`, to the byte, unless `special_tokens` or
    `vocab_multiple` append tokens, its end-of-document token is not marked special, or `begin` is
    not what its post-processor does.

    Raises:
        DataError: There is no tokenizer, or none that `tokenizers` can run.
        ConfigError, LaunchError, DiskError: The hub refuses it (see `fetch_files`).
    """
    assert config.path is not None
    try:
        released = _read(_find(config.path))
    except (DataError, LaunchError) as error:
        raise type(error)(
            error.what, where=error.where, fix=f"{error.fix} (--tokenizer, or tokenizer.path of a config)"
        ) from error
    content = released.content
    assert content is not None
    if config.begin is not None:
        content = fit_start(content, config.begin, config.path)
    tokenizer = parse_tokenizer(content, config.path)
    before = dump_tokenizer(tokenizer)
    names = [*config.special_tokens]
    eos = config.eos or getattr(released.theirs, "eos_token", None)
    if eos is not None and tokenizer.token_to_id(eos) is not None:
        names.append(eos)
    # Those that are special keep how they take the white space around them (Phi-3).
    add_special(tokenizer, [name for name in names if name not in special_ids(tokenizer)])
    fill_up(tokenizer, config.vocab_multiple)
    after = dump_tokenizer(tokenizer)
    return GivenTokenizer(content if after == before else after, eos, released.theirs)


@lru_cache(maxsize=1)
def read_release(path: str) -> bytes:
    """Returns the tokenizer.json of a release; once, as transformers is slow and may warn.

    Raises: The errors of `read_given`.
    """
    return read_given(TokenizerConfig(kind="given", path=path)).content


def _read(place: Path) -> ReleasedTokenizer:
    if place.is_dir():
        released = read_released(place)
        if released.content is None:
            raise DataError(released.reason, where=str(place), fix=f"give a {FILE}, or train one")
        return released
    foreign = name_vocabulary(place)
    if foreign is None and place.suffix in PIECES:
        foreign = "a sentencepiece model, whose special tokens are in the files beside it"
    if foreign is not None:
        raise DataError(
            foreign,
            where=str(place),
            fix=f"give the folder of a release, or its {FILE}",
        )
    content = read_tokenizer_file(place)
    check_patterns(content, str(place))
    return ReleasedTokenizer(content, None)


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
            raise ConfigError(
                f"tokenizer.begin=true: the tokenizer has no start token, such as {', '.join(KNOWN_BOS[:3])}",
                where=where,
                fix="name one in tokenizer.special_tokens, or leave begin out",
            )
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
            raise DataError(
                f"cannot be read: {type(error).__name__}: {error}",
                where=str(of_run),
                fix="restore it, or name a template",
            ) from None
    # Without these there is none, and transformers takes seconds to import.
    has_files = any((folder / name).is_file() for name in ("tokenizer_config.json", "chat_template.jinja"))
    if not has_files:
        return None
    theirs = load_released(folder, own_code=(folder / FILE).is_file())
    return OF_TOKENIZER if theirs.chat_template else None


def resolve_template(template: Template, given: GivenTokenizer, where: str) -> dict[str, str]:
    """Returns a chat template with its text and the special tokens that it reads.

    `where` is the path of the tokenizer.

    Raises: ConfigError: There is no such template. DataError: The file cannot be read.
    """
    tokenizer, theirs = parse_tokenizer(given.content, where), given.theirs
    special = "\n".join(sorted(name for name in special_ids(tokenizer) if name.strip()))
    if isinstance(template, dict):
        return {**template, SPECIAL_KEY: special}
    if theirs is not None:
        tokens = {name: token for name, token in theirs.special_tokens_map.items() if isinstance(token, str)}
    else:
        variables = special_tokens_of(tokenizer).model_dump(include={"pad", "bos", "eos"}, exclude_none=True)
        tokens = {f"{name}_token": str(tokenizer.id_to_token(number)) for name, number in variables.items()}
    if template == OF_TOKENIZER:
        return {**_own_texts(theirs, where), **tokens, SPECIAL_KEY: special}
    return {JINJA_KEY: _read_template(template), **tokens, SPECIAL_KEY: special}


def _read_template(path: str) -> str:
    try:
        return read_tokenizer_file(Path(path).expanduser()).decode()
    except UnicodeDecodeError as error:
        text = f"not UTF-8: {error.reason}"
        raise DataError(text, where=path, fix="give a chat template") from None


def _own_texts(theirs: Any, where: str) -> dict[str, str]:
    """Returns the chat template of a tokenizer. Raises: ConfigError: It has none."""
    templates = None if theirs is None else theirs.chat_template
    if not templates:
        text = "the tokenizer has no chat template"
        if theirs is None:
            text = "a file of a tokenizer has no chat template"
        elif Path(where, _OF_PROCESSOR).is_file():
            text = f"{text}: {_OF_PROCESSOR} is read by processors alone"
        raise ConfigError(
            f"template=tokenizer: {text}",
            where=where,
            fix="give the folder of a model that chats, a .jinja file, chatml, or a text for each role",
        )
    if isinstance(templates, str):
        return {JINJA_KEY: templates}
    if "default" not in templates:
        raise ConfigError(
            f"template=tokenizer: of its chat templates, {', '.join(templates)}, none is named default",
            where=where,
            fix="give one of them as a .jinja file",
        )
    texts = {JINJA_KEY: templates["default"]}
    if TOOLS_KEY in templates:  # transformers chooses of these two
        texts[TOOLS_KEY] = templates[TOOLS_KEY]
    return texts


def check_template_of(given: GivenTokenizer, template: dict[str, str], config: TokenizerConfig) -> None:
    """Compares conversations, their texts and ids, with what transformers makes of them.

    Raises: DataError: They differ, or the template takes too much.
    """
    where = str(config.path)
    texts = check_renderings(template, given.theirs, where)
    if config.special_tokens or config.eos not in (None, given.theirs.eos_token):
        return  # tokens that transformers does not have
    tokenizer = parse_tokenizer(given.content, where)
    if (difference := compare_texts(tokenizer, given.theirs, texts)) is not None:
        text, ours, theirs = difference.text[:80], difference.ours, difference.theirs
        text = f"a conversation, {text!r}, is {ours}, and in transformers {theirs}"
        raise DataError(text, where=where, fix=f"give its {FILE}, with a .jinja file as the template")


def _find(name: str) -> Path:
    """Returns the file or folder of a given tokenizer; a model of the hub is fetched."""
    path = Path(name).expanduser()
    # A model folder has it in `tokenizer`, and a checkpoint beside its run's.
    places = [path, path / "tokenizer"]
    if (path / "manifest.json").is_file():
        places.append(path.resolve().parent.parent)
    if (folder := next(filter(has_tokenizer, places), None)) is not None:
        return folder
    if path.exists() or path.suffix == ".json" or not is_hub_name(name):
        return path
    return fetch_files(name, ["config.json", *SETTINGS_FILES, *VOCABULARY_FILES])
