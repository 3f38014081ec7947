"""Batch: the input of one model call.  Prefill, a chunk of it, decode and verification are all this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

LogitRows = Literal["last", "all", "none"]


@dataclass(frozen=True)
class Batch:
    """T tokens of several sequences, end to end: no padding and no batch axis.

    The tokens of one sequence stand together, in ascending positions without gaps, so that a query finds all
    of its keys in the cache once the keys of the call are written.

    Shapes:
        token_ids   i32[T]
        positions   i32[T]  place of each token in its own sequence, from 0
        seq_ids     i32[T]  the cache lane that holds the sequence, 0 .. R-1
        logit_rows  i32[M]  tokens (numbers in 0 .. T-1) whose logits are wanted; prefill wants the last one
    """

    token_ids: np.ndarray
    positions: np.ndarray
    seq_ids: np.ndarray
    logit_rows: np.ndarray

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


def make_batch(parts: Sequence[tuple[int, int, Sequence[int] | np.ndarray, LogitRows]]) -> Batch:
    """Lay the new tokens of some sequences end to end.

    Args:
        parts: (lane, position of the first token, token ids, whose logits are wanted) for each sequence
    """
    token_ids, positions, seq_ids, logit_rows = [], [], [], []
    n_tokens = 0
    for r, (seq_id, start, ids, logits) in enumerate(parts):
        ids = np.asarray(ids, np.int64).reshape(-1)
        _check_part(r, seq_id, start, ids, logits, [p[0] for p in parts[:r]])
        token_ids.append(ids)
        positions.append(np.arange(start, start + len(ids)))
        seq_ids.append(np.full(len(ids), seq_id))
        rows = {"last": [len(ids) - 1], "all": range(len(ids)), "none": []}[logits]
        logit_rows.append(n_tokens + np.asarray(rows, np.int64))
        n_tokens += len(ids)
    if not parts:
        raise ValueError(
            "batch: got no sequences, expected at least one. Nothing to compute is not a model call"
        )
    return Batch(*(np.concatenate(a).astype(np.int32) for a in (token_ids, positions, seq_ids, logit_rows)))


def _check_part(r: int, seq_id: int, start: int, ids: np.ndarray, logits: str, earlier: list[int]) -> None:
    where = f"batch part {r}"
    if ids.size == 0:
        raise ValueError(
            f"{where}: got no tokens, expected at least one. Leave the sequence out of the batch"
        )
    if seq_id < 0 or start < 0:
        raise ValueError(
            f"{where}: got lane {seq_id}, start {start}; expected neither negative. Number both from 0"
        )
    if seq_id in earlier:
        raise ValueError(
            f"{where}: lane {seq_id} is in the batch twice. Join the tokens of one sequence in one part"
        )
    if ids.min() < 0 or ids.max() >= 1 << 31 or start + ids.size >= 1 << 31:
        raise ValueError(
            f"{where}: token id or position out of range; expected 0 .. 2^31 - 1. Check the tokenizer"
        )
    if logits not in ("last", "all", "none"):
        raise ValueError(f"{where}: logits {logits!r}, expected 'last', 'all' or 'none'. Choose one of them")
