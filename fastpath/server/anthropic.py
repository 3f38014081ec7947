"""Anthropic's API: /v1/messages, /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from secrets import token_hex
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from fastpath.server.errors import ApiError, shape
from fastpath.server.service import Answer, Fields, Service, body_schema, stops_of
from fastpath.server.streams import JSON, sse
from fastpath.talk.events import Call, Finish, Options, Said, Text, Thought
from fastpath.talk.exchange import Prompt
from refimpl.frontend.dialects import anthropic_choice, anthropic_messages, anthropic_tools

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class CountRequest(Fields):
    messages: list[Any]
    model: str = ""
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["Anthropic"])

    @routes.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
    async def messages(request: Request) -> Response:
        asked = await service.read(request, MessagesRequest)
        prompt = await service.prepared(lambda: _prompt(service, asked))
        answer = _Message(service.settings.name)
        if asked.stream:
            n = len(prompt.ids)
            return service.streamed(prompt, lambda events: answer.frames(events, n), _failed)
        return await service.whole(request, prompt, answer.whole)

    @routes.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountRequest))
    async def count(request: Request) -> Response:
        asked = await service.read(request, CountRequest)
        ids = await service.in_thread(_counted, service, asked)
        return JSON({"input_tokens": ids})

    return routes


def _failed(error: ApiError) -> bytes:
    return sse(shape("/v1/messages", error), "error")


def _plain(asked: CountRequest, options: Options) -> tuple[list[Any], Options]:
    """The messages as OpenAI's API has them; a last one of the assistant is the beginning of the answer."""
    messages = anthropic_messages(asked.messages, asked.system)
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        options = Options(**{**vars(options), "continue_final": True})
    return messages, options


def _prompt(service: Service, asked: MessagesRequest) -> Prompt:
    sampling = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}
    options = Options(
        params=service.params(**sampling),
        max_tokens=asked.max_tokens,
        stops=stops_of(asked.stop_sequences, "stop_sequences"),
        **_common(asked),
    )
    return service.chat(*_plain(asked, options))


def _common(asked: CountRequest) -> dict[str, Any]:
    thinking = asked.thinking or {}
    kind = thinking.get("type", "disabled")
    if kind not in ("enabled", "disabled", "adaptive"):
        message = f"thinking.type: {str(kind)[:80]}, expected enabled, adaptive or disabled"
        raise ApiError(400, message, field="thinking.type")
    budget = thinking.get("budget_tokens") if kind == "enabled" else None
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        message = f"thinking.budget_tokens: {str(budget)[:80]}, expected a number of tokens"
        raise ApiError(400, message, field="thinking.budget_tokens")
    return {
        "tools": anthropic_tools(asked.tools),
        "choice": anthropic_choice(asked.tool_choice),
        "thinking": kind != "disabled",
        "budget": budget,
    }


def _counted(service: Service, asked: CountRequest) -> int:
    messages, options = _plain(asked, Options(**_common(asked)))
    return service.exchange.count(messages, options)


class _Message:
    """One answer: blocks of thinking, text and calls."""

    def __init__(self, name: str):
        self._name, self._id = name, f"msg_{token_hex(12)}"

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        [answer] = answers
        blocks: list[dict[str, Any]] = []
        if answer.thought:
            blocks.append({"type": "thinking", "thinking": answer.thought, "signature": ""})
        if answer.text or not (answer.calls or answer.thought):
            blocks.append({"type": "text", "text": answer.text})
        blocks += [_tool_use(call) | {"input": call.values} for call in answer.calls]
        return self._head(blocks) | _stop(answer.end) | {"usage": _usage(answer.end)}

    def _head(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._name,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def frames(self, events: AsyncIterator[Said], n_prompt: int) -> AsyncIterator[bytes]:
        begun = self._head([]) | {"usage": {"input_tokens": n_prompt, "output_tokens": 0}}
        yield sse({"type": "message_start", "message": begun}, "message_start")
        yield PING
        index, kind = -1, ""
        async for said in events:
            fresh = {Thought: "thinking", Text: "text", Call: "tool_use", Finish: ""}[type(said)]
            if kind and (fresh != kind or isinstance(said, Call)):
                if kind == "thinking":
                    yield _delta(index, {"type": "signature_delta", "signature": ""})
                yield sse({"type": "content_block_stop", "index": index}, "content_block_stop")
                kind = ""
            if isinstance(said, Finish):
                if index < 0:  # an empty answer has an empty text
                    index = 0
                    yield _block(index, {"type": "text", "text": ""})
                    yield sse({"type": "content_block_stop", "index": index}, "content_block_stop")
                last = {"type": "message_delta", "delta": _stop(said), "usage": _usage(said)}
                yield sse(last, "message_delta")
                yield sse({"type": "message_stop"}, "message_stop")
            else:
                if not kind:
                    index, kind = index + 1, fresh
                    yield _block(index, _empty(said))
                yield _delta(index, _more(said))


def _empty(said: Said) -> dict[str, Any]:
    """A block that begins."""
    if isinstance(said, Thought):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return _tool_use(said) | {"input": {}} if isinstance(said, Call) else {"type": "text", "text": ""}


def _more(said: Said) -> dict[str, Any]:
    """What is added to a block."""
    if isinstance(said, Thought):
        return {"type": "thinking_delta", "thinking": said.text}
    if isinstance(said, Call):
        return {"type": "input_json_delta", "partial_json": said.arguments}
    return {"type": "text_delta", "text": said.text if isinstance(said, Text) else ""}


def _block(index: int, block: Mapping[str, Any]) -> bytes:
    return sse({"type": "content_block_start", "index": index, "content_block": block}, "content_block_start")


def _delta(index: int, delta: Mapping[str, Any]) -> bytes:
    return sse({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")


def _tool_use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _stop(end: Finish) -> dict[str, Any]:
    if end.stop_string:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_string}
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": reasons.get(end.reason, "end_turn"), "stop_sequence": None}


def _usage(end: Finish) -> dict[str, int]:
    usage = end.usage
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.generated,
    }
