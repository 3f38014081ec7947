"""OpenAI's Responses API: /v1/responses.  Nothing is stored: a conversation comes whole in `input`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from secrets import token_hex
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from fastpath.server.errors import ApiError
from fastpath.server.openai import schema_of
from fastpath.server.service import Answer, Fields, Service, body_schema
from fastpath.server.streams import sse
from fastpath.talk.events import Call, Finish, Options, Said, Text, Thought
from fastpath.talk.exchange import Prompt
from refimpl.frontend.dialects import openai_choice, responses_messages, responses_tools

Item = dict[str, Any]


class ResponsesRequest(Fields):
    input: str | list[Any]
    instructions: str | None = None
    model: str = ""
    stream: bool = False
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
    async def responses(request: Request) -> Response:
        asked = await service.read(request, ResponsesRequest)
        prompt = await service.prepared(lambda: _prompt(service, asked))
        answer = _Response(service.settings.name, asked)
        if asked.stream:
            return service.streamed(prompt, answer.frames, answer.failed)
        return await service.whole(request, prompt, answer.whole)

    return routes


def _prompt(service: Service, asked: ResponsesRequest) -> Prompt:
    if asked.previous_response_id is not None:
        field = "previous_response_id"
        message = f"{field}: responses are not stored here. Send the conversation as `input`"
        raise ApiError(400, message, field=field)
    effort = (asked.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        message = f"reasoning.effort: {str(effort)[:80]}, expected none, minimal, low, medium or high"
        raise ApiError(400, message, field="reasoning.effort")
    sampling = {"temperature": asked.temperature, "top_p": asked.top_p, "seed": asked.seed}
    options = Options(
        params=service.params(**sampling),
        max_tokens=service.limit(asked.max_output_tokens, field="max_output_tokens"),
        tools=responses_tools(asked.tools),
        choice=openai_choice(asked.tool_choice, parallel=asked.parallel_tool_calls),
        thinking=effort not in (None, "none"),
        schema=schema_of((asked.text or {}).get("format"), "text.format"),
        schema_field="text.format",
    )
    return service.chat(responses_messages(asked.input, asked.instructions), options, "input")


class _Response:
    """One response: items of reasoning, text and calls, in this order as they come."""

    def __init__(self, name: str, asked: ResponsesRequest):
        self._asked, self._name = asked, name
        self._id, self._created = f"resp_{token_hex(16)}", int(time.time())
        self._output: list[Item] = []  # finished items
        self._open: Item | None = None
        self._n = 0  # events so far

    def whole(self, answers: Sequence[Answer]) -> Item:
        [answer] = answers
        if answer.thought:
            self._output.append(_reasoning(answer.thought))
        if answer.text or not answer.calls:
            self._output.append(_message(answer.text))
        self._output += [_call_item(call) for call in answer.calls]
        return self._ended(answer.end)

    def _ended(self, end: Finish) -> Item:
        cut = end.reason == "length"
        status = "incomplete" if cut else "completed"
        details = {"reason": "max_output_tokens"} if cut else None
        return self._object(status, end) | {"incomplete_details": details}

    def _object(self, status: str, end: Finish | None = None) -> Item:
        asked = self._asked
        usage = None
        if end is not None:
            usage = {
                "input_tokens": end.usage.prompt,
                "input_tokens_details": {"cached_tokens": end.usage.cached},
                "output_tokens": end.usage.generated,
                "output_tokens_details": {"reasoning_tokens": end.usage.thought},
                "total_tokens": end.usage.prompt + end.usage.generated,
            }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._name,
            "output": list(self._output),
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "metadata": {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "tools": asked.tools or [],
            "usage": usage,
            "store": False,
        }

    # -- a stream ----------------------------------------------------------------------------------

    async def frames(self, events: AsyncIterator[Said]) -> AsyncIterator[bytes]:
        yield self._event("response.created", response=self._object("in_progress"))
        yield self._event("response.in_progress", response=self._object("in_progress"))
        async for said in events:
            if isinstance(said, Thought):
                for frame in self._text(_reasoning(""), said.text):
                    yield frame
            elif isinstance(said, Text):
                for frame in self._text(_message(""), said.text):
                    yield frame
            elif isinstance(said, Call):
                for frame in [*self._closed(), *self._called(said)]:
                    yield frame
            elif isinstance(said, Finish):
                if not self._output and self._open is None:
                    for frame in self._text(_message(""), ""):
                        yield frame
                for frame in self._closed():
                    yield frame
                ended = self._ended(said)
                yield self._event(f"response.{ended['status']}", response=ended)

    def failed(self, error: ApiError) -> bytes:
        what = {"code": error.code or error.type, "message": error.message}
        return self._event("response.failed", response=self._object("failed") | {"error": what})

    def _event(self, kind: str, **members: Any) -> bytes:
        self._n += 1
        return sse({"type": kind, "sequence_number": self._n - 1, **members}, kind)

    def _text(self, fresh: Item, text: str) -> list[bytes]:
        """More text of the open item, or of a new one of this kind."""
        frames = []
        if self._open is None or self._open["type"] != fresh["type"]:
            frames += [*self._closed(), *self._opened(fresh)]
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        if text:
            frames.append(self._at(f"response.{part['type']}.delta", delta=text))
        return frames

    def _opened(self, item: Item) -> list[bytes]:
        self._open = item
        part = item["content"][0]
        begun = {**item, "status": "in_progress", "content": []}
        where = {"output_index": len(self._output)}
        return [
            self._event("response.output_item.added", item=begun, **where),
            self._at("response.content_part.added", part={**part, "text": ""}),
        ]

    def _closed(self) -> list[bytes]:
        item = self._open
        if item is None:
            return []
        part = item["content"][0]
        frames = [
            self._at(f"response.{part['type']}.done", text=part["text"]),
            self._at("response.content_part.done", part=part),
            self._event("response.output_item.done", item=item, output_index=len(self._output)),
        ]
        self._output.append(item)
        self._open = None
        return frames

    def _at(self, kind: str, **members: Any) -> bytes:
        assert self._open is not None
        logprobs: Item = {"logprobs": []} if kind.startswith("response.output_text") else {}
        where = {"item_id": self._open["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **where, **members, **logprobs)

    def _called(self, call: Call) -> list[bytes]:
        item = _call_item(call)
        at = len(self._output)
        where = {"item_id": item["id"], "output_index": at}
        name = "response.function_call_arguments"
        begun = {**item, "status": "in_progress", "arguments": ""}
        frames = [
            self._event("response.output_item.added", item=begun, output_index=at),
            self._event(f"{name}.delta", delta=call.arguments, **where),
            self._event(f"{name}.done", arguments=call.arguments, name=call.name, **where),
            self._event("response.output_item.done", item=item, output_index=at),
        ]
        self._output.append(item)
        return frames


def _message(text: str) -> Item:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    id = f"msg_{token_hex(16)}"
    return {"id": id, "type": "message", "status": "completed", "role": "assistant", "content": [part]}


def _reasoning(text: str) -> Item:
    part = {"type": "reasoning_text", "text": text}
    id = f"rs_{token_hex(16)}"
    return {"id": id, "type": "reasoning", "status": "completed", "summary": [], "content": [part]}


def _call_item(call: Call) -> Item:
    return {
        "id": f"fc_{token_hex(16)}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }
