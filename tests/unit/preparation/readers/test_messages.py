"""Messages as others write them: keys, roles, content and JSON text; what is learned, counted or refused."""

import json
import re

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pretrain.config.prepare import FilterConfig, InputConfig
from pretrain.preparation.filters import NO_ASSISTANT_TURN, refuse
from pretrain.preparation.readers.messages import ROLE_OF
from pretrain.preparation.readers.record_fields import RecordError
from pretrain.preparation.readers.records import ReadRule
from tests.helpers.chat_templates import CHATML, GENERATION

TOOL_USE = (
    "{% if tools %}Tools:{% for tool in tools %}{{ tool|tojson }}{% endfor %}\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments|tojson }}){% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part['text']|trim }}|{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JINJA = {name: {"jinja": text} for name, text in (("chatml", CHATML), ("tags", GENERATION), ("parts", PARTS))}
TEMPLATES = {**JINJA, "of ours": "chatml", "none": None}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"x": {"default": None}}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"x": 1, "y": None}}}


def user(content, **more):
    return {"role": "user", "content": content, **more}


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


def read(record, template=CHATML, kind="records", **options):
    template = {"jinja": template} if isinstance(template, str) and "{" in template else template
    options = {"messages_field": "messages"} | options if kind == "records" else options
    return ReadRule(InputConfig(template=template, **options), kind).build(record, 7)


def learned(document):
    return "".join(text for text, is_learned in document.segments if is_learned)


def theirs(messages, template, **options):
    messages = [{key: value for key, value in one.items() if value is not None} for one in messages]
    [text], _ = render_jinja_template([messages], chat_template=template, **options)
    return text


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize(
    "flag",
    [
        *(
            {key: value}
            for key in ("weight", "loss_weight", "train", "training", "trainable", "learn", "loss", "loss_mask")
            for value in (0, False)
        ),
        *({key: value} for key in ("masked", "is_masked", "mask", "ignore") for value in (1, True)),
        {"label": False},
        {"weight": 0.0, "masked": True},
    ],
    ids=str,
)
def test_an_answer_that_is_not_to_be_learned_has_no_loss_in_any_template(template, flag):
    chat = [user("Hi"), says("one two", **flag), user("so?"), says("three", weight=1)]
    found = read({"messages": chat}, template)
    assert "three" in learned(found) and "one two" not in learned(found) and "one two" in found.text
    assert found.unused == {}
    nothing = read({"messages": [user("Hi"), says("one", **flag)]}, template)
    assert refuse(nothing, FilterConfig()) == NO_ASSISTANT_TURN


def test_an_answer_that_is_not_to_be_learned_has_none_in_a_preference():
    prompt = [user("Hi"), says("Yes?"), user("Who?")]
    record = {"prompt": prompt, "chosen": [says("Ada."), user("and"), says("no", weight=0)], "rejected": [says("No.")]}
    found = read(record, kind="preferences")
    assert (learned(found), learned(found.rejected)) == ("Ada.<|im_end|>\n", "No.<|im_end|>\n")


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([user("a"), says("b", weight=0.5)], r"messages\[1\].weight is 0.5: a turn is learned or not; write 0 or 1"),
        ([user("a"), says("b", train="no")], r"messages\[1\].train is 'no'"),
        ([user("a"), says("b", weight=1, masked=True)], "says by weight and masked that it is learned and is not"),
        ([user("a", weight=1), says("b")], r"messages\[0\].weight says that a turn of the user is learned"),
        ([user("a"), says("b", train_detail=[{"train": True}])], "says what is learned by characters"),
        ([{"role": "narrator", "content": "a"}], r"messages\[0\].role is 'narrator', which is not known; use one of"),
        ([{"role": 3, "content": "a"}], r"messages\[0\].role is a number, not a string"),
        ([{"content": "a"}], r"messages\[0\].role is absent"),
        ([user(None), says("b")], r"messages\[0\].content is null, not a string"),
        ([user("a"), says(5)], r"messages\[1\].content is a number, not a string"),
        ([user("a"), says(True)], r"messages\[1\].content is a boolean"),
        ([user({"text": "a"}), says("b")], r"messages\[0\].content is an object"),
        (
            [user([{"type": "image_url", "image_url": "x"}]), says("b")],
            r"content\[0\] is of the type 'image_url', not text",
        ),
        (
            [user([{"type": "text", "text": "a"}, {"type": "input_audio"}]), says("b")],
            r"content\[1\] is of the type 'input_",
        ),
        ([user([{"type": "text", "text": 5}]), says("b")], r"messages\[0\].content\[0\].text is a number"),
        ([user(["a"]), says("b")], r"messages\[0\].content\[0\] is a string, not an object"),
        ([user("a"), says("\ud800")], "unpaired surrogate"),
        ([user("a"), says("", tool_calls=[CALL])], "has nothing but tool_calls, which the template does not write"),
        ([user("a"), says(None, function_call={"name": "f"})], "has nothing but function_call"),
        ([["user", "a"]], r"messages\[0\] is a list, not an object"),
        ("[1", "field 'messages' is a string, not a list"),
        ({"role": "user"}, "field 'messages' is an object, not a list"),
    ],
)
def test_a_message_that_says_what_cannot_be_done_is_refused_under_every_template(chat, message, template):
    with pytest.raises(RecordError) as caught:
        read({"messages": chat}, template)
    assert re.search(message, f"{caught.value}; {caught.value.fix}")


def test_a_role_that_a_template_names_is_passed_on():
    template = CHATML + "{% if messages[0].role == 'narrator' %}{% endif %}"
    assert read({"messages": [{"role": "narrator", "content": "a"}, says("b")]}, template).text.startswith(
        "<|im_start|>narrator\na"
    )


@pytest.mark.parametrize("template", JINJA.values(), ids=JINJA)
@pytest.mark.parametrize("role", [*ROLE_OF, "Human", " USER "])
def test_roles_of_others_are_those_of_one_table(role, template):
    known = ROLE_OF[role.strip().lower()]
    found = read({"messages": [user("a"), {"from": role, "value": "b"}, says("c")]}, template)
    assert f"<|im_start|>{known}\nb<|im_end|>" in found.text and ("b" in learned(found)) == (known == "assistant")


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_content_in_parts_is_taken_apart_unless_the_template_does(template):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two", "image_url": None}, {"text": "!"}]
    chat = [user(parts), says([{"type": "text", "text": "three"}])]
    found = read({"messages": chat}, template)
    if template == JINJA["parts"]:
        assert (
            found.text == theirs(chat, PARTS) and "one|two|!|" in found.text and learned(found) == "three|<|im_end|>\n"
        )
        return
    assert "one two!" in found.text and "three" in learned(found)
    assert found.text == read({"messages": [user("one two!"), says("three")]}, template).text
    assert (
        read({"messages": [user([]), says("a")]}, template).text
        == read({"messages": [user(""), says("a")]}, template).text
    )


@pytest.mark.parametrize("as_text", [False, True], ids=["lists", "json"])
def test_tools_and_calls_are_written_as_transformers_does_from_lists_and_from_their_json_text(as_text):
    function = {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}
    calls = [{**CALL, "function": function}] if as_text else [CALL]
    chat = [user("Hi"), {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "4"}]
    chat.append(says("It is 4."))
    record = {"messages": chat, "tools": [TOOL]}
    if as_text:
        chat[1]["tool_calls"] = json.dumps(calls)
        record = {"messages": json.dumps(chat), "tools": json.dumps([json.dumps(TOOL)])}
    found = read(record, TOOL_USE)
    given = [user("Hi"), {"role": "assistant", "tool_calls": [CALL]}, *chat[2:]]
    assert found.text == theirs(given, TOOL_USE, tools=[TOOL]) and '"default": null' in found.text
    assert learned(found) == 'look({"x": 1, "y": null})<|im_end|>\nIt is 4.<|im_end|>\n'
    assert found.unused == {}
    assert read({**record, "tools": "" if as_text else []}, TOOL_USE).text == theirs(given, TOOL_USE)


@pytest.mark.parametrize("listed", [[TOOL], json.dumps([TOOL])], ids=["list", "json"])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_of_a_system_turn_are_those_of_a_template_that_reads_no_turns_own(role, listed):
    chat = [{"role": role, "content": "s"}, user("Hi"), says("a")]
    inside = [{**chat[0], "tools": listed}, *chat[1:]]
    expected = theirs(chat, TOOL_USE, tools=[TOOL])
    for record in ({"messages": inside}, {"messages": inside, "tools": [TOOL]}):
        found = read(record, TOOL_USE)
        assert (found.text, found.unused) == (expected, {})
    own = TOOL_USE.replace("{{ m.role }}\n", "{{ m.role }}{{ m.tools or '' }}\n")
    found = read({"messages": inside}, own)
    assert (found.text, found.unused) == (theirs(inside, own), {})
    assert read({"messages": [chat[0], user("Hi", tools=listed), says("a")]}, TOOL_USE).unused == {
        "messages[].tools": 1
    }
    assert read({"messages": inside}, CHATML).unused == {"messages[].tools": 1}
    assert read({"messages": inside}, CHATML + "{% set name = 1 %}{% set id = name %}").unused == {
        "messages[].tools": 1
    }
    preference = {"prompt": inside[:2], "chosen": [says("a")], "rejected": [says("b")]}
    assert read(preference, TOOL_USE, kind="preferences").text == expected


def test_a_variable_of_a_template_is_no_key_of_messages():
    template = "{% set id = 1 %}" + CHATML + "{% if id %}{% endif %}"
    assert read({"messages": [user("a", id=3), says("b")]}, template).unused == {"messages[].id": 1}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_answer_that_is_not_to_be_learned_is_in_no_loss(content, template):
    chat = [user("Hi"), says(content, weight=0), user("so?"), says("three"), user("and?"), says("", weight=0)]
    found = read({"messages": chat}, template)
    end = "" if template is None else "<|im_end|>\n" if template != JINJA["tags"] else "<|im_end|>"
    assert learned(found) == "three" + end
    bare = [{key: one[key] for key in ("role", "content")} for one in chat]
    if isinstance(template, dict):
        assert found.text == theirs(bare, template["jinja"])


def test_arguments_stay_text_for_a_template_that_takes_text():
    template = TOOL_USE.replace("call.function.arguments|tojson", "call.function.arguments if call.function.arguments "
                                "is string else call.function.arguments|tojson")  # fmt: skip
    call = {**CALL, "function": {"name": "look", "arguments": '{"x":1}'}}
    chat = [user("Hi"), {"role": "assistant", "tool_calls": [call]}]
    assert 'look({"x":1})' in read({"messages": chat}, template).text == theirs(chat, template)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"tools": "[{"}, "field 'tools' is a string, not a list"),
        ({"tools": {"name": "look"}}, "field 'tools' is an object, not a list"),
        (
            {"tools": '{"name": "look"}'},
            "field 'tools' is the JSON text of an object, not a list; write a list of tools, or its JSON",
        ),
        ({"tools": ["[1]"]}, r"tools\[0\] is the JSON text of a list, not an object"),
        ({"messages": '{"role": "user"}'}, "field 'messages' is the JSON text of an object, not a list"),
        (
            {"messages": [user("a"), says("", tool_calls='{"name": "f"}')]},
            r"messages\[1\].tool_calls is the JSON text of an object, not a list",
        ),
        (
            {"tools": [TOOL], "messages": [{"role": "system", "content": "s", "tools": [{"name": "f"}]}, user("a")]},
            "a turn of the system lists other tools, and the template writes one list; leave one out",
        ),
        ({"tools": ["look"]}, r"tools\[0\] is a string, not an object"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": "x"}}]},
            r"function.parameters is a str",
        ),
        ({"messages": [user("a"), says("", tool_calls="x")]}, r"messages\[1\].tool_calls is a string, not a list"),
        ({"messages": [user("a"), says("", tool_calls=[3])]}, r"tool_calls\[0\] is a number, not an object"),
        (
            {"messages": [user("a"), says("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])]},
            r"messages\[1\].tool_calls\[0\].function.arguments is a string, not an object",
        ),
        ({"system": 5}, "field 'system' is a number, not a string"),
        (
            {"system": "a", "messages": [{"role": "system", "content": "b"}, user("c")]},
            "are both the system's; leave one",
        ),
        ({"weight": 0}, "field 'weight' says that the record is not learned"),
        ({"kto_tag": False}, "field 'kto_tag' says that the record is not learned"),
        ({"mask": True}, "field 'mask' says that the record is not learned"),
        ({"loss_mask": [0, 1]}, "field 'loss_mask' is a list: each turn says if it is learned"),
        ({"completion": "b", "label": False}, "field 'label' says that the record is not learned"),
    ],
)
def test_a_field_of_another_type_than_its_name_says_is_refused(record, message):
    with pytest.raises(RecordError) as caught:
        read({"messages": [user("a"), says("b")], **record}, TOOL_USE)
    assert re.search(message, f"{caught.value}; {caught.value.fix}")


def test_keys_that_nothing_used_are_counted():
    chat = [
        user("a", name="Ada", id=3),
        says("b", reasoning_content="so", weight=1, cut=None),
        user("c", id=4),
        says("d"),
    ]
    record = {"messages": chat, "tools": [TOOL], "source": "x", "language": "en", "empty": [], "label": True}
    found = ReadRule(InputConfig(messages_field="messages", template=JINJA["chatml"]), "records", ("language",))
    expected = {"messages[].name": 1, "messages[].id": 2, "messages[].reasoning_content": 1, "tools": 1, "source": 1}
    assert found.build(record, 7).unused == {**expected, "label": 1}
    assert read(record, "chatml").unused == {**expected, "label": 1, "language": 1}
    prose = read(record, "{# name #}a name, an id of the source, label, language, tools" + CHATML)
    assert prose.unused == {**expected, "label": 1, "language": 1}
    reads = read(record, CHATML + "{% if messages[0].reasoning_content or tools or messages[0].name %}{% endif %}")
    assert reads.unused == {"messages[].id": 2, "source": 1, "label": 1, "language": 1}
    plain = {"prompt": "a", "response": "b", "lang": "en"}
    assert read(plain, "chatml", messages_field=None).unused == {"lang": 1}
    preference = {"prompt": [user("a", id=1)], "chosen": [says("b", id=2)], "rejected": "c", "score": 5}
    assert read(preference, "chatml", kind="preferences").unused == {"prompt[].id": 2, "chosen[].id": 1, "score": 1}


def test_a_system_prompt_and_a_history_in_fields_of_their_own_are_turns():
    found = read({"system": "Be brief.", "messages": [user("a"), says("b")]})
    assert found.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na")
    record = {"instruction": "a", "input": "", "output": "b", "system": "Be brief.", "history": [["x", "y"]]}
    found = read(record, "chatml", messages_field=None)
    assert (
        found.text
        == read(
            {"messages": [{"role": "system", "content": "Be brief."}, user("x"), says("y"), user("a"), says("b")]},
            "chatml",
        ).text
    )
    assert learned(found) == "y<|im_end|>\nb<|im_end|>\n" and found.unused == {}
    with pytest.raises(RecordError, match=r"history\[0\] is no pair of a prompt and a response"):
        read({**record, "history": "x"}, "chatml", messages_field=None)


def test_an_answer_that_the_template_leaves_out_is_refused():
    template = PARTS.replace("{{ m.content }}", "")
    with pytest.raises(RecordError, match="turn 1, of the assistant, is not in the chat template's text"):
        read({"messages": [user("a"), says("b")]}, template)
