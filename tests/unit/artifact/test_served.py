"""Answers of a server end before a stop string, whole or in events, and nothing else of them changes."""

import asyncio
import json

import pytest

from pretrain.artifact.served import StopTexts

TEXT = "one two END three"
PIECES = ["one", " tw", "o E", "ND", " three"]


def event(choice):
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"


def chat(content, ends=None):
    return {"index": 0, "delta": {} if content is None else {"content": content}, "finish_reason": ends}


def answer_of(body, pieces=PIECES, *, path="/v1/chat/completions", is_stream=True, defaults=()):
    """What a client gets of a server that says so, and the request that this one got."""
    asked, sent = [], []

    async def server(scope, receive, send):
        asked.append((await receive())["body"])
        kind = b"text/event-stream" if is_stream else b"application/json"
        if is_stream:
            parts = [event({"index": 0, "delta": {"role": "assistant"}, "finish_reason": None})]
            parts += [event(chat(piece)) for piece in pieces] + [event(chat(None, "length"))]
        else:
            choice = {"index": 0, "finish_reason": "length"}
            text = "".join(pieces)
            choice |= {"message": {"role": "assistant", "content": text}} if "chat" in path else {"text": text}
            parts = [json.dumps({"choices": [choice], "usage": {"total_tokens": 9}}).encode()]
        headers = [(b"content-type", kind), *([] if is_stream else [(b"content-length", b"%d" % len(parts[0]))])]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        content = b"".join(parts)
        for first in range(0, len(content), 50):  # events are cut anywhere
            await send({"type": "http.response.body", "body": content[first : first + 50], "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    parts = iter([content[:5], content[5:]])

    async def receive():
        part = next(parts)
        return {"type": "http.request", "body": part, "more_body": part == content[:5]}

    async def send(message):
        sent.append(message)

    asyncio.run(StopTexts(server, defaults)({"type": "http", "path": path}, receive, send))
    return sent[0], b"".join(message["body"] for message in sent[1:]), asked


def choices_of(content):
    events = [one.removeprefix(b"data: ") for one in content.split(b"\n\n") if one]
    return [json.loads(one)["choices"][0] for one in events]


@pytest.mark.parametrize("stop", ["END", ["END"], ["zq", "END", "three"]], ids=str)
def test_a_stream_has_no_part_of_a_stop_string_and_says_why_it_ends(stop):
    _, content, asked = answer_of({"stop": stop})
    assert json.loads(asked[0]) == {"stop": stop}
    choices = choices_of(content)
    assert [one["delta"].get("content", "") for one in choices] == ["", "one", " tw", "o ", ""]
    assert choices[-1]["finish_reason"] == "stop"


def test_what_was_held_back_comes_at_the_end_of_a_stream():
    _, content, _ = answer_of({"stop": "o ENDE"}, ["tw", "o EN"])
    choices = choices_of(content)
    assert [one["delta"].get("content", "") for one in choices] == ["", "tw", "o EN"]
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_whole_answer_ends_before_it_and_has_its_length(path):
    start, content, _ = answer_of({"stop": "END"}, path=path, is_stream=False)
    answer = json.loads(content)
    (choice,) = answer["choices"]
    assert choice.get("text", choice.get("message", {}).get("content")) == "one two "
    assert (choice["finish_reason"], answer["usage"]) == ("stop", {"total_tokens": 9})
    assert dict(start["headers"])[b"content-length"] == str(len(content)).encode()


@pytest.mark.parametrize("body", [{}, {"stop": None}, {"stop": []}, b"not json"], ids=str)
def test_an_answer_without_stop_strings_passes_to_the_byte(body):
    plain = b"".join([event({"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}),
                      *(event(chat(piece)) for piece in PIECES), event(chat(None, "length"))])  # fmt: skip
    assert answer_of(body)[1] == plain
    assert answer_of(body, path="/v1/models", defaults=("END",))[1] == plain


def test_those_of_the_model_hold_where_a_request_has_none():
    _, content, _ = answer_of({}, is_stream=False, defaults=("two",))
    assert json.loads(content)["choices"][0]["message"]["content"] == "one "
    _, content, _ = answer_of({"stop": "END"}, is_stream=False, defaults=("two",))
    assert json.loads(content)["choices"][0]["message"]["content"] == "one two "


@pytest.mark.parametrize("stop", [["a", "b", "c", "d", "e"], 5, [1], ""], ids=str)
def test_others_are_refused_by_name(stop):
    start, content, asked = answer_of({"stop": stop})
    assert (start["status"], asked) == (400, [])
    message = json.loads(content)["error"]["message"]
    assert message in ("stop must be a text, or a list of up to 4 texts", "a stop string is empty")
