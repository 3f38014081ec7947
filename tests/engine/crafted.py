"""An op table whose logits a test makes, and what an engine answers on them."""

from dataclasses import replace
from itertools import count
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st

from fastpath import arrays
from fastpath.engine import Engine, Request, engine
from refimpl.frontend.sampling import SamplingParams
from tests import tiny

ROWS = 40  # of the longest call
SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 3e38)


class Crafted:
    """`ops`, but for the product with the output matrix: that is `rows`, whatever comes in.

    rows  f32[ROWS, V], before the soft cap, if there is one
    """

    def __init__(self, ops, model, is_capped=True):
        self._ops, self._output, self._is_capped = ops, model.weights.output, is_capped
        self.rows = np.zeros((ROWS, model.config.vocab_size), np.float32)

    def __getattr__(self, name):
        return getattr(self._ops, name)

    def linear(self, x, weight, activations):
        if weight is not self._output:
            return self._ops.linear(x, weight, activations)
        return arrays.of(self._ops).put(self.rows[: len(x)])

    def softcap(self, x, cap):
        return self._ops.softcap(x, cap) if self._is_capped else x

    def top_k(self, logits, k, cap):
        return self._ops.top_k(logits, k, cap if self._is_capped else None)

    def fill(self, seed):
        """Normal numbers, or few different ones, some beyond the cap; in one row of five an odd one."""
        rng = np.random.default_rng(seed)
        for row in self.rows:
            row[:] = rng.choice([0.0, -0.0, 0.5, 1.5, 90.0, 99.0], len(row))
            if rng.random() < 0.5:
                row[:] = rng.standard_normal(len(row)) * rng.choice([1, 30])
            if rng.random() < 1 / 5:
                row[rng.integers(len(row))] = rng.choice(SPECIAL)


def with_layers(model, *kept):
    """Fewer of its layers, of which each has keys of its own."""
    layers = tuple(replace(model.config.layers[i], index=n, kv_from=n) for n, i in enumerate(kept))
    weights = replace(model.weights, layers=tuple(model.weights.layers[i] for i in kept))
    return replace(model, config=replace(model.config, layers=layers), weights=weights)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 9.0]), top_k=st.sampled_from([0, 1, 5, 64, 200]),
    top_p=st.sampled_from([1.0, 0.9]), min_p=st.sampled_from([0.0, 0.1]), seed=st.integers(0, 9),
    repeat_penalty=st.sampled_from([1.0, 1.0, 1.2]), bias=st.sampled_from([{}, {}, {40: -2.0}, {40: 2.0}]),
)  # fmt: skip


@st.composite
def requests(draw, most=4):
    """Few that stop, few that want to be told more."""
    found = []
    for _ in range(draw(st.integers(1, most))):
        start, n = draw(st.integers(0, 9)), draw(st.integers(1, 20))
        stops = frozenset(draw(st.sets(st.integers(0, 60), max_size=3)))
        odd = draw(st.sampled_from([{}] * 5 + [{"n_logprobs": 2}, {"n_prompt_logprobs": 1}]))
        prompt = tiny.prompt("12b")[start : start + n]
        found.append(Request(prompt, (), draw(PARAMS), draw(st.integers(0, 4)), stops, **odd))
    return found


def answers(table, model, asked, seed, *, by_rows, **options):
    """([what came of each request], the engine).  by_rows: whole rows are brought, whoever asks for what."""
    with patch.object(engine, "largest_of", (lambda *_: None) if by_rows else engine.largest_of):
        made = Engine(model, table, context_len=64, chunk=16, **options)
        ids = [made.add(request) for request in asked]
        for step in count():
            if made.is_idle:
                break
            table.fill((seed, step))
            made.step()
    results = map(made.result, ids)
    return [(r.tokens, r.reason, str(r.error), r.prompt_logprobs) for r in results], made
