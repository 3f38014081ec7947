"""Messages, tools and the thinking switch -> the prompt, as text and as token ids.

The template is the one in the model file, or `gemma4.jinja` beside this module for files without one.  It
runs in the sandbox of template_sandbox.py on messages that messages.py has brought into plain form.

Ids are made so that only the template's own markers become marker tokens.  `<turn|>` in the text of a user is
fenced before the template sees it: a character that occurs nowhere else is put behind its `<`.  The tokenizer
reads markers first, then drops the fences, then encodes the text between two markers in one piece, so that
merges reach across from template to user text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refimpl.frontend.media_prompt import MediaPart, expand
from refimpl.frontend.messages import map_strings, normalize_messages, normalize_tools
from refimpl.frontend.tokenizer import Tokenizer, unused_character

if TYPE_CHECKING:
    from refimpl.frontend.template_sandbox import BoundedEnvironment

MAX_SECONDS = 1.5
SECONDS_PER_PAIR = 5e-6  # published templates compare each message with those before it: 2 us for a pair
_OPEN_MODEL_TURN = "<|turn>model\n"
_CLOSED_TURN = "<turn|>\n"
_ASKS_FOR_TOOL_ROLE = re.compile(r"""[!=]=\s*['"]tool['"]""")


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
        self._is_gemma = _CLOSED_TURN.rstrip() in self.source

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
        return self._render(self._variables(messages, tools), thinking, add_generation_prompt, extra)

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
    ) -> list[int]:
        """The prompt as token ids: one BOS in front, and no markers but the template's own.

        media  what stands in the places of images, sounds and videos, in order; without any the template's
               placeholders stay, one token each
        """
        variables = self._variables(messages, tools)
        fence = unused_character([self.source, *_strings_in(variables)])
        fenced = map_strings(variables, _fencer(tokenizer.markers, fence))
        text = self._render(fenced, thinking, add_generation_prompt, extra)
        if media:
            text = expand(text, media)  # the markers in users' texts are fenced: these are the template's
        return tokenizer.encode(text, add_bos=True, parse_special=True, fence=fence)

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
            **(extra or {}),
            **variables,
        }
        seconds = MAX_SECONDS + SECONDS_PER_PAIR * len(variables["messages"]) ** 2
        try:
            text = self._environment.render(self.source, given, seconds=seconds)
        except ValueError as error:
            if self.is_builtin or not self._name:
                raise
            raise ValueError(
                f"{self._name}: {error} (the file's own template did not take these messages: change them, "
                "use another file, or give a raw prompt, which needs no template)"
            ) from error
        if add_generation_prompt and self._is_gemma and text.endswith(_CLOSED_TURN):
            # Published revisions forget the model's turn after a message with calls, results and text.
            # llama.cpp adds it too (common/parsers/gemma4.cpp).
            text += _OPEN_MODEL_TURN
        return text


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
