"""The process that serves OpenAI's protocol, and Anthropic's, to agents. `rlx.environments.endpoint_pool` starts one for each process that samples.

Its owner sends lines of JSON: ["start", host, secret, on_rewritten_history, format of tool calls, settings], then ["answer", call, content],
["reject", call, text, code] and ["close", life, lowest open life]. It sends ["address", URL], ["call", number, life, content],
["cancel", number, life] and, after a close, ["closed", 0, life, numbers of the calls whose answers the agent got].

A life is one start of a sample's agent. Its token is the life's number, signed; so a call needs no table of tokens, and no agent can
make another's. A client that several samples share has the token of any of them as its key, and that of the sample as `model`.

With settings (port, key, name of the model) there are no lives: who has the key may call, and nothing is remembered of a call.
"""

import asyncio
import hmac
import itertools
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from rlx.environments.anthropic_calls import message_events, message_of, read_message
from rlx.environments.endpoint_pool import token_of
from rlx.environments.openai_calls import BadCall, Call, History, answer, events, read, said
from rlx.processes.lines import line_of

MODEL = "policy"
READERS = {"chat/completions": partial(read, True), "completions": partial(read, False), "messages": read_message}
LONGEST_BODY, LONGEST_UPLOAD_S = 2**22, 60.0  # bytes, and the time in which they arrive
MOST_AT_ONCE, MOST_SERVED = 256, 4096  # calls in work: of a life, or of all who have the key
UNKNOWN = "expected the token of a running sample: Authorization: Bearer $OPENAI_API_KEY"
UNKNOWN_KEY = "expected the key of rlx serve: Authorization: Bearer $OPENAI_API_KEY"
KEPT_S = 86_400  # idle connections stay open: a client that reuses one as it closes would see an error
LONGEST_LINE = 2**40  # bytes; the owner is trusted


@dataclass(eq=False)
class _Life:
    number: int
    history: History
    waiting: dict[int, "asyncio.Future[Any]"] = field(default_factory=dict)  # calls in work
    turns: int = 0
    got: list[int] = field(default_factory=list)  # calls whose answers the agent has
    most: int = MOST_AT_ONCE


def serve(connection: socket.socket) -> None:
    """Serve until the owner closes the connection."""
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        runner.run(_serve(connection))


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
    _, host, *settings = json.loads(await reader.readline())
    own = _Server(writer, *settings)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for path, reads in READERS.items():
        app.add_route(f"/v1/{path}", partial(own.call, reads), ["POST"])
    app.get("/v1/models")(own.models)
    app.add_exception_handler(BadCall, _rejected)
    with socket.create_server((host, own.port), backlog=4096) as listening:
        options = {"log_level": "error", "access_log": False, "lifespan": "off", "timeout_keep_alive": KEPT_S}
        server = uvicorn.Server(uvicorn.Config(app, **options))
        task = asyncio.ensure_future(server.serve(sockets=[listening]))
        own.send("address", f"http://{host}:{listening.getsockname()[1]}/v1")
        while line := await reader.readline():
            own.take(*json.loads(line))
        server.should_exit = server.force_exit = True
        await task


class _Server:
    def __init__(
        self,
        writer: asyncio.StreamWriter,
        secret: str,
        on_rewritten: str,
        tool_format: str,
        settings: dict[str, Any] | None = None,
    ):
        known = settings or {"port": 0, "key": None, "name": MODEL}
        self.port, self._key, self._name = known["port"], known["key"], known["name"]
        self._anyone = _Life(0, History(on_rewritten), most=MOST_SERVED)
        self._writer, self._secret, self._mode, self._format = writer, secret, on_rewritten, tool_format
        self._lives: dict[int, _Life] = {}
        self._closed: set[int] = set()
        self._lowest = 0  # life that may be open
        self._numbers = itertools.count(1)
        self._life_of: dict[int, _Life] = {}  # of the calls that the owner works on

    def send(self, *message: Any) -> None:
        self._writer.write(line_of(message))

    def take(self, kind: str, number: int, *content: Any) -> None:
        """Handle a message of the owner."""
        if kind == "close":
            self._lowest = content[0]
            self._closed = {each for each in self._closed if each >= self._lowest} | {number}
            life = self._lives.pop(number, None)
            for call, waiting in life.waiting.items() if life else ():
                self._life_of.pop(call, None)
                if not waiting.done():
                    waiting.set_exception(BadCall("the sample has ended", 410))
            self.send("closed", 0, number, life.got if life else [])
        elif (life := self._life_of.pop(number, None)) is not None and not life.waiting[number].done():
            waiting = life.waiting[number]
            if kind == "answer":
                waiting.set_result(content[0])
            else:
                waiting.set_exception(BadCall(content[0], code=content[1]))

    async def models(self, request: Request) -> Response:
        self._number(_token(request))
        return JSONResponse({"object": "list", "data": [{"id": self._name, "object": "model", "owned_by": "rlx"}]})

    def _number(self, token: str) -> int:
        """Return the life of a token that this run has made; it may have ended. Raises BadCall."""
        if self._key is not None:
            if not hmac.compare_digest(token.encode(), self._key.encode()):
                raise BadCall(UNKNOWN_KEY, 401, "invalid_api_key")
            return self._anyone.number
        digits = token.split("-")[1] if token.count("-") == 2 else ""
        life = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 else -1
        if not hmac.compare_digest(token.encode(), token_of(self._secret, life).encode()):
            raise BadCall(UNKNOWN, 401, "invalid_api_key")
        return life

    def _life(self, token: str) -> _Life:
        """Return the life of a token. Raises BadCall if it has ended."""
        life = self._number(token)
        if life in self._closed or life < self._lowest:
            raise BadCall(UNKNOWN, 401, "invalid_api_key")
        return self._lives.setdefault(life, _Life(life, History(self._mode)))

    async def call(self, reads: Callable[[bytes], Call], request: Request) -> Response:
        token = _token(request)
        self._number(token)
        call = reads(await _body(request))
        life = self._anyone if self._key is not None else self._life(call.sample or token)
        if len(life.waiting) >= life.most:
            raise BadCall(f"{life.most} calls are in work; wait for one of them", 429)
        content = life.history.place(call)._asdict() | call.wishes
        content["ids"] = call.prompt if isinstance(call.prompt, list) else None
        number = next(self._numbers)
        waiting = life.waiting[number] = asyncio.get_running_loop().create_future()
        self._life_of[number] = life
        self.send("call", number, life.number, content)
        ends = partial(self._end, life, number, waiting)
        if call.stream:
            return _Stream(self._events(life, call, number, waiting), ends)
        gone = asyncio.ensure_future(request.receive())  # the next message after the body: the client has left
        try:
            await asyncio.wait({gone, waiting}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # it may have left while the answer was made
            if gone.done():
                raise BadCall("the client has left", 499)
            whole = self._whole(life, call, number, waiting.result())
            self._note_read(life, number)
            return JSONResponse(message_of(whole) if call.is_messages else whole)
        finally:
            gone.cancel()
            ends()

    async def _events(
        self, life: _Life, call: Call, number: int, waiting: "asyncio.Future[Any]"
    ) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events. The stream opens at once, so errors are events, too."""
        yield b": accepted\n\n"
        try:
            whole = self._whole(life, call, number, await waiting)
        except BadCall as fault:
            yield _event(_error(fault, call.is_messages))
            return
        for each in message_events(whole) if call.is_messages else events(call, whole):
            yield _event(each)
        if not call.is_messages:
            yield b"data: [DONE]\n\n"
        self._note_read(life, number)

    def _note_read(self, life: _Life, number: int) -> None:
        if self._key is None:
            life.got.append(number)

    def _whole(self, life: _Life, call: Call, number: int, content: Any) -> dict[str, Any]:
        """Return an answer as the agent reads it, and keep its turns."""
        turns = []
        for place, choice in enumerate(content["choices"]):
            turns.append(said(choice["text"], call, self._format, life.turns))
            if self._key is None:
                life.history.add(call, (number, place), turns[-1], choice["whole_text"])
            life.turns += 1
        return answer(call, number, content, turns) | {"model": self._name}

    def _end(self, life: _Life, number: int, waiting: "asyncio.Future[Any]") -> None:
        del life.waiting[number]
        if self._life_of.pop(number, None) is not None:
            self.send("cancel", number, life.number)
        if waiting.done() and not waiting.cancelled():
            waiting.exception()  # an error that nobody awaits would be logged


class _Stream(StreamingResponse):
    """Server-sent events; calls `ends` however it ends."""

    def __init__(self, content: AsyncIterator[bytes], ends: Callable[[], None]):
        super().__init__(content, media_type="text/event-stream")
        self._ends = ends

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ends()


async def _rejected(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, BadCall)
    # The rest of a body that was not read cannot be told from a next request
    headers = {"connection": "close"} if fault.status in (401, 408, 413) else None
    return JSONResponse(_error(fault, request.url.path == "/v1/messages"), fault.status, headers)


def _error(fault: BadCall, is_messages: bool) -> dict[str, Any]:
    return {"type": "error", **fault.body} if is_messages else fault.body


def _token(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _body(request: Request) -> bytes:
    """Return the body. Raises BadCall if it is too long or takes too long."""
    length, data = request.headers.get("content-length", "0"), bytearray()
    promised = int(length) if length.isdigit() and len(length) < 19 else LONGEST_BODY + 1
    try:
        async with asyncio.timeout(LONGEST_UPLOAD_S):
            async for part in request.stream():
                data += part
                if max(promised, len(data)) > LONGEST_BODY:
                    raise BadCall(f"the body has more than {LONGEST_BODY:,} bytes", 413)
    except TimeoutError:
        raise BadCall(f"the body has not arrived within {LONGEST_UPLOAD_S:g} s", 408) from None
    except ClientDisconnect:
        raise BadCall("the client has left", 499) from None
    return bytes(data)


def _event(value: Any) -> bytes:
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value)}\n\n".encode()
