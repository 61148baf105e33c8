"""Chat templates of strangers: what takes all CPU or memory ends its process, and the next one renders."""

import os
import signal

import pytest

from pretrain.errors import DataError
from pretrain.tokenizer import template_sandbox
from pretrain.tokenizer.chat_template import load_chat_template
from pretrain.tokenizer.template_sandbox import TemplateSandbox, sandbox
from tests.helpers.tables import thinned

MEMORY = "takes more than 128 MiB of memory"
TOO_MUCH = f"takes more than 0.1 s of CPU|{MEMORY}"  # whichever comes first on a machine
DEEP, RECURSION, LONG = "is nested too deeply", "recurses too deeply", "writes [0-9,]+ characters"
GROWING = "{%% set ns = namespace(a=%s) %%}{%% for i in range(60) %%}{%% set ns.a = %s %%}{%% endfor %%}{{ ns.a|%s }}"
TWINS = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
BOMBS = {
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TOO_MUCH),
    "tests": ("{% for i in range(99999) if range(99999)|sum < 0 %}{% endfor %}", TOO_MUCH),
    "power": ("{{ 10**100000000 }}", TOO_MUCH),
    "power of a variable": ("{% set n = 10 %}{{ n ** (n ** 8) }}", TOO_MUCH),
    "batch": ("{{ [1]|batch(10**9, 1)|list|length }}", TOO_MUCH),
    "slice": ("{{ [1]|slice(10**8)|list|length }}", TOO_MUCH),
    "list": ("{{ ([1]*10**9)|length }}", TOO_MUCH),
    "doubled text": (GROWING % ("'a'", "ns.a + ns.a", "length"), TOO_MUCH),
    "doubled text by ~": (GROWING % ("'a'", "ns.a ~ ns.a", "length"), TOO_MUCH),
    "doubled list": (GROWING % ("[1]", "ns.a + ns.a", "length"), TOO_MUCH),
    "lists of lists": (GROWING % ("[1]", "[ns.a, ns.a]", "string"), TOO_MUCH),
    "equal lists of lists": (TWINS + "{{ ns.a == ns.b }}", TOO_MUCH),
    "replaced": (GROWING % ("'a'", "ns.a|replace('a', 'aaaaaaaa')", "length"), TOO_MUCH),
    "joined": ("{{ (['a'*1000]*10**6)|join('b'*1000) }}", TOO_MUCH),
    "tojson": ("{{ ([1]*10**6)|tojson(indent=10000) }}", TOO_MUCH),
    "wordwrap": ("{{ ('a'*10**6)|wordwrap(1) }}", TOO_MUCH),
    "lipsum": ("{{ lipsum(n=10**6) }}", TOO_MUCH),
    "indent": ("{{ 'x\nx'|indent(10**10) }}", TOO_MUCH),
    "text": ("{{ 'a' * 10**10 }}", TOO_MUCH),
    "center": ("{{ 'a'|center(10**10) }}", TOO_MUCH),
    "ljust": ("{{ 'a'.ljust(10**10) }}", TOO_MUCH),
    "zfill": ("{{ 'a'.zfill(10**10) }}", TOO_MUCH),
    "expandtabs": ("{{ '\t'.expandtabs(10**9) }}", TOO_MUCH),
    "width of format": ("{{ '{:10000000000}'.format(1) }}", TOO_MUCH),
    "nested width": ("{{ '{:{}}'.format(1, 10**10) }}", TOO_MUCH),
    "width of %": ("{{ '%10000000000d' % 1 }}", TOO_MUCH),
    "the filter format": ("{{ '%*d'|format(10**9, 1) }}", TOO_MUCH),
    "sum of lists": ("{{ ([[1]]*10**6)|sum(start=[])|length }}", TOO_MUCH),
    "strip": ("{{ ('a'*10**6).strip('b'*10**6 ~ 'a')|length }}", TOO_MUCH),
    "of a prompt alone": ("{% if add_generation_prompt %}{{ 10**100000000 }}{% endif %}", TOO_MUCH),
    "of tools alone": ("{% if tools %}{{ 10**100000000 }}{% endif %}", TOO_MUCH),
    "parentheses": ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", DEEP),
    "blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, DEEP),
    "not": ("{{" + "not " * 20000 + "1}}", DEEP),
    "macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", RECURSION),
    "long text": ("{% for i in range(400) %}{{ 'abcdefgh' * 10000 }}{% endfor %}", LONG),
}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def limits(monkeypatch):
    """Limits that a test meets soon."""
    monkeypatch.setattr(template_sandbox, "CPU_S", 0.1)
    monkeypatch.setattr(template_sandbox, "MEMORY_BYTES", 128 * 2**20)
    monkeypatch.setattr(template_sandbox, "TEXT_CHARS", 2**20)


def render(template, one=None):
    [found] = (one or sandbox()).render(template, None, {"messages": MESSAGES}, [(1, False)])
    return found.error or found.rest


# The limits are the kernel's: others of CPU and memory meet the same ones.
IN_GATE = {"loops", "power", "doubled text", "equal lists of lists", "tojson", "width of format", "of a prompt alone",
           "of tools alone", "parentheses", "macro", "long text"}  # fmt: skip


@pytest.mark.parametrize("name", thinned(BOMBS, len(BOMBS), IN_GATE))
def test_a_template_that_takes_too_much_is_refused_in_a_line(name, limits):
    template, message = BOMBS[name]
    # At once, as of strangers' folders: the first rendering is that of `load_chat_template`.
    with pytest.raises(DataError, match=f"^the chat template ({message}); choose another") as caught:
        load_chat_template({"jinja": template, "bos_token": "<s>"})
    assert caught.value.exit_code == 65 and "\n" not in str(caught.value)


def test_one_that_takes_too_much_of_some_messages_alone_is_refused_there(limits):
    template = "{% if messages|length > 2 %}{{ 'a' * 10**10 }}{% endif %}"
    loaded = load_chat_template({"jinja": template})
    assert loaded.render(MESSAGES) == []
    with pytest.raises(DataError, match=MEMORY):
        loaded.render(MESSAGES * 3)
    assert loaded.render(MESSAGES) == [], "the next conversation is rendered"


def test_limits_grow_with_the_conversation(limits):
    long = [{"role": "user", "content": "a" * 2**23}]
    [found] = sandbox().render("{{ messages[0].content * 2 }}", None, {"messages": long}, [(1, False)])
    assert found.rest == "a" * 2**24


def test_a_fork_and_an_interrupted_rendering_start_a_process_of_their_own(monkeypatch):
    one = TemplateSandbox()
    assert render("{{ messages[0].content }}", one) == "hi"
    child = os.fork()
    if child == 0:
        os._exit(0 if render("{{ messages[0].role }}", one) == "user" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert render("{{ messages[0].role }}", one) == "user"
    process, read = one._process, one._process.stdout

    class Interrupted:
        """Ctrl-C while the parent waits for the answer."""

        def readline(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(process, "stdout", Interrupted())
    monkeypatch.setattr(process, "communicate", lambda: (read.close(), process.wait()))
    with pytest.raises(KeyboardInterrupt):
        render("{{ 1 }}", one)
    assert process.returncode == -signal.SIGKILL
    assert render("{{ 1 + 1 }}", one) == "2"
    one.close()


def test_another_process_is_started_for_one_that_was_killed():
    one = TemplateSandbox()
    assert render("{{ 1 }}", one) == "1"
    one._process.kill()
    one._process.wait()
    assert render("{{ 2 }}", one) == "2"
    one.close()


def test_a_template_longer_than_any_is_refused_unread():
    with pytest.raises(DataError, match="the chat template has 2,000,000 characters; choose another"):
        load_chat_template({"jinja": "a" * 2_000_000})
