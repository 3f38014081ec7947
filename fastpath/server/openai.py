"""OpenAI's API: /v1/models, /v1/chat/completions (completions.py and responses.py have the others, sampled.py
what is shared)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from fastpath.server.errors import ApiError, of_anthropic
from fastpath.server.sampled import DONE, Sampled, failed, prompt_logprobs_of, timings, usage_of
from fastpath.server.service import Answer, Service, body_schema, stops_of
from fastpath.server.streams import JSON, dumps, sse
from fastpath.talk.events import Call, Finish, Options, PromptLogprobs, Said, Text, Thought
from refimpl.frontend.dialects import openai_choice
from refimpl.frontend.sampling import Logprob
from refimpl.frontend.tokenizer import Tokenizer


class ChatRequest(Sampled):
    messages: list[Any]
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning_effort: str | None = None
    thinking_budget: int | None = Field(None, ge=0)
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    image_tokens: Literal[70, 140, 280, 560, 1120] | None = None
    functions: Any = None
    modalities: list[str] | None = None


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        name = service.settings.name
        ends = {"has_more": False, "first_id": name, "last_id": name} if of_anthropic(request) else {}
        return JSON({"object": "list", "data": [_model(service)]} | ends)

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.settings.name:
            known = service.settings.name
            message = f"model: {name} is not here, expected {known}"
            raise ApiError(404, message, field="model", code="model_not_found")
        return JSON(_model(service))

    @routes.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
    async def chat(request: Request) -> Response:
        asked = await service.read(request, ChatRequest)
        prompt = await service.prepared(lambda: service.chat(asked.messages, chat_options(service, asked)))
        answer = _ChatAnswer(service, asked)
        if asked.stream:
            return service.streamed(prompt, answer.frames, failed)
        return await service.whole(request, prompt, answer.whole)

    return routes


def _model(service: Service) -> dict[str, Any]:
    """As OpenAI's API has it, and as Anthropic's has it at the same path."""
    name = service.settings.name
    return {
        "id": name,
        "object": "model",
        "created": service.began,
        "owned_by": "twinpath",
        "context_length": service.exchange.context_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.began, UTC).isoformat(),
    }


# -- requests --------------------------------------------------------------------------------------


def chat_options(service: Service, asked: ChatRequest) -> Options:
    asked.check_prompt_logprobs()
    _check_unknown(asked)
    template = dict(asked.chat_template_kwargs or {})
    limit = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    thinking = template.pop("enable_thinking", asked.reasoning_effort not in (None, "none"))
    if not isinstance(thinking, bool):
        name = "chat_template_kwargs.enable_thinking"
        raise ApiError(400, f"{name}: {str(thinking)[:80]}, expected true or false", field=name)
    most = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    return Options(
        params=service.params(asked.names(), **asked.sampling()),
        max_tokens=service.limit(most, field=limit),
        min_tokens=asked.min_tokens,
        n=asked.n,
        stops=stops_of(asked.stop),
        tools=asked.tools or (),
        choice=openai_choice(asked.tool_choice, parallel=asked.parallel_tool_calls),
        thinking=thinking,
        budget=asked.thinking_budget,
        schema=schema_of(asked.response_format, "response_format"),
        grammar=asked.form(),
        n_logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        n_prompt_logprobs=asked.prompt_logprobs,
        continue_final=asked.continue_final_message,
        image_tokens=asked.image_tokens,
        template=template,
    )


def _check_unknown(asked: ChatRequest) -> None:
    """What would change the answer if it were done, and cannot be done, is not passed over."""
    if asked.functions:
        raise ApiError(400, "functions: expected them as tools, which they became in 2023", field="functions")
    if set(asked.modalities or ()) - {"text"}:
        message = (
            f"modalities: {str(asked.modalities)[:80]}, expected text: this model writes and does not speak"
        )
        raise ApiError(400, message, field="modalities")
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs: expected logprobs to be true with it", field="top_logprobs")


def schema_of(form: Any, field: str) -> Mapping[str, Any] | None:
    """The JSON schema that `response_format` asks for, also as the Responses API has it, which is flat."""
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise ApiError(400, f"{field}: {str(form)[:80]}, expected an object with a type", field=field)
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return form["schema"] if isinstance(form.get("schema"), Mapping) else {"type": "object"}
    if kind == "json_schema":
        inner = form.get("json_schema", form)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if isinstance(schema, Mapping):
            return schema
        raise ApiError(
            400, f"{field}.json_schema.schema: expected a JSON schema", field=f"{field}.json_schema"
        )
    message = f"{field}.type: {str(kind)[:80]}, expected text, json_object or json_schema"
    raise ApiError(400, message, field=f"{field}.type")


# -- answers ---------------------------------------------------------------------------------------


class _ChatAnswer:
    """One answer of the chat API."""

    def __init__(self, service: Service, asked: ChatRequest):
        self._name, self._tokenizer = service.settings.name, service.exchange.tokenizer
        self._id, self._created = f"chatcmpl-{token_hex(12)}", int(time.time())
        self._wants_usage, self._n_read = asked.wants_usage, asked.prompt_logprobs
        head = dumps(self._head("chat.completion.chunk"))
        self._begin = b"data: " + head.removesuffix(b"}") + b',"choices":['  # of each chunk

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        for answer in answers:
            message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
            if not answer.text and not answer.calls:
                message["content"] = ""
            if answer.thought:
                message["reasoning_content"] = answer.thought
            if answer.calls:
                message["tool_calls"] = [_call(call) for call in answer.calls]
            choice = {"index": answer.choice, "message": message, "finish_reason": answer.end.reason}
            choices.append(choice | {"logprobs": self._logprobs(answer.logprobs)})
        ends = [answer.end for answer in answers]
        made: dict[str, Any] = {"choices": choices, "usage": usage_of(ends), "timings": timings(ends)}
        if self._n_read is not None:
            found = answers[0].prompt_logprobs
            made["prompt_logprobs"] = prompt_logprobs_of(self._tokenizer, found, self._n_read)
        return self._head("chat.completion") | made

    async def frames(self, events: AsyncIterator[Said]) -> AsyncIterator[bytes]:
        ends: list[Finish] = []
        begun: set[int] = set()
        async for said in events:
            if said.choice not in begun:
                begun.add(said.choice)
                yield self._chunk(said.choice, {"role": "assistant", "content": ""})
            if isinstance(said, Thought):
                yield self._chunk(said.choice, {"reasoning_content": said.text})
            elif isinstance(said, Text):
                yield self._chunk(said.choice, {"content": said.text}, logprobs=said.logprobs)
            elif isinstance(said, Call):
                yield self._chunk(said.choice, {"tool_calls": [{"index": said.index, **_call(said)}]})
            elif not isinstance(said, PromptLogprobs):
                ends.append(said)
                rest = () if said.stop_string else said.logprobs
                yield self._chunk(said.choice, {}, said.reason, rest)
        if self._wants_usage:
            last = {"choices": [], "usage": usage_of(ends), "timings": timings(ends)}
            yield sse(self._head("chat.completion.chunk") | last)
        yield DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._name}

    def _chunk(
        self,
        k: int,
        delta: Mapping[str, Any],
        reason: str | None = None,
        logprobs: Sequence[Logprob] = (),
    ) -> bytes:
        choice = {"index": k, "delta": delta, "finish_reason": reason, "logprobs": self._logprobs(logprobs)}
        return self._begin + dumps(choice) + b"]}\n\n"

    def _logprobs(self, found: Sequence[Logprob]) -> dict[str, Any] | None:
        if not found:
            return None
        return {"content": [logprob_of(self._tokenizer, each) for each in found], "refusal": None}


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def logprob_of(tokenizer: Tokenizer, found: Logprob) -> dict[str, Any]:
    """One token and the likeliest ones at its place, as the chat API writes them."""

    def one(token: int, value: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}

    return one(found.token, found.logprob) | {"top_logprobs": [one(*pair) for pair in found.top]}
