"""What may come next in an answer, besides what the model finds likely.

A constraint follows an answer token by token.  Before a token is drawn it takes out of a row of logits what
must not come; afterwards it is told what came.  It knows nothing of engines and batches.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np


class Constraint(Protocol):
    """Follows one answer."""

    def mask(self, row: np.ndarray, history: Sequence[int] | np.ndarray) -> None:
        """Set to -inf in `row` f[V], in place, what must not come next.

        history  all ids so far, prompt included
        """

    def accept(self, token: int) -> None:
        """The next token of the answer; also the one that ends it, if it is told."""

    def rollback(self, n: int) -> None:
        """Forget the last `n` tokens that were accepted (drafts that were not verified)."""

    def fork(self) -> "Constraint":
        """Another one in the same state, for another answer to the same prompt."""


def only(row: np.ndarray, ids: Iterable[int]) -> None:
    """Leave nothing in a row but these ids, as they are."""
    allowed = np.fromiter((i for i in ids if 0 <= i < len(row)), np.int64)
    kept = row[allowed]
    row.fill(-np.inf)
    row[allowed] = kept


def ends_in_thought(
    prompt_ids: Sequence[int], opener: int | None, closer: int | None, turn: int | None
) -> bool:
    """Whether a prompt ends inside an open thought. The others are ids of markers, None for missing ones."""
    last = next((token for token in reversed(prompt_ids) if token in (opener, closer, turn)), None)
    return last is not None and last == opener


class All:
    """Several constraints: what one of them forbids must not come."""

    def __init__(self, *constraints: Constraint):
        self._constraints = constraints

    def mask(self, row: np.ndarray, history: Sequence[int] | np.ndarray) -> None:
        for constraint in self._constraints:
            constraint.mask(row, history)

    def accept(self, token: int) -> None:
        for constraint in self._constraints:
            constraint.accept(token)

    def rollback(self, n: int) -> None:
        for constraint in self._constraints:
            constraint.rollback(n)

    def fork(self) -> "All":
        return All(*(constraint.fork() for constraint in self._constraints))


class MinTokens:
    """The answer does not end before it has `n` tokens, unless nothing else may come: its form is complete.

    The last of several constraints.

    ends  ids that end it
    """

    def __init__(self, n: int, ends: Iterable[int], n_so_far: int = 0):
        self._n, self._ends, self._n_so_far = n, tuple(ends), n_so_far

    def mask(self, row: np.ndarray, history: Sequence[int] | np.ndarray) -> None:
        if self._n_so_far < self._n:
            ends = [i for i in self._ends if i < len(row)]
            kept = row[ends]
            row[ends] = -np.inf
            if not (row > -np.inf).any():
                row[ends] = kept

    def accept(self, token: int) -> None:
        self._n_so_far += 1

    def rollback(self, n: int) -> None:
        self._n_so_far -= n

    def fork(self) -> "MinTokens":
        return MinTokens(self._n, self._ends, self._n_so_far)
