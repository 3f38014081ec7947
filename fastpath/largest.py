"""The next token from the largest logits of a row: a device need not hand over the row.

    k = wanted(params, history, suppress)          None: the choice takes the whole row
    values, ids = ops.top_k(logits, k, cap)        of the device
    token = draw(values[t], ids[t], params, history, position, suppress)

The token is the one that `refimpl.frontend.sampling.sample` takes from the row.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from refimpl.frontend.sampling import SamplingParams, sample

MAX_K = 256  # of ops.top_k on a device: a block has a thread for each


def wanted(
    params: SamplingParams, history: np.ndarray | Iterable[int], suppress: Iterable[int]
) -> int | None:
    """How many of the largest logits have everything that the choice looks at.

    Those that it keeps, and one for each token that it may push out of them. A penalty that makes tokens
    likelier may bring in one from anywhere.
    """
    is_greedy = params.temperature == 0
    if not is_greedy and not params.top_k:
        return None
    pushed = len(set(suppress))
    if params.has_penalties:
        if params.repeat_penalty < 1 or params.presence_penalty < 0 or params.frequency_penalty < 0:
            return None
        pushed += len(set(_recent(params, history)))
    k = (1 if is_greedy else params.top_k) + pushed
    return k if k <= MAX_K else None


def draw(
    values: np.ndarray,
    ids: np.ndarray,
    params: SamplingParams,
    history: np.ndarray | Iterable[int] = (),
    position: int = 0,
    suppress: Iterable[int] = (),
) -> int:
    """
    Shapes:
        values, ids  f[k], i[k]  of ops.top_k, at least as many as `wanted` says
    Raises:
        ValueError: the row is not finite, or nothing is left of it
    """
    order = np.argsort(ids[ids >= 0])  # of equal ones the sampler takes the first: lower ids must come first
    values, ids = values[ids >= 0][order], ids[ids >= 0][order]
    if not np.isfinite(values).all():
        bad = int(ids[~np.isfinite(values)][0])
        raise ValueError(
            f"logits[{bad}] is no finite number; the model's weights or a kernel are broken: compare with "
            "--backend ref"
        )
    place = {int(v): i for i, v in enumerate(ids)}
    past = [place[v] for v in _recent(params, history) if v in place] if params.has_penalties else ()
    params = replace(params, penalty_window=-1)
    return int(ids[sample(values, params, past, position, [place[v] for v in suppress if v in place])])


def _recent(params: SamplingParams, history: np.ndarray | Iterable[int]) -> list[int]:
    """The tokens that penalties look at."""
    ids = [int(v) for v in history]
    return ids if params.penalty_window < 0 else ids[len(ids) - min(params.penalty_window, len(ids)) :]
