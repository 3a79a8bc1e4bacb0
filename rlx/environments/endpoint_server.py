"""The process that serves OpenAI's protocol to agents. `rlx.environments.endpoint_pool` starts one for each process that samples.

Its owner sends lines of JSON: ["start", secret, host, on_rewritten_history, format of tool calls], then ["answer", call, content],
["reject", call, text, code] and ["close", life, lowest open life]. It sends ["address", URL], ["call", number, life, content],
["cancel", number] and, after a close, ["closed", life, numbers of the calls whose answers the agent got].

A life is one start of a sample's agent. Its token is the life's number, signed; so a call needs no table of tokens, and no agent can
make another's.
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

from rlx.environments.endpoint_pool import token_of
from rlx.environments.openai_calls import MODEL, BadCall, Call, Choice, History, Said, answer, events, read, said
from rlx.processes.lines import line_of

LONGEST_BODY = 2**22  # bytes
LONGEST_UPLOAD_S = 60.0
"""A body must have arrived by then [s]."""
MOST_AT_ONCE = 256
"""Calls of a life in work."""
KEPT_S = 86_400
"""Idle connections stay open: a client that reuses one as it closes would see an error."""
LONGEST_LINE = 2**40  # bytes; the owner is trusted


@dataclass(eq=False)
class _Life:
    number: int
    history: History
    waiting: dict[int, "asyncio.Future[Any]"] = field(default_factory=dict)  # calls in work
    turns: int = 0
    got: list[int] = field(default_factory=list)  # calls whose answers the agent has


def serve(connection: socket.socket) -> None:
    """Serve until the owner closes the connection."""
    asyncio.run(_serve(connection))


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
    _, secret, host, on_rewritten, tool_format = json.loads(await reader.readline())
    own = _Server(writer, secret, on_rewritten, tool_format)
    with socket.create_server((host, 0), backlog=4096) as listening:
        options = uvicorn.Config(own.app(), log_level="error", access_log=False, lifespan="off", ws="none")
        options.timeout_keep_alive = KEPT_S
        server = uvicorn.Server(options)
        task = asyncio.ensure_future(server.serve(sockets=[listening]))
        own.send("address", f"http://{host}:{listening.getsockname()[1]}/v1")
        while line := await reader.readline():
            own.take(*json.loads(line))
        server.should_exit = server.force_exit = True
        await task


class _Server:
    def __init__(self, writer: asyncio.StreamWriter, secret: str, on_rewritten: str, tool_format: str):
        self._writer, self._secret, self._mode, self._format = writer, secret, on_rewritten, tool_format
        self._lives: dict[int, _Life] = {}
        self._closed: set[int] = set()
        self._lowest = 0  # life that may be open
        self._numbers = itertools.count(1)
        self._life_of: dict[int, _Life] = {}  # of a call in work

    def send(self, *message: Any) -> None:
        self._writer.write(line_of(message))

    def app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.post("/v1/chat/completions")(self._chat)
        app.post("/v1/completions")(self._text)
        app.get("/v1/models")(self._models)
        app.exception_handler(BadCall)(_rejected)
        return app

    def take(self, kind: str, number: int, *content: Any) -> None:
        """Handle a message of the owner."""
        if kind == "close":
            (self._lowest,) = content
            self._closed = {each for each in self._closed if each >= self._lowest} | {number}
            life = self._lives.pop(number, None)
            for call, waiting in life.waiting.items() if life else ():
                self._life_of.pop(call, None)
                if not waiting.done():
                    waiting.set_exception(BadCall("the sample has ended", 410))
            self.send("closed", number, life.got if life else [])
            return
        waits = self._life_of.pop(number).waiting.get(number) if number in self._life_of else None
        if waits is not None and not waits.done():
            if kind == "reject":
                waits.set_exception(BadCall(content[0], code=content[1]))
            else:
                waits.set_result(content[0])

    async def _models(self, request: Request) -> Response:
        self._life(request)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "rlx"}]})

    async def _chat(self, request: Request) -> Response:
        return await self._call(request, True)

    async def _text(self, request: Request) -> Response:
        return await self._call(request, False)

    def _life(self, request: Request) -> _Life:
        """Return the life whose token a request has. Raises BadCall."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        number = token.split("-")[1] if kind.lower() == "bearer" and token.count("-") == 2 else ""
        if not (number.isascii() and number.isdigit() and len(number) < 19):
            raise BadCall(
                "expected the token of a sample: Authorization: Bearer $OPENAI_API_KEY", 401, "invalid_api_key"
            )
        life = int(number)
        is_own = hmac.compare_digest(token.encode(), token_of(self._secret, life).encode())
        if not is_own or life in self._closed or life < self._lowest:
            raise BadCall("the token is of no sample that is running", 401, "invalid_api_key")
        if life not in self._lives:
            self._lives[life] = _Life(life, History(self._mode))
        return self._lives[life]

    async def _call(self, request: Request, is_chat: bool) -> Response:
        life = self._life(request)
        call = read(is_chat, await _body(request))
        if len(life.waiting) >= MOST_AT_ONCE:
            raise BadCall(f"the sample has {MOST_AT_ONCE} calls in work; wait for one of them", 429)
        place = life.history.place(call)
        if life.number in self._closed:  # while the body arrived
            raise BadCall("the sample has ended", 410)
        number = next(self._numbers)
        waiting = life.waiting[number] = asyncio.get_running_loop().create_future()
        self._life_of[number] = life
        content = place._asdict() | {"tools": call.schemas, **call.wishes}
        content["ids"] = call.prompt if isinstance(call.prompt, list) else None
        self.send("call", number, life.number, content)
        ends = partial(self._end, life, number, waiting)
        if call.stream:
            return _Stream(self._events(life, call, number, waiting), ends)
        gone = asyncio.ensure_future(request.receive())  # the next message after the body: the client has left
        try:
            await asyncio.wait({gone, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                await asyncio.sleep(0)  # it may have left while the answer was made
            if gone.done():
                raise BadCall("the client has left", 499)
            whole = self._whole(life, call, number, waiting.result())
            life.got.append(number)
            return JSONResponse(whole)
        finally:
            gone.cancel()
            ends()

    async def _events(
        self, life: _Life, call: Call, number: int, waiting: "asyncio.Future[Any]"
    ) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events. An open stream begins at once, so errors are events, too."""
        yield b": accepted\n\n"
        try:
            whole = self._whole(life, call, number, await waiting)
        except BadCall as fault:
            yield _event(fault.body)
            return
        for each in events(call, whole):
            yield _event(each)
        yield b"data: [DONE]\n\n"
        life.got.append(number)

    def _whole(self, life: _Life, call: Call, number: int, content: Any) -> dict[str, Any]:
        """Return an answer as the agent reads it, and keep its turns."""
        prompt, sampled = content
        choices = [Choice(*each) for each in sampled]
        turns: list[Said] = []
        for place, choice in enumerate(choices):
            turns.append(said(choice.text, call, self._format, life.turns))
            life.turns += 1
            life.history.add(call, (number, place), turns[-1], choice.whole_text)
        return answer(call, number, prompt, choices, turns)

    def _end(self, life: _Life, number: int, waiting: "asyncio.Future[Any]") -> None:
        life.waiting.pop(number, None)
        if self._life_of.pop(number, None) is not None:  # the owner works on it
            self.send("cancel", number)
        if not waiting.done():
            waiting.cancel()
        elif not waiting.cancelled():
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
    return JSONResponse(fault.body, fault.status, {"connection": "close"} if fault.status in (401, 408, 413) else None)


async def _body(request: Request) -> bytes:
    """Return the body. Raises BadCall if it is too long or takes too long."""
    length = request.headers.get("content-length", "")
    too_long = BadCall(f"the body has more than {LONGEST_BODY:,} bytes", 413)
    if length.isdigit() and int(length) > LONGEST_BODY:
        raise too_long
    data = bytearray()
    try:
        async with asyncio.timeout(LONGEST_UPLOAD_S):
            async for part in request.stream():
                data += part
                if len(data) > LONGEST_BODY:
                    raise too_long
    except TimeoutError:
        raise BadCall(f"the body has not arrived within {LONGEST_UPLOAD_S:g} s", 408) from None
    except ClientDisconnect:
        raise BadCall("the client has left", 499) from None
    return bytes(data)


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
