"""create_app: the routes, what stands around them, and how errors are told."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp

from fastpath.server import anthropic, completions, ollama, openai, operations, responses
from fastpath.server.errors import ApiError, response
from fastpath.server.limits import Guard
from fastpath.server.service import Service
from fastpath.server.streams import ClientGone
from fastpath.talk.worker import Closing, InternalError, QueueFull

DRAIN_S = 10.0  # how long answers may go on when the server is told to end
PAGE = Path(__file__).with_name("page.html")


def create_app(service: Service) -> ASGIApp:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.in_thread(service.exchange.worker.close, DRAIN_S)

    app = FastAPI(title="Twinpath", lifespan=lifespan, docs_url=None, redoc_url=None)
    for module in (openai, completions, responses, anthropic, ollama, operations):
        app.include_router(module.router(service))

    text = PAGE.read_text(encoding="utf-8")
    headers = page_headers(text)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(text, headers=headers)

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        what = {404: "no such path", 405: f"{request.method} is not allowed here"}
        told = ApiError(
            error.status_code, what.get(error.status_code, str(error.detail)), headers=error.headers
        )
        return response(request, told)

    @app.exception_handler(ClientGone)
    async def of_nobody(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def of_ours(request: Request, error: Exception) -> Response:
        return response(request, service.told(error))

    for kind in TOLD:  # by name: what is left to the handler of everything is raised again behind its answer
        app.add_exception_handler(kind, of_ours)
    app.add_exception_handler(Exception, of_ours)
    return Guard(app, service.settings)


TOLD = (ApiError, ValueError, QueueFull, Closing, MemoryError, RecursionError, InternalError)


def page_headers(page: str) -> dict[str, str]:
    """The page runs its own script and no other, and talks to this server only."""
    script = page.split("<script>")[1].split("</script>")[0]
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src 'self' data: blob:; media-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
