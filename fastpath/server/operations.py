"""For those who run the server: health, metrics, tokens, templates, what is being computed."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import Response as Plain

from fastpath.server.openai import ChatRequest, chat_options
from fastpath.server.service import Fields, Service, body_schema
from fastpath.server.streams import JSON
from fastpath.talk.events import Options


class TokenizeRequest(Fields):
    content: str
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False


class DetokenizeRequest(Fields):
    tokens: list[int] = Field(max_length=1 << 20)


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["operations"])
    exchange, worker = service.exchange, service.exchange.worker
    tokenizer = exchange.tokenizer

    @routes.get("/health")
    async def health() -> Response:
        status = "closing" if worker.is_closing else "ok"
        return JSON({"status": status}, 503 if worker.is_closing else 200)

    @routes.get("/metrics")
    async def metrics() -> Response:
        text = await service.in_thread(service.metrics.text)
        return Plain(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        asked = await service.read(request, TokenizeRequest)
        special = {"add_bos": asked.add_special, "parse_special": asked.parse_special}
        ids = await service.in_thread(lambda: tokenizer.encode(asked.content, **special))
        tokens: list[Any] = list(map(int, ids))
        if asked.with_pieces:
            tokens = [{"id": i, "piece": _piece(tokenizer.token_bytes(i))} for i in tokens]
        return JSON({"tokens": tokens})

    @routes.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        asked = await service.read(request, DetokenizeRequest)

        def decoded() -> str:
            try:
                worker.engine.lanes.model.check_ids(asked.tokens)
            except ValueError as error:
                raise ValueError(f"tokens: {error}") from None
            return tokenizer.decode(asked.tokens)

        return JSON({"content": await service.in_thread(decoded)})

    @routes.post("/apply-template", openapi_extra=body_schema(ChatRequest))
    async def apply_template(request: Request) -> Response:
        asked = await service.read(request, ChatRequest)

        def rendered() -> str:
            options: Options = chat_options(service, asked)
            return tokenizer.decode(exchange.render(asked.messages, options))

        return JSON({"prompt": await service.in_thread(rendered)})

    @routes.get("/props")
    async def props() -> Response:
        engine = worker.engine
        sampling = service.settings.sampling
        return JSON(
            {
                "model": service.settings.name,
                "n_ctx": exchange.context_len,
                "chat_template": exchange.template.source,
                "modalities": {
                    "vision": exchange.encoders is not None and exchange.encoders.media.vision is not None,
                    "audio": exchange.encoders is not None and exchange.encoders.media.audio is not None,
                },
                "default_generation_settings": {
                    "temperature": sampling.temperature,
                    "top_k": sampling.top_k,
                    "top_p": sampling.top_p,
                    "min_p": sampling.min_p,
                    "max_tokens": service.settings.max_tokens,
                },
                "kv_type": str(engine.lanes.kv_type),
                "max_waiting": worker.max_waiting,
            }
        )

    @routes.get("/slots")
    async def slots() -> Response:
        running = await service.in_thread(worker.running)
        return JSON(
            [
                {
                    "id": id,
                    "prompt_tokens": n,
                    "cached_tokens": usage.cached,
                    "generated_tokens": usage.generated,
                    "is_waiting": not usage.generated and not usage.computed,
                }
                for id, n, usage in running
            ]
        )

    return routes


def _piece(data: bytes) -> Any:
    """A token as text, or the bytes of one that is none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)
