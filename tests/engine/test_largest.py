"""From a row's largest logits the token that the whole row gives."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fastpath.largest import draw, wanted
from refimpl.frontend.sampling import SamplingParams, sample
from refimpl.ops import top_k

# few values, so that equal ones are many
ROWS = st.lists(st.integers(-6, 6), min_size=1, max_size=60).map(lambda row: np.array(row, np.float32) / 2)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 40.0]), top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.7, 0.1]),
    min_p=st.sampled_from([0.0, 0.2]), repeat_penalty=st.sampled_from([1.0, 1.3, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, 2.0]), frequency_penalty=st.sampled_from([0.0, 0.25]),
    penalty_window=st.sampled_from([-1, 0, 3, 64]), seed=st.integers(0, 9),
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
    assume(k is not None and not set(range(len(row))) <= set(suppress))
    values, ids = top_k(row[None], k)
    want = sample(row, params, history, position, suppress)
    assert draw(values[0], ids[0], params, history, position, suppress) == want


@pytest.mark.parametrize(
    ("params", "k"),
    [
        ({}, 3), ({"temperature": 1.0}, None), ({"temperature": 1.0, "top_k": 64, "top_p": 0.95}, 66),
        ({"temperature": 1.0, "top_k": 255}, None), ({"repeat_penalty": 1.1, "penalty_window": 2}, 5),
        ({"repeat_penalty": 0.9}, None), ({"presence_penalty": -0.1}, None),
        ({"frequency_penalty": -0.1}, None),
    ],
)  # fmt: skip
def test_how_many_are_wanted(params, k):
    """Two suppressed ids, and a history of three tokens of which the last two differ."""
    assert wanted(SamplingParams(**params), [5, 5, 7], [1, 2]) == k


def test_a_row_that_is_not_finite():
    values, ids = top_k(np.array([[1.0, np.inf, np.nan, 0.0]], np.float32), 2)
    with pytest.raises(ValueError, match=r"logits\[1\] is no finite number"):
        draw(values[0], ids[0], SamplingParams())
