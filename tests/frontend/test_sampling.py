"""Sampling: arithmetic done by hand, distributions by chi-square, and what must not matter."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from refimpl.frontend.sampling import SamplingParams, distribution, log_softmax, sample, softmax, uniform

LOGITS = np.array([2.0, -1.0, 0.5, 1.0, 0.5], np.float32)
rows = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=2, max_size=30).map(np.array)
samplers = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    seed=st.integers(0, 2**64 - 1),
)


# -- by hand ---------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equal_ids():
    assert sample(np.array([1.0, 3.0, 3.0, 2.0]), SamplingParams()) == 1
    assert sample(np.full(7, -2.0), SamplingParams()) == 0


def test_penalties():
    # history 0 0 1: logit 2 -> 2 / 2 - 2 * 0.25 - 0.125, logit -1 -> -1 * 2 - 0.25 - 0.125, the others stay
    params = SamplingParams(temperature=1, repeat_penalty=2, presence_penalty=0.125, frequency_penalty=0.25)
    expected = np.array([0.375, -2.375, 0.5, 1.0, 0.5])
    np.testing.assert_allclose(
        distribution(LOGITS, params, [0, 0, 1]), np.exp(expected) / np.exp(expected).sum()
    )
    assert sample(LOGITS, SamplingParams(repeat_penalty=2, presence_penalty=0.125), [0]) == 3  # 0.875 < 1


def test_penalties_look_at_a_window():
    def penalized(window):
        return sample(LOGITS, SamplingParams(presence_penalty=5, penalty_window=window), [0, 3, 3, 3]) != 0

    assert [penalized(w) for w in (-1, 4, 3, 0)] == [True, True, False, False]
    assert penalized(64)


def test_penalties_ignore_ids_that_do_not_exist():
    params = SamplingParams(presence_penalty=5)
    assert sample(LOGITS, params, [-1, 99]) == 0


def kept(params):
    return np.flatnonzero(distribution(LOGITS, params)).tolist()


def test_top_k():
    assert kept(SamplingParams(temperature=1, top_k=1)) == [0]
    assert kept(SamplingParams(temperature=1, top_k=3)) == [0, 2, 3]  # of the two 0.5 the lower id
    assert kept(SamplingParams(temperature=1, top_k=99)) == [0, 1, 2, 3, 4]


def test_top_p():
    # probabilities in order of size: 0: 0.5365, 3: 0.1974, 2 and 4: 0.1197, 1: 0.0267
    assert kept(SamplingParams(temperature=1, top_p=0.5)) == [0]
    assert kept(SamplingParams(temperature=1, top_p=0.7)) == [0, 3]
    assert kept(SamplingParams(temperature=1, top_p=0.74)) == [0, 2, 3]
    assert kept(SamplingParams(temperature=1, top_p=0.97)) == [0, 2, 3, 4]
    assert kept(SamplingParams(temperature=1, top_p=0.98)) == [0, 1, 2, 3, 4]


def test_min_p():
    # e^-1 = 0.368, e^-1.5 = 0.223, e^-3 = 0.0498
    assert kept(SamplingParams(temperature=1, min_p=0.5)) == [0]
    assert kept(SamplingParams(temperature=1, min_p=0.3)) == [0, 3]
    assert kept(SamplingParams(temperature=1, min_p=0.2)) == [0, 2, 3, 4]
    assert kept(SamplingParams(temperature=1, min_p=0.04)) == [0, 1, 2, 3, 4]


def test_limits_do_not_see_the_temperature():
    for temperature in (0.1, 1, 100):
        assert kept(SamplingParams(temperature=temperature, top_p=0.7)) == [0, 3]
        assert kept(SamplingParams(temperature=temperature, min_p=0.2)) == [0, 2, 3, 4]


def test_top_p_counts_what_top_k_left():
    # of 0: 0.5365 and 3: 0.1974 the first has 0.731
    assert kept(SamplingParams(temperature=1, top_k=2, top_p=0.73)) == [0]
    assert kept(SamplingParams(temperature=1, top_k=2, top_p=0.74)) == [0, 3]


def test_temperature():
    probs = distribution(LOGITS, SamplingParams(temperature=2))
    assert probs[0] / probs[3] == pytest.approx(math.exp(0.5))
    assert distribution(LOGITS, SamplingParams(temperature=1e-4))[0] == pytest.approx(1)
    np.testing.assert_allclose(distribution(LOGITS, SamplingParams(temperature=1e6)), 0.2, rtol=1e-5)


def test_suppressed_tokens_never_come():
    assert sample(LOGITS, SamplingParams(), suppress=(0, 3)) == 2
    assert distribution(LOGITS, SamplingParams(temperature=1), suppress=[0, 77])[0] == 0
    with pytest.raises(ValueError, match="suppress: all 5 tokens"):
        sample(LOGITS, SamplingParams(), suppress=range(5))


def test_log_softmax():
    np.testing.assert_allclose(log_softmax(np.zeros(4)), -1.3862943611198906)
    np.testing.assert_allclose(log_softmax(np.array([1000.0, 0.0])), [0.0, -1000.0])
    assert log_softmax(LOGITS).dtype == np.float64
    np.testing.assert_allclose(softmax(np.stack([LOGITS, LOGITS + 3])).sum(axis=-1), 1)


# -- draws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1),
        SamplingParams(temperature=0.7, top_k=3, seed=5),
        SamplingParams(temperature=1.5, top_p=0.9, seed=7),
        SamplingParams(temperature=1, min_p=0.2, repeat_penalty=1.5, seed=11),
    ],
)
def test_draws_follow_the_distribution(params):
    n_draws = 4000
    drawn = np.bincount([sample(LOGITS, params, [0], k) for k in range(n_draws)], minlength=5)
    expected = distribution(LOGITS, params, [0]) * n_draws
    possible = expected > 0
    assert drawn[~possible].sum() == 0
    assert stats.chisquare(drawn[possible], expected[possible]).pvalue > 1e-3


def test_draws_of_neighbours_are_independent():
    at_positions = [uniform(0, k) for k in range(4000)]
    of_seeds = [uniform(k, 0) for k in range(4000)]
    for numbers in (at_positions, of_seeds):
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.06  # 4 / sqrt(4000)
    assert uniform(3, 4) != uniform(4, 3)
    assert uniform(2**64 - 1, 2**40) != uniform(2**64 - 2, 2**40)  # all bits of a seed count


# -- what must hold for all ------------------------------------------------------------------------


@given(rows, samplers, st.lists(st.integers(0, 29), max_size=8), st.integers(0, 1000))
def test_a_sample_is_possible_and_repeatable(logits, params, history, position):
    token = sample(logits, params, history, position)
    probs = distribution(logits, params, history)
    assert probs[token] > 0
    assert probs.sum() == pytest.approx(1)
    assert token == sample(logits.copy(), params, np.array(history, np.int32), position)


@given(rows, samplers, st.integers(0, 1000), st.integers(-8, 8))
def test_adding_a_constant_changes_nothing(logits, params, position, shift):
    free = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, seed=params.seed
    )
    assert sample(logits, free, (), position) == sample(logits + shift, free, (), position)


@given(rows, samplers, st.data())
def test_the_order_of_the_vocabulary_does_not_matter(logits, params, data):
    distinct = logits + np.arange(len(logits)) / 1000  # ties go by id
    order = np.array(data.draw(st.permutations(range(len(logits)))))
    np.testing.assert_allclose(
        distribution(distinct, params)[order], distribution(distinct[order], params), atol=1e-12
    )


def test_limits_on_a_large_vocabulary():
    logits = np.random.default_rng(0).normal(0, 3, 20_000)
    order = np.argsort(-logits, kind="stable")
    sums = np.cumsum(softmax(logits)[order])
    for top_p in (0.1, 0.9, 0.999):
        expected = np.sort(order[: np.flatnonzero(sums >= top_p)[0] + 1])
        probs = distribution(logits, SamplingParams(temperature=1, top_p=top_p))
        assert np.array_equal(np.flatnonzero(probs), expected)
    probs = distribution(logits, SamplingParams(temperature=1, top_k=64))
    assert np.array_equal(np.flatnonzero(probs), np.sort(order[:64]))


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_logits(bad):
    logits = LOGITS.copy()
    logits[3] = bad
    with pytest.raises(ValueError, match=r"^logits\[3\] is .*, expected finite numbers; .*--backend ref$"):
        sample(logits, SamplingParams())


@pytest.mark.parametrize("logits", [np.zeros((2, 3)), np.zeros(0), 1.0])
def test_no_row_of_logits(logits):
    with pytest.raises(ValueError, match="logits: shape"):
        sample(logits, SamplingParams())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("top_k", -1), ("top_k", 1.5), ("top_p", 0), ("top_p", 1.01), ("top_p", -1),
        ("min_p", -0.1), ("min_p", 1.1),
        ("repeat_penalty", 0), ("repeat_penalty", -1), ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf), ("penalty_window", -2), ("seed", -1), ("seed", 2**64),
        ("seed", 1.0), ("top_k", True),
    ],
)  # fmt: skip
def test_parameters_that_make_no_sense(name, value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name}: {value!r}, expected ")
    assert "\n" not in str(caught.value)


# -- a vocabulary of real size takes shorter ways ----------------------------------------------------


@given(st.integers(0, 2**32), st.sampled_from([1, 3, 64]), st.booleans())
def test_the_largest_of_a_vocabulary_are_those_of_a_sorted_one(seed, top_k, has_ties):
    logits = np.random.default_rng(seed).standard_normal(5000).astype(np.float32)
    if has_ties:
        logits = np.round(logits * 2) / 2
    order = np.argsort(-logits, kind="stable")  # of equal ones the lower id first
    chosen = np.flatnonzero(distribution(logits, SamplingParams(temperature=1, top_k=top_k)))
    assert sorted(order[:top_k]) == chosen.tolist()
    assert sample(logits, SamplingParams()) == order[0]
    assert sample(logits, SamplingParams(), suppress=iter([order[0], order[1]])) == order[2]
