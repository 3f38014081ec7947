"""One forward call of the engine: what goes in, and what becomes of each request by what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastpath import arrays
from fastpath.engine.request import Reason, Record
from fastpath.lanes import Lanes, rows_not_finite
from fastpath.largest import Largest, class_of, draw, wanted
from refimpl.batch import Batch, LogitRows, SoftTokens, make_batch
from refimpl.frontend.sampling import Logprob, logprob_of, prompt_logprobs, sample

Who = Sequence[tuple[Record, int]]  # requests, and by how many tokens each goes on


@dataclass(frozen=True)
class Outcome:
    """What a call made of one request. It says what is to be, so that writing it down twice does no harm.

    n_known  ids before the call; token: the one more that there is now
    n_first  of them, how many were computed before it
    read     of the prompt's tokens from n_first on, as far as the call's rows say it, if they are wanted;
             in place of the first of them, which no row of this call predicts, None
    """

    record: Record
    n_done: int
    n_known: int
    token: int | None = None
    logits: np.ndarray | None = None
    logprob: Logprob | None = None
    reason: Reason | None = None
    error: Exception | None = None
    n_first: int = 0
    read: Sequence[Logprob | None] = ()


def batch_of(who: Who) -> Batch:
    """Logits are wanted of those who have no more to compute, and of prompts that are to be read."""
    if all(r.task.pending == 1 and (r.n_answer or not r.soft) for r, _ in who):
        return _rows([record for record, _ in who])
    pieces: list[tuple[int, int, list[int], LogitRows]] = []
    soft: dict[int, Sequence[SoftTokens]] = {}
    for record, n in who:
        task = record.task
        ids = record.ids[task.n_done : task.n_done + n]
        rows: LogitRows = "all" if record.wants_prompt_rows else "last" if n == task.pending else "none"
        pieces.append((task.lane, task.n_done, ids, rows))
        if record.soft:
            soft[task.lane] = record.soft
    return make_batch(pieces, soft)


def largest_of(who: Who, lanes: Lanes) -> int | None:
    """How many of a row's largest logits everybody's choice can be made of; None: the rows have to come.

    Where ops compute in memory of the host, rows cost nothing.
    """
    drawn = [record for record, n in who if n == record.task.pending]
    if not arrays.is_elsewhere(lanes.ops) or not drawn or any(_wants_rows(record) for record, _ in who):
        return None
    suppress = lanes.model.tokenizer.suppress_ids
    ks = [k for record in drawn if (k := wanted(record.request.params, record.ids, suppress)) is not None]
    return class_of(max(ks)) if len(ks) == len(drawn) else None


def _wants_rows(record: Record) -> bool:
    request = record.request
    is_told = request.want_logits or request.n_logprobs is not None
    return is_told or record.wants_prompt_rows or request.constraint is not None


def outcomes_of(who: Who, rows: np.ndarray | Largest, lanes: Lanes) -> list[Outcome]:
    """rows f32[M, V], or their largest: of whom `batch_of` says, in its order. Changes nothing."""
    suppress = lanes.model.tokenizer.suppress_ids
    broken = rows.not_finite() if isinstance(rows, Largest) else rows_not_finite(rows)
    outcomes, end = [], 0
    for record, n in who:
        task, n_known = record.task, len(record.ids)
        start, end = end, end + (n if record.wants_prompt_rows else int(n == task.pending))
        if any(start <= row < end for row in broken):
            error: Exception = lanes.not_finite(record.ids, record.soft)
            outcomes.append(Outcome(record, task.n_done, n_known, reason="error", error=error))
            continue
        if n == task.pending:
            made = _drawn(record, rows[end - 1], suppress)
        else:
            made = Outcome(record, task.n_done + n, n_known)
        if record.wants_prompt_rows and isinstance(rows, np.ndarray):
            made = replace(made, n_first=task.n_done, read=_read(record, n, rows[start:end]))
        outcomes.append(made)
    return outcomes


def _read(record: Record, n: int, rows: np.ndarray) -> Sequence[Logprob | None]:
    """Of the prompt's tokens that these rows predict, with None in front."""
    first = record.task.n_done
    ids = record.ids[first : min(first + n + 1, record.n_prompt)]
    return prompt_logprobs(rows[: len(ids)], ids, record.request.n_prompt_logprobs or 0)


def _drawn(record: Record, row: np.ndarray | Largest, suppress: tuple[int, ...]) -> Outcome:
    """All ids of a request are in the cache, and these are the logits after the last."""
    n, request = len(record.ids), record.request
    if request.max_tokens == 0:
        return Outcome(record, n, n, reason="length")
    try:
        with np.errstate(all="ignore"):  # extreme temperatures and penalties make infinities on the way
            if isinstance(row, Largest):
                token = draw(row, request.params, record.ids, n, suppress)
            else:
                token = sample(row, request.params, record.ids, n, suppress, request.constraint)
    except Exception as error:  # whatever it is, it is this request's: the others go on
        return Outcome(record, n, n, reason="error", error=error)
    if token in record.stop_ids:
        return Outcome(record, n, n, reason="stop")
    reason: Reason | None = "length" if n + 1 == record.task.most else None
    if isinstance(row, Largest):  # nobody wants more of it
        return Outcome(record, n, n, token, reason=reason)
    logits = row.copy() if request.want_logits else None
    likely = None if request.n_logprobs is None else logprob_of(row, token, request.n_logprobs)
    return Outcome(record, n, n, token, logits, likely, reason)


def accepted(made: Outcome) -> Outcome:
    """Tells the constraint what was drawn, once. A constraint that fails ends its request, and no other."""
    record, constraint = made.record, made.record.request.constraint
    n = made.n_known - record.n_prompt + 1
    if constraint is None or made.token is None or record.n_accepted >= n:
        return made
    record.n_accepted = n
    try:
        constraint.accept(made.token)
    except Exception as error:  # as in _drawn
        return replace(made, token=None, reason="error", error=error)
    return made


def _rows(records: Sequence[Record]) -> Batch:
    """One token of each: what make_batch would make of them, in a tenth of the time."""
    n = len(records)
    return Batch(
        np.array([record.ids[-1] for record in records], np.int32),
        np.array([len(record.ids) - 1 for record in records], np.int32),
        np.array([record.task.lane for record in records], np.int32),
        np.arange(n, dtype=np.int32),
    )
