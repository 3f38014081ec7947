"""Logits to the next token: penalties, top-k, top-p, min-p, temperature, a draw keyed by (seed, position).

The steps and their order are those of llama.cpp's default chain (common/common.h `samplers`; we have these):

    1. suppress      tokens that the model file forbids are out, and what a constraint forbids (constraint.py)
    2. bias          is added to the logits of single tokens
    3. penalties     on tokens of the history: repetition divides (positive) or multiplies (negative) a logit,
                     then frequency takes off once per occurrence and presence once (llama-sampler.cpp
                     `llama_sampler_penalties_apply`)
    4. top-k         the k largest stay; equal ones: lower ids first
    5. top-p         the smallest set of likeliest tokens whose probabilities sum to at least p stays
    6. min-p         tokens at least min_p times as likely as the likeliest stay
    7. temperature   logits / temperature, then softmax and one draw

Steps 4 to 6 look at probabilities before the temperature, as llama.cpp does: a high temperature does not
bring back what they cut.  Temperature 0 is greedy: the largest logit after step 3, of equal ones the lowest.

Probabilities are float64 of one row, so that the choice does not depend on a batch, a thread or a vector
width.  Logits stay as they come until few are left: comparing them needs no more precision than they have.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from sys import float_info
from typing import Any, NamedTuple

import numpy as np

from refimpl.frontend.constraint import Constraint

PENALTY_WINDOW = 64  # tokens of history that penalties look at; llama.cpp's penalty_last_n
MAX_BIASED = 1 << 16
COLUMN = 64  # logits of a column in `_largest`
PIECE = 1 << 14  # logits at a time: their float64 stays in the cache


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
    choice             which of several answers to one prompt this is: each has draws of its own
    bias               added to the logits of tokens: pairs (id, number), or a mapping; -inf: never
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
    choice: int = 0
    bias: tuple[tuple[int, float], ...] | Mapping[int, float] = ()

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
        _check("choice", self.choice, 0, (1 << 31) - 1, whole=True)
        object.__setattr__(self, "bias", _checked_bias(self.bias))

    @property
    def has_penalties(self) -> bool:
        return (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def choices(self, n: int) -> list["SamplingParams"]:
        """The parameters of `n` answers to one prompt; the first is what it would be alone."""
        _check("n", n, 1, 1 << 31, whole=True)
        return [replace(self, choice=k) for k in range(n)]


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    history: np.ndarray | Iterable[int] = (),
    position: int = 0,
    suppress: Iterable[int] = (),
    constraint: Constraint | None = None,
) -> int:
    """The next token.  A pure function: equal arguments give equal tokens, whatever else runs.

    Shapes:
        logits      f[V]    after the soft cap, before anything of this module
        history     i[...]  ids so far, prompt included; penalties look at the last `params.penalty_window`
        position    int     of the token that is drawn; with the seed it is the key of the draw
        suppress    ids that must not come
        constraint  what else must not come; it is asked, and not told what was drawn
    """
    row = _prepared(logits, params, history, suppress, constraint)
    if params.temperature == 0:
        return row.best()
    number = uniform(params.seed, position, params.choice)
    if not (params.top_k or params.top_p < 1 or params.min_p):
        return _drawn(row.all(), params.temperature, number)
    ids, kept = _filtered(row, params)
    return int(ids[_drawn(kept, params.temperature, number)])


def _drawn(scores: np.ndarray, temperature: float, number: float) -> int:
    """Where a number in [0, 1) falls among probabilities laid end to end.  Overwrites the scores."""
    scores -= scores.max()
    scores /= temperature
    cumulative = np.cumsum(np.exp(scores, out=scores), out=scores)
    end = int(np.searchsorted(cumulative, cumulative[-1]))  # the last that has any probability
    return min(int(np.searchsorted(cumulative, number * cumulative[-1], side="right")), end)


def distribution(
    logits: np.ndarray,
    params: SamplingParams,
    history: np.ndarray | Iterable[int] = (),
    suppress: Iterable[int] = (),
    constraint: Constraint | None = None,
) -> np.ndarray:
    """f64[V]: the probabilities that `sample` draws from (greedy: one 1)."""
    row = _prepared(logits, params, history, suppress, constraint)
    probs = np.zeros(len(row.rest))
    if params.temperature == 0:
        probs[row.best()] = 1.0
    else:
        ids, kept = _filtered(row, params)
        probs[ids] = softmax(kept / params.temperature)
    return probs


# -- log-probabilities -----------------------------------------------------------------------------


class Logprob(NamedTuple):
    """How likely the model found a token, before this module's steps.

    logprob  natural logarithm of its probability
    top      the likeliest tokens at its place with theirs, likeliest first, of equal ones the lower id
    rank     how many tokens are at least as likely, itself included: 1 for the likeliest
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


def logprob_of(logits: np.ndarray, token: int, n_top: int = 0) -> Logprob:
    """Of one row f[V], after the soft cap."""
    logits = np.asarray(logits)
    if logits.ndim != 1 or not 0 <= token < len(logits):
        raise ValueError(f"logprob: token {token}, logits {logits.shape}, expected a token of one row f[V]")
    largest = float(logits.max())
    pieces = (logits[k : k + PIECE].astype(np.float64) for k in range(0, len(logits), PIECE))
    total = largest + float(np.log(sum(np.exp(piece - largest).sum() for piece in pieces)))
    top = _largest(logits, n_top) if n_top > 0 else ()
    pairs = tuple((int(i), float(logits[i]) - total) for i in top)
    rank = int(np.count_nonzero(logits >= logits[token]))
    return Logprob(int(token), float(logits[token]) - total, pairs, rank)


def prompt_logprobs(rows: np.ndarray, ids: Sequence[int], n_top: int = 0) -> list[Logprob | None]:
    """Of a prompt's tokens: None for the first, which nothing predicts.

    Shapes:
        rows  f[T, V]  logits at the prompt's positions; the last row (of the token to come) may be missing
        ids   i[T]
    """
    if len(ids) - 1 > len(rows) or len(rows) > len(ids):
        raise ValueError(
            f"prompt logprobs: {len(rows)} rows of logits for {len(ids)} tokens, expected one each"
        )
    return [None, *(logprob_of(row, token, n_top) for row, token in zip(rows, ids[1:], strict=False))][
        : len(ids)
    ]


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


def uniform(seed: int, position: int, choice: int = 0) -> float:
    """A number in [0, 1) that belongs to (seed, choice, position): Philox is a function of key and counter,
    with no state to carry.
    """
    key, counter = np.array([seed, choice], np.uint64), np.array([0, 0, 0, position], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


# -- steps 1 to 3 ----------------------------------------------------------------------------------


class _Row(NamedTuple):
    """Logits after steps 1 to 3: a row, and the few of it that are not what they were.

    rest     f[V]    the logits as they came; -inf where one is forbidden, or changed
    changed  i64[C]  ids whose logits bias and penalties have changed, in order
    scores   f64[C]  and to what
    """

    rest: np.ndarray
    changed: np.ndarray
    scores: np.ndarray

    def best(self) -> int:
        """The largest, of equal ones the lowest id."""
        first = int(np.argmax(self.rest))  # NumPy takes the first of equal ones
        if not len(self.changed):
            return first
        k = int(np.argmax(self.scores))
        of_rest, of_changed = (
            (float(self.rest[first]), -first),
            (float(self.scores[k]), -int(self.changed[k])),
        )
        return -max(of_rest, of_changed)[1]

    def largest(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, f64 scores) of the `n` largest above -inf, sorted; of equal ones the lower ids first."""
        ids = _largest(self.rest, n)
        scores = self.rest[ids].astype(np.float64)
        if len(self.changed):
            ids, scores = np.concatenate([ids, self.changed]), np.concatenate([scores, self.scores])
            order = np.lexsort((ids, -scores))[:n]
            ids, scores = ids[order], scores[order]
        return ids, scores

    def all(self) -> np.ndarray:
        """f64[V]: all scores."""
        scores = self.rest.astype(np.float64)
        scores[self.changed] = self.scores
        return scores


def _prepared(
    logits: np.ndarray,
    params: SamplingParams,
    history: np.ndarray | Iterable[int],
    suppress: Iterable[int],
    constraint: Constraint | None,
) -> _Row:
    """Steps 1 to 3."""
    row = np.asarray(logits)
    if row.dtype not in (np.float32, np.float64):
        row = row.astype(np.float64)
    if row.ndim != 1 or not len(row):
        raise ValueError(f"logits: shape {row.shape}, expected one row f[V]")
    if not (np.isfinite(row.max()) and np.isfinite(row.min())):  # both pass NaN on
        bad = int(np.flatnonzero(~np.isfinite(row))[0])
        raise ValueError(
            f"logits[{bad}] is {row[bad]}, expected finite numbers; the model's weights or a kernel are "
            "broken: compare with --backend ref"
        )
    forbidden = _known(np.fromiter(suppress, np.int64), len(row))
    ids, scores = _changed(row, params, history)
    if constraint is None and not len(forbidden) and not len(ids):
        return _Row(row, ids, scores)
    row = row.copy()
    row[forbidden] = -inf
    if constraint is not None:
        constraint.mask(row, history if isinstance(history, Sequence | np.ndarray) else list(history))
    stay = (row[ids] > -inf) & (scores > -inf)
    row[ids] = -inf
    ids, scores = ids[stay], scores[stay]
    if not len(ids) and row.max() == -inf:
        if constraint is None:
            raise ValueError(
                f"suppress: all {len(row)} tokens of the vocabulary (with bias), expected one that is left"
            )
        raise ValueError(
            f"constraint: all {len(row)} tokens of the vocabulary are forbidden, expected at least one that "
            "may come next. Does its grammar have no end here, or does the model file forbid what it wants?"
        )
    return _Row(row, ids, scores)


def _changed(
    row: np.ndarray, params: SamplingParams, history: np.ndarray | Iterable[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Steps 2 and 3: (ids in order, f64 scores) of the tokens that bias or penalties change."""
    past = np.zeros(0, np.int64)
    if params.has_penalties:
        recent = history if isinstance(history, np.ndarray | list) else list(history)
        if params.penalty_window >= 0:
            recent = recent[len(recent) - min(params.penalty_window, len(recent)) :]
        past = _known(np.asarray(recent, np.int64), len(row))
    bias = dict(params.bias)
    if not len(past) and not bias:
        return past, np.zeros(0)
    seen, counts = np.unique(past, return_counts=True)
    ids = np.union1d(seen, _known(np.fromiter(bias, np.int64), len(row))) if bias else seen
    scores = row[ids].astype(np.float64)
    if bias:
        scores += [bias.get(int(i), 0.0) for i in ids]
    at = np.searchsorted(ids, seen)
    hit = scores[at]
    hit = np.where(hit > 0, hit / params.repeat_penalty, hit * params.repeat_penalty)
    scores[at] = hit - counts * params.frequency_penalty - params.presence_penalty
    return ids, scores


def _known(ids: np.ndarray, n_vocab: int) -> np.ndarray:
    return ids[(ids >= 0) & (ids < n_vocab)]


# -- steps 4 to 6 ----------------------------------------------------------------------------------


def _filtered(row: _Row, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """(ids, their scores); sorted, likeliest first and equal ones by id, where a limit needed the order."""
    if params.top_k:
        ids, kept = row.largest(params.top_k)
    else:
        kept = row.all()
        ids = np.flatnonzero(kept > -inf)
        kept = kept[ids]
    if params.top_p < 1:
        nucleus = _nucleus(kept, params.top_p)
        ids, kept = ids[nucleus], kept[nucleus]
    if params.min_p > 0:
        likely = kept >= kept.max() + np.log(params.min_p)
        ids, kept = ids[likely], kept[likely]
    return ids, kept


def _largest(scores: np.ndarray, n: int) -> np.ndarray:
    """Where the `n` largest scores above -inf are, sorted; of equal ones the lower ids first.

    Of a vocabulary only the few columns of a table are looked into whose maxima can be among the n largest:
    without this, finding 64 of 262,144 takes 3 ms.
    """
    rows = min(len(scores) // max(8 * n, 1), COLUMN)
    if rows >= 2:
        columns = len(scores) // rows
        table = scores[: rows * columns].reshape(rows, columns)
        maxima = table.max(axis=0)
        bound = np.partition(maxima, -n)[-n]
        chosen = np.flatnonzero((maxima >= bound) & (maxima > -inf))
        ids = (np.arange(rows)[:, None] * columns + chosen).ravel()  # ascending, as equal ones must be
        ids = np.concatenate([ids, np.arange(rows * columns, len(scores))])
        found = scores[ids]
        ids = ids[(found >= bound) & (found > -inf)]
    else:
        ids = np.flatnonzero(scores > -inf)
    found = scores[ids]
    if n < len(ids):
        is_near = found >= np.partition(found, -n)[-n]  # with ties more than n, until they are sorted
        ids, found = ids[is_near], found[is_near]
    return ids[np.argsort(-found, kind="stable")][:n]


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


def _checked_bias(bias: object) -> tuple[tuple[int, float], ...]:
    pairs = tuple(bias.items()) if isinstance(bias, Mapping) else bias
    if not isinstance(pairs, tuple | list) or len(pairs) > MAX_BIASED:
        raise ValueError(f"bias: {type(bias).__name__}, expected at most {MAX_BIASED} pairs of id and number")
    for pair in pairs:
        token, value = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
        _check("bias", token, 0, inf, "token ids", whole=True)
        if value != -inf:
            _check(f"bias[{token}]", value, -inf, inf)
    return tuple((int(token), float(value)) for token, value in sorted(dict(pairs).items()))


def _check(
    name: str,
    value: Any,
    low: float,
    high: float,
    expected: str = "",
    *,
    whole: bool = False,
    low_open: bool = False,
) -> None:
    """Refuse a parameter that is no number in [low, high] (finite, in any case)."""
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    is_finite = is_number and abs(value) <= float_info.max  # isfinite fails at an int that no float can be
    if not (is_finite and low <= value <= high and not (low_open and value == low)):
        if not expected:
            kind = "a whole number" if whole else "a number"
            least = "" if low == -inf else f" of at least {low:g}"
            most = "" if high == inf else f" and at most {high if whole else f'{high:g}'}"
            expected = kind + least + most
        raise ValueError(f"{name}: {value!r:.80}, expected {expected}")
