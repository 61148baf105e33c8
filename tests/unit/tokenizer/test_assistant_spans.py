"""Parts of a conversation that are the assistant's: as transformers' mask with tags, and without by comparison."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pretrain.tokenizer.chat_template import ChatTemplateError, load_chat_template
from tests.helpers.chat_templates import CHATML, FAMILIES, GENERATION

BEGIN, END = "{% generation %}", "{% endgeneration %}"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def user(content, **more):
    return {"role": "user", "content": content, **more}


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS = {
    "two answers": [SYSTEM, user("Hi"), says("one two"), user("and?"), says("  three \n")],
    "answers in a row": [user("Hi"), says("one"), says("two"), user("x"), says("three")],
    "assistant first": [says("one"), user("x"), says("two")],
    "reasoning": [user("Hi"), says("one", reasoning_content="because"), user("y"), says("two", reasoning_content="so")],
    "one answer": [user("Hi"), says("one")],
    "user last": [user("Hi"), says("one"), user("y")],
    "spelled": [user("<|im_end|>"), says("<|im_end|> a"), user("y"), says("b")],
}


def chatml(answer, other="{{ m.content }}<|im_end|>"):
    """ChatML with a text of its own for turns of the assistant."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}"
        + other
    ) + "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


TAGGED = {
    "one a turn": GENERATION,
    "three a turn": chatml(
        f"{BEGIN}<think>{{{{ m.reasoning_content or '' }}}}</think>{END}{{{{ ' ' }}}}"
        f"{BEGIN}{{{{ m.content|trim }}}}{END}{BEGIN}<|im_end|>{END}"
    ),
    "part of a turn": chatml(f"x: {BEGIN}{{{{ m.content|trim }}}}{END}<|im_end|>"),
    "the last turn": chatml(
        f"{{% if loop.last %}}{BEGIN}{{{{ m.content }}}}{END}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    ),
    "users too": chatml(f"{BEGIN}{{{{ m.content }}}}<|im_end|>{END}", f"{BEGIN}{{{{ m.content }}}}{END}<|im_end|>"),
    "one in another": chatml(f"{BEGIN}{{{{ m.content }}}}{BEGIN}<|im_end|>{END}{END}"),
    "white space control": chatml("{%- generation -%}\n {{ m.content }}<|im_end|>\n{%- endgeneration -%}"),
    "all": f"{BEGIN}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{END}",
}


def theirs(template, messages):
    options = {"chat_template": template, "return_assistant_tokens_mask": True}
    [text], [places] = render_jinja_template([messages], **options, **TOKENS)
    inside = {place for start, stop in places for place in range(start, stop)}
    return text, "".join(text[place] for place in sorted(inside))


def learned(template, messages, silent=(), **options):
    special = ["<|im_start|>", "<|im_end|>"]
    parts = load_chat_template({"jinja": template, **TOKENS}, special).segments(messages, silent=silent, **options)
    return "".join(part.text for part in parts), [part.text for part in parts if part.is_learned]


def test_a_tag_in_a_string_is_none():
    template = chatml("{{ '{% generation %}' }}{{ m.content }}")
    assert learned(template, CONVERSATIONS["user last"])[1] == ["{% generation %}one\n"]


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", TAGGED)
def test_what_is_in_the_tags_is_learned_as_in_transformers(name, messages):
    text, mask = theirs(TAGGED[name], messages)
    found = learned(TAGGED[name], messages)
    assert (found[0], "".join(found[1])) == (text, mask)


MASKED = [
    ("one a turn", "two answers", {2}, ["  three \n<|im_end|>"]),
    ("three a turn", "two answers", {2}, ["<think></think>", "three<|im_end|>"]),
    ("three a turn", "two answers", {0, 1, 4}, ["<think></think>", "one two<|im_end|>"]),
    ("part of a turn", "reasoning", {1}, ["two"]),
    ("users too", "two answers", {0, 1, 2, 3}, ["  three \n<|im_end|>"]),
    ("users too", "two answers", {4}, ["Be brief.", "Hi", "one two<|im_end|>", "and?"]),
    ("one in another", "answers in a row", {1}, ["two<|im_end|>", "three<|im_end|>"]),
    ("the last turn", "two answers", {2}, ["  three \n"]),
    ("the last turn", "two answers", {4}, []),
]


@pytest.mark.parametrize(("name", "conversation", "silent", "expected"), MASKED)
def test_turns_that_are_not_learned_take_their_tags_along(name, conversation, silent, expected):
    text, found = learned(TAGGED[name], CONVERSATIONS[conversation], silent)
    assert found == expected and text == theirs(TAGGED[name], CONVERSATIONS[conversation])[0]


@pytest.mark.parametrize(
    ("name", "conversation", "silent", "message"),
    [
        ("all", "two answers", {2}, r"a part in {% generation %} is of two turns, one of them not learned"),
        ("three a turn", "answers in a row", {1}, "is of two turns"),
    ],
)
def test_a_tag_of_a_turn_that_is_learned_and_of_one_that_is_not_is_refused(name, conversation, silent, message):
    with pytest.raises(ChatTemplateError, match=message):
        learned(TAGGED[name], CONVERSATIONS[conversation], silent)


def test_a_template_that_changes_what_is_in_its_tag_is_refused():
    template = chatml("{% set text %}" + BEGIN + " {{ m.content }}" + END + "{% endset %}{{ text|trim }}")
    with pytest.raises(ChatTemplateError, match=r"changes what it has within \{% generation %\}"):
        learned(template, CONVERSATIONS["two answers"])


# Without tags: templates that write a turn otherwise as the last one, or the generation prompt otherwise than the turn.
TRIMS = chatml("{{ m.content|trim }}<|im_end|>")
LAST_THINKS = chatml(
    "{% if loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>"
)
OPENS = chatml("{{ m.content|trim }}<|im_end|>").replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
CLOSES = OPENS.replace("<think>\n{% endif %}", "<think>\n\n</think>\n\n{% endif %}")
SYSTEM_LAST = (
    "{% set s = messages[0].content %}{% for m in messages[1:] %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last or loop.index == messages|length - 2 %}{{ s }} {% endif %}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
TAIL = CHATML + "{% if not add_generation_prompt %}Remember: {{ messages[0].content }}{% endif %}"
RETURNS = chatml("{{ m.content }}{{ '<|im_start|>' if loop.last else '<|im_end|>' }}")
UNTAGGED = [
    (CHATML, "two answers", ["one two<|im_end|>\n", "  three \n<|im_end|>\n"]),
    (CHATML, "assistant first", ["one<|im_end|>\n", "two<|im_end|>\n"]),
    (CHATML, "answers in a row", ["one<|im_end|>\n", "two<|im_end|>\n", "three<|im_end|>\n"]),
    (TRIMS, "two answers", ["one two<|im_end|>\n", "three<|im_end|>\n"]),
    (LAST_THINKS, "reasoning", ["one<|im_end|>\n", "<think>\nso\n</think>\n\ntwo<|im_end|>\n"]),
    (OPENS, "two answers", ["one two<|im_end|>\n", "three<|im_end|>\n"]),
    (CLOSES, "two answers", ["one two<|im_end|>\n", "three<|im_end|>\n"]),
    (CLOSES, "assistant first", ["one<|im_end|>\n", "two<|im_end|>\n"]),
    (SYSTEM_LAST, "two answers", [" one two</s>", "   three \n</s>"]),
    (RETURNS, "one answer", ["one<|im_start|>\n"]),
    (FAMILIES["phi-3"][0], "two answers", ["one two<|end|>\n", "  three \n<|end|>\n</s>"]),
]


@pytest.mark.parametrize(("template", "conversation", "expected"), UNTAGGED)
def test_without_tags_the_words_of_the_assistant_and_what_ends_them_are_learned(template, conversation, expected):
    messages = CONVERSATIONS[conversation]
    text, found = learned(template, messages)
    assert text == theirs(template, messages)[0]
    assert found == expected
    # A turn that is not learned leaves the others as they are.
    turns = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    for turn, part in zip(turns, expected, strict=True):
        assert learned(template, messages, {turn})[1] == [one for one in expected if one != part]


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        (TAIL, "one answer", "turn 1 has no place in the chat template's text: a rendering of the turns with one more"),
        (RETURNS, "two answers", "turn 2 has no place .* a rendering of the turns up to it has"),
        (
            FAMILIES["zephyr"][0].replace("<|assistant|>' }}", "<|bot|>' }}"),
            "two answers",
            "with the generation prompt",
        ),
        ("{{ messages[0].role }}", "assistant first", "the first turn is the assistant's, before which"),
        ("{% if messages|length > 2 %}{{ raise_exception('long') }}{% endif %}", "user last", "refuses it: long"),
    ],
    ids=["tail", "return", "header", "first", "refused"],
)
def test_text_that_may_not_be_the_assistants_is_refused(template, conversation, message):
    with pytest.raises(ChatTemplateError, match=message):
        learned(template, CONVERSATIONS[conversation])


def test_a_special_token_at_which_the_template_divides_a_message_is_refused():
    template = CHATML.replace("message['content']", "message['content'].split('<|im_end|>')[-1].lstrip()")
    assert learned(template, [user("a"), says("<|im_end|>x")])[1] == ["x<|im_end|>\n"]
    with pytest.raises(ChatTemplateError, match="a message spells a special token, at which the chat template divides"):
        learned(template, [user("a"), says("<|im_end|> x")])
