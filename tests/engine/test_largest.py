"""From a row's largest logits the token that the whole row gives."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fastpath.cpu
from fastpath import arrays
from fastpath.engine import Request
from fastpath.lanes import Lanes
from fastpath.largest import Largest, class_of, draw, wanted
from refimpl.frontend.sampling import SamplingParams, sample
from refimpl.ops import top_k
from tests.engine.crafted import Crafted, answers, requests

# few values, so that equal ones are many, both zeros among them
VALUES = st.sampled_from([*(k / 2 for k in range(-6, 7)), -0.0])
ROWS = st.lists(VALUES, min_size=1, max_size=60).map(lambda row: np.array(row, np.float32))
BIAS = st.dictionaries(st.integers(0, 61), st.sampled_from([-np.inf, -1.5, -0.25, 0.0]), max_size=3)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 40.0]), top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.7, 0.1]),
    min_p=st.sampled_from([0.0, 0.2]), repeat_penalty=st.sampled_from([1.0, 1.3, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, 2.0]), frequency_penalty=st.sampled_from([0.0, 0.25]),
    penalty_window=st.sampled_from([-1, 0, 3, 64]), seed=st.integers(0, 9),
    bias=st.just({}) | BIAS,
)  # fmt: skip
IDS = st.lists(st.integers(0, 61), max_size=8)
FEW = st.lists(st.integers(0, 61), max_size=3)


@given(
    row=ROWS,
    params=PARAMS,
    history=IDS,
    suppress=st.lists(st.integers(0, 61), max_size=3),
    position=st.integers(0, 99),
)
def test_the_same_token(row, params, history, suppress, position):
    k = wanted(params, history, suppress)
    never = {token for token, number in params.bias if number == -np.inf}
    assume(k is not None and not set(range(len(row))) <= {*suppress, *never})
    want = sample(row, params, history, position, suppress)
    for most in (k, class_of(k)):
        found = Largest(*top_k(row[None], most))
        assert draw(found[0], params, history, position, suppress) == want


@pytest.mark.parametrize(
    ("params", "k"),
    [
        ({}, 3), ({"temperature": 1.0}, None), ({"temperature": 1.0, "top_k": 64, "top_p": 0.95}, 66),
        ({"temperature": 1.0, "top_k": 255}, None), ({"repeat_penalty": 1.1, "penalty_window": 2}, 5),
        ({"repeat_penalty": 0.9}, None), ({"presence_penalty": -0.1}, None),
        ({"frequency_penalty": -0.1}, None), ({"bias": {2: -1.0, 4: -np.inf}}, 4), ({"bias": {2: 0.5}}, None),
    ],
)  # fmt: skip
def test_how_many_are_wanted(params, k):
    """Two suppressed ids, and a history of three tokens of which the last two differ."""
    assert wanted(SamplingParams(**params), [5, 5, 7], [1, 2]) == k


def test_a_row_that_is_not_finite():
    for k in (1, 2, 5):
        found = Largest(
            *top_k(np.array([[0, 3, 2, 1], [1.0, 9, np.inf, 0.0], [7, 1, 0, -np.inf]], np.float32), k)
        )
        assert found.not_finite() == [1, 2]
        assert draw(found[0], SamplingParams()) == 1
        for row, bad in ((1, 2), (2, 3)):
            with pytest.raises(ValueError, match=rf"logits\[{bad}\] is no finite number"):
                draw(found[row], SamplingParams())


class Elsewhere(Crafted):
    """The CPU's table, as if its results lay somewhere else."""

    arrays = arrays


@settings(max_examples=60)
@given(
    asked=requests(),
    seed=st.integers(0, 99),
    suppress=st.sampled_from([(), (2, 30, 9999)]),
    cap=st.booleans(),
)
def test_an_engine_draws_the_same(tiny_model, asked, seed, suppress, cap):
    """Tokens, ends and faults, in company of those who want whole rows."""
    model = tiny_model("12b")
    options = {"n_seqs": 3, "replay": False}
    with patch.object(model.tokenizer, "suppress_ids", suppress):
        want, _ = answers(Crafted(fastpath.cpu, model, cap), model, asked, seed, by_rows=True, **options)
        got, _ = answers(Elsewhere(fastpath.cpu, model, cap), model, asked, seed, by_rows=False, **options)
    assert got == want


@pytest.mark.parametrize("table", [Crafted, Elsewhere])
def test_who_asks_for_the_largest(tiny_model, table, monkeypatch):
    """Where rows lie on the host already, nobody; else whoever can."""
    model, asked = tiny_model("12b"), []
    largest = Lanes.largest
    monkeypatch.setattr(Lanes, "largest", lambda self, *call: asked.append(call[1]) or largest(self, *call))
    for params, more in (({}, {}), ({"temperature": 1.0, "top_k": 64}, {}), ({}, {"n_logprobs": 1})):
        request = Request([2, 5, 7], (), SamplingParams(**params), 2, frozenset(), **more)
        answers(table(fastpath.cpu, model), model, [request], 0, by_rows=False, replay=False)
    assert asked == ([] if table is Crafted else [1, 1, 64, 64])
