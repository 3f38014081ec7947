"""What an answer is made of, as it comes, and what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from refimpl.frontend.dialects import ToolChoice
from refimpl.frontend.grammar import Grammar
from refimpl.frontend.messages import Message
from refimpl.frontend.sampling import Logprob, SamplingParams

Reason = Literal["stop", "length", "tool_calls", "abort"]


@dataclass(frozen=True)
class Options:
    """How a conversation is to be gone on with.

    params          of sampling
    max_tokens      of the answer; None: as many as the context holds
    min_tokens      before which it does not end
    n               answers
    stops           strings that end an answer where its text has come to one
    tools           declarations, as OpenAI's chat API has them
    choice          whether and which of them are to be called
    thinking        the model thinks before it answers
    budget          tokens of a thought; None: no limit with thinking on, a short one with thinking off
    schema          JSON schema of the answer; schema_field: what a client calls it
    grammar         form of the answer, other than a schema's
    n_logprobs      events of text carry the log-probabilities of their tokens, and so many likeliest ones
    n_prompt_logprobs  the same of the prompt's tokens, in an event of their own before all others
    continue_final  the last message is the beginning of the answer
    image_tokens    most soft tokens of an image; None: what the exchange was made with
    template        further variables of the template
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    stops: Sequence[str] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    thinking: bool = False
    budget: int | None = None
    schema: Mapping[str, Any] | None = None
    schema_field: str = "response_format"
    grammar: Grammar | None = None
    n_logprobs: int | None = None
    n_prompt_logprobs: int | None = None
    continue_final: bool = False
    image_tokens: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptLogprobs:
    """How likely each token of the prompt is; None for the first. Of all answers, it is told to number 0."""

    choice: int
    found: tuple[Logprob | None, ...]


@dataclass(frozen=True)
class Thought:
    """`text` continues the thought of answer number `choice`."""

    choice: int
    text: str


@dataclass(frozen=True)
class Text:
    """`text` continues the answer. logprobs: of the tokens that it is made of, if they were asked for."""

    choice: int
    text: str
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class Call:
    """One whole call of a tool. index: which of this answer; arguments: JSON, and what it says."""

    choice: int
    index: int
    id: str
    name: str
    arguments: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Usage:
    """Of one answer: tokens and seconds.

    prompt     tokens of the prompt; cached: of these, how many the prefix cache had
    generated  tokens of the answer; thought: of these, in thoughts
    queue_s    until it was admitted; first_s: until the first token, from the beginning
    prefill_s  of the prompt; decode_s: of the tokens after the first
    """

    prompt: int
    cached: int
    generated: int
    thought: int
    queue_s: float
    first_s: float
    prefill_s: float
    decode_s: float

    @property
    def per_second(self) -> float:
        """Tokens after the first, per second; 0 where there are none."""
        return (self.generated - 1) / self.decode_s if self.generated > 1 and self.decode_s > 0 else 0.0


@dataclass(frozen=True)
class Finish:
    """The end of answer number `choice`.

    message      the whole answer, as OpenAI's chat API has it: what to put behind the conversation
    stop_string  the one that ended it
    logprobs     of tokens that no text came of (the rest after the last Text)
    """

    choice: int
    reason: Reason
    usage: Usage
    message: Message
    stop_string: str = ""
    logprobs: tuple[Logprob, ...] = ()


Said = PromptLogprobs | Thought | Text | Call | Finish
