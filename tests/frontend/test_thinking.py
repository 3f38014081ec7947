"""Limits of thoughts, with the exact numbers, on logits that say what the model wants."""

import numpy as np
import pytest

from refimpl.frontend.constraint import All, Constraint, MinTokens, only
from refimpl.frontend.sampling import SamplingParams, sample
from refimpl.frontend.thinking import ThoughtLimits
from tests.frontend.vocab import small

OPEN, CLOSE, CALL = (small().id_of(piece) for piece in ("<|channel>", "<channel|>", "<|tool_call>"))
A, LINE = small().id_of("a"), small().id_of("\n")
RESULT = small().encode("<|turn>model\n<tool_response|>", parse_special=True)


def run(constraint: Constraint, wanted: list[int]) -> list[int]:
    """The answer of a model that wants one token after the other; a forced close takes no place of them."""
    made: list[int] = []
    waiting = list(wanted)
    while waiting:
        row = np.zeros(small().n_vocab, np.float32)
        row[waiting[0]] = 9
        token = sample(row, SamplingParams(), made, constraint=constraint)
        constraint.accept(token)
        made.append(token)
        if token != CLOSE or waiting[0] == CLOSE:
            waiting.pop(0)
    return made


def thought(made: list[int]) -> int:
    """Tokens from the opener to the closer, without the closer."""
    return made.index(CLOSE) - made.index(OPEN)


@pytest.mark.parametrize(
    ("max_tokens", "most"), [(40, 20), (256, 128), (2000, 128), (None, 128), (100, 50), (3, 1)]
)
def test_thinking_off_without_line_breaks(max_tokens, most):
    made = run(ThoughtLimits(small(), thinking=False, max_tokens=max_tokens), [OPEN, *[A] * 200])
    assert thought(made) == most
    assert made.count(CLOSE) == 1


@pytest.mark.parametrize(("max_tokens", "least"), [(40, 10), (256, 64), (2000, 64)])
def test_thinking_off_ends_at_the_first_line_break_past_the_budget(max_tokens, least):
    for at in (
        least - 1,
        least,
        least + 1,
        least + 5,
    ):  # the how manieth token of the thought the line break is
        wanted = [OPEN, *[A] * (at - 2), LINE, *[A] * 200]
        made = run(ThoughtLimits(small(), thinking=False, max_tokens=max_tokens), wanted)
        assert thought(made) == (at if at > least else 2 * least)


def test_the_line_breaks_of_other_tokens_count():
    two = small().id_of("\n\n")
    made = run(ThoughtLimits(small(), thinking=False, max_tokens=16), [OPEN, A, A, A, two, A, A, A])
    assert thought(made) == 5


@pytest.mark.parametrize("budget", [1, 2, 7, 100])
def test_thinking_on_ends_at_exactly_the_budget(budget):
    limits = ThoughtLimits(small(), thinking=True, max_tokens=40, budget=budget)
    made = run(limits, [OPEN, A, LINE, *[A, LINE] * 80])
    assert thought(made) == budget


def test_a_thought_that_the_prompt_opened_counts_from_the_first_token():
    prompt = small().encode("<|turn>model\n<tool_response|><|channel>thought\n", parse_special=True)
    made = run(ThoughtLimits(small(), prompt, thinking=True, budget=5), [A] * 9)
    assert made == [A] * 5 + [CLOSE] + [A] * 4


def test_no_budget_and_zero():
    wanted = [OPEN, *[A, LINE] * 150, CLOSE, A]
    assert run(ThoughtLimits(small(), thinking=True, max_tokens=40), wanted) == wanted
    for thinking in (False, True):
        assert run(ThoughtLimits(small(), thinking=thinking, max_tokens=40, budget=0), wanted) == wanted


def test_a_second_thought_is_counted_anew():
    made = run(ThoughtLimits(small(), thinking=True, budget=3), [OPEN, A, CLOSE, A, OPEN, A, A, A])
    assert made == [OPEN, A, CLOSE, A, OPEN, A, A, CLOSE, A]


def test_a_call_ends_a_thought():
    wanted = [OPEN, A, CALL, *[A] * 9]
    assert run(ThoughtLimits(small(), thinking=True, budget=4), wanted) == wanted


def allowed(constraint, prompt=()):
    row = np.zeros(small().n_vocab, np.float32)
    constraint.mask(row, prompt)
    return set(np.flatnonzero(row > -np.inf).tolist())


def test_a_stray_close_after_a_result_is_masked_there_only():
    everything = set(range(small().n_vocab))
    limits = ThoughtLimits(small(), RESULT, thinking=False)
    assert allowed(limits) == everything - {CLOSE}
    limits.accept(A)
    assert allowed(limits) == everything - {CLOSE}  # the close came after the answer
    limits.accept(OPEN)
    assert allowed(limits) == everything  # now there is something to close
    limits.accept(CLOSE)
    assert allowed(limits) == everything - {CLOSE}
    assert allowed(ThoughtLimits(small(), RESULT, thinking=True)) == everything
    prompt = small().encode("<|turn>model\n", parse_special=True)
    assert allowed(ThoughtLimits(small(), prompt, thinking=False)) == everything


def test_rollback_and_fork():
    limits = ThoughtLimits(small(), thinking=True, budget=3)
    for token in (A, OPEN, A):
        limits.accept(token)
    other = limits.fork()
    limits.accept(A)
    assert allowed(limits) == {CLOSE}
    assert len(allowed(other)) == small().n_vocab
    other.accept(LINE)
    assert allowed(other) == {CLOSE}
    limits.rollback(1)
    assert len(allowed(limits)) == small().n_vocab
    limits.rollback(2)
    assert not limits.in_thought
    limits.rollback(0)
    run(limits, [A, A, A, A])


@pytest.mark.parametrize("budget", [-1, 1.5, "9", True])
def test_budgets_that_are_none(budget):
    with pytest.raises(ValueError, match=r"^thinking budget: .*expected a number of tokens"):
        ThoughtLimits(small(), thinking=True, budget=budget)


# -- constraints -----------------------------------------------------------------------------------


def test_min_tokens():
    ends = sorted(small().eog_ids)
    constraint = MinTokens(3, [*ends, 10**6])
    wanted = [ends[0], ends[0], ends[0], ends[0]]
    made = run(constraint, wanted)
    assert [token in ends for token in made] == [False, False, False, True]
    constraint.rollback(2)
    assert allowed(constraint) == set(range(small().n_vocab)) - set(ends)
    other = constraint.fork()
    other.accept(A)
    assert ends[0] in allowed(other) and ends[0] not in allowed(constraint)


def test_all_of_several():
    both = All(MinTokens(2, small().eog_ids), ThoughtLimits(small(), RESULT, thinking=False))
    assert allowed(both) == set(range(small().n_vocab)) - small().eog_ids - {CLOSE}
    other = both.fork()
    for _ in range(2):
        both.accept(A)
    assert small().eog_ids <= allowed(both)
    assert not small().eog_ids & allowed(other)
    both.rollback(1)
    assert not small().eog_ids & allowed(both)


def test_only():
    row = np.array([1.0, -np.inf, 3.0, 4.0], np.float32)
    only(row, [1, 2, 99, -1])
    np.testing.assert_array_equal(row, [-np.inf, -np.inf, 3, -np.inf])
