"""Everything that can go wrong with a request, in the shape that the API of its path has for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.requests import HTTPConnection

from fastpath.lanes import NotFiniteError
from fastpath.server.streams import JSON
from fastpath.talk.exchange import ContextOverflow
from fastpath.talk.worker import Closing, QueueFull

_FIELD = re.compile(r"^([A-Za-z_]\w*(?:\[[^\]]*\]|\.[\w$-]+)*): ")
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
ANTHROPIC = "/v1/messages"
MAX_SHOWN = 400  # characters of a message


class ApiError(Exception):
    """A request that gets no answer.

    status   of HTTP
    message  one line
    field    of the request, if one is to blame
    code     a word for programs
    more     further members of the error
    headers  of the response
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        more: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        message = " ".join(message.split())
        self.message = message if len(message) <= MAX_SHOWN else message[: MAX_SHOWN - 3] + "..."
        self.status, self.field, self.code = status, field, code
        self.more, self.headers = dict(more or {}), dict(headers or {})

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")


def api_error(error: BaseException) -> ApiError:
    """What a client is told of an exception.  Whose fault is ours is not described: logs say more."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _invalid(error)
    if isinstance(error, ContextOverflow):
        more = {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_context}
        return ApiError(400, str(error), field=error.field, code="context_length_exceeded", more=more)
    if isinstance(error, QueueFull):
        wait = {"Retry-After": str(error.retry_after)}
        return ApiError(429, str(error), code="queue_full", headers=wait)
    if isinstance(error, Closing):
        return ApiError(503, str(error), code="shutting_down", headers={"Retry-After": "10"})
    if isinstance(error, MemoryError):
        return ApiError(503, "out of memory. Send a shorter prompt, or try again later", code="out_of_memory")
    if isinstance(error, RecursionError):
        return ApiError(400, "the request is nested too deeply, expected some hundred levels")
    if isinstance(error, ValueError) and not isinstance(error, NotFiniteError):
        found = _FIELD.match(str(error))
        return ApiError(400, str(error), field=found[1] if found else None)
    return ApiError(500, "internal error. The server's log says more", code="internal_error")


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    field = ""
    for step in first["loc"]:
        field += f"[{step}]" if isinstance(step, int) else f".{step}" if field else str(step)
    if first["type"] == "json_invalid":
        return ApiError(400, f"body: {first['msg']}", field="body")
    text = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{field or 'body'}: {text}", field=field or "body")


# -- shapes ----------------------------------------------------------------------------------------


def shape(path: str, error: ApiError) -> dict[str, Any]:
    """The body of an error, as the API of this path writes it."""
    if path.startswith(ANTHROPIC):
        message = _FIELD.sub(lambda found: re.sub(r"\[(\w+)\]", r".\1", found[0]), error.message, 1)
        return {"type": "error", "error": {"type": error.type, "message": message, **error.more}}
    if path.startswith("/api/"):
        return {"error": error.message}
    what = {"message": error.message, "type": error.type, "param": error.field, "code": error.code}
    return {"error": {**what, **error.more}}


def of_anthropic(request: HTTPConnection) -> bool:
    """Whether it is a client of Anthropic's API: some of its paths are OpenAI's too."""
    return "anthropic-version" in request.headers or request.url.path.startswith(ANTHROPIC)


def response(request: HTTPConnection, error: ApiError) -> JSON:
    path = ANTHROPIC if of_anthropic(request) else request.url.path
    return JSON(shape(path, error), error.status, headers=error.headers)
