"""Messages of a conversation, as datasets of others spell them, and what is learned of them.

    {"role": "user", "content": "..."}     of OpenAI; `from` and `value` of ShareGPT
    roles                                  one table; others only if the template names them
    content                                text, or parts of text; anything else is refused
    weight: 0, train: false, masked: true  a turn of the assistant that is not learned
    tools, tool_calls, their arguments     lists and objects, or JSON text of them

A key that neither this file nor the template reads is counted.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pretrain.preparation.readers.record_fields import RecordError, bad_field, describe, encode, kind_of
from pretrain.tokenizer.chat_template import ASSISTANT, ChatTemplate
from pretrain.utils.safe_read import parse_json

ROLES = ("system", "developer", "user", "tool", "function", "ipython", ASSISTANT)
"""Roles that templates know; they are passed on as they are."""
ROLE_OF = {role: role for role in ROLES}
ROLE_OF |= dict.fromkeys(("human", "prompter"), "user")
ROLE_OF |= dict.fromkeys(("gpt", "model", "bot", "chatbot", "chatgpt", "ai"), ASSISTANT)
ROLE_OF |= dict.fromkeys(("observation", "tool_response", "tool_result"), "tool")

_TEXT_PART = "text"
"""Type of a part of a message."""
_FIX = 'write {"role": "user", "content": "..."}'
_ALIASES = {"from": "role", "value": "content"}  # of ShareGPT
# Keys that say if a turn is learned: of OpenAI and mistral-finetune; axolotl; ms-swift and others;
# and those that say the opposite, of torchtune and others.
_LEARNED = (
    "weight", "loss_weight", "train", "training", "trainable", "learn", "loss", "loss_mask", "label",
)  # fmt: skip
_SILENT = ("masked", "is_masked", "mask", "ignore")
LEARNED_FIELDS = (*_LEARNED, *_SILENT, "kto_tag")
"""Fields of a record that say the same of all of it."""
_OF_PLACES = ("train_detail", "training_detail")  # axolotl: by characters


@dataclass
class Messages:
    """The messages of a record, with the roles and types that templates read."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    silent: set[int] = field(default_factory=set)  # turns that say that they are not learned
    unused: Counter[str] = field(default_factory=Counter)  # keys
    tools: list[list[Any]] = field(default_factory=list)  # of turns of the system

    @property
    def learned(self) -> list[bool]:
        """Whether each turn is the assistant's, and learned."""
        roles = [one["role"] for one in self.messages]
        return [role == ASSISTANT and turn not in self.silent for turn, role in enumerate(roles)]

    def append(self, other: "Messages") -> None:
        """Appends later messages."""
        self.silent |= {len(self.messages) + turn for turn in other.silent}
        self.messages += other.messages
        self.unused += other.unused
        self.tools += other.tools


def read_messages(record: Mapping[str, Any], name: str, template: ChatTemplate | None) -> Messages:
    """Reads a field of a record; without a chat template contents are text. Raises: RecordError."""
    messages = Messages()
    for turn, one in enumerate(_list_messages(record, name)):
        place = f"{name}[{turn}]"
        if not isinstance(one, dict):
            raise RecordError(f"{place} is {kind_of(one)}, not an object", _FIX)
        message = {key: value for key, value in one.items() if value is not None}
        for alias, key in _ALIASES.items():
            if key not in one and alias in message:
                message[key] = message.pop(alias)
            elif key not in message and key in one:
                message[key] = None  # for the error
        if tools := _take_tools(message, place, template):
            messages.tools.append(tools)
        messages.messages.append(_read_message(message, place, name, template, messages.unused))
        if _is_silent(message, place, messages.messages[-1]["role"]):
            messages.silent.add(turn)
    return messages


def _list_messages(record: Mapping[str, Any], name: str) -> list[Any]:
    """Returns the messages of a field, or of its JSON text. Raises: RecordError."""
    value = record.get(name)
    messages = _parse(value)
    if isinstance(messages, list):
        return messages
    if isinstance(value, str) and not isinstance(messages, str):
        text = f"field {name!r} is {_say_kind(value, messages)}, not a list"
        raise RecordError(text, "write a list of messages, or its JSON")
    error = bad_field(record, name, "a list", "messages_field")
    if name not in record and {"prompt", "instruction"} & record.keys():
        option = "inputs.0.messages_field=null"
        error.fix = f"leave messages_field out ({option}): prompts with answers need none"
    raise error


def _read_message(
    message: dict[str, Any],
    place: str,
    name: str,
    template: ChatTemplate | None,
    unused: Counter[str],
) -> dict[str, Any]:
    """Returns a message for the template; counts keys that nothing reads. Raises: RecordError."""
    message["role"] = _read_role(message, place, template)
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = calls = _read_calls(calls, f"{place}.tool_calls", template)
    keys = set() if template is None else set(filter(template.reads, message))
    said = [key for key in ("tool_calls", "function_call") if message.get(key)]
    content = message.get("content")
    if not content and said and not keys & {*said}:
        raise RecordError(
            f"{place} has nothing but {said[0]}, which the template does not write",
            "use a chat template that writes it (template), or leave the record out",
        )
    reasons = keys & {"reasoning_content", "thinking", "reasoning"}
    if content is None and (said or reasons):
        message.pop("content", None)
    else:
        message["content"] = _read_content(message, place, template)
    for key in message.keys() - keys - {"role", "content", *_LEARNED, *_SILENT}:
        if message[key] not in ("", [], {}):
            unused[f"{name}[].{key}"] += 1
    if template is not None:
        return message
    return {key: message[key] for key in ("role", "content")}


def _read_role(message: Mapping[str, Any], place: str, template: ChatTemplate | None) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise RecordError(f"{place}.role {describe(message, 'role', 'a string')}", _FIX)
    name = ROLE_OF.get(role.strip().lower())
    if name is None and template is not None and template.names_role(role):
        name = role
    if name is None:
        raise RecordError(
            f"{place}.role is {role!r}, which is not known",
            f"use one of {', '.join(ROLE_OF)}",
        )
    return name


def _read_content(message: Mapping[str, Any], place: str, template: ChatTemplate | None) -> Any:
    content = message.get("content")
    if isinstance(content, list):
        return _read_parts(content, f"{place}.content", template)
    takes_objects = template is not None and template.tests("content", "mapping|string")
    if isinstance(content, dict) and message["role"] == "tool" and takes_objects:
        return content
    if not isinstance(content, str):
        raise RecordError(f"{place}.content {describe(message, 'content', 'a string')}", _FIX)
    encode(content)
    return content


def _read_parts(parts: list[Any], place: str, template: ChatTemplate | None) -> Any:
    """Returns the text of parts, or them, for a template that takes them. Raises: RecordError."""
    texts = []
    for number, part in enumerate(parts):
        if not isinstance(part, dict):
            raise RecordError(f"{place}[{number}] is {kind_of(part)}, not an object", _FIX)
        part = {key: value for key, value in part.items() if value is not None}
        if part.get("type", _TEXT_PART) != _TEXT_PART:
            raise RecordError(
                f"{place}[{number}] is of the type {part['type']!r}, not text",
                "leave such records out: text alone is learned",
            )
        if not isinstance(part.get("text"), str):
            raise RecordError(f"{place}[{number}].text {describe(part, 'text', 'a string')}", _FIX)
        encode(part["text"])
        texts.append({"type": "text", **part})
    if texts and template is not None and template.takes_parts:
        return texts
    return "".join(part["text"] for part in texts)


def _is_silent(message: Mapping[str, Any], place: str, role: str) -> bool:
    """Returns whether a turn says that it is not learned. Raises: RecordError."""
    if marks := [key for key in _OF_PLACES if message.get(key)]:
        raise RecordError(
            f"{place}.{marks[0]} says what is learned by characters, which is not supported",
            "make turns of these parts, each with `train`",
        )
    said = {}
    for key in (*_LEARNED, *_SILENT):
        value = message.get(key)
        if value is None or (key == "label" and not isinstance(value, bool)):
            continue
        if value not in (0, 1):
            raise RecordError(
                f"{place}.{key} is {value!r}: a turn is learned or not",
                "write 0 or 1",
            )
        said[key] = bool(value) == (key in _LEARNED)
    if len({*said.values()}) > 1:
        raise RecordError(
            f"{place} says by {' and '.join(said)} that it is learned and is not",
            "leave one out",
        )
    if role != ASSISTANT and any(said.values()):
        raise RecordError(
            f"{place}.{next(iter(said))} says that a turn of the {role} is learned",
            "turns of the assistant alone are: remove the key, or write the opposite",
        )
    return False in said.values()


def _read_calls(given: Any, place: str, template: ChatTemplate | None) -> list[Any]:
    """Returns calls of tools, whose arguments are objects. Raises: RecordError."""
    calls = _parse(given)
    if not isinstance(calls, list):
        text = f"{place} is {_say_kind(given, calls)}, not a list"
        raise RecordError(text, "write a list of calls, or its JSON")
    calls_read = []
    takes_text = template is not None and template.tests("arguments", "string|mapping")
    for number, call in enumerate(calls):
        call = _object(call, f"{place}[{number}]")
        function = call.get("function")
        inner = function if isinstance(function, dict) else call
        arguments = inner.get("arguments")
        if isinstance(arguments, str) and not takes_text:
            key = "function.arguments" if inner is function else "arguments"
            inner = {**inner, "arguments": _object(arguments, f"{place}[{number}].{key}")}
        calls_read.append({**call, "function": inner} if isinstance(function, dict) else inner)
    return calls_read


def read_tools(record: Mapping[str, Any], turns: Messages) -> list[Any] | None:
    """Returns the tools of a record, or of a turn; None: none. Raises: RecordError."""
    tools = _read_tools(record.get("tools"), "field 'tools'")
    for listed in turns.tools:
        if tools is not None and listed != tools:
            text = "a turn of the system lists other tools, and the template writes one list"
            raise RecordError(text, "leave one out")
        tools = listed
    return tools


def _take_tools(message: dict[str, Any], place: str, template: ChatTemplate | None) -> list[Any] | None:
    """Takes the tools out of a turn of the system, where the template reads none of a turn."""
    is_system = ROLE_OF.get(str(message.get("role")).strip().lower()) in ("system", "developer")
    if not is_system or template is None or template.reads("tools") or not template.takes("tools"):
        return None
    return _read_tools(message.pop("tools", None), f"{place}.tools")


def _read_tools(given: Any, place: str) -> list[Any] | None:
    """Returns the tools of a list or its JSON, whose functions are objects. Raises: RecordError."""
    tools = _parse(given)
    if not tools:
        return None
    if not isinstance(tools, list):
        text = f"{place} is {_say_kind(given, tools)}, not a list"
        raise RecordError(text, "write a list of tools, or its JSON")
    tools_read = []
    for number, tool in enumerate(tools):
        tool = _object(tool, f"tools[{number}]")
        for key in ("function", "parameters"):
            if isinstance(tool.get(key), str) and tool[key].lstrip().startswith("{"):
                tool = {**tool, key: _object(tool[key], f"tools[{number}].{key}")}
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("parameters"), str):
            parameters = _object(function["parameters"], f"tools[{number}].function.parameters")
            tool = {**tool, "function": {**function, "parameters": parameters}}
        tools_read.append(tool)
    return tools_read


def read_system(record: Mapping[str, Any], template: ChatTemplate | None) -> Messages:
    """Returns the system's turn that a record has in a field of its own. Raises: RecordError."""
    text = record.get("system")
    if text is None or text == "":
        return Messages()
    if not isinstance(text, str):
        raise bad_field(record, "system", "a string", "messages_field")
    return read_messages({"system": [{"role": "system", "content": text}]}, "system", template)


def check_learned(record: Mapping[str, Any]) -> None:
    """Refuses a record that says that it is not learned, as of KTO. Raises: RecordError."""
    # `label` is anything, but beside a completion, as in TRL.
    keys = {*LEARNED_FIELDS} - ({"label"} if "completion" not in record else set())
    for key in sorted(keys & record.keys()):
        value = record[key]
        if isinstance(value, list) and value:
            raise RecordError(
                f"field {key!r} is a list: each turn says if it is learned",
                'write "weight": 0 or 1 into the turns',
            )
        if isinstance(value, int | float) and bool(value) == (key in _SILENT):
            raise RecordError(
                f"field {key!r} says that the record is not learned",
                "leave it out, or make a preference of it (kind=preferences)",
            )


def _parse(value: Any) -> Any:
    """Returns the value of JSON text; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def _say_kind(given: Any, parsed: Any) -> str:
    """Returns the type of a value that may be JSON text."""
    if isinstance(given, str) and not isinstance(parsed, str):
        return f"the JSON text of {kind_of(parsed)}"
    return kind_of(parsed)


def _object(value: Any, place: str) -> dict[str, Any]:
    parsed = _parse(value)
    if not isinstance(parsed, dict):
        text = f"{place} is {_say_kind(value, parsed)}, not an object"
        raise RecordError(text, "write a JSON object, as an object or as its text")
    return parsed
