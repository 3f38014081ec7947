"""What is refused before it is read: strangers, web pages of other places, and bodies that are too large."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable
from secrets import token_hex
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastpath.server.errors import ApiError, response
from fastpath.server.logs import REQUEST, note
from fastpath.server.service import Settings

OPEN = ("/", "/health")  # paths that need no key: a page without secrets, and a sign of life
_ALLOWED_METHODS = b"GET, POST, OPTIONS"


class Guard:
    """Stands around the whole application, and writes a line of the log for each request."""

    def __init__(self, app: ASGIApp, settings: Settings):
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        began, id, status = time.perf_counter(), token_hex(8), 0
        REQUEST.set(id)

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = MutableHeaders(scope=message)
                own["x-request-id"] = id
                self._allow(headers.get("origin"), own)
            await send(message)

        try:
            await self._guarded(scope, headers, receive, sent)
        finally:
            took = round(1e3 * (time.perf_counter() - began), 1)
            note(method=scope["method"], path=scope["path"][:200], status=status, ms=took)

    async def _guarded(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            self._check_host(headers)
            self._check_origin(headers)
            if scope["method"] == "OPTIONS" and headers.get("origin") in self._settings.origins:
                await _preflight(headers.get("access-control-request-headers", ""), send)
                return
            if scope["path"] not in OPEN:
                self._check_key(headers)
            if scope["method"] == "HEAD":  # as Ollama's own client greets; the server leaves the body out
                scope = {**scope, "method": "GET"}
            await self._app(scope, self._bounded(headers, receive), send)
        except ApiError as error:  # of the three checks; those of the application are answered inside
            await response(HTTPConnection(scope), error)(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        """A page of another place can point its own name at this machine; it then asks as if it were ours."""
        try:
            name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        except ValueError:
            name = ""
        if self._settings.hosts is not None and name not in self._settings.hosts:
            message = f"host {name[:80]} is not this server. Start it with --allow-host {name[:80]}"
            raise ApiError(403, message, code="host_not_allowed")

    def _check_origin(self, headers: Headers) -> None:
        """A page of another place sends its Origin. Pages on other machines must not use this one."""
        origin = headers.get("origin")
        if origin is None or origin in self._settings.origins:
            return
        try:
            place = urlsplit(origin).netloc
        except ValueError:
            place = ""
        if not place or place != headers.get("host"):
            message = f"origin {origin[:80]} is not allowed here. Start the server with --cors {origin[:80]}"
            raise ApiError(403, message, code="origin_not_allowed")

    def _check_key(self, headers: Headers) -> None:
        key = self._settings.api_key
        if key is None:
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not given:
            given = headers.get("x-api-key", "")
        if not hmac.compare_digest(given.strip().encode("latin-1"), key.encode()):
            wanted = {"WWW-Authenticate": "Bearer"}
            raise ApiError(
                401,
                "the API key is missing or wrong. Send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers=wanted,
            )

    def _bounded(self, headers: Headers, receive: Receive) -> Receive:
        """A body of at most so many bytes, whatever its header says."""
        most, n = self._settings.max_body, 0
        said = headers.get("content-length", "")
        if said.isdigit() and int(said) > most:
            raise _too_large(most)

        async def received() -> Message:
            nonlocal n
            message = await receive()
            n += len(message.get("body", b""))
            if n > most:
                raise _too_large(most)
            return message

        return received

    def _allow(self, origin: str | None, headers: MutableHeaders) -> None:
        if origin is not None and origin in self._settings.origins:
            headers["access-control-allow-origin"] = origin
            headers.add_vary_header("Origin")


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"body: more than {most} bytes, expected at most that", field="body")


async def _preflight(asked: str, send: Callable[[Message], Awaitable[None]]) -> None:
    """To a page that may ask: with any headers, as clients send many of their own (x-stainless-...)."""
    headers = [
        (b"access-control-allow-methods", _ALLOWED_METHODS),
        (b"access-control-allow-headers", (asked or "authorization, content-type").encode("latin-1")),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
