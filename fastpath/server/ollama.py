"""Ollama's API: /api/chat, /api/generate, /api/tags, /api/show, /api/ps, /api/version; streams are NDJSON."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Request, Response

from fastpath.server.errors import ApiError
from fastpath.server.service import Answer, Fields, Service, body_schema, stops_of
from fastpath.server.streams import JSON, line
from fastpath.talk.events import Call, Finish, Options, Said, Text, Thought
from fastpath.talk.exchange import Prompt
from refimpl.frontend.dialects import ollama_generated, ollama_messages
from refimpl.media_tensors import Media

NDJSON = "application/x-ndjson"
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "presence_penalty",
            "frequency_penalty", "repeat_last_n")  # fmt: skip
_NAMES = {name: f"options.{name}" for name in _OPTIONS} | {"penalty_window": "options.repeat_last_n"}
_WHOLE = ("top_k", "seed", "repeat_last_n")
_EFFORTS = ("low", "medium", "high")


class OllamaRequest(Fields):
    model: str = ""
    stream: bool = True
    format: Any = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None


class ChatRequest(OllamaRequest):
    messages: list[Any] | None = None
    tools: list[Any] | None = None


class GenerateRequest(OllamaRequest):
    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    raw: bool = False
    suffix: str | None = None


class ShowRequest(Fields):
    model: str = ""
    name: str = ""  # what it was called before


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["Ollama"])
    about = _About(service)

    @routes.post("/api/chat", openapi_extra=body_schema(ChatRequest))
    async def chat(request: Request) -> Response:
        asked = await service.read(request, ChatRequest)
        if not asked.messages:  # how Ollama's clients have a model loaded
            return JSON(about.head() | {"message": _said("assistant"), "done": True, "done_reason": "load"})
        return await _answer(service, request, asked, lambda: _chat(service, asked), _chat_piece)

    @routes.post("/api/generate", openapi_extra=body_schema(GenerateRequest))
    async def generate(request: Request) -> Response:
        asked = await service.read(request, GenerateRequest)
        if not asked.prompt and not asked.images:
            return JSON(about.head() | {"response": "", "done": True, "done_reason": "load"})
        return await _answer(service, request, asked, lambda: _generate(service, asked), _generate_piece)

    @routes.get("/api/tags")
    async def tags() -> Response:
        return JSON({"models": [about.model()]})

    @routes.get("/api/ps")
    async def ps() -> Response:
        times = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
        return JSON({"models": [about.model() | times | {"context_length": service.exchange.context_len}]})

    @routes.post("/api/show", openapi_extra=body_schema(ShowRequest))
    async def show(request: Request) -> Response:
        asked = await service.read(request, ShowRequest)
        name, known = asked.model or asked.name, service.settings.name
        if name.removesuffix(":latest") not in (known, known.removesuffix(":latest"), ""):
            raise ApiError(404, f"model: {name} is not here, expected {known}", field="model")
        return JSON(about.all())

    @routes.get("/api/version")
    async def its_version() -> Response:
        return JSON({"version": _version()})

    return routes


def _version() -> str:
    try:
        return version("twinpath")
    except PackageNotFoundError:
        return "0"


def _kinds(media: Media) -> list[str]:
    return [name for name in ("vision", "audio") if getattr(media, name) is not None]


class _About:
    """What the model is."""

    def __init__(self, service: Service):
        self._service = service
        self._file = service.exchange.worker.engine.lanes.model.file
        encoders = service.exchange.encoders
        self._media = [] if encoders is None else _kinds(encoders.media)

    def head(self) -> dict[str, Any]:
        return _head(self._service.settings.name)

    def model(self) -> dict[str, Any]:
        name = self._service.settings.name
        began = datetime.fromtimestamp(self._service.began, UTC).isoformat()
        n_bytes = sum(int(tensor.nbytes) for tensor in self._file.tensors.values())
        digest = hashlib.sha256(f"{name} {n_bytes}".encode()).hexdigest()
        return {
            "name": name,
            "model": name,
            "modified_at": began,
            "size": n_bytes,
            "digest": digest,
            "details": self._details(),
        }

    def all(self) -> dict[str, Any]:
        kept = {
            key: value
            for key, value in self._file.metadata.items()
            if not key.startswith("tokenizer.") and isinstance(value, str | int | float | bool)
        }
        can = ["completion", "tools", "thinking", *self._media]
        return {
            "modelfile": "",
            "parameters": "",
            "template": self._service.exchange.template.source,
            "details": self._details(),
            "model_info": kept,
            "capabilities": can,
        }

    def _details(self) -> dict[str, Any]:
        size = str(self._file.metadata.get("general.size_label", ""))
        family = str(self._file.metadata.get("general.architecture", "gemma4"))
        return {
            "parent_model": "",
            "format": "gguf",
            "family": family,
            "families": [family],
            "parameter_size": size,
            "quantization_level": "",
        }


# -- requests --------------------------------------------------------------------------------------


def _options(service: Service, asked: OllamaRequest, tools: Sequence[Any] | None) -> Options:
    if isinstance(asked.think, str) and asked.think not in _EFFORTS:
        message = f"think: {asked.think[:80]}, expected true, false, {', '.join(_EFFORTS)}"
        raise ApiError(400, message, field="think")
    given = asked.options or {}
    sampling = {name: _number(given, name) for name in _OPTIONS}
    sampling["penalty_window"] = sampling.pop("repeat_last_n")
    most = _number(given, "num_predict", whole=True)
    stop = given.get("stop")
    if not isinstance(stop, str | None) and not (
        isinstance(stop, list) and all(isinstance(each, str) for each in stop)
    ):
        raise ApiError(400, "options.stop: expected a string or a list of strings", field="options.stop")
    return Options(
        params=service.params(_NAMES, **sampling),
        max_tokens=service.limit(
            most if most is not None and most >= 0 else None, field="options.num_predict"
        ),
        stops=stops_of(stop, "options.stop"),
        tools=tools or (),
        thinking=bool(asked.think),
        schema=_schema(asked.format),
        schema_field="format",
    )


def _number(given: Mapping[str, Any], name: str, whole: bool = False) -> Any:
    value = given.get(name)
    whole = whole or name in _WHOLE
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and whole and not value.is_integer()):
        kind = "a whole number" if whole else "a number"
        raise ApiError(400, f"options.{name}: {str(value)[:80]}, expected {kind}", field=f"options.{name}")
    return int(value) if whole else value


def _schema(form: Any) -> Mapping[str, Any] | None:
    if form in (None, ""):
        return None
    if form == "json":
        return {"type": "object"}
    if isinstance(form, Mapping):
        return form
    raise ApiError(400, f"format: {str(form)[:80]}, expected json or a JSON schema", field="format")


def _chat(service: Service, asked: ChatRequest) -> Prompt:
    messages = ollama_messages(asked.messages or [])
    options = _options(service, asked, asked.tools)
    last = messages[-1]
    if last.get("role") == "assistant" and not last.get("tool_calls"):
        options = Options(**{**vars(options), "continue_final": True})
    return service.chat(messages, options)


def _generate(service: Service, asked: GenerateRequest) -> Prompt:
    if asked.suffix:
        raise ApiError(
            400, "suffix: this model writes on, and fills nothing in. Leave it out", field="suffix"
        )
    options = _options(service, asked, None)
    if asked.raw:
        for name in ("system", "images"):
            if getattr(asked, name):
                message = f"{name}: not with raw, whose prompt stands as it is. Leave out one of the two"
                raise ApiError(400, message, field=name)
        return service.exchange.prepare_raw(asked.prompt, options)
    messages = ollama_generated(asked.prompt, asked.system, asked.images)
    return service.chat(messages, options, "prompt")


# -- answers ---------------------------------------------------------------------------------------

Piece = Callable[[str, str, Sequence[Call]], dict[str, Any]]


def _head(name: str) -> dict[str, Any]:
    return {"model": name, "created_at": datetime.now(UTC).isoformat()}


def _said(role: str, text: str = "", thought: str = "", calls: Sequence[Call] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": text}
    message |= {"thinking": thought} if thought else {}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": call.values}}
            for call in calls
        ]
    return message


def _chat_piece(text: str, thought: str, calls: Sequence[Call]) -> dict[str, Any]:
    return {"message": _said("assistant", text, thought, calls)}


def _generate_piece(text: str, thought: str, calls: Sequence[Call]) -> dict[str, Any]:
    return {"response": text} | ({"thinking": thought} if thought else {})


async def _answer(
    service: Service,
    request: Request,
    asked: OllamaRequest,
    make: Callable[[], Prompt],
    piece: Piece,
) -> Response:
    prompt = await service.prepared(make)
    name = service.settings.name

    async def frames(events: AsyncIterator[Said]) -> AsyncIterator[bytes]:
        async for said in events:
            if isinstance(said, Finish):
                yield line(_head(name) | piece("", "", ()) | _done(said))
            else:
                text = said.text if isinstance(said, Text) else ""
                thought = said.text if isinstance(said, Thought) else ""
                calls = (said,) if isinstance(said, Call) else ()
                yield line(_head(name) | piece(text, thought, calls) | {"done": False})

    def whole(answers: Sequence[Answer]) -> dict[str, Any]:
        [answer] = answers
        return _head(name) | piece(answer.text, answer.thought, answer.calls) | _done(answer.end)

    if asked.stream:
        return service.streamed(prompt, frames, lambda error: line({"error": error.message}), NDJSON)
    return await service.whole(request, prompt, whole)


def _done(end: Finish) -> dict[str, Any]:
    usage = end.usage
    total = usage.queue_s + usage.prefill_s + usage.decode_s
    return {
        "done": True,
        "done_reason": "length" if end.reason == "length" else "stop",
        "total_duration": int(1e9 * total),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": int(1e9 * usage.prefill_s),
        "eval_count": usage.generated,
        "eval_duration": int(1e9 * usage.decode_s),
    }
