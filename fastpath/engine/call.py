"""One forward call of the engine: what goes in, and what becomes of each request by what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastpath.engine.request import Reason, Record
from fastpath.lanes import Lanes, rows_not_finite
from refimpl.batch import Batch, LogitRows, SoftTokens, make_batch
from refimpl.frontend.sampling import sample

Who = Sequence[tuple[Record, int]]  # requests, and by how many tokens each goes on


@dataclass(frozen=True)
class Outcome:
    """What a call made of one request. It says what is to be, so that writing it down twice does no harm.

    n_known  ids before the call; token: the one more that there is now
    """

    record: Record
    n_done: int
    n_known: int
    token: int | None = None
    logits: np.ndarray | None = None
    reason: Reason | None = None
    error: Exception | None = None


def batch_of(who: Who) -> Batch:
    """Logits are wanted of those who have no more to compute."""
    if all(r.task.pending == 1 and (r.n_answer or not r.soft) for r, _ in who):
        return _rows([record for record, _ in who])
    pieces: list[tuple[int, int, list[int], LogitRows]] = []
    soft: dict[int, Sequence[SoftTokens]] = {}
    for record, n in who:
        task = record.task
        ids = record.ids[task.n_done : task.n_done + n]
        pieces.append((task.lane, task.n_done, ids, "last" if n == task.pending else "none"))
        if record.soft:
            soft[task.lane] = record.soft
    return make_batch(pieces, soft)


def outcomes_of(who: Who, logits: np.ndarray, lanes: Lanes) -> list[Outcome]:
    """logits f32[M, V]: of those who have no more to compute, in their order. Changes nothing."""
    suppress = lanes.model.tokenizer.suppress_ids
    broken = set(rows_not_finite(logits))
    outcomes, row = [], 0
    for record, n in who:
        task, n_known = record.task, len(record.ids)
        if n < task.pending:
            outcomes.append(Outcome(record, task.n_done + n, n_known))
            continue
        if row in broken:
            error: Exception = lanes.not_finite(record.ids, record.soft)
            outcomes.append(Outcome(record, task.n_done, n_known, reason="error", error=error))
        else:
            outcomes.append(_drawn(record, logits[row], suppress))
        row += 1
    return outcomes


def _drawn(record: Record, logits: np.ndarray, suppress: tuple[int, ...]) -> Outcome:
    """All ids of a request are in the cache, and these are the logits after the last."""
    n, request = len(record.ids), record.request
    if request.max_tokens == 0:
        return Outcome(record, n, n, reason="length")
    try:
        with np.errstate(all="ignore"):  # extreme temperatures and penalties make infinities on the way
            token = sample(logits, request.params, record.ids, n, suppress)
    except Exception as error:  # whatever it is, it is this request's: the others go on
        return Outcome(record, n, n, reason="error", error=error)
    if token in record.stop_ids:
        return Outcome(record, n, n, reason="stop")
    wanted = logits.copy() if request.want_logits else None
    return Outcome(record, n, n, token, wanted, "length" if n + 1 == record.task.most else None)


def _rows(records: Sequence[Record]) -> Batch:
    """One token of each: what make_batch would make of them, in a tenth of the time."""
    n = len(records)
    return Batch(
        np.array([record.ids[-1] for record in records], np.int32),
        np.array([len(record.ids) - 1 for record in records], np.int32),
        np.array([record.task.lane for record in records], np.int32),
        np.arange(n, dtype=np.int32),
    )
