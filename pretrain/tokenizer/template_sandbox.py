"""Rendering of chat templates, which are programs of strangers, in a process with limits.

    ChatTemplate -> TemplateSandbox.render -> a line of JSON -> this file as a program, jinja2 alone
                                           <- a line of JSON <-

Jinja's sandbox keeps a template from the machine; the process keeps it from taking all CPU or
memory. The kernel ends it at a time of CPU or an address space that no conversation needs, in the
middle of a power or a product too, and the next rendering starts another one. Limits are of CPU
time: a busy machine changes no result. The program imports little: a start takes 50 ms.
"""

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from functools import cache, lru_cache
from typing import IO, Any, NamedTuple

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pretrain.utils.process import start_program
from pretrain.utils.safe_read import parse_json

GENERATED = ("\ufdd0", "\ufdd1")
"""Noncharacters of Unicode, which no text has: around what `{% generation %}` has."""
CPU_S = 3.0
"""CPU of one rendering or compilation, in seconds, and of each MiB of the conversation besides."""
MEMORY_BYTES = 512 * 2**20
"""Address space of the process, which takes 30 MiB; per byte of the conversation `TIMES_INPUT`."""
TEXT_CHARS = 16 * 2**20
"""Length of a rendering, and per byte of the conversation `TIMES_INPUT`."""
TIMES_INPUT = 32
MAX_TEMPLATE_CHARS = 2**20
"""Length of a template; the longest of releases have some 30,000 characters."""
_NAME_CHARS = 100
_MESSAGE_CHARS = 300
_TOOL = {"type": "function", "function": {"name": "a", "parameters": {}}}
_EXCHANGE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "a"})
_NO_MEMORY = 3  # exit code


class TemplateLimitError(Exception):
    """A template that takes more CPU, memory or depth than any conversation needs."""


class Rendering(NamedTuple):
    """A text by what it has in common with the first one of its request."""

    num_same: int  # characters at its beginning that are those of the first
    rest: str
    error: str | None = None  # the template refused the messages

    def text(self, first: str) -> str:
        """Returns the text."""
        return first[: self.num_same] + self.rest


class TemplateFacts(NamedTuple):
    """Contents of a template."""

    is_tagged: bool  # has `{% generation %}`
    names: frozenset[str]  # keys and attributes that it reads, and short strings
    variables: frozenset[str]


class TemplateSandbox:
    """The process that renders, started with the first request, and again if one has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process id: a fork has the pipes of its parent

    def compile(self, jinja: str) -> TemplateFacts:
        """Returns what a template has, after renderings of an exchange for its limits.

        Raises: ValueError: It is no Jinja. TemplateLimitError.
        """
        if len(jinja) > MAX_TEMPLATE_CHARS:
            raise TemplateLimitError(f"has {len(jinja):,} characters")
        jobs = [(2, False), (1, True)]
        for tools in ([_TOOL], None):
            variables = {"messages": _EXCHANGE, "tools": tools}
            request = {"jinja": jinja, "jobs": jobs, "variables": variables, "facts": True}
            answer = self._ask(request)
        names = (frozenset(answer[key]) for key in ("names", "variables"))
        return TemplateFacts(answer["is_tagged"], *names)

    def render(
        self,
        jinja: str,
        today: str | None,
        variables: Mapping[str, Any],
        jobs: Sequence[tuple[int, bool]],
        *,
        marks: bool = False,
    ) -> list[Rendering]:
        """Renders the first messages of `variables`: their number, and if with a generation prompt.

        With `marks`, what `{% generation %}` has is between the characters `GENERATED`. Raises:
        TemplateLimitError.
        """
        request = {
            "jinja": jinja,
            "today": today,
            "variables": variables,
            "jobs": jobs,
            "marks": marks,
        }
        return [Rendering(*one) for one in self._ask(request)["texts"]]

    def _ask(self, request: Mapping[str, Any]) -> Any:
        limits = {"cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES, "text_chars": TEXT_CHARS}
        # Objects that JSON has not, as dates of Parquet, become their type, as in transformers.
        content = {**request, **limits}
        line = json.dumps(content, default=lambda value: f"<{type(value).__name__}>").encode()
        with self._lock:
            process = self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line + b"\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                reply = b""
            except BaseException:  # Ctrl-C in the middle of an exchange
                self.close()
                raise
            if not reply.endswith(b"\n"):
                self._process = None
                raise TemplateLimitError(_reason(process.wait()))
        answer = parse_json(reply)
        if answer.get("limit"):
            raise TemplateLimitError(answer["limit"])
        if answer["error"] is not None:
            raise ValueError(answer["error"])
        return answer

    def _start(self) -> "subprocess.Popen[bytes]":
        is_own = self._owner == os.getpid()
        if self._process is None or not is_own or self._process.poll() is not None:
            self._owner = os.getpid()
            self._process = start_program(__file__)
        return self._process

    def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()


@cache
def sandbox() -> TemplateSandbox:
    """Returns the sandbox of this process."""
    process = TemplateSandbox()
    atexit.register(process.close)
    return process


def _reason(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"takes more than {CPU_S:g} s of CPU"
    if code == _NO_MEMORY:
        return f"takes more than {MEMORY_BYTES >> 20} MiB of memory"
    return f"ends the process that renders it (exit code {code})"


# From here on: the program.


class _GenerationTag(Extension):
    """`{% generation %}`: what the assistant writes, between two marks."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads a set of the class
    has_marks = False
    is_used = False

    def parse(self, parser: Parser) -> nodes.Node:
        """Returns the body of the tag, within `_mark`."""
        line = next(parser.stream).lineno
        self.is_used = True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        begin, end = GENERATED if self.has_marks else ("", "")
        return f"{begin}{caller()}{end}"


class _TemplateNamespace(Namespace):
    """Jinja's namespace without attributes of Python's own, as in transformers."""

    def __init__(self, /, *pairs: Any, **attributes: Any) -> None:
        super().__init__()
        for name, value in dict(*pairs, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot store {name!r}")
        super().__setitem__(name, value)


class _TemplateDict:
    """`dict` without the class itself, whose attributes lead out of the sandbox."""

    def __call__(self, *pairs: Any, **items: Any) -> dict[Any, Any]:
        return dict(*pairs, **items)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """Returns a dict with equal values."""
        return dict.fromkeys(*arguments)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes the characters of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _names_of(tree: nodes.Template) -> list[str]:
    """Returns the attributes, keys and short strings of a template."""
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    texts = (node.value for node in tree.find_all(nodes.Const))
    names |= {text for text in texts if isinstance(text, str) and len(text) <= _NAME_CHARS}
    return sorted(names)


@lru_cache(maxsize=32)
def _compile(jinja: str, today: str | None, has_marks: bool) -> tuple[Template, dict[str, Any]]:
    """Compiles a template as transformers does; `today` is the date that it reads (ISO)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    tag: Any = environment.extensions[_GenerationTag.identifier]
    tag.has_marks = has_marks
    environment.filters["tojson"] = _to_json

    def strftime_now(form: str) -> str:
        now = datetime.now() if today is None else date.fromisoformat(today)
        return now.strftime(form)

    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": strftime_now,
        "namespace": _TemplateNamespace,
        "dict": _TemplateDict(),
    }
    template = environment.from_string(jinja)
    tree = environment.parse(jinja)
    variables = sorted({node.name for node in tree.find_all(nodes.Name)})
    facts = {"is_tagged": tag.is_used, "names": _names_of(tree), "variables": variables}
    return template, facts


def _allow(request: Mapping[str, Any], num_bytes: int) -> None:
    """Sets the limits of the next step, after which the kernel ends this process."""
    signal.setitimer(signal.ITIMER_PROF, request["cpu_s"] * (1 + num_bytes / 2**20))
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = request["memory_bytes"] + TIMES_INPUT * num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _answer(request: Mapping[str, Any], num_bytes: int) -> dict[str, Any]:
    """Returns the answer to a request of `num_bytes`."""
    _allow(request, num_bytes)
    try:
        options = request["jinja"], request.get("today"), request.get("marks", False)
        template, facts = _compile(*options)
    except RecursionError:
        return {"limit": "is nested too deeply"}
    except TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except (SyntaxError, ValueError, TypeError, TemplateError) as error:  # of Python's compiler too
        return {"error": _line(error)}
    texts: list[tuple[int, str, str | None]] = []
    first = ""
    for count, generation_prompt in request["jobs"]:
        _allow(request, num_bytes)
        variables = request["variables"]
        defaults = {
            "messages": variables["messages"][:count],
            "add_generation_prompt": generation_prompt,
        }
        try:
            text = template.render({**variables, **defaults})
        except RecursionError:
            return {"limit": "recurses too deeply"}
        except MemoryError:
            raise
        except Exception as error:  # of a stranger's program: Jinja's errors, and any of Python's
            texts.append((0, "", _line(error)))
            continue
        if len(text) > request["text_chars"] + TIMES_INPUT * num_bytes:
            return {"limit": f"writes {len(text):,} characters"}
        first = first if texts else text
        same = _num_same(first, text) if texts else 0
        texts.append((same, text[same:], None))
    answer: dict[str, Any] = {"error": None, "texts": texts}
    if request.get("facts"):
        answer |= facts
    return answer


def _line(error: Exception) -> str:
    return " ".join(str(error)[:_MESSAGE_CHARS].split()) or type(error).__name__


def _num_same(one: str, other: str) -> int:
    """Returns the length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.startswith(other[low:middle], low) else (low, middle - 1)
    return low


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while line := requests.readline():
        try:
            answer = json.dumps(_answer(parse_json(line), len(line))).encode()
        except MemoryError:
            os._exit(_NO_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer + b"\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
