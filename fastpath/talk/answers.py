"""The engine's events of one prompt -> what was said, for each of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from fastpath import engine as many
from fastpath.talk.events import Call, Finish, PromptLogprobs, Said, Text, Thought, Usage
from refimpl.frontend.messages import Message
from refimpl.frontend.output_parser import Event
from refimpl.frontend.reply import Reason, Reply
from refimpl.frontend.sampling import Logprob
from refimpl.frontend.splice import Written
from refimpl.frontend.stop_strings import StopStrings
from refimpl.frontend.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastpath.talk.exchange import Prompt
    from fastpath.talk.worker import Ticket


class _Reader(Protocol):
    """What Reply (refimpl/frontend/reply.py) and RawReply have in common."""

    reason: Reason | None

    @property
    def is_stopped(self) -> bool: ...
    @property
    def stop_string(self) -> str: ...
    @property
    def in_thought(self) -> bool: ...
    @property
    def n_thought(self) -> int: ...
    def push(self, token: int) -> list[Event]: ...
    def finish(self, *, at_limit: bool = False) -> list[Event]: ...
    def message(self) -> Message: ...


class RawReply:
    """The answer to a raw prompt: text, markers included, up to a stop string."""

    in_thought, n_thought = False, 0

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._stream, self._stops = tokenizer.stream(), StopStrings(stops)
        self._text = ""
        self.reason: Reason | None = None

    @property
    def is_stopped(self) -> bool:
        return self._stops.stopped

    @property
    def stop_string(self) -> str:
        return self._stops.which

    def push(self, token: int) -> list[Event]:
        return self._noted(self._stops.push(self._stream.push(token)))

    def finish(self, *, at_limit: bool = False) -> list[Event]:
        text = self._stops.push(self._stream.flush())
        self.reason = "length" if at_limit and not self.is_stopped else "stop"
        return self._noted(text + self._stops.flush())

    def message(self) -> Message:
        return {"role": "assistant", "content": self._text}

    def _noted(self, text: str) -> list[Event]:
        self._text += text
        return [Event("content", text)] if text else []


class Answers:
    """
    are_over  all of them have ended
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, ticket: Ticket):
        self._ticket = ticket
        self._n_left = len(ticket.requests)
        self._answers = [_Answer(k, tokenizer, prompt) for k in range(self._n_left)]

    @property
    def are_over(self) -> bool:
        return self._n_left == 0

    def push(self, k: int, event: many.Event) -> Sequence[Said]:
        """What an event of the engine says of answer number k.

        Raises:
            Exception: what the request ended with; no more of it can be told
        """
        answer = self._answers[k]
        if answer.is_over:
            return ()
        if isinstance(event, many.Token):
            said = answer.token(event)
            if answer.reader.is_stopped and not answer.is_cut:
                answer.is_cut = True
                self._ticket.cancel(k)
            return said
        if isinstance(event, many.PromptRead):
            return [PromptLogprobs(k, event.logprobs)]
        if event.error is not None:
            raise event.error
        self._n_left -= 1
        return answer.end(event)

    def whole(self) -> list[tuple[Message, Written]]:
        """Answers that came to their end, with the ids that they are made of."""
        readers = [each.reader for each in self._answers if each.is_over and not each.is_cut]
        return [(each.message(), each.written()) for each in readers if isinstance(each, Reply)]


class _Answer:
    """is_cut: a stop string has ended it, or its client has."""

    def __init__(self, k: int, tokenizer: Tokenizer, prompt: Prompt):
        options = prompt.options
        self.k, self.is_over, self.is_cut = k, False, False
        self.reader: _Reader
        if prompt.asked is None:
            self.reader = RawReply(tokenizer, options.stops)
        else:
            # "none" declares no tools: what looks like a call is text then
            may_call = bool(options.tools) and options.choice.mode != "none"
            self.reader = Reply(
                tokenizer, prompt.ids, tools=options.tools, parse_calls=may_call, stops=options.stops
            )
        self._logprobs: list[Logprob] = []

    def token(self, event: many.Token) -> list[Said]:
        was_in_thought = self.reader.in_thought
        events = self.reader.push(event.token)
        if event.logprob is not None and not (was_in_thought or self.reader.in_thought):
            self._logprobs.append(event.logprob)
        return [self._said(each) for each in events]

    def end(self, event: many.Finished) -> list[Said]:
        events = self.reader.finish(at_limit=event.reason == "length")
        said = [self._said(each) for each in events]
        self.is_over = True
        is_aborted = event.reason == "abort" and not self.reader.is_stopped
        self.is_cut = self.is_cut or is_aborted
        reason = self.reader.reason or "stop"
        usage = _usage(event.usage, self.reader.n_thought)
        rest, self._logprobs = tuple(self._logprobs), []
        return [
            *said,
            Finish(
                self.k,
                "abort" if is_aborted else reason,
                usage,
                self.reader.message(),
                self.reader.stop_string,
                rest,
            ),
        ]

    def _said(self, event: Event) -> Said:
        if event.kind == "thought":
            return Thought(self.k, event.text)
        if event.kind == "content":
            logprobs, self._logprobs = tuple(self._logprobs), []
            return Text(self.k, event.text, logprobs)
        return Call(self.k, event.index, event.id, event.name, event.text, event.arguments or {})


def _usage(usage: many.Usage, n_thought: int) -> Usage:
    return Usage(
        usage.prompt,
        usage.cached,
        usage.generated,
        n_thought,
        usage.queue_s,
        usage.first_s,
        usage.prefill_s,
        usage.decode_s,
    )
