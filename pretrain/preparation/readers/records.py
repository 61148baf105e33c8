"""The rule by which an input is read, and its records: JSON or a row of Parquet -> a document.

    text       {"text": "..."}
    pairs      {"source": "...", "target": "..."}
    records    {"prompt": "...", "response": "..."}: the response is in the loss
               {"instruction": "...", "input": "...", "output": "..."} (Alpaca): the output is
               {"messages": [{"role": "user", "content": "..."}, ...]}: the turns of the assistant
               are in the loss; of ShareGPT, `from`, `value`, "human" and "gpt" are read alike;
               a chat template gets the messages as they are, and the `tools` of the record
    feedback   a record, with "label": true where its answer is wanted, else false
    preferences  {"prompt": "...", "chosen": "...", "rejected": "..."}: the answers are learned;
               or lists of messages, whose last turns differ: after the prompt's, or with them
    classes    {"text": "...", "label": "..."}: a label is text, a whole number, or true or false
    tags       {"tokens": ["...", ...], "tags": ["...", ...]}: as many labels as words
    answers    {"question": "...", "context": "...", "answers": {"text": ["..."], "answer_start": [0]}}:
               as in SQuAD, places in characters; the first answer counts, and there may be none
    choices    {"question": "...", "choices": ["...", "..."], "label": 0}: the right one's place or
               text; or {"text": [...], "label": ["A", ...]}, and its label
    triples    {"query": "...", "positive": "...", "negatives": ["...", ...], "group": "..."}:
               the last two may be absent

The names of the fields are options of the input. The caller adds the place to a RecordError.
"""

import hashlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_LE
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from pretrain.config.prepare import DataKind, InputConfig
from pretrain.kinds.layouts import LAYOUTS
from pretrain.kinds.layouts.choices import CHOICE_BEGINS, CHOICE_IS_FIRST, CHOICE_IS_RIGHT
from pretrain.kinds.layouts.triples import IS_POSITIVE, NUM_GROUPS, TEXT_BEGINS
from pretrain.preparation.filters import BAD_FIELD, TOO_LARGE, UNDECODABLE, BadInputError, BadItem, Document, Label
from pretrain.preparation.readers.conversations import (
    EXTRA_FIELDS,
    OPTIONAL_INPUT,
    names_of_prompt,
    prompt_fields,
)
from pretrain.preparation.readers.record_fields import (
    ABSENT,
    RecordError,
    bad_field,
    encode,
    find_field,
    head_of,
    kind_of,
    spelled,
    text_of,
)
from pretrain.utils.foreign_files import HEAD_BYTES, name_text

_OF_TEXT = ("text", "source", "target", "prompt", "response", "question", "context", "query", "positive")
TEXT_OPTIONS = frozenset(f"{name}_field" for name in _OF_TEXT)
"""Options whose fields may be lists of strings, which `joiner` joins."""
UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ReadRule:
    """Options of a reader for one input."""

    config: InputConfig
    kind: DataKind = "text"
    fields: tuple[str, ...] = ()  # of records, for filters
    build_document: Callable[[Mapping[str, Any], InputConfig, int], Document] = field(init=False)
    lifted: dict[str, bool] = field(init=False)  # fields inside others; whether lists are joined

    def __post_init__(self) -> None:
        options = [option for option in InputConfig.model_fields if option.endswith("_field")]
        named = [(name, option) for option in options for name in _listed(getattr(self.config, option))]
        names = {name: option in TEXT_OPTIONS for name, option in named}
        is_joined = self.config.joiner is not None
        lifted = {name: is_joined and names[name] for name in names if "." in name or is_joined}
        object.__setattr__(self, "lifted", lifted)
        object.__setattr__(self, "build_document", resolve_name(LAYOUTS[self.kind].document))

    @property
    def limit(self) -> int:
        """Bytes that a document, and a line, may have."""
        return self.config.max_document_bytes

    @property
    def skips(self) -> bool:
        """True if bad items are left out."""
        return self.config.on_error == "skip"

    def leave_out(
        self, error: BadInputError, consumed_bytes: int, num_records: int = 1, lost_bytes: int = 0
    ) -> BadItem:
        """Returns what stands for a bad item. Raises: BadInputError: Bad items stop the reading."""
        if not self.skips:
            raise error from None
        return BadItem(
            "",
            b"",
            consumed_bytes,
            refused=error.reason,
            error=f"{error.where}: {error.what}",
            num_records=num_records,
            lost_bytes=lost_bytes,
        )

    def text_fields(self, known: Collection[str]) -> tuple[dict[str, str], list[str]]:
        """Returns the fields that documents are made of: needed ones, by their option, and those that may be absent.

        `known` are the fields of the records.
        """
        layout = LAYOUTS[self.kind]
        if layout.loss_mask and not layout.two_sides and not self.config.messages_field:
            (first, *further), response = prompt_fields(self.config, known)
            needed = {"prompt_field": first, "response_field": response}
            if layout.judged:
                needed["label_field"] = self.config.label_field
            further += [OPTIONAL_INPUT] if first == "instruction" else []
            return needed, [*further, *EXTRA_FIELDS]
        needed = {option: getattr(self.config, option) for option in layout.fields}
        prompts = names_of_prompt(self.config) if layout.two_sides else []
        optional = [getattr(self.config, option) for option in layout.optional]
        return needed, [*prompts, *optional, *(EXTRA_FIELDS if layout.loss_mask else ())]

    def choose_columns(self, known: Sequence[str], where: str) -> list[str]:
        """Returns the columns of documents. Raises: BadInputError: One is absent, or there twice."""
        needed, optional = self.text_fields(known)
        heads = {name: head_of(known, name) for name in (*needed.values(), *optional, *self.fields)}
        for option, name in needed.items():
            if heads[name] is None:
                raise BadInputError(
                    f"there is no column {name!r}; columns: {', '.join(known[:20]) or 'none'}",
                    where=where,
                    fix=f"choose another with {spelled(option)}",
                    reason=BAD_FIELD,
                )
        wanted = [head for head in dict.fromkeys(heads.values()) if head is not None]
        for head in wanted:
            if known.count(head) > 1:
                raise BadInputError(
                    f"{known.count(head)} columns have the name {head!r}",
                    where=where,
                    fix="rename one",
                    reason=BAD_FIELD,
                )
        return wanted

    def build(self, record: Mapping[str, Any], consumed_bytes: int) -> Document:
        """Makes a document of a record of `consumed_bytes` of the input. Raises: RecordError."""
        if self.lifted:
            record = self._lift(record)
        document = self.build_document(record, self.config, consumed_bytes)
        document.fields = self.select_fields(record)
        unused = document.unused.items()
        document.unused = {key: count for key, count in unused if key not in self.fields}
        return document

    def _lift(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a record with fields inside others lifted out, and lists of strings joined."""
        lifted = dict(record)
        for name, is_joined in self.lifted.items():
            value = find_field(record, name)
            if is_joined and isinstance(value, list) and all(isinstance(one, str) for one in value):
                value = str(self.config.joiner).join(value)
            if value is not ABSENT:
                lifted[name] = value
        return lifted

    def select_fields(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that filters ask for."""
        values = {name: find_field(record, name) for name in self.fields}
        return {name: value for name, value in values.items() if value is not ABSENT}


def without_marks(utf8: bytes) -> bytes:
    """Returns a text without byte-order marks at the beginning of lines, as of joined files."""
    return utf8.removeprefix(UTF8_BOM).replace(b"\n" + UTF8_BOM, b"\n")


def too_long(what: str, limit: int, where: str) -> BadInputError:
    """Builds the error of a line or document that is longer than the limit."""
    option = "--max-document-bytes, or max_document_bytes of the input"
    return BadInputError(
        f"{what} is longer than max_document_bytes={limit}",
        where=where,
        fix=f"raise it ({option}), which costs memory, or cut the text",
        reason=TOO_LARGE,
    )


def decode(utf8: bytes, name: str, offset: int) -> str:
    """Decodes text at byte `offset` of `name`. Raises: BadInputError, with the wrong byte."""
    try:
        return utf8.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(error, name, offset) from None


def not_utf8(error: UnicodeDecodeError, name: str, offset: int) -> BadInputError:
    """Builds the error of bytes, from byte `offset` of `name` on, that are not UTF-8."""
    text = f"invalid UTF-8: byte 0x{error.object[error.start]:02x} ({error.reason})"
    fix = "convert the file to UTF-8 (iconv -f ENCODING), drop such bytes (iconv -c -f UTF-8 -t UTF-8)"
    fix += ", or leave such texts out (--on-error skip, or on_error of the input)"
    if offset == 0 and (foreign := name_text("", error.object[:HEAD_BYTES])):
        text, fix = f"{foreign[0]}, by its first bytes, not UTF-8", foreign[1]
    if offset == 0 and error.object.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):  # of UTF-32 too, little-endian
        encoding = "UTF-32" if error.object.startswith(BOM_UTF32_LE) else "UTF-16"
        text = f"{encoding} by its byte-order mark, not UTF-8"
        fix = f"convert it: iconv -f {encoding} -t UTF-8 FILE > NEW_FILE"
    where = f"{name}, byte {offset + error.start}"
    return BadInputError(text, where=where, fix=fix, reason=UNDECODABLE)


def build_text(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    """Builds a text. Raises: RecordError."""
    text, utf8 = text_of(record, config.text_field, spelled("text_field"))
    return Document(text, utf8, consumed_bytes)


def build_pair(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    """Builds a pair. Raises: RecordError."""
    source, _ = text_of(record, config.source_field, "source_field")
    target, utf8 = text_of(record, config.target_field, "target_field")
    return Document(target, utf8, consumed_bytes, source=source)


def build_class(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    """Builds a text with a label. Raises: RecordError."""
    document = build_text(record, config, consumed_bytes)
    name = config.label_field
    if name not in record:
        raise bad_field(record, name, "a label", "label_field")
    label = _label(record[name], f"field {name!r}")
    document.labels = (Label(label, 0, len(document.text)),)
    return document


def build_tags(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    """Builds a text of words with a label each. Raises: RecordError."""
    words_field = config.words_field
    tags_field = config.tags_field
    for name, option in ((words_field, "words_field"), (tags_field, "tags_field")):
        if not isinstance(record.get(name), list):
            raise bad_field(record, name, "a list", option)
    words = record[words_field]
    tags = record[tags_field]
    if len(words) != len(tags):
        counts = f"{len(words)} words and {tags_field!r} {len(tags)} tags"
        raise RecordError(f"field {words_field!r} has {counts}", "give each word one tag")
    labels = []
    end = -1
    for number, (word, tag) in enumerate(zip(words, tags, strict=True)):
        if not isinstance(word, str) or not word.strip():
            kind = "blank" if isinstance(word, str) else f"{kind_of(word)}, not a string"
            raise RecordError(
                f"{words_field}[{number}] is {kind}",
                "give words with characters in them",
            )
        start = end + 1
        end = start + len(word)
        labels.append(Label(_label(tag, f"{tags_field}[{number}]"), start, end))
    text = " ".join(words)
    return Document(text, encode(text), consumed_bytes, labels=tuple(labels))


def build_answer(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    """Builds a question with a text that has the answer. Raises: RecordError."""
    question = _written(record, config.question_field, "question_field")
    context = _written(record, config.context_field, "context_field")
    text, start = _first_answer(record, config.answers_field)
    quoted = context[start : start + len(text)]
    if quoted != text:
        other = context.find(text)
        place = f", and nowhere in {config.context_field!r}" if other < 0 else f"; it is at {other}"
        raise RecordError(
            f"answer {text[:40]!r} is not at character {start}, where {quoted[:40]!r} is{place}",
            "give the place of the answer in characters, not bytes",
        )
    label = Label("answer", start, start + len(text))
    return Document(context, encode(context), consumed_bytes, source=question, labels=(label,))


def _written(record: Mapping[str, Any], name: str, option: str) -> str:
    """Returns a text that is not blank. Raises: RecordError."""
    text, _ = text_of(record, name, option)
    if not text.strip():
        raise RecordError(f"field {name!r} is blank", "give each question and its text some words")
    return text


def _first_answer(record: Mapping[str, Any], name: str) -> tuple[str, int]:
    """Returns the first answer, as `datasets` or the original SQuAD has it; without one ("", 0)."""
    value = record.get(name)
    listed = value if isinstance(value, list) else [value]
    answers = [answer for answer in listed if isinstance(answer, dict)]
    if len(answers) < len(listed):
        raise bad_field(record, name, "an object of text and answer_start", "answers_field")
    texts = [text for answer in answers for text in _listed(answer.get("text"))]
    starts = [start for answer in answers for start in _listed(answer.get("answer_start"))]
    if not texts and not starts:
        return "", 0
    text = next(iter(texts), None)
    start = next(iter(starts), None)
    if not isinstance(text, str) or not text.strip() or type(start) is not int or start < 0:
        raise RecordError(
            f"field {name!r} begins with text {str(text)[:40]!r} and answer_start {str(start)[:20]!r}",
            "give a text and its first character, or for no answer empty lists",
        )
    return text, start


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def build_choices(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    """Builds a question with answers to choose from. Raises: RecordError."""
    question = _written(record, config.question_field, "question_field")
    name = config.choices_field
    value = record.get(name)
    texts = names = value
    if isinstance(value, dict):
        texts, names = value.get("text"), value.get("label")
    if not isinstance(texts, list) or not isinstance(names, list) or len(texts) != len(names):
        raise bad_field(record, name, "a list, or as many of text and label", "choices_field")
    if len(texts) < 2:
        raise RecordError(
            f"field {name!r} has {len(texts)} of two choices or more",
            "leave the record out",
        )
    for number, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise RecordError(f"{name}[{number}] is no text", "give each choice some words")
    label = record.get(config.label_field)
    right = _find_choice(label, names, may_be_place=names is texts)
    if not 0 <= right < len(texts):
        usable = f"0 to {len(texts) - 1}, or a text" if names is texts else ", ".join(map(str, names))
        raise RecordError(
            f"field {config.label_field!r} is {str(label)[:40]!r}, and none of {len(texts)} choices",
            f"use {usable}",
        )
    labels = []
    start = 0
    for number, text in enumerate(texts):
        bits = (CHOICE_BEGINS, CHOICE_IS_FIRST * (number == 0), CHOICE_IS_RIGHT * (number == right))
        labels.append(Label(sum(bits), start, start + len(text)))
        start += len(text) + 1
    text = "\n".join(texts)
    return Document(text, encode(text), consumed_bytes, source=question, labels=tuple(labels))


def build_triple(record: Mapping[str, Any], config: InputConfig, consumed_bytes: int) -> Document:
    """Builds a query with its positive and hard negatives. Raises: RecordError."""
    query = _written(record, config.query_field, "query_field")
    texts = [_written(record, config.positive_field, "positive_field")]
    name = config.negatives_field
    texts += _listed(record.get(name))
    for number, text in enumerate(texts[1:]):
        if not isinstance(text, str) or not text.strip():
            fix = "give each hard negative some words, or leave it out"
            raise RecordError(f"{name}[{number}] is no text", fix)
    group = record.get(config.group_field)
    labels = [Label(_number_group(group, config.group_field), 0, 0)]
    start = 0
    for number, text in enumerate(texts):
        labels.append(Label(TEXT_BEGINS | IS_POSITIVE * (number == 0), start, start + len(text)))
        start += len(text) + 1
    text = "\n".join(texts)
    return Document(text, encode(text), consumed_bytes, source=query, labels=tuple(labels))


def _number_group(group: object, name: str) -> int:
    """Returns a number by the hash of a group's name, from 1 on; 0: there is no group."""
    if group is None:
        return 0
    if isinstance(group, bool) or not isinstance(group, str | int):
        raise bad_field({name: group}, name, "a string or a whole number", "group_field")
    digest = hashlib.blake2b(str(group).encode(errors="replace"), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "little") % (NUM_GROUPS - 1)


def _find_choice(label: object, names: Sequence[object], *, may_be_place: bool) -> int:
    """Returns the number of the choice that a label names; -1 for none, or a number that is too large."""
    if label in names and not isinstance(label, bool):
        return names.index(label)
    if may_be_place and type(label) in (int, str) and str(label).isdecimal():
        return int(str(label))
    return -1


def _label(value: object, place: str) -> str | int:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int) and value != "":
        return value
    kind = "empty" if value == "" else f"{kind_of(value)}, not a string or a whole number"
    raise RecordError(f"{place} is {kind}", "give each label a name or a whole number")
