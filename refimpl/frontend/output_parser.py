"""Generated token ids -> thoughts, answer text and tool calls, as they come.

A Gemma 4 answer looks like this, where every `<...>` is one token:

    <|channel>thought\\nreason\\n<channel|>text<|tool_call>call:name{key:<|"|>text<|"|>,n:2}<tool_call|><turn|>

The parser is a state machine on ids, so that a marker spelled out in prose is prose.  What it makes of an
answer does not depend on how the ids arrive.  Models slip; these slips are mended, and whatever cannot be
read as a call is delivered as text, never dropped:

    thoughts   an opener without `thought` after it is dropped, repeated openers are one, a closer without an
               opener is dropped
    calls      see tool_call.py
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Literal

from refimpl.frontend.tokenizer import Tokenizer
from refimpl.frontend.tool_call import QUOTE, ToolCallError, parse_tool_call

_HEADER = "thought"

Kind = Literal["thought", "content", "tool_call"]
_State = Literal["content", "header", "thought", "call", "role", "end"]


@dataclass(frozen=True)
class Event:
    """A piece of the answer.

    kind       "thought" or "content": `text` continues it; "tool_call": one whole call
    text       the text; of a call: its arguments as JSON
    name       the called tool
    arguments  its arguments
    index      which call of this answer it is, from 0
    id         of the call, for the message that will bring its result
    """

    kind: Kind
    text: str
    name: str = ""
    arguments: Mapping[str, Any] | None = None
    index: int = 0
    id: str = field(default="", compare=False)


class OutputParser:
    """Turns the ids of one answer into events.

    prompt_ids   the prompt: if it ends inside a thought (templates open one after a tool result), so does the
                 parser begin
    parse_calls  False where no tools were offered on purpose: what looks like a call is then text
    tools        the declarations, if known: a bare value of a parameter declared as a string is then a string
    new_id       makes the ids of calls
    n_calls      how many calls were read so far
    n_thought    how many generated tokens belonged to thoughts, markers included
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        parse_calls: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        new_id: Callable[[], str] = lambda: f"call_{token_hex(12)}",
    ):
        self._tokenizer = tokenizer
        self._parse_calls = parse_calls
        self._tools = tools or ()
        self._new_id = new_id
        self._stream = tokenizer.stream()
        names = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|turn>")
        self._open, self._close, self._call, self._call_end, self._quote, self._turn = map(
            tokenizer.id_of, names
        )
        self._spelled = ""  # the end of a text that may become a marker (`push_text`)
        self._state: _State = "content"
        self._outer: Literal["content", "thought"] = "content"  # where `<|channel>` stood
        self._header = ""  # the line after `<|channel>` or `<|turn>`, as far as it has come
        self._held = ""  # white space that is dropped if a border follows
        self._is_start = False  # right after a border: white space is dropped
        self._call_parts: list[str | None] = []  # text, and None for the quote token
        self.n_calls = 0
        self.n_thought = 0
        self._read_prompt(prompt_ids)

    def push(self, token_id: int) -> list[Event]:
        """What one more token completes."""
        events: list[Event] = []
        if self._state == "end":
            return events
        in_thought = self.in_thought
        if token_id in self._tokenizer.eog_ids:
            self._end(events, by_model=True)
        elif self._state == "call":
            self._push_in_call(token_id, events)
        elif self._tokenizer.is_special(token_id):
            self._push_text(self._stream.flush(), events)
            self._push_marker(token_id, events)
        else:
            self._push_text(self._stream.push(token_id), events)
        self.n_thought += in_thought or self.in_thought
        return events

    @property
    def in_thought(self) -> bool:
        """True while a thought is open."""
        return self._state in ("thought", "header")

    def push_text(self, text: str) -> list[Event]:
        """The same for an answer of which only the text is known, markers spelled out, in any pieces."""
        text = self._spelled + text
        markers = [*map(self._tokenizer.piece, sorted(self._tokenizer.eog_ids)), *self._tokenizer.markers]
        longest = max(map(len, markers)) - 1
        ends = (text[-n:] for n in range(min(len(text), longest), 0, -1))
        self._spelled = next(
            (end for end in ends if any(m.startswith(end) and m != end for m in markers)), ""
        )
        events: list[Event] = []
        complete = text[: len(text) - len(self._spelled)]
        for k, piece in enumerate(re.split("(" + "|".join(map(re.escape, markers)) + ")", complete)):
            marker = self._tokenizer.id_of(piece) if k % 2 else None
            if marker is None:
                self._push_plain(piece, events)
            else:
                events += self.push(marker)
        return events

    def _push_plain(self, text: str, events: list[Event]) -> None:
        if self._state == "call":
            self._call_parts.append(text)
        elif self._state != "end":
            self._push_text(text, events)

    def finish(self) -> list[Event]:
        """What is left when no more tokens come: the budget is spent, or generation has ended."""
        events: list[Event] = []
        self._push_plain(self._spelled, events)
        self._spelled = ""
        if self._state != "end":
            self._end(events, by_model=False)
        return events

    def parse(self, ids: Iterable[int]) -> list[Event]:
        """A whole answer at once, with neighbouring pieces of one kind joined."""
        events = [event for token_id in ids for event in self.push(token_id)]
        return joined(events + self.finish())

    # -- thoughts and text -------------------------------------------------------------------------

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Take the state at the end of the prompt from what stands in it since its last turn began."""
        ends = self._tokenizer.eog_ids
        ids = [int(i) for i in prompt_ids]
        last = next((k for k in range(len(ids) - 1, -1, -1) if ids[k] == self._turn or ids[k] in ends), None)
        if last is None:
            return
        for token_id in ids[last + (ids[last] in ends) :]:
            self.push(token_id)
        self._stream.flush()
        self._held = ""
        self.n_calls = self.n_thought = 0

    def _push_marker(self, token_id: int, events: list[Event]) -> None:
        if token_id == self._open:
            self._leave_header(events)
            self._outer = "thought" if self._state == "thought" else "content"
            self._state = "header"
        elif token_id == self._close:
            if self._state != "content":
                self._border("content")
        elif token_id == self._call:
            self._leave_header(events)
            self._border("call")
            self._call_parts = []
        elif token_id == self._turn:
            self._leave_header(events)
            self._state = "role"
        elif token_id == self._quote:
            self._push_text('"', events)

    def _border(self, state: "_State") -> None:
        self._held, self._header, self._is_start, self._state = "", "", True, state

    def _push_text(self, text: str, events: list[Event]) -> None:
        if self._state == "header":
            text = self._after_channel(text)
        elif self._state == "role":
            text = self._after_role(text)
        if self._is_start:
            text = text.lstrip()
        if not text:
            return
        self._is_start = False
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            events.append(Event("thought" if self._state == "thought" else "content", shown))

    def _after_channel(self, text: str) -> str:
        """The text without the name of the channel; "" while that may still be coming."""
        text = self._header + text
        self._header = ""
        if text.startswith(_HEADER):
            if self._outer == "content":
                self._held = ""
            self._state, self._is_start = "thought", True
            return text[len(_HEADER) :]
        if _HEADER.startswith(text):
            self._header = text
            return ""
        self._state = self._outer  # no thought: as if `<|channel>` had not been
        return text

    def _after_role(self, text: str) -> str:
        """The text after the line that names the role; "" until the line has ended."""
        line, newline, rest = (self._header + text).partition("\n")
        self._header = "" if newline else line
        if newline:
            self._state = "content"
        return rest

    def _leave_header(self, events: list[Event]) -> None:
        """A marker came where the name of a channel was expected: what came of a name is text."""
        if self._state == "header":
            text, self._header, self._state = self._header, "", self._outer
            self._push_text(text, events)
        elif self._state == "role":
            self._header, self._state = "", "content"

    # -- calls -------------------------------------------------------------------------------------

    def _push_in_call(self, token_id: int, events: list[Event]) -> None:
        if token_id == self._call_end or token_id == self._call:
            self._end_call(events, by_model=True)
            if token_id == self._call:
                self._state, self._call_parts = "call", []
        elif token_id == self._quote:
            self._call_parts += [self._stream.flush(), None]
        elif not self._tokenizer.is_special(token_id) or self._call_parts.count(None) % 2:
            self._call_parts.append(self._stream.push(token_id))  # in a string every other token is its text

    def _end_call(self, events: list[Event], *, by_model: bool) -> None:
        """`by_model`: it ended the call; else the budget did, and a call that lacks its end may lack more."""
        self._call_parts.append(self._stream.flush())
        self._border("content")
        try:
            if not self._parse_calls:
                raise ToolCallError("no tools were offered")
            name, arguments = parse_tool_call(self._call_parts, self._tools, may_lack_end=by_model)
        except ToolCallError:
            mark = QUOTE if self._parse_calls else '"'
            text = "".join(mark if part is None else part for part in self._call_parts)
            if text:
                self._is_start = False
                events.append(Event("content", text))
        else:
            text = json.dumps(arguments, ensure_ascii=False)
            events.append(Event("tool_call", text, name, arguments, self.n_calls, self._new_id()))
            self.n_calls += 1

    def _end(self, events: list[Event], *, by_model: bool) -> None:
        if self._state == "call":
            self._end_call(events, by_model=by_model)
        self._push_text(self._stream.flush(), events)
        if self._state == "content" and self._held:
            events.append(Event("content", self._held))
        self._state = "end"


def joined(events: Iterable[Event]) -> list[Event]:
    """Events with neighbouring pieces of text of one kind made one."""
    result: list[Event] = []
    for event in events:
        if result and event.kind != "tool_call" and event.kind == result[-1].kind:
            result[-1] = Event(event.kind, result[-1].text + event.text)
        else:
            result.append(event)
    return result
