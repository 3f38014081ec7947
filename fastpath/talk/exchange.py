"""Exchange: messages and options -> a prompt -> typed events of its answers.

    worker = Worker(engine)
    exchange = Exchange(worker, encoders=encoders)             # encoders: fastpath/media.py, if there are any
    prompt = exchange.prepare(messages, Options(thinking=True, max_tokens=500))   # ValueError: a bad request
    for event in exchange.answer(prompt):                      # blocks; events.py says what comes
        if isinstance(event, Text): print(event.text, end="")
        if isinstance(event, Finish): messages.append(event.message)

Leaving the loop early (break, an exception, Ctrl+C) gives the answer up within one step of the model.  In an
event loop: `async for event in exchange.begin(prompt)`; `prepare` takes milliseconds, with images longer, and
belongs in a thread there.  `messages` are those of OpenAI's chat API (frontend/dialects.py brings
other shapes into this one); images, sounds and videos are in them as data URLs or base64.

The ids of each answer are kept, and stand in the prompts of later turns that begin with the same messages:
the prefix cache then finds every token of the conversation so far.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastpath import engine as many
from fastpath.media import Encoders, Opened
from fastpath.talk.answers import Answers
from fastpath.talk.events import Options, Said
from fastpath.talk.post import Post
from fastpath.talk.worker import Heard, Ticket, Worker
from refimpl.batch import SoftTokens
from refimpl.frontend.constraint import All, Constraint, MinTokens
from refimpl.frontend.dialects import Media, media_of
from refimpl.frontend.grammar import Grammar, Grammars, tool_calls
from refimpl.frontend.image import BUDGETS, DEFAULT_BUDGET
from refimpl.frontend.media_input import DEFAULT_SAMPLING, Sampling
from refimpl.frontend.media_prompt import Kind, MediaPart, locate, soft_tokens
from refimpl.frontend.splice import Conversation, KeptAnswers
from refimpl.frontend.thinking import ThoughtLimits

Fetch = Callable[[Media], bytes]
DETAILS = {"low": min(BUDGETS), "high": max(BUDGETS)}  # soft tokens of an image
MAX_MESSAGES = 4096  # published templates compare each with those before it: 17 s for so many
MAX_MEDIA = 64  # images, sounds and videos of one request
MAX_FETCHED = 128 << 20  # bytes of those of them that lie elsewhere


class ContextOverflow(ValueError):
    """The prompt leaves no room for an answer.

    n_prompt, n_context  tokens
    field  of the request
    """

    def __init__(self, n_prompt: int, n_context: int, field: str = "messages"):
        super().__init__(
            f"{field}: the prompt has {n_prompt} tokens, but the context holds {n_context}, expected at "
            f"most {n_context - 1} so that there is room for an answer. Shorten it"
        )
        self.n_prompt, self.n_context, self.field = n_prompt, n_context, field


@dataclass(frozen=True)
class Prompt:
    """A request that is ready.

    ids       of the whole conversation
    soft      its images and sounds
    asked     the messages that it was made of; of a raw prompt None
    notes     what its client should know, as that the end of a sound is not heard
    """

    ids: Sequence[int]
    options: Options
    soft: Sequence[SoftTokens] = ()
    asked: Conversation | None = None
    constraint: Constraint | None = field(default=None, repr=False)
    notes: Sequence[str] = ()


class Exchange:
    """
    encoders      what sees and hears; None: messages with media are refused
    budget        of thoughts, where a request says nothing (Options.budget)
    image_budget  most soft tokens of an image
    sampling      which frames of a video are shown
    """

    def __init__(
        self,
        worker: Worker,
        *,
        encoders: Encoders | None = None,
        budget: int | None = None,
        image_budget: int = DEFAULT_BUDGET,
        sampling: Sampling = DEFAULT_SAMPLING,
    ):
        self.worker, self.encoders, self.budget = worker, encoders, budget
        self.image_budget, self.sampling = image_budget, sampling
        model = worker.engine.lanes.model
        self.tokenizer, self.template = model.tokenizer, model.template
        self.context_len = worker.engine.lanes.context_len
        self.grammars = Grammars(self.tokenizer)
        self._kept = KeptAnswers()
        self._post: Post | None = None
        self._lock = threading.Lock()  # of kept answers; event loops take it: nothing long is done under it

    # Before an answer.

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], options: Options, fetch: Fetch | None = None
    ) -> Prompt:
        """
        fetch  gets what lies at a URL; None: such media are refused

        Raises:
            ValueError: one line that begins with the field; ContextOverflow among them
            QueueFull, Closing: of the worker, before the work begins
        """
        self.worker.check_room()
        opened = self._opened(messages, options, fetch)
        asked = Conversation(messages if _are_objects(messages) else ())
        ids = self._rendered(messages, asked, options, [each.input.part for each in opened])
        soft: Sequence[SoftTokens] = ()
        if opened and options.n_prompt_logprobs is not None:
            raise ValueError(
                "prompt_logprobs: the messages have images, sounds or videos, expected words alone: nothing "
                "says how likely a picture is"
            )
        if opened:
            ids, starts = locate(ids, self.tokenizer, [each.input.part for each in opened])
        self._check_room(len(ids))
        if opened:
            assert self.encoders is not None
            futures = [self.worker.call(partial(self.encoders.encode, each)) for each in opened]
            soft = soft_tokens(starts, [future.result() for future in futures])
        options = self._bounded(ids, options)
        notes = [note for each in opened for note in each.input.notes]
        constraint = self._constraint(ids, options, is_chat=True)
        return Prompt(ids, options, soft, asked, constraint, notes)

    def prepare_raw(self, prompt: str | Sequence[int], options: Options, where: str = "prompt") -> Prompt:
        """A text without a template, after exactly one BOS, or ids as they are. Raises as `prepare` does.

        where  the field that it came in
        """
        self.worker.check_room()
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_bos=True, parse_special=True)
        else:
            ids = [int(i) for i in prompt]
            if not ids:
                raise ValueError(f"{where}: no tokens, expected at least one")
            try:
                self.worker.engine.lanes.model.check_ids(ids)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        self._check_room(len(ids), where)
        options = self._bounded(ids, options)
        return Prompt(ids, options, (), None, self._constraint(ids, options, is_chat=False))

    def count(
        self, messages: Sequence[Mapping[str, Any]], options: Options, fetch: Fetch | None = None
    ) -> int:
        """Tokens of the prompt that these would make; nothing is computed. Raises as `prepare` does."""
        opened = self._opened(messages, options, fetch)
        return len(self.render(messages, options, [each.input.part for each in opened]))

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: Options, media: Sequence[MediaPart] = ()
    ) -> list[int]:
        """The ids of a conversation; ids of earlier answers are what they were."""
        asked = Conversation(messages if _are_objects(messages) else ())
        return self._rendered(messages, asked, options, media)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        asked: Conversation,
        options: Options,
        media: Sequence[MediaPart],
    ) -> list[int]:
        if len(asked.keys) > MAX_MESSAGES:
            raise ValueError(f"messages: {len(messages)} messages, expected at most {MAX_MESSAGES}")
        with self._lock:
            written = self._kept.find(asked)
        tools = options.tools if options.choice.mode != "none" else ()
        return self.template.render_ids(
            self.tokenizer,
            messages,
            tools=tools,
            thinking=options.thinking,
            extra=options.template,
            media=media,
            generated=written,
            continue_final=options.continue_final,
        )

    def _opened(self, messages: Any, options: Options, fetch: Fetch | None) -> list[Opened]:
        """What stands in the messages, decoded; their faults are for the template to find."""
        found = media_of(messages) if _are_objects(messages) else []
        if not found:
            return []
        if self.encoders is None:
            raise ValueError(
                f"{found[0].where}: an image, sound or video, but this model runs without its encoders. "
                "Start it with --mmproj FILE"
            )
        if len(found) > MAX_MEDIA:
            raise ValueError(
                f"messages: {len(found)} images, sounds and videos, expected at most {MAX_MEDIA}"
            )
        opened: list[Opened] = []
        n_fetched = n_soft = 0
        for item in found:
            data = item.data
            if data is None:
                data = _fetched(item, fetch, MAX_FETCHED - n_fetched)
                n_fetched += len(data)
            kind: Kind = item.kind  # type: ignore[assignment]
            budget = DETAILS.get(item.detail) or options.image_tokens or self.image_budget
            how = partial(self.encoders.open, budget=budget, sampling=self.sampling)
            opened.append(how(kind, data, name=item.where))
            n_soft += sum(opened[-1].input.part.counts)
            self._check_room(n_soft)  # before the next is decoded: of each, the pixels are held
        return opened

    def _check_room(self, n: int, where: str = "messages") -> None:
        if n >= self.context_len:
            raise ContextOverflow(n, self.context_len, where)

    def _bounded(self, ids: Sequence[int], options: Options) -> Options:
        room = self.context_len - len(ids)
        wanted = room if options.max_tokens is None else min(options.max_tokens, room)
        return replace(options, max_tokens=wanted)

    def _constraint(self, ids: Sequence[int], options: Options, *, is_chat: bool) -> Constraint | None:
        parts: list[Constraint] = []
        if is_chat:
            budget = self.budget if options.budget is None else options.budget
            parts.append(
                ThoughtLimits(
                    self.tokenizer,
                    ids,
                    thinking=options.thinking,
                    max_tokens=options.max_tokens,
                    budget=budget,
                )
            )
        grammar = _form(options)
        if grammar is not None:
            parts.append(self.grammars.constraint(grammar, ids, thinking=is_chat and options.thinking))
        if options.min_tokens:
            parts.append(MinTokens(options.min_tokens, self.tokenizer.eog_ids))
        return All(*parts) if parts else None

    # The answer.

    def answer(self, prompt: Prompt) -> Iterator[Said]:
        """The events of all answers to a prompt; the thread waits for each.

        Raises:
            ValueError, QueueFull, Closing: as `prepare`
            Exception: what an answer ended with, if that was an error
        """
        heard: queue.SimpleQueue[tuple[int, many.Event]] = queue.SimpleQueue()
        ticket = self._submit(prompt, lambda k, event: heard.put((k, event)))
        answers = Answers(self.tokenizer, prompt, ticket)
        try:
            while not answers.are_over:
                yield from answers.push(*heard.get())
        finally:
            self._leave(prompt, answers, ticket)

    def begin(self, prompt: Prompt) -> Talk:
        """The same in an event loop: the request is in the engine when this returns."""
        return Talk(self, prompt)

    def post(self, loop: asyncio.AbstractEventLoop) -> Post:
        """The one of this loop, which all its answers share."""
        if self._post is None or self._post.loop is not loop:
            self._post = Post(loop)
        return self._post

    def _submit(self, prompt: Prompt, heard: Heard, told: Callable[[], None] | None = None) -> Ticket:
        options, constraint = prompt.options, prompt.constraint
        assert options.max_tokens is not None
        requests = [
            many.Request(
                prompt.ids,
                prompt.soft,
                params,
                options.max_tokens,
                constraint=None if constraint is None else constraint.fork(),
                n_logprobs=options.n_logprobs,
                n_prompt_logprobs=None if k else options.n_prompt_logprobs,
            )
            for k, params in enumerate(options.params.choices(options.n))
        ]
        return self.worker.submit(requests, heard, told)

    def _leave(self, prompt: Prompt, answers: Answers, ticket: Ticket) -> None:
        if not answers.are_over:
            ticket.cancel()
        if prompt.asked is None:
            return
        with self._lock:
            for message, written in answers.whole():
                self._kept.keep(prompt.asked, message, written)


class Talk:
    """The answers to one prompt, in an event loop: `async for said in talk`, and `leave` in any case."""

    def __init__(self, exchange: Exchange, prompt: Prompt):
        self.prompt = prompt
        self._exchange, self._is_left = exchange, False
        self._heard: list[tuple[int, many.Event]] = []
        self._news = asyncio.Event()
        post = exchange.post(asyncio.get_running_loop())
        self._ticket = exchange._submit(prompt, partial(post.put, self._hear), post.send)
        self._answers = Answers(exchange.tokenizer, prompt, self._ticket)

    def _hear(self, k: int, event: many.Event) -> None:
        self._heard.append((k, event))
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[Said]:
        try:
            while not self._answers.are_over:
                await self._news.wait()
                self._news.clear()
                heard, self._heard = self._heard, []
                for k, event in heard:
                    for said in self._answers.push(k, event):
                        yield said
        finally:
            self.leave()

    def leave(self) -> None:
        """Gives the answers up that have not ended."""
        if not self._is_left:
            self._is_left = True
            self._exchange._leave(self.prompt, self._answers, self._ticket)


def _fetched(item: Media, fetch: Fetch | None, most: int) -> bytes:
    if fetch is None:
        raise ValueError(f"{item.where}: a URL, expected the content itself (base64 or a data URL)")
    data = fetch(item)
    if len(data) > most:
        raise ValueError(f"{item.where}: with those before it more than {MAX_FETCHED} bytes are elsewhere")
    return data


def _form(options: Options) -> Grammar | None:
    """The one form that the answer is to have: what asks for two cannot be promised both."""
    called = tool_calls(options.tools, options.choice, options.schema, options.schema_field)
    if options.grammar is not None and called is not None:
        raise ValueError(
            f"{options.grammar.field}: a form of the answer beside {called.field}, which asks for another; "
            "expected one of them"
        )
    return options.grammar or called


def _are_objects(messages: Any) -> bool:
    return isinstance(messages, list | tuple) and all(isinstance(each, Mapping) for each in messages)
