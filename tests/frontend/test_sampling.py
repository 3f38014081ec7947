"""Sampling: arithmetic done by hand, distributions by chi-square, and what must not matter."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from refimpl.frontend.sampling import (
    Logprob,
    SamplingParams,
    distribution,
    log_softmax,
    logprob_of,
    prompt_logprobs,
    sample,
    softmax,
    uniform,
)

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
    bias=st.dictionaries(st.integers(0, 31), st.sampled_from([-100.0, -1.5, 2.0, math.inf * -1]), max_size=1),
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


def test_bias_is_added_before_penalties():
    # -1 + 3 = 2, then 2 / 2 - 0.5 = 0.5; 0.5 + 1 = 1.5; of the others nothing changes
    params = SamplingParams(temperature=1, bias={1: 3, 4: 1.0}, repeat_penalty=2, presence_penalty=0.5)
    np.testing.assert_allclose(
        distribution(LOGITS, params, [1]), softmax(np.array([2.0, 0.5, 0.5, 1.0, 1.5]))
    )
    assert sample(LOGITS, SamplingParams(bias={1: 3.5})) == 1
    assert sample(LOGITS, SamplingParams(bias={1: 3.0})) == 0  # equal to logit 0: the lower id
    assert sample(LOGITS, SamplingParams(bias={0: -100, 3: -100})) == 2


def test_a_bias_of_minus_infinity_forbids():
    params = SamplingParams(temperature=1, bias=[(0, -math.inf), (3, -math.inf)])
    assert np.flatnonzero(distribution(LOGITS, params)).tolist() == [1, 2, 4]
    with pytest.raises(ValueError, match="suppress: all 5 tokens"):
        sample(LOGITS, SamplingParams(bias={k: -math.inf for k in range(5)}))


def test_bias_is_one_thing_however_it_is_given():
    assert SamplingParams(bias={7: 1, 3: -2}) == SamplingParams(bias=((3, -2.0), (7, 1.0)))
    assert hash(SamplingParams(bias={7: 1})) == hash(SamplingParams(bias=[(7, 1)]))
    assert sample(LOGITS, SamplingParams(bias={99: 50.0})) == 0  # no token of this vocabulary


class Forbid:
    """A constraint that forbids some ids and counts how often it was asked."""

    def __init__(self, *ids):
        self.ids, self.histories = list(ids), []

    def mask(self, row, history):
        row[self.ids] = -np.inf
        self.histories.append(list(history))


def test_what_a_constraint_forbids_never_comes():
    kept_row = LOGITS.copy()
    for params in (SamplingParams(), SamplingParams(temperature=1, top_k=2), SamplingParams(bias={0: 50.0})):
        constraint = Forbid(0, 3)
        assert sample(LOGITS, params, [1, 2], constraint=constraint) in (2, 4)
        assert constraint.histories == [[1, 2]]
    np.testing.assert_array_equal(LOGITS, kept_row)  # the row itself is not written to
    params = SamplingParams(temperature=1, presence_penalty=3)
    probs = distribution(LOGITS, params, [0, 2], constraint=Forbid(0))
    np.testing.assert_allclose(probs, softmax(np.array([-np.inf, -1.0, -2.5, 1.0, 0.5])))
    with pytest.raises(ValueError, match=r"^constraint: all 5 tokens"):
        sample(LOGITS, SamplingParams(), constraint=Forbid(*range(5)))


@given(rows, samplers, st.sets(st.integers(0, 29), max_size=5), st.integers(0, 99))
def test_a_constraint_and_suppressed_tokens_are_one_thing(logits, params, forbidden, position):
    forbidden = sorted(k for k in forbidden if k < len(logits) - 1)
    history = [0, 1, 1]

    def drawn(**how):
        try:
            return sample(logits, params, history, position, **how)
        except ValueError:  # nothing is left
            return None

    assert drawn(suppress=forbidden) == drawn(constraint=Forbid(*forbidden))


# -- choices ---------------------------------------------------------------------------------------


def test_choices_draw_for_themselves():
    params = SamplingParams(temperature=1, seed=3, top_k=4)
    first, *others = params.choices(3)
    assert first == params
    draws = [[sample(LOGITS, p, (), k) for k in range(64)] for p in (first, *others)]
    assert draws[0] == [sample(LOGITS, params, (), k) for k in range(64)]
    assert draws[0] != draws[1] != draws[2] != draws[0]
    numbers = [[uniform(3, k, choice) for k in range(4000)] for choice in (0, 1)]
    assert abs(np.corrcoef(numbers)[0, 1]) < 0.06  # 4 / sqrt(4000)
    assert uniform(3, 5, 1) != uniform(4, 5, 0)


# -- log-probabilities -----------------------------------------------------------------------------


def test_logprobs_of_a_uniform_model():
    assert logprob_of(np.zeros(4, np.float32), 2, 2) == Logprob(
        2, -math.log(4), ((0, -math.log(4)), (1, -math.log(4))), rank=4
    )
    assert logprob_of(np.zeros(4), 2).logprob == pytest.approx(-1.3863, abs=1e-4)


@given(rows, st.integers(0, 40), st.data())
def test_logprobs_are_those_of_the_definition(logits, n_top, data):
    token = data.draw(st.integers(0, len(logits) - 1))
    logprobs = log_softmax(logits)
    found = logprob_of(logits, token, n_top)
    assert found.logprob == pytest.approx(logprobs[token], abs=1e-12)
    order = np.argsort(-logits, kind="stable")[:n_top]
    assert [k for k, _ in found.top] == order.tolist()
    np.testing.assert_allclose([value for _, value in found.top], logprobs[order], atol=1e-12)
    assert found.rank == sum(value >= logits[token] for value in logits)


def test_logprobs_of_a_vocabulary_of_real_size():
    logits = np.random.default_rng(0).normal(0, 3, 50_001).astype(np.float32)
    found = logprob_of(logits, 7, 5)
    np.testing.assert_allclose(found.logprob, log_softmax(logits)[7], rtol=1e-12)
    assert [k for k, _ in found.top] == np.argsort(-logits, kind="stable")[:5].tolist()


def test_logprobs_of_a_prompt():
    rows_of = np.stack([LOGITS, LOGITS[::-1], LOGITS + 1])
    first, *others = prompt_logprobs(rows_of, [4, 0, 1], 1)
    assert first is None
    expected = log_softmax(LOGITS)
    assert [p.logprob for p in others] == pytest.approx([expected[0], expected[3]])
    assert [p.top[0][0] for p in others] == [0, 4]
    assert prompt_logprobs(rows_of[:2], [4, 0, 1], 1) == [first, *others]
    assert prompt_logprobs(rows_of[:1], [4]) == [None]
    for wrong in ([4, 0], [4, 0, 1, 1, 1]):
        with pytest.raises(ValueError, match="prompt logprobs: 3 rows of logits for"):
            prompt_logprobs(rows_of, wrong)


@pytest.mark.parametrize(("logits", "token"), [(np.zeros((2, 3)), 0), (np.zeros(3), 3), (np.zeros(3), -1)])
def test_logprobs_of_nothing(logits, token):
    with pytest.raises(ValueError, match=r"^logprob: token"):
        logprob_of(logits, token)


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
    params = replace(params, bias=())  # it is told by id
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
        ("seed", 1.0), ("top_k", True), ("choice", -1), ("bias", {-1: 0.0}), ("bias", {"a": 1.0}),
        ("bias", [5]), ("bias", 5),
    ],
)  # fmt: skip
def test_parameters_that_make_no_sense(name, value):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    start = f"{name}: " if name == "bias" else f"{name}: {value!r}, expected "
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


# -- a vocabulary of real size takes shorter ways ----------------------------------------------------


@given(
    st.integers(0, 2**32),
    st.sampled_from([0, 1, 5, 64, 700]),
    st.sampled_from([0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.02]),
    st.sampled_from([np.float32, np.float64]),
    st.integers(0, 70),
)
def test_few_are_looked_at_and_all_are_meant(seed, top_k, top_p, min_p, dtype, n_history):
    """The steps of the docstring, each over the whole vocabulary, on one as large as shortcuts need."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal(6001) * 3, int(rng.integers(0, 4))).astype(dtype)
    history = rng.integers(0, 6001, n_history)
    bias = {int(i): float(rng.choice([-2.0, 9.0, -np.inf])) for i in rng.integers(0, 6001, 3)}
    suppress = rng.integers(0, 6001, 2).tolist()
    params = SamplingParams(
        temperature=0.7,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        bias=bias,
        repeat_penalty=1.2,
        frequency_penalty=0.1,
    )

    scores = logits.astype(np.float64)
    for token, value in bias.items():
        scores[token] += value
    for token in set(history[-64:].tolist()):
        scores[token] = scores[token] / 1.2 if scores[token] > 0 else scores[token] * 1.2
        scores[token] -= 0.1 * (history[-64:] == token).sum()
    scores[suppress] = -np.inf
    order = [i for i in np.argsort(-scores, kind="stable").tolist() if scores[i] > -np.inf]
    order = order[: top_k or None]
    if top_p < 1:
        sums = np.cumsum(softmax(scores[order]))
        order = order[: int(np.argmax(sums >= top_p * (1 - 1e-12))) + 1]
    order = [i for i in order if scores[i] >= scores[order[0]] + (math.log(min_p) if min_p else -np.inf)]
    expected = np.zeros(6001)
    expected[order] = softmax(scores[order] / 0.7)
    np.testing.assert_allclose(distribution(logits, params, history, suppress), expected, atol=1e-12)


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
