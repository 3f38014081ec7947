"""What a caller asks of the engine and hears from it: requests, events, usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fastpath.engine.scheduler import Task
from refimpl.batch import SoftTokens
from refimpl.frontend.constraint import Constraint
from refimpl.frontend.sampling import Logprob, SamplingParams

Reason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Request:
    """A prompt, and how to go on from it.

    prompt_ids   the whole conversation so far: what of it is in the cache already is found by its ids
    soft         images and sounds, by their positions in the prompt; nobody writes to their rows afterwards,
                 since the prefix cache knows them by what they were
    params       of sampling; a draw depends on (seed, position) only, so company changes no answer
    max_tokens   of the answer; 0 computes the prompt and leaves it in the prefix cache
    stop_ids     end the answer and are no part of it; None: the model's end-of-generation tokens
    want_logits  every Token event carries the row that it was drawn from
    constraint   what may come next; it is told every token of the answer, so each request has one of its own
    n_logprobs   every Token event says how likely the model found it, and so many likeliest ones; None: not
    n_prompt_logprobs  the same of the prompt's tokens, in a PromptRead event before all others; None: not.
                 Such a prompt is computed anew: rows of what the prefix cache holds are nowhere
    """

    prompt_ids: Sequence[int]
    soft: Sequence[SoftTokens] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 100
    stop_ids: frozenset[int] | None = None
    want_logits: bool = False
    constraint: Constraint | None = None
    n_logprobs: int | None = None
    n_prompt_logprobs: int | None = None


@dataclass
class Usage:
    """What a request took so far.

    prompt       tokens of the prompt
    cached       of these, how many were in the prefix cache when it was first admitted
    computed     the others; cached + computed == prompt, once it was admitted
    generated    tokens of the answer
    recomputed   tokens that went through the model again, because pages ran out and the request had to wait
    preemptions  how often that was
    queue_s      seconds until it was first admitted
    first_s      seconds until its first token
    prefill_s    seconds of the calls that computed its prompt, with whoever else was in them
    decode_s     seconds of the calls after its first token
    """

    prompt: int
    cached: int = 0
    computed: int = 0
    generated: int = 0
    recomputed: int = 0
    preemptions: int = 0
    queue_s: float = 0.0
    first_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class Token:
    """`token` is number `index` of the answer to request `id`.

    logits   f32[V] as it was drawn from, if the request wants it
    logprob  of these, before a constraint or a sampler changed them, if the request wants it
    """

    id: int
    index: int
    token: int
    logits: np.ndarray | None = None
    logprob: Logprob | None = None


@dataclass(frozen=True)
class PromptRead:
    """How likely the model found each token of the prompt; None for the first, which nothing predicts."""

    id: int
    logprobs: tuple[Logprob | None, ...]


@dataclass(frozen=True)
class Finished:
    """The last event of a request. error: what went wrong, for the reason "error"."""

    id: int
    reason: Reason
    usage: Usage
    error: Exception | None = None


Event = Token | PromptRead | Finished


@dataclass(frozen=True)
class Result:
    """An answer so far, or all of it: `reason` is None while it is being made."""

    tokens: tuple[int, ...]
    reason: Reason | None
    usage: Usage
    error: Exception | None = None
    prompt_logprobs: tuple[Logprob | None, ...] = ()

    @property
    def n_told(self) -> int:
        """Tokens of which something is kept here."""
        return len(self.tokens) + len(self.prompt_logprobs)


@dataclass(eq=False)
class Record:
    """A request while the engine has it.

    ids       prompt and answer so far: what is in the cache, or has to get there
    n_computed  of them, at most: later preemptions took it away again
    is_sound  False: it met NaN, and nothing of it may serve others
    n_accepted  tokens of the answer that the constraint was told
    prompt_logprobs  of the prompt's first tokens, if the request wants them: as far as it was computed once
    """

    id: int
    request: Request
    ids: list[int]
    stop_ids: frozenset[int]
    task: Task
    usage: Usage
    began: float
    n_computed: int = 0
    is_admitted: bool = False
    reason: Reason | None = None
    error: Exception | None = None
    is_sound: bool = True
    is_streamed: bool = False
    n_accepted: int = 0
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)

    @property
    def wants_prompt_rows(self) -> bool:
        wanted = self.request.n_prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.n_prompt

    @property
    def soft(self) -> Sequence[SoftTokens]:
        return self.request.soft

    @property
    def n_prompt(self) -> int:
        return self.usage.prompt

    @property
    def n_answer(self) -> int:
        return len(self.ids) - self.n_prompt

    def result(self) -> Result:
        tokens = tuple(self.ids[self.n_prompt :])
        return Result(tokens, self.reason, self.usage, self.error, tuple(self.prompt_logprobs))
