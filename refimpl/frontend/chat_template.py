"""Messages, tools and the thinking switch -> the prompt, as text and as token ids.

The template is the one in the model file, or `gemma4.jinja` beside this module for files without one.  It
runs in the sandbox of template_sandbox.py on messages that messages.py has brought into plain form.

Ids are made so that only the template's own markers become marker tokens.  `<turn|>` in the text of a user is
fenced before the template sees it: a character that occurs nowhere else is put behind its `<`.  The tokenizer
reads markers first, then drops the fences, then encodes the text between two markers in one piece, so that
merges reach across from template to user text.  Answers whose generated ids are known stand there with just
these (splice.py).
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refimpl.frontend.media_prompt import MediaPart, expand
from refimpl.frontend.messages import (
    Message,
    Placed,
    map_strings,
    normalize_messages,
    normalize_tools,
    place_of,
    shown,
)
from refimpl.frontend.splice import Written, cut, with_marks
from refimpl.frontend.tokenizer import Tokenizer, unused_character
from refimpl.frontend.turns import TURN_MARKERS, balanced

if TYPE_CHECKING:
    from refimpl.frontend.template_sandbox import BoundedEnvironment

MAX_SECONDS = 1.5
SECONDS_PER_PAIR = 5e-6  # published templates compare each message with those before it: 2 us for a pair
_OPEN_THOUGHT = "<|channel>thought\n"
_EMPTY_THOUGHT = "<|channel>thought\n<channel|>"
_ASKS_FOR_TOOL_ROLE = re.compile(r"""[!=]=\s*['"]tool['"]""")


class _Refused(ValueError):
    """The template did not take the messages."""


class ChatTemplate:
    """How one model file writes a conversation.

    source        the file's Jinja template; None: the built-in one
    small_family  E2B and E4B: with thinking off the built-in template adds no empty thought (the larger
                  models want one)
    bos           how the vocabulary spells BOS
    name          of the file that the template comes from, for messages
    """

    def __init__(
        self, source: str | None, *, small_family: bool, bos: str, eos: str = "<eos>", name: str = ""
    ):
        if not isinstance(source, str | None):
            raise ValueError(
                f"tokenizer.chat_template: {type(source).__name__}, expected text; convert the model again"
            )
        self.is_builtin = source is None
        self.source = builtin_source() if source is None else source
        self._small_family = small_family
        self._bos, self._eos, self._name = bos, eos, name
        # Templates that ask for the role "tool" read such messages themselves; the oldest one wants
        # `tool_responses`.
        self._fold_results = "tool_responses" in self.source and not _ASKS_FOR_TOOL_ROLE.search(self.source)
        self._is_gemma = all(marker in self.source for marker in TURN_MARKERS)

    @cached_property
    def _environment(self) -> "BoundedEnvironment":
        from refimpl.frontend.template_sandbox import BoundedEnvironment  # here: importing Jinja takes 40 ms

        return BoundedEnvironment()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text.  What cannot be rendered is a `ValueError` of one line.

        messages  [{"role": ..., "content": ...}, ...] as in the chat API of OpenAI, with everything that it
                  allows
        tools     declarations as there
        thinking  let the model think before it answers
        extra     further variables of the template, such as preserve_thinking
        """
        variables = self._variables(messages, tools)
        fence = unused_character([self.source, *_strings_in([variables, extra or {}])])
        given = map_strings([variables, extra or {}], _fencer(TURN_MARKERS, fence))
        return self._render(given[0], thinking, add_generation_prompt, given[1]).replace(fence, "")

    def render_ids(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        media: Sequence[MediaPart] = (),
        generated: Mapping[int, Written] | None = None,
        continue_final: bool = False,
    ) -> list[int]:
        """The prompt as token ids: one BOS in front, and no markers but the template's own.

        media           what stands in the places of images, sounds and videos, in order; without any the
                        template's placeholders stay, one token each
        generated       ids of assistant's messages, by index: they stand in place of the ids of the text
        continue_final  the last message is the beginning of the answer (its thoughts, text, or both), which
                        the model goes on with
        """
        head, final = self._without_final(messages) if continue_final else (messages, None)
        variables = self._variables(head, tools)
        strings = [self.source, *_strings_in([variables, extra or {}, final])]
        fence = unused_character(strings)
        mark = unused_character([*strings, fence])
        fenced = _fencer(tokenizer.markers, fence)

        def text_of(variables: dict[str, Any]) -> str:
            free = map_strings(extra or {}, fenced)
            try:
                text = self._render(map_strings(variables, fenced), thinking, add_generation_prompt, free)
            except _Refused as error:
                raise ValueError(f"{self._culprit(head, tools, thinking, free)}: {error}") from error
            if final is not None:
                text = _begun(text, map_strings(final, fenced))
            # the markers in users' texts are fenced: these are the template's
            return expand(text, media) if media else text

        pieces: list[str | list[int]] | set[int] = set()
        written = dict(generated or {})
        if final is not None:
            written.pop(len(head), None)  # where its text ends is not where its last token does
        while written and isinstance(pieces, set):
            text = text_of(self._variables(with_marks(head, written, tokenizer, mark), tools))
            pieces = cut(text, head, written, tokenizer, mark)
            if isinstance(pieces, set):
                written = {k: answer for k, answer in written.items() if k not in pieces}
        if isinstance(pieces, set):
            pieces = [text_of(variables)]

        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, str):
                ids += tokenizer.encode(piece, add_bos=not ids, parse_special=True, fence=fence)
            else:
                ids += piece
        return ids

    def _without_final(self, messages: Any) -> tuple[Any, Message | None]:
        """The messages before the last, and the last one in plain form: the beginning of an answer."""
        *head, last = messages if isinstance(messages, list | tuple) and messages else [None]
        where = place_of(last, f"messages[{len(head)}]")
        if not isinstance(last, Mapping):
            raise ValueError(f"{where}: {shown(last)}, expected an object with a role and a content")
        [final] = normalize_messages([Placed(last, where)], null=None, fold_results=False)
        if final["role"] != "assistant" or final.get("tool_calls"):
            raise ValueError(
                f"{where}: role {final['role']}, {len(final.get('tool_calls', ()))} calls; "
                "expected an assistant's message without calls, whose text the answer goes on with"
            )
        return head, final

    def _culprit(self, messages: Sequence[Any], tools: Any, thinking: bool, extra: Mapping[str, Any]) -> str:
        """The field of the first message that the template does not take behind those before it."""
        begin, taken, refused = time.perf_counter(), 0, len(messages)
        while refused - taken > 1:
            if time.perf_counter() - begin > MAX_SECONDS:
                return "messages"
            k = (taken + refused) // 2
            try:
                self._render(self._variables(messages[:k], tools), thinking, True, extra)
            except ValueError:
                refused = k
            else:
                taken = k
        return place_of(messages[refused - 1], f"messages[{refused - 1}]") if messages else "messages"

    def _variables(self, messages: Any, tools: Any) -> dict[str, Any]:
        from refimpl.frontend.template_functions import NULL

        try:
            return {
                "messages": normalize_messages(messages, null=NULL, fold_results=self._fold_results),
                "tools": normalize_tools(tools) or None,
            }
        except RecursionError:
            raise ValueError("messages: nested too deeply, expected at most some hundred levels") from None

    def _render(
        self,
        variables: dict[str, Any],
        thinking: bool,
        add_generation_prompt: bool,
        extra: Mapping[str, Any] | None,
    ) -> str:
        given = {
            "enable_thinking": thinking,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._bos,
            "eos_token": self._eos,
            "small_family": self._small_family,
            **{key: value for key, value in (extra or {}).items() if key not in ("bos_token", "eos_token")},
            **variables,
        }
        seconds = MAX_SECONDS + SECONDS_PER_PAIR * len(variables["messages"]) ** 2
        try:
            text = self._environment.render(self.source, given, seconds=seconds)
        except ValueError as error:
            if self.is_builtin or not self._name:
                raise _Refused(str(error)) from error
            raise _Refused(
                f"{self._name}: {error} (the file's own template did not take these messages: change them, "
                "use another file, or give a raw prompt, which needs no template)"
            ) from error
        return balanced(text, open_model_turn=add_generation_prompt) if self._is_gemma else text


def _begun(text: str, final: Message) -> str:
    """A prompt that ends in the beginning of the answer: thoughts, text, or closed thoughts and text."""
    content, thought = final["content"], final.get("reasoning_content") or final.get("reasoning") or ""
    if not isinstance(content, str):
        raise ValueError("messages: the answer to go on with has media, expected text")
    if thought:
        text = text.removesuffix(_EMPTY_THOUGHT).removesuffix(_OPEN_THOUGHT) + _OPEN_THOUGHT + thought
        return text + (f"\n<channel|>{content}" if content else "")
    return text + ("<channel|>" if content and text.endswith(_OPEN_THOUGHT) else "") + content


@cache
def builtin_source() -> str:
    """The template for files that carry none."""
    return Path(__file__).with_name("gemma4.jinja").read_text(encoding="utf-8")


def _fencer(markers: Sequence[str], fence: str) -> Callable[[str], str]:
    """A function that makes every marker in a text unreadable, those included that the text around it would
    complete.
    """
    beginnings = {marker[:k] for marker in markers for k in range(1, len(marker))}
    longest = max(map(len, markers), default=0)

    def fenced(text: str) -> str:
        for marker in markers:
            if marker in text:
                text = text.replace(marker, marker[0] + fence + marker[1:])
        end = len(text.rstrip())  # templates trim, and then write on
        for k in range(min(longest, end), 0, -1):
            if text[end - k : end] in beginnings:
                return text[: end - k + 1] + fence + text[end - k + 1 :]
        return text

    return fenced


def _strings_in(value: Any) -> list[str]:
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    map_strings(value, note)
    return found
