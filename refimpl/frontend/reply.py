"""One answer on its way to a client: thoughts, text up to a stop string, calls, and how it ended."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from refimpl.frontend.messages import Message
from refimpl.frontend.output_parser import Event, OutputParser
from refimpl.frontend.splice import Written
from refimpl.frontend.stop_strings import StopStrings
from refimpl.frontend.tokenizer import Tokenizer

Reason = Literal["stop", "length", "tool_calls"]


class Reply:
    """Takes the tokens of one answer and gives what an API sends of them.

    prompt_ids   the prompt: what it ends in is what the answer begins in
    tools        the declarations; parse_calls=False: what looks like a call is text (tool_choice "none")
    stops        strings that end the answer where its text (not a thought, not a call) has come to one

    is_stopped   a stop string was found: generate no more
    stop_string  which
    reason       how the answer ended, once `finish` was called
    n_thought    tokens of thoughts, markers included
    ids          all tokens
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parse_calls: bool = True,
        stops: Iterable[str] = (),
    ):
        self._parser = OutputParser(tokenizer, prompt_ids, parse_calls=parse_calls, tools=tools)
        self._stops = StopStrings(stops)
        self._began_in_thought = self._parser.in_thought
        self._ends = tokenizer.eog_ids
        self._ended = False
        self._thought, self._content = "", ""
        self._calls: list[Event] = []
        self.ids: list[int] = []
        self.reason: Reason | None = None

    @property
    def is_stopped(self) -> bool:
        return self._stops.stopped

    @property
    def stop_string(self) -> str:
        return self._stops.which

    @property
    def in_thought(self) -> bool:
        return self._parser.in_thought

    @property
    def n_thought(self) -> int:
        return self._parser.n_thought

    def push(self, token: int) -> list[Event]:
        """What one more token completes.  The token that ends generation may be told or not."""
        if self.is_stopped:
            return []
        self.ids.append(token)
        self._ended = self._ended or token in self._ends
        return self._passed(self._parser.push(token))

    def finish(self, *, at_limit: bool = False) -> list[Event]:
        """What is left when no more tokens come.

        at_limit  the answer was cut off (max_tokens, or the context is full)
        """
        events = [] if self.is_stopped else self._passed(self._parser.finish())
        if text := self._stops.flush():
            events.append(self._noted(Event("content", text)))
        cut = at_limit and not (self.is_stopped or self._ended)
        self.reason = "length" if cut else "tool_calls" if self._calls else "stop"
        return events

    def message(self) -> Message:
        """The answer so far as a message of OpenAI's chat API, as a client sends it back."""
        message: Message = {"role": "assistant", "content": self._content or None}
        if self._thought:
            message["reasoning_content"] = self._thought
        if self._calls:
            message["tool_calls"] = [call_of(event) for event in self._calls]
        return message

    def written(self) -> Written:
        """The ids for the prompts after this one (splice.py)."""
        return Written(tuple(self.ids), self._began_in_thought)

    def _passed(self, events: Iterable[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if event.kind == "content":
                text = self._stops.push(event.text)
            else:  # a stop string does not reach across a call
                text = self._stops.flush()
            if text:
                passed.append(self._noted(Event("content", text)))
            if self.is_stopped:
                break
            if event.kind != "content":
                passed.append(self._noted(event))
        return passed

    def _noted(self, event: Event) -> Event:
        if event.kind == "thought":
            self._thought += event.text
        elif event.kind == "content":
            self._content += event.text
        else:
            self._calls.append(event)
        return event


def call_of(event: Event) -> Message:
    """A call as it stands in a message."""
    return {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": event.text}}
