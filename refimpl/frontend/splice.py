"""The ids of an answer in the prompts after it: exactly those that were generated, not those of its text.

An answer's text can often be cut into tokens in more ways than one, and the model need not have chosen the
tokenizer's.  A prompt that is rendered from text alone then leaves the cached prefix at the first such place.
So messages that carry their generated ids are rendered with marks in the places of thought, text and calls;
the template decides, as for any message, what of them it shows and where, and the ids take the place of what
lies between.  What it does not show (old thoughts) is cut out of the ids: there the cached prefix ends.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from json import dumps, loads
from typing import Any

from refimpl.frontend.tokenizer import Tokenizer

Message = dict[str, Any]
_REASONING = ("reasoning", "reasoning_content", "thinking")
MAX_KEPT_IDS = 1 << 20


@dataclass(frozen=True)
class Written:
    """What the model generated as one assistant message.

    ids         token ids, with or without the one that ended generation
    in_thought  the prompt ended inside an opened thought, which these ids go on with
    """

    ids: tuple[int, ...]
    in_thought: bool = False


def with_marks(
    messages: Sequence[Any], written: Mapping[int, Written], tokenizer: Tokenizer, mark: str
) -> list[Any]:
    """The messages with marks in those that have ids.

    written  by the index of an assistant's message
    mark     a character that occurs nowhere else
    """
    marked = list(messages)
    for k, answer in written.items():
        if not (0 <= k < len(marked) and marked[k].get("role") in ("assistant", "model")):
            raise ValueError(f"generated[{k}]: messages[{k}] is no assistant's message, expected one")
        message = {key: value for key, value in marked[k].items() if key not in _REASONING}
        if _has_thought(answer, tokenizer):
            message |= {name: f"{mark}{k}.t{mark}" for name in _REASONING[:2]}
        calls = message.get("tool_calls") or []
        if calls:  # names stay: results are found by them
            call = {f"{mark}{k}.a{mark}": 0}
            message["tool_calls"] = [{**c, "function": {**c["function"], "arguments": call}} for c in calls]
        message["content"] = "" if calls else f"{mark}{k}.c{mark}"
        marked[k] = message
    return marked


def cut(
    text: str,
    messages: Sequence[Any],
    written: Mapping[int, Written],
    tokenizer: Tokenizer,
    mark: str,
) -> list[str | list[int]] | set[int]:
    """A rendered text -> the texts between the marks and the ids in their places.

    A template may write a message in a form that has no place for its ids: then the indices of these messages
    come back, to be rendered from their text.
    """
    found: dict[int, re.Match[str]] = {}
    n_marks = Counter(map(int, re.findall(rf"{mark}(\d+)\.[tac]{mark}", text)))
    for match in _places(mark).finditer(text):
        kinds = re.findall(rf"{mark}(\d+)\.([tac]){mark}", match[0])
        [k, *others] = {int(k) for k, _ in kinds}
        n_calls = len(messages[k].get("tool_calls") or ())
        is_whole = len(kinds) == n_marks[k] and sum(kind == "a" for _, kind in kinds) == n_calls
        if is_whole and not others:
            found[k] = match
    if len(found) < len(written):
        return written.keys() - found.keys()

    pieces: list[str | list[int]] = []
    at = 0
    for k, match in sorted(found.items(), key=lambda item: item[1].start()):
        is_shown = match["thought"] is not None
        begin = match.start()
        if is_shown and written[k].in_thought:
            begin += len(match["opener"])  # the template's own words, which the prompt ended with
        pieces += [text[at:begin], _shown_ids(written[k], is_shown, tokenizer)]
        at = match.end()
    return [*pieces, text[at:]]


def _places(mark: str) -> re.Pattern[str]:
    """What templates write for marked messages, their turns and results aside."""
    thought = rf"(?P<thought>(?P<opener><\|channel>thought\n){mark}\d+\.t{mark}\n?<channel\|>)?"
    call = rf"<\|tool_call>call:[^{mark}{{]*\{{{mark}\d+\.a{mark}:0\}}<tool_call\|>"
    return re.compile(rf"{thought}(?:{mark}\d+\.c{mark}|(?:{call})+)")


def _has_thought(answer: Written, tokenizer: Tokenizer) -> bool:
    return answer.in_thought or tokenizer.id_of("<|channel>") in answer.ids


def _shown_ids(answer: Written, with_thoughts: bool, tokenizer: Tokenizer) -> list[int]:
    ids = [int(i) for i in answer.ids]
    while ids and ids[-1] in tokenizer.eog_ids:
        ids.pop()
    if with_thoughts:
        return ids
    opener, closer = tokenizer.id_of("<|channel>"), tokenizer.id_of("<channel|>")
    kept, inside = [], answer.in_thought
    for token in ids:
        if token in (opener, closer):
            inside = token == opener
        elif not inside:
            kept.append(token)
    return kept


class Conversation:
    """Messages by their hashes: of each, what it says and all before it says.

    Made where there is time: pictures are hashed with the text.  Answers are then cheap to add.
    """

    def __init__(self, messages: Iterable[Mapping[str, Any]]):
        self._state, self.keys = sha256(), list[bytes]()
        for message in messages:
            self._state.update(_said(message))
            self.keys.append(self._state.digest())

    def key_with(self, answer: Mapping[str, Any]) -> bytes:
        """Of the answer to all of them."""
        state = self._state.copy()
        state.update(_said(answer))
        return state.digest()


class KeptAnswers:
    """The ids of the last answers, found again when a client sends the conversation back.

    An answer is found by the whole conversation up to it, its own text and calls included: a message that was
    edited has no ids.  Thoughts do not count: most clients do not send them back.
    """

    def __init__(self, max_ids: int = MAX_KEPT_IDS):
        self._max_ids, self._n_ids = max_ids, 0
        self._kept: OrderedDict[bytes, Written] = OrderedDict()

    def keep(self, asked: Conversation, answer: Mapping[str, Any], written: Written) -> None:
        """Keep the ids of an answer to these messages, given as it was sent to the client."""
        if not written.ids:
            return
        key = asked.key_with(answer)
        self._forget(key)
        self._kept[key] = written
        self._n_ids += len(written.ids)
        while self._n_ids > self._max_ids:
            self._forget(next(iter(self._kept)))

    def find(self, asked: Conversation) -> dict[int, Written]:
        """The ids that are known, by the index of their message."""
        found = {}
        for k, key in enumerate(asked.keys):
            if key in self._kept:
                self._kept.move_to_end(key)
                found[k] = self._kept[key]
        return found

    def _forget(self, key: bytes) -> None:
        if key in self._kept:
            self._n_ids -= len(self._kept.pop(key).ids)


def _said(message: Mapping[str, Any]) -> bytes:
    """What a message says; what is no message is left for others to refuse."""
    given = message.get("tool_calls")
    calls = [
        [function.get("name"), _arguments(function.get("arguments"))]
        for call in (given if isinstance(given, list | tuple) else ())
        if isinstance(call, Mapping) and isinstance(function := call.get("function"), Mapping)
    ]
    said = [message.get("role"), message.get("content") or "", calls, message.get("tool_call_id")]
    return dumps(said, sort_keys=True, default=str).encode()


def _arguments(value: Any) -> Any:
    """As they compare equal however a client spells their JSON."""
    try:
        return loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
