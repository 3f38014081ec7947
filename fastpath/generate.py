"""Tokens one after the other: the answer to one prompt."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fastpath.engine import Engine, Request, Usage
from refimpl.batch import SoftTokens
from refimpl.frontend.sampling import SamplingParams


@dataclass
class Generation:
    """The ids of an answer, made while they are read. `reason` is known when they end: "stop" or "length".

    Who stops reading before says so with `end`, and may set a reason.
    """

    engine: Engine
    request: Request
    progress: Callable[[int, int], None] | None = None
    reason: str | None = None
    id: int | None = None
    n_prefilled: int = 0  # tokens of the prompt that are done
    usage: Usage | None = None

    def __iter__(self) -> Iterator[int]:
        self.id = self.engine.add(self.request)
        self.usage = self.engine.usage(self.id)
        try:
            yield from self.engine.stream(self.id, self._progressed)
        finally:
            self.end()

    def end(self) -> None:
        """No more tokens are wanted."""
        if self.id is not None:
            self.engine.abort(self.id)
            self.reason = self.reason or self.engine.result(self.id).reason

    def _progressed(self, done: int, total: int) -> None:
        self.n_prefilled = done
        if self.progress is not None:
            self.progress(done, total)

    @property
    def prefill_s(self) -> float:
        return self.usage.prefill_s if self.usage else 0.0

    @property
    def decode_s(self) -> float:
        return self.usage.decode_s if self.usage else 0.0

    @property
    def n_decoded(self) -> int:
        """Tokens that were computed after the first one: the last of an answer is not, unless it went on."""
        if self.usage is None or not self.usage.generated:
            return 0
        return self.usage.generated - (self.reason == "length")


def generate(
    engine: Engine,
    prompt_ids: Sequence[int],
    params: SamplingParams | None = None,
    max_tokens: int = 100,
    *,
    stop_ids: Iterable[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    soft: Sequence[SoftTokens] = (),
) -> Generation:
    """An answer to a prompt: the whole conversation so far, of which the engine keeps what it has computed.

    stop_ids   ids that end the answer and are not part of it; None = the model's end-of-generation tokens
    progress   (done, total) prompt tokens, after each chunk; an exception from it ends the prefill there
    soft       images and sounds of the prompt, by their positions

    The draw of a token depends on (seed, position) only: see frontend/sampling.py.
    """
    ends = None if stop_ids is None else frozenset(stop_ids)
    request = Request(prompt_ids, soft, params or SamplingParams(), max_tokens, ends)
    return Generation(engine, request, progress)
