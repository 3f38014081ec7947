"""The next token from the largest logits of a row: a device need not hand over the row.

    k = wanted(params, history, suppress)          None: the choice takes the whole row
    rows = Largest(*ops.top_k(logits, k, cap))     of the device
    token = draw(rows[t], params, history, position, suppress)

The token is the one that `refimpl.frontend.sampling.sample` takes from the row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from refimpl.frontend.sampling import SamplingParams, sample

MAX_K = 256  # of ops.top_k on a device: a block has a thread for each
CLASSES = (1, 64, MAX_K)  # what is asked for: each is a recorded program of its own


@dataclass(frozen=True)
class Largest:
    """What ops.top_k found in some rows, or in one of them.

    Shapes:
        values  f[..., k]  descending, after the soft cap; NaN in front where the row is not finite
        ids     i[..., k]
    """

    values: np.ndarray
    ids: np.ndarray

    def __getitem__(self, t: int) -> "Largest":
        return Largest(self.values[t], self.ids[t])

    def copy(self) -> "Largest":
        return Largest(self.values.copy(), self.ids.copy())

    def not_finite(self) -> list[int]:
        """Which rows."""
        return np.flatnonzero(np.isnan(self.values[:, 0])).tolist()


def wanted(params: SamplingParams, history: Sequence[int], suppress: Iterable[int]) -> int | None:
    """How many of the largest logits have everything that the choice looks at.

    Those that it keeps, and one for each token that it may push out of them. A penalty or a bias that makes
    tokens likelier may bring in one from anywhere.
    """
    is_greedy = params.temperature == 0
    if not is_greedy and not params.top_k:
        return None
    bias = dict(params.bias)
    if any(number > 0 for number in bias.values()):
        return None
    pushed = {*suppress, *bias}
    if params.has_penalties:
        if params.repeat_penalty < 1 or params.presence_penalty < 0 or params.frequency_penalty < 0:
            return None
        pushed.update(_recent(params, history))
    k = (1 if is_greedy else params.top_k) + len(pushed)
    return k if k <= MAX_K else None


def class_of(k: int) -> int:
    """The least of CLASSES that is enough."""
    return next(most for most in CLASSES if most >= k)


def draw(
    row: Largest,
    params: SamplingParams,
    history: Sequence[int] = (),
    position: int = 0,
    suppress: Iterable[int] = (),
) -> int:
    """
    Shapes:
        row  at least as many as `wanted` says
    Raises:
        ValueError: the row is not finite, or nothing is left of it
    """
    order = np.argsort(row.ids)  # of equal ones the sampler takes the first: lower ids must come first
    order = order[row.ids[order] >= 0]
    values, ids = row.values[order], row.ids[order]
    if not np.isfinite(values).all():
        bad = int(ids[~np.isfinite(values)][0])
        raise ValueError(
            f"logits[{bad}] is no finite number; the model's weights or a kernel are broken: compare with "
            "--backend ref"
        )
    place = {int(v): i for i, v in enumerate(ids)}
    past = [place[v] for v in _recent(params, history) if v in place] if params.has_penalties else ()
    bias = {place[v]: number for v, number in dict(params.bias).items() if v in place}
    params = replace(params, penalty_window=-1, bias=bias)
    return int(ids[sample(values, params, past, position, [place[v] for v in suppress if v in place])])


def _recent(params: SamplingParams, history: Sequence[int]) -> Sequence[int]:
    """The tokens that penalties look at."""
    n = len(history)
    return history if params.penalty_window < 0 else history[n - min(params.penalty_window, n) :]
