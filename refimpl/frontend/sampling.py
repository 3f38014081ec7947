"""Logits to the next token: penalties, top-k, top-p, min-p, temperature, a draw keyed by (seed, position).

The steps and their order are those of llama.cpp's default chain (common/common.h `samplers`; we have these):

    1. suppress      tokens that the model file forbids are out
    2. penalties     on tokens of the history: repetition divides (positive) or multiplies (negative) a logit,
                     then frequency takes off once per occurrence and presence once (llama-sampler.cpp
                     `llama_sampler_penalties_apply`)
    3. top-k         the k largest stay; equal ones: lower ids first
    4. top-p         the smallest set of likeliest tokens whose probabilities sum to at least p stays
    5. min-p         tokens at least min_p times as likely as the likeliest stay
    6. temperature   logits / temperature, then softmax and one draw

Steps 3 to 5 look at probabilities before the temperature, as llama.cpp does: a high temperature does not
bring back what they cut.  Temperature 0 is greedy: the largest logit after step 2, of equal ones the lowest.

Everything is float64 on one row, so that the choice does not depend on a batch, a thread or a vector width.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np

PENALTY_WINDOW = 64  # tokens of history that penalties look at; llama.cpp's penalty_last_n


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens; the defaults are greedy.

    temperature        0: greedy; 1: the model's own distribution; Gemma 4's authors recommend 1 with top_k 64
                       and top_p 0.95
    top_k              0: no limit
    top_p              1: no limit
    min_p              0: no limit
    repeat_penalty     1: none; more than 1 makes tokens of the history less likely
    presence_penalty   0: none; taken off the logit of each token that occurs in the history
    frequency_penalty  0: none; taken off once per occurrence
    penalty_window     how many of the last tokens count as history; 0: none, -1: all
    seed               of the draws
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = PENALTY_WINDOW
    seed: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0, inf)
        _check("top_k", self.top_k, 0, 1 << 31, whole=True)
        _check("top_p", self.top_p, 0, 1, "0 < top_p <= 1", low_open=True)
        _check("min_p", self.min_p, 0, 1)
        _check("repeat_penalty", self.repeat_penalty, 0, inf, "above 0", low_open=True)
        _check("presence_penalty", self.presence_penalty, -inf, inf)
        _check("frequency_penalty", self.frequency_penalty, -inf, inf)
        _check("penalty_window", self.penalty_window, -1, 1 << 31, whole=True)
        _check("seed", self.seed, 0, (1 << 64) - 1, whole=True)

    @property
    def has_penalties(self) -> bool:
        return (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    history: np.ndarray | Iterable[int] = (),
    position: int = 0,
    suppress: Iterable[int] = (),
) -> int:
    """The next token.  A pure function: equal arguments give equal tokens, whatever else runs.

    Shapes:
        logits    f[V]    after the soft cap, before anything of this module
        history   i[...]  ids so far, prompt included; penalties look at the last `params.penalty_window`
        position  int     of the token that is drawn; with the seed it is the key of the draw
        suppress  ids that must not come
    """
    suppress = tuple(suppress)
    if params.temperature == 0 and not params.has_penalties:
        best = _likeliest(logits, suppress)
        if best is not None:
            return best
    scores = _scores(logits, params, history, suppress)
    if params.temperature == 0:
        return int(np.argmax(scores))  # NumPy takes the first of equal ones
    ids, kept = _filtered(scores, params)
    cumulative = np.cumsum(np.exp((kept - kept.max()) / params.temperature))
    draw = uniform(params.seed, position) * cumulative[-1]
    return int(ids[min(int(np.searchsorted(cumulative, draw, side="right")), len(ids) - 1)])


def distribution(
    logits: np.ndarray,
    params: SamplingParams,
    history: np.ndarray | Iterable[int] = (),
    suppress: Iterable[int] = (),
) -> np.ndarray:
    """f64[V]: the probabilities that `sample` draws from (greedy: one 1)."""
    scores = _scores(logits, params, history, suppress)
    probs = np.zeros(len(scores))
    if params.temperature == 0:
        probs[np.argmax(scores)] = 1.0
    else:
        ids, kept = _filtered(scores, params)
        probs[ids] = softmax(kept / params.temperature)
    return probs


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f64[..., V]: natural logarithms of the model's probabilities, as APIs report them (before this module's
    steps).
    """
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def softmax(logits: np.ndarray) -> np.ndarray:
    """f64[..., V]"""
    return np.exp(log_softmax(logits))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that belongs to (seed, position): Philox is a function of key and counter, with no
    state to carry.
    """
    key, counter = np.array([seed, 0], np.uint64), np.array([0, 0, 0, position], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def _likeliest(logits: np.ndarray, suppress: tuple[int, ...]) -> int | None:
    """The largest of the logits as they are, if that is the answer: one pass instead of ten."""
    logits = np.asarray(logits)
    if logits.ndim != 1 or not len(logits) or not _all_finite(logits):
        return None
    best = int(np.argmax(logits))
    return None if best in suppress else best


def _all_finite(x: np.ndarray) -> bool:
    """Maximum and minimum pass NaN on, and are cheaper than a look at each number."""
    return bool(np.isfinite(x.max()) and np.isfinite(x.min()))


def _scores(
    logits: np.ndarray, params: SamplingParams, history: np.ndarray | Iterable[int], suppress: Iterable[int]
) -> np.ndarray:
    """f64[V]: steps 1 and 2."""
    scores = np.array(logits, np.float64)
    if scores.ndim != 1 or not len(scores):
        raise ValueError(f"logits: shape {scores.shape}, expected one row f[V]")
    if not _all_finite(np.asarray(logits)):
        bad = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise ValueError(
            f"logits[{bad}] is {scores[bad]}, expected finite numbers; the model's weights or a kernel are "
            "broken: compare with --backend ref"
        )
    if params.has_penalties:
        _penalize(scores, params, history)
    forbidden = np.fromiter(suppress, np.int64)
    if len(forbidden):
        scores[forbidden[(forbidden >= 0) & (forbidden < len(scores))]] = -inf
        if scores.max() == -inf:
            raise ValueError(
                f"suppress: all {len(scores)} tokens of the vocabulary, expected at least one that is left"
            )
    return scores


def _penalize(scores: np.ndarray, params: SamplingParams, history: np.ndarray | Iterable[int]) -> None:
    """Step 2, in place."""
    recent = history if isinstance(history, np.ndarray | list) else list(history)
    if params.penalty_window >= 0:
        recent = recent[len(recent) - min(params.penalty_window, len(recent)) :]
    past = np.asarray(recent, np.int64)
    past = past[(past >= 0) & (past < len(scores))]
    ids, counts = np.unique(past, return_counts=True)
    seen = scores[ids]
    seen = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
    scores[ids] = seen - counts * params.frequency_penalty - params.presence_penalty


def _filtered(scores: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Steps 3 to 5: (ids, their scores); sorted, likeliest first and equal ones by id, where a limit needed
    the order.
    """
    ids = _largest(scores, params.top_k) if params.top_k else np.flatnonzero(scores > -inf)
    kept = scores[ids]
    if params.top_p < 1:
        nucleus = _nucleus(kept, params.top_p)
        ids, kept = ids[nucleus], kept[nucleus]
    if params.min_p > 0:
        likely = kept >= kept.max() + np.log(params.min_p)
        ids, kept = ids[likely], kept[likely]
    return ids, kept


def _largest(scores: np.ndarray, n: int) -> np.ndarray:
    """Where the `n` largest scores above -inf are, sorted; of equal ones the lower ids."""
    bound = _at_most_nth(scores, n)
    ids = np.flatnonzero(scores >= bound if bound > -inf else scores > -inf)
    if n < len(ids):
        threshold = np.partition(scores[ids], -n)[-n]
        ids = ids[scores[ids] >= threshold]  # with ties more than n, until they are sorted
    return ids[np.argsort(-scores[ids], kind="stable")][:n]


def _at_most_nth(scores: np.ndarray, n: int) -> float:
    """A bound that at least `n` scores reach, and of a vocabulary few more: the n-th largest of the maxima of
    runs of it. Without it, finding 64 of 262,144 takes 3 ms.
    """
    run = len(scores) // max(8 * n, 1)
    if run < 2:
        return -inf
    maxima = scores[: len(scores) // run * run].reshape(-1, run).max(axis=1)
    return float(np.partition(maxima, -n)[-n])


def _nucleus(scores: np.ndarray, top_p: float) -> np.ndarray:
    """Where the shortest run of largest scores is whose probabilities among all reach `top_p`, sorted."""
    largest = scores.max()
    wanted = top_p * np.exp(scores - largest).sum()
    n = 256  # most distributions need few tokens, and sorting a whole vocabulary takes 20 ms
    while True:
        head = _largest(scores, n)
        sums = np.cumsum(np.exp(scores[head] - largest))
        if sums[-1] >= wanted or len(head) == len(scores):
            return head[: int(np.searchsorted(sums, wanted)) + 1]
        n *= 8


def _check(
    name: str,
    value: float,
    low: float,
    high: float,
    expected: str = "",
    *,
    whole: bool = False,
    low_open: bool = False,
) -> None:
    """Refuse a parameter that is no number in [low, high] (finite, in any case)."""
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not (is_number and isfinite(value) and low <= value <= high and not (low_open and value == low)):
        if not expected:
            kind = "a whole number" if whole else "a number"
            least = "" if low == -inf else f" of at least {low:g}"
            most = "" if high == inf else f" and at most {high if whole else f'{high:g}'}"
            expected = kind + least + most
        raise ValueError(f"{name}: {value!r}, expected {expected}")
