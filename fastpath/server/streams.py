"""Responses: JSON at once, and events one after the other; both end their work when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
PING_S = 15.0  # a stream that says nothing for so long says that it lives: proxies cut others off
PING = b": ping\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def dumps(value: Any) -> bytes:
    """JSON in UTF-8.  Halves of surrogate pairs, which clients can send, become question marks."""
    return _encode(value).encode("utf-8", "replace")


class JSON(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


def sse(value: Any, event: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + dumps(value) + b"\n\n"


def line(value: Any) -> bytes:
    """One line of NDJSON."""
    return dumps(value) + b"\n"


class ClientGone(Exception):
    """Nobody waits for the answer."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, which is cancelled when the client goes.

    Raises:
        ClientGone
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _ended(task, gone)


class Streamed(Response):
    """A body that is written while it is made.

    leave  called when it ends, however it ends
    ping   what to write when there has been nothing for a while; b"": nothing
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        leave: Callable[[], None],
        media_type: str = "text/event-stream",
        ping: bytes = PING,
    ):
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # proxies would collect tokens
        self._frames, self._leave, self._ping = frames, leave, ping
        self._is_quiet = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        others = [asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(self._keep_alive(send))]
        try:
            await asyncio.wait({writer, others[0]}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            self._leave()
            await _ended(writer, *others)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            self._is_quiet = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while self._ping:
            self._is_quiet = True
            await asyncio.sleep(PING_S)
            if self._is_quiet:
                await send({"type": "http.response.body", "body": self._ping, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
