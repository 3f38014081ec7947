"""OpenAI's API of raw prompts, /v1/completions: several prompts at once, and how likely their tokens were."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from secrets import token_hex
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from fastpath.server.errors import ApiError
from fastpath.server.sampled import DONE, Sampled, failed, prompt_logprobs_of, timings, usage_of
from fastpath.server.service import MAX_PROMPTS, Answer, Service, body_schema, stops_of
from fastpath.server.streams import sse
from fastpath.talk.events import Finish, Options, PromptLogprobs, Said, Text
from fastpath.talk.exchange import Prompt
from refimpl.frontend.sampling import Logprob
from refimpl.frontend.tokenizer import Tokenizer


class CompletionRequest(Sampled):
    prompt: str | list[int] | list[str | list[int]] = ""
    max_tokens: int | None = 16
    echo: bool = False
    suffix: str | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        asked = await service.read(request, CompletionRequest)
        prompts = await service.prepared(lambda: _prompts(service, asked))
        answer = _Completion(service, asked, prompts)
        if asked.stream:
            return service.streamed(prompts, answer.frames, failed)
        return await service.whole(request, prompts, answer.whole)

    return routes


def _prompts(service: Service, asked: CompletionRequest) -> list[Prompt]:
    if asked.suffix:
        raise ApiError(
            400, "suffix: this model writes on, and fills nothing in. Leave it out", field="suffix"
        )
    if asked.best_of not in (None, asked.n):
        message = f"best_of: {asked.best_of}, expected n ({asked.n}): all answers are given, none is chosen"
        raise ApiError(400, message, field="best_of")
    asked.check_prompt_logprobs()
    texts = _several(asked.prompt)
    most = min(MAX_PROMPTS, service.exchange.worker.max_waiting)
    if len(texts) > most:
        raise ApiError(400, f"prompt: {len(texts)} prompts, expected at most {most}", field="prompt")
    wanted = [asked.prompt_logprobs, asked.logprobs if asked.echo else None]
    options = Options(
        params=service.params(asked.names(), **asked.sampling()),
        max_tokens=service.limit(asked.max_tokens, 0),
        min_tokens=asked.min_tokens,
        n=asked.n,
        stops=stops_of(asked.stop),
        grammar=asked.form(),
        n_logprobs=asked.logprobs,
        n_prompt_logprobs=max((n for n in wanted if n is not None), default=None),
    )
    return [service.exchange.prepare_raw(text, options, field) for field, text in texts]


def _several(prompt: Any) -> list[tuple[str, str | list[int]]]:
    """(field, text or ids) of each prompt."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return [(f"prompt[{k}]", each) for k, each in enumerate(prompt)]
    return [("prompt", prompt)]


class _Completion:
    """The answers to one request: number k to prompt p is choice p * n + k."""

    def __init__(self, service: Service, asked: CompletionRequest, prompts: Sequence[Prompt]):
        self._name, self._tokenizer = service.settings.name, service.exchange.tokenizer
        self._id, self._created = f"cmpl-{token_hex(12)}", int(time.time())
        self._asked, self._prompts = asked, prompts
        self._texts = [text for _, text in _several(asked.prompt)]
        self._read: dict[int, Sequence[Logprob | None]] = {}  # by prompt

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        asked, choices = self._asked, []
        for answer in answers:
            p = answer.choice // asked.n
            if answer.prompt_logprobs:
                self._read[p] = answer.prompt_logprobs
            words = self._words(p)
            begun = words.begun()
            choice = self._choice(
                answer.choice, begun + answer.text, answer.end.reason, words.told(answer.logprobs)
            )
            if asked.prompt_logprobs is not None:
                found = prompt_logprobs_of(self._tokenizer, self._read[p], asked.prompt_logprobs)
                choice["prompt_logprobs"] = found
            choices.append(choice)
        ends = [answer.end for answer in answers]
        return self._head() | {"choices": choices, "usage": usage_of(ends, asked.n), "timings": timings(ends)}

    async def frames(self, events: AsyncIterator[Said]) -> AsyncIterator[bytes]:
        ends: list[Finish] = []
        words: dict[int, _Words] = {}
        async for said in events:
            k, p = said.choice, said.choice // self._asked.n
            if isinstance(said, PromptLogprobs):
                self._read[p] = said.found
                continue
            if k not in words:
                words[k] = self._words(p)
                if self._asked.echo:
                    begun = words[k].begun()
                    yield self._chunk(self._choice(k, begun, None, words[k].told(())))
            if isinstance(said, Text):
                yield self._chunk(self._choice(k, said.text, None, words[k].told(said.logprobs)))
            elif isinstance(said, Finish):
                ends.append(said)
                rest = () if said.stop_string else said.logprobs
                yield self._chunk(self._choice(k, "", said.reason, words[k].told(rest)))
        if self._asked.wants_usage:
            last = {"choices": [], "usage": usage_of(ends, self._asked.n), "timings": timings(ends)}
            yield sse(self._head() | last)
        yield DONE

    def _words(self, p: int) -> _Words:
        asked, ids, text = self._asked, self._prompts[p].ids, self._texts[p]
        hidden = isinstance(text, str) and ids[0] == self._tokenizer.bos_id  # it was put in front of a text
        if not asked.echo:
            return _Words(self._tokenizer, asked.logprobs)
        words = _Words(self._tokenizer, asked.logprobs)
        words.echo(ids[hidden:], self._read.get(p, ())[hidden:], text if isinstance(text, str) else None)
        return words

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._name,
        }

    def _chunk(self, choice: Mapping[str, Any]) -> bytes:
        return sse(self._head() | {"choices": [choice]})

    def _choice(self, k: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": k, "text": text, "finish_reason": reason, "logprobs": logprobs}


class _Words:
    """The tokens of one choice as this API lists them, with where in its text each begins.

    n_top  likeliest tokens at each place; None: nothing is listed
    """

    def __init__(self, tokenizer: Tokenizer, n_top: int | None):
        self._tokenizer, self._n_top = tokenizer, n_top
        self._stream, self._offset, self._text = tokenizer.stream(), 0, ""
        self._waiting: list[tuple[int, Logprob | None]] = []

    def echo(self, ids: Sequence[int], found: Sequence[Logprob | None], text: str | None) -> None:
        """The prompt comes first. text: what it was made of, if that is known."""
        self._text = self._tokenizer.decode(ids) if text is None else text
        if self._n_top is not None:
            self._waiting = list(zip(ids, found, strict=True))

    def begun(self) -> str:
        """What the choice's text begins with."""
        return self._text

    def told(self, found: Sequence[Logprob]) -> dict[str, Any] | None:
        """What is listed of these, and of the prompt, if it was not listed yet."""
        listed = [*self._waiting, *((each.token, each) for each in found)]
        if self._waiting:
            self._waiting = []
        if not listed:
            return None
        offsets = []
        for token, _ in listed:
            offsets.append(self._offset)
            self._offset += len(self._stream.push(token))
        return {
            "tokens": [self._word(token) for token, _ in listed],
            "token_logprobs": [None if each is None else each.logprob for _, each in listed],
            "top_logprobs": [self._top(each) for _, each in listed],
            "text_offset": offsets,
        }

    def _top(self, found: Logprob | None) -> dict[str, float] | None:
        """The likeliest ones, and the token itself, which need not be among them."""
        if found is None:
            return None
        top = {self._word(token): value for token, value in found.top[: self._n_top]}
        return top | {self._word(found.token): found.logprob}

    def _word(self, token: int) -> str:
        """Its text; of a piece of a character its bytes, as OpenAI writes them."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
