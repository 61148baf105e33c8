"""The server of transformers for `pretrain serve`: one model, errors of OpenAI's API, stop strings.

    model     another one is 404, `model_not_found`, with the right name; the list has that alone
    request   `stop`, one text or up to 4, else `stop_strings` of the model's generation_config.json
    answer    the text before the first of them: whole, or in events that have no part of one

Run as a module it is `transformers`, with that server. Nothing else of an answer changes.
"""

import json
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError
from pretrain.generation.stop_strings import StopFilter, check_stops
from pretrain.interop.generation import read_generation_defaults
from pretrain.interop.release_files import GENERATION, read_object
from pretrain.interop.served_templates import limit_renderings
from pretrain.utils.safe_read import parse_json

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Server = Callable[[Message, Receive, Send], Awaitable[None]]
"""An application of ASGI."""

PATHS = ("/v1/completions", "/v1/chat/completions")
MAX_STOPS = 4
"""Most stop strings of a request, as OpenAI has it."""


class StopTexts:
    """A server whose answers end before a stop string; `defaults` are the model's."""

    def __init__(self, server: Server, defaults: tuple[str, ...] = ()) -> None:
        self._server = server
        self._defaults = defaults

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves a request; one with other stop strings than texts is refused with 400."""
        if scope["type"] != "http" or scope["path"] not in PATHS:
            await self._server(scope, receive, send)
            return
        content, is_whole = b"", False
        while not is_whole:
            part = await receive()
            content += part.get("body", b"")
            is_whole = not part.get("more_body", False)
        try:
            stops = self._stops_of(content)
        except ConfigError as error:
            await _refuse(send, error.what)
            return
        requests = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def receive_again() -> Message:
            first = next(requests, None)
            return await receive() if first is None else first

        await self._server(scope, receive_again, _Answer(stops, send).send if stops else send)

    def _stops_of(self, content: bytes) -> tuple[str, ...]:
        """Returns the stop strings of a request. Raises: ConfigError: No texts, or too many."""
        try:
            body = parse_json(content)
        except ValueError:
            return ()  # the server refuses it
        asked = body.get("stop") if isinstance(body, dict) else None
        if asked is None:
            return self._defaults
        stops = asked if isinstance(asked, list) else [asked]
        if len(stops) > MAX_STOPS or not all(isinstance(stop, str) for stop in stops):
            raise ConfigError(f"stop must be a text, or a list of up to {MAX_STOPS} texts")
        check_stops(stops, "stop")
        return tuple(stops)


async def _refuse(send: Send, what: str) -> None:
    answer = error_body(what, param="stop")
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


class _Answer:
    """An answer on its way to the client."""

    def __init__(self, stops: tuple[str, ...], send: Send) -> None:
        self._send = send
        self._filter = StopFilter(stops)
        self._start: Message = {}
        self._is_stream = False
        self._held = b""

    async def send(self, message: Message) -> None:
        """Sends a part of an answer on, or holds it until it is whole."""
        if message["type"] == "http.response.start":
            self._start = message
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            if self._is_stream:
                await self._send(message)
            return
        self._held += message.get("body", b"")
        has_more = message.get("more_body", False)
        if self._is_stream:
            *events, self._held = self._held.split(b"\n\n")
            events += [] if has_more else [self._held]
            body = b"".join(map(self._event, events))
            await self._send({**message, "body": body})
        elif not has_more:
            body = self._cut(self._held)
            headers = [pair for pair in self._start["headers"] if pair[0] != b"content-length"]
            length = (b"content-length", str(len(body)).encode())
            await self._send({**self._start, "headers": [*headers, length]})
            await self._send({**message, "body": body})

    def _event(self, event: bytes) -> bytes:
        """Returns an event with what is known to come before a stop string; nothing for none."""
        data = event.removeprefix(b"data: ")
        if data == event:
            return event + b"\n\n" if event else b""
        events = self._cut(data)
        return b"data: " + events + b"\n\n" if events else b""

    def _cut(self, content: bytes) -> bytes:
        """Returns an answer, or one of its events, as it is to be said; empty: nothing is yet."""
        try:
            answer = parse_json(content)
        except ValueError:
            return content  # `[DONE]`
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not choices:
            return content
        (choice,) = choices
        holder = next((choice[key] for key in ("delta", "message") if key in choice), choice)
        name = "text" if holder is choice else "content"
        text, ends = holder.get(name) or "", choice.get("finish_reason")
        said = "" if self._filter.is_found else self._filter.add(text)
        if ends:
            said += self._filter.rest()
            choice["finish_reason"] = "stop" if self._filter.is_found else ends
        elif text and not said:
            return b""
        if text or said:
            holder[name] = said
        return json.dumps(answer, ensure_ascii=False).encode()


def error_body(message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Returns the body of an error as OpenAI's API has it; clients print its message."""
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return {"error": error}


def serve_one(app: Any, name: str) -> None:
    """Has a FastAPI app serve the model `name` alone, with the errors of OpenAI's API."""
    from fastapi import HTTPException, Request
    from fastapi.responses import JSONResponse

    @app.exception_handler(HTTPException)
    async def tell(_: Request, error: HTTPException) -> Any:
        return JSONResponse(error_body(str(error.detail)), status_code=error.status_code)

    @app.middleware("http")
    async def check_model(request: Request, go_on: Callable[[Any], Awaitable[Any]]) -> Any:
        if request.method == "GET" and request.url.path == "/v1/models":
            only = {"id": name, "object": "model", "created": 0, "owned_by": "pretrain"}
            return JSONResponse({"object": "list", "data": [only]})
        is_json = "json" in request.headers.get("content-type", "")
        try:
            body = await request.json() if request.method == "POST" and is_json else {}
        except ValueError:
            body = {}  # the app reports it
        asked = body.get("model", name) if isinstance(body, dict) else name
        if asked != name:
            message = f'The model "{asked}" is not served here; the model is "{name}".'
            return JSONResponse(error_body(message, "model_not_found"), status_code=404)
        return await go_on(request)


def main() -> None:
    """Runs the command line of transformers: `serve FOLDER ...`."""
    from transformers import processing_utils, tokenization_utils_base
    from transformers.cli import transformers as command
    from transformers.cli.serving import server

    for users in (tokenization_utils_base, processing_utils):
        limit_renderings(users)

    path = Path(sys.argv[2]) / GENERATION
    defaults = read_generation_defaults(read_object(path)).stop_strings if path.is_file() else ()
    build = server.build_server

    def build_server(*arguments: Any, **named: Any) -> StopTexts:
        app = build(*arguments, **named)
        serve_one(app, path.parent.name)
        return StopTexts(app, defaults)

    server.build_server = build_server
    command.main()


if __name__ == "__main__":
    main()
