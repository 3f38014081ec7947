"""Tokens one after the other: what turns logits into an answer."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastpath.lanes import Lanes
from refimpl.batch import SoftTokens
from refimpl.frontend.sampling import SamplingParams, sample


@dataclass
class Generation:
    """The ids of an answer, made while they are read. `reason` is known when they end: "stop" or "length"."""

    engine: Lanes
    prompt_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    suppress: tuple[int, ...]
    lane: int = 0
    progress: Callable[[int, int], None] | None = None
    soft: Sequence[SoftTokens] = ()
    reason: str | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    n_decoded: int = 0
    history: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[int]:
        begin = time.perf_counter()
        try:
            logits = self.engine.prefill(
                self.prompt_ids, lane=self.lane, soft=self.soft, progress=self.progress
            )
        finally:
            self.prefill_s = time.perf_counter() - begin
        self.history = self.engine.tokens[self.lane].copy()
        self.reason = "length"
        for n in range(self.max_tokens):
            if n > 0:
                if self.engine.room(self.lane) == 0:
                    return
                begin = time.perf_counter()
                logits = self.engine.decode(self.history[-1], lane=self.lane)
                self.decode_s += time.perf_counter() - begin
                self.n_decoded += 1
            token_id = self._sample(logits)
            if token_id in self.stop_ids:
                self.reason = "stop"
                return
            self.history.append(token_id)
            yield token_id

    def _sample(self, logits: np.ndarray) -> int:
        return sample(logits, self.params, self.history, len(self.history), self.suppress)


def generate(
    engine: Lanes,
    prompt_ids: Sequence[int],
    params: SamplingParams | None = None,
    max_tokens: int = 100,
    *,
    lane: int = 0,
    stop_ids: Iterable[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    soft: Sequence[SoftTokens] = (),
) -> Generation:
    """An answer to a prompt that is appended to what the lane holds.

    stop_ids   ids that end the answer and are not part of it; None = the model's end-of-generation tokens
    progress   (done, total) prompt tokens, after each chunk
    soft       images and sounds of the prompt, by their positions in the sequence

    The draw of a token depends on (seed, position) only: see frontend/sampling.py.
    """
    tokenizer = engine.model.tokenizer
    ends = tokenizer.eog_ids if stop_ids is None else frozenset(stop_ids)
    return Generation(
        engine,
        prompt_ids,
        params or SamplingParams(),
        max_tokens,
        ends,
        tokenizer.suppress_ids,
        lane,
        progress,
        soft,
    )
