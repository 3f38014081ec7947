"""Service: what the APIs share.  Reads a request, prepares it in a thread, and watches over its answer."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator
from starlette.requests import Request
from starlette.responses import Response

from fastpath.server.errors import ApiError, api_error
from fastpath.server.logs import fault, note
from fastpath.server.metrics import Metrics
from fastpath.server.streams import JSON, Streamed, unless_gone
from fastpath.talk.events import Finish, Options, PromptLogprobs, Said, Text, Thought
from fastpath.talk.exchange import ContextOverflow, Exchange, Fetch, Prompt, Talk
from fastpath.talk.several import Several
from refimpl.frontend.sampling import SamplingParams

Body = TypeVar("Body", bound=BaseModel)
Made = TypeVar("Made", bound="Prompt | list[Prompt]")
SMALL_BODY = 1 << 16  # bytes that are read faster than a thread is told to
PREPARING = 4  # requests whose prompts are made at the same time
MAX_CHOICES = 16
MAX_PROMPTS = 64  # of one request
MAX_STOPS = 64
MAX_NOTE = 1000  # characters of a header
NAMES = {"bias": "logit_bias"}


class Fields(BaseModel):
    """A request's body: unknown members are let through, as clients send many."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Null is what clients write for what they leave open: OpenAI allows it nearly everywhere."""
        if isinstance(given, dict):
            return {name: value for name, value in given.items() if value is not None}
        return given


@dataclass(frozen=True)
class Settings:
    """
    name         of the model, as clients see it
    max_tokens   of an answer that has no limit of its own; None: what the context holds
    sampling     of requests that say nothing
    api_key      that clients must send; None: none
    max_body     bytes of a request
    origins      web pages of other places that may ask
    hosts        names of this server that requests may use; None: any
    fetch        gets media that lie at a URL; None: such media are refused
    log_prompts  the texts of prompts and answers stand in the log; without it nothing of them does
    """

    name: str
    max_tokens: int | None = None
    sampling: SamplingParams = field(
        default_factory=lambda: SamplingParams(temperature=1.0, top_k=64, top_p=0.95)
    )
    api_key: str | None = None
    max_body: int = 64 << 20
    origins: Sequence[str] = ()
    hosts: Sequence[str] | None = None
    fetch: Fetch | None = None
    log_prompts: bool = False


class Service:
    """paths: of files of this machine, which no answer may name."""

    def __init__(self, exchange: Exchange, settings: Settings, paths: Sequence[Path] = ()):
        self.exchange, self.settings = exchange, settings
        self.began, self.metrics = int(time.time()), Metrics(exchange)
        self._paths = [(str(path), path.name) for path in paths]
        self._pool = ThreadPoolExecutor(PREPARING, "prepare")

    def close(self, timeout: float) -> None:
        self.exchange.worker.close(timeout)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # From a body to a prompt.

    async def in_thread(self, function: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *given)

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The body of a request, whatever it says of its type: it is JSON."""
        body = await request.body() or b"{}"
        if len(body) <= SMALL_BODY:
            return kind.model_validate_json(body)
        return await self.in_thread(kind.model_validate_json, body)

    async def prepared(self, make: Callable[[], Made]) -> Made:
        """A prompt or several, made in a thread.  If there is no room, this is said before the work."""
        self.exchange.worker.check_room()
        return await self.in_thread(make)

    def chat(self, messages: Any, options: Options, where: str = "messages") -> Prompt:
        """where: the field that the conversation came in."""
        try:
            return self.exchange.prepare(messages, options, self.settings.fetch)
        except ContextOverflow as error:
            raise ContextOverflow(error.n_prompt, error.n_context, where) from None

    def params(self, names: Mapping[str, str] = NAMES, /, **given: Any) -> SamplingParams:
        """Sampling as asked for; what was not said is what the server was started with.

        names  fields of a request that the API calls otherwise than SamplingParams does
        """
        said = {key: value for key, value in given.items() if value is not None}
        said.setdefault("seed", secrets.randbits(63))
        if said["seed"] < 0:
            said["seed"] += 1 << 64  # clients send -1 and other signed numbers
        try:
            return replace(self.settings.sampling, **said)
        except ValueError as error:
            found = re.match(r"\w+", str(error))
            name = found[0] if found else ""
            raise ValueError(names.get(name, name) + str(error)[len(name) :]) from None

    def limit(self, max_tokens: int | None, least: int = 1, field: str = "max_tokens") -> int | None:
        if max_tokens is None:
            return self.settings.max_tokens
        if max_tokens < least:
            raise ApiError(400, f"{field}: {max_tokens}, expected at least {least}", field=field)
        return max_tokens

    # From a prompt to a response.

    async def whole(
        self, request: Request, prompt: Prompt | list[Prompt], make: Callable[[list[Answer]], Any]
    ) -> Response:
        """All answers at once."""
        talk = self._begun(prompt)
        prompts = prompt if isinstance(prompt, list) else [prompt]
        try:
            n = sum(each.options.n for each in prompts)
            answers = await unless_gone(request, self._collected(talk, n))
        finally:
            talk.leave()
        headers = _notes(prompt)
        if any(answer.prompt_logprobs for answer in answers):  # those of a long prompt take seconds to write
            return await self.in_thread(lambda: JSON(make(answers), headers=headers))
        return JSON(make(answers), headers=headers)

    def _begun(self, prompt: Prompt | list[Prompt]) -> Talk | Several:
        if self.settings.log_prompts:
            for each in prompt if isinstance(prompt, list) else [prompt]:
                note(prompt=self.exchange.tokenizer.decode(each.ids))
        if isinstance(prompt, list):
            return Several(self.exchange, prompt)
        return self.exchange.begin(prompt)

    async def _collected(self, talk: Talk | Several, n: int) -> list[Answer]:
        answers = [Answer(k) for k in range(n)]
        async for said in self._watched(talk):
            answers[said.choice].add(said)
        return answers

    def streamed(
        self,
        prompt: Prompt | list[Prompt],
        frames: Callable[[AsyncIterator[Said]], AsyncIterator[bytes]],
        failed: Callable[[ApiError], bytes],
        media_type: str = "text/event-stream",
    ) -> Response:
        """An answer as it comes.

        frames  what the API writes of the events
        failed  what it writes of an error in the middle of them
        """
        talk = self._begun(prompt)
        ping = {} if media_type == "text/event-stream" else {"ping": b""}
        made = Streamed(self._safe(frames(self._watched(talk)), failed), talk.leave, media_type, **ping)
        made.headers.update(_notes(prompt))
        return made

    async def _safe(
        self, frames: AsyncIterator[bytes], failed: Callable[[ApiError], bytes]
    ) -> AsyncIterator[bytes]:
        try:
            async for frame in frames:
                yield frame
        except Exception as error:
            yield failed(self.told(error))

    async def _watched(self, talk: Talk | Several) -> AsyncIterator[Said]:
        last = None
        async for said in talk:
            now = time.perf_counter()
            if isinstance(said, Finish):
                self.metrics.finished(said)
                if self.settings.log_prompts:
                    note(choice=said.choice, answer=said.message, reason=said.reason)
                if said.reason == "abort":
                    raise ApiError(503, "the answer was given up, as the server is shutting down")
            elif isinstance(said, Thought | Text):
                if last is not None:
                    self.metrics.between.observe(now - last)
                last = now
            yield said

    # Errors.

    def told(self, error: BaseException) -> ApiError:
        """What the client is told; ours are logged."""
        found = api_error(error)
        if found.status >= 500 and not isinstance(error, ApiError):
            fault(error)
        for path, name in self._paths:
            found.message = found.message.replace(path, name)
        return found


@dataclass
class Answer:
    """All that was said in one answer."""

    choice: int
    thought: str = ""
    text: str = ""
    calls: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: Sequence[Any] = ()
    finish: Finish | None = None

    def add(self, said: Said) -> None:
        if isinstance(said, Thought):
            self.thought += said.text
        elif isinstance(said, Text):
            self.text += said.text
            self.logprobs += said.logprobs
        elif isinstance(said, PromptLogprobs):
            self.prompt_logprobs = said.found
        elif isinstance(said, Finish):
            self.finish = said
            if not said.stop_string:
                self.logprobs += said.logprobs
        else:
            self.calls.append(said)

    @property
    def end(self) -> Finish:
        assert self.finish is not None, "an answer that has not ended"
        return self.finish


def _notes(prompt: Prompt | list[Prompt]) -> dict[str, str]:
    """A header for what a client should know of its request: that the end of a sound is not heard."""
    notes = [] if isinstance(prompt, list) else prompt.notes
    text = " ".join("; ".join(notes).split()).encode("ascii", "replace").decode()
    return {"x-note": text[:MAX_NOTE]} if text else {}


def stops_of(stop: str | Sequence[str] | None, field: str = "stop") -> list[str]:
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"{field}: {len(stops)} strings, expected at most {MAX_STOPS}", field=field)
    if not all(stops):
        raise ApiError(400, f"{field}: an empty string, expected at least one character", field=field)
    return stops


def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The body for the OpenAPI document: routes read it themselves."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
