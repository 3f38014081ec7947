"""What chats and raw completions of OpenAI's API have in common: members of requests, numbers of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from fastpath.server.errors import ApiError, shape
from fastpath.server.service import MAX_CHOICES, NAMES, Fields
from fastpath.server.streams import sse
from fastpath.talk.events import Finish
from refimpl.frontend import grammar as forms
from refimpl.frontend.sampling import Logprob
from refimpl.frontend.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class Sampled(Fields):
    """What chats and raw completions have in common."""

    model: str = ""
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    min_tokens: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    regex: str | None = None
    grammar: str | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)

    def sampling(self) -> dict[str, Any]:
        """For `Service.params`."""
        repeat = self.repeat_penalty if self.repeat_penalty is not None else self.repetition_penalty
        names = ("seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
        return {name: getattr(self, name) for name in names} | {
            "repeat_penalty": repeat,
            "bias": self.logit_bias,
        }

    def names(self) -> dict[str, str]:
        given = "repeat_penalty" if self.repeat_penalty is not None else "repetition_penalty"
        return {**NAMES, "repeat_penalty": given}

    @property
    def wants_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def check_prompt_logprobs(self) -> None:
        if self.prompt_logprobs is not None and self.stream:
            message = (
                "prompt_logprobs: not in a stream, as in vLLM, whose field this is. Leave out one of the two"
            )
            raise ApiError(400, message, field="prompt_logprobs")

    def form(self) -> forms.Grammar | None:
        """What OpenAI's API does not have: `regex`, and `grammar` in the syntax of llama.cpp or Lark."""
        if self.regex is not None and self.grammar is not None:
            message = "regex: a form of the answer beside grammar, expected one of them"
            raise ApiError(400, message, field="regex")
        if self.regex is not None:
            return forms.regex(self.regex)
        if self.grammar is not None:
            return forms.gbnf(self.grammar) if "::=" in self.grammar else forms.lark(self.grammar)
        return None


def failed(error: ApiError) -> bytes:
    """An error in the middle of a stream."""
    return sse(shape("/v1/", error))


def prompt_logprobs_of(
    tokenizer: Tokenizer, found: Sequence[Logprob | None], n_top: int
) -> list[dict[str, Any] | None]:
    """The tokens of a prompt and the likeliest ones at their places, as vLLM writes them."""

    def one(token: int, value: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_bytes(token).decode("utf-8", "replace")
        return {"logprob": value, "rank": rank, "decoded_token": text}

    listed: list[dict[str, Any] | None] = []
    for each in found:
        if each is None:
            listed.append(None)
            continue
        top = {str(token): one(token, value, k + 1) for k, (token, value) in enumerate(each.top[:n_top])}
        listed.append({str(each.token): one(each.token, each.logprob, each.rank)} | top)
    return listed


def usage_of(ends: Sequence[Finish], n: int = MAX_CHOICES) -> dict[str, Any]:
    """Of all answers. n: to each prompt; the first one's usage says what its prompt was."""
    usages = [end.usage for end in ends]
    firsts = {end.choice // n: end.usage for end in sorted(ends, key=lambda end: -end.choice)}.values()
    prompt, generated = sum(usage.prompt for usage in firsts), sum(usage.generated for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached for usage in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.thought for usage in usages)},
    }


def timings(ends: Sequence[Finish]) -> dict[str, float]:
    """Of the first answer, in milliseconds."""
    usage = ends[0].usage
    return {
        "queue_ms": 1e3 * usage.queue_s,
        "first_token_ms": 1e3 * usage.first_s,
        "prompt_ms": 1e3 * usage.prefill_s,
        "predicted_ms": 1e3 * usage.decode_s,
        "predicted_per_second": usage.per_second,
    }
