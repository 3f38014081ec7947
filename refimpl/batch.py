"""Batch: the input of one model call.  Prefill, a chunk of it, decode and verification are all this."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

LogitRows = Literal["last", "all", "none"]
PAD = 0  # the token id under a soft token: what the per-layer table is asked for there


@dataclass(frozen=True)
class SoftTokens:
    """An image, a frame or a sound in a sequence: rows that stand where token embeddings would.

    Shapes:
        start   int      position of the first row in the sequence
        rows    f[n, D]  as the encoder made them
        vision  bool     images and frames: models whose media attention is "bidirectional" let all rows of
                         one see each other; sounds are heard in order everywhere
    """

    start: int
    rows: np.ndarray
    vision: bool

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)

    @cached_property
    def digest(self) -> bytes:
        """What the model sees or hears, wherever it stands: 32 bytes, computed once.

        Soft tokens all have the id PAD, so this is what tells one image from another.  Rows hold everything
        that the file and the budget decided; `vision` decides which rows see each other.
        """
        kind = f"{self.rows.dtype.str} {self.rows.shape} {self.vision}\n"
        return hashlib.sha256(kind.encode() + np.ascontiguousarray(self.rows).tobytes()).digest()


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
        soft        f[U, D] | None  embeddings of soft tokens; None: there are only words
        soft_rows   i32[U] | None   the tokens that they replace; the ids of these are PAD
        ends        i32[T] | None   the last position of the image or frame that a token belongs to, or its
                                    own position; None: no images
    """

    token_ids: np.ndarray
    positions: np.ndarray
    seq_ids: np.ndarray
    logit_rows: np.ndarray
    soft: np.ndarray | None = None
    soft_rows: np.ndarray | None = None
    ends: np.ndarray | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


def make_batch(
    parts: Sequence[tuple[int, int, Sequence[int] | np.ndarray, LogitRows]],
    soft: Mapping[int, Sequence[SoftTokens]] | None = None,
) -> Batch:
    """Lay the new tokens of some sequences end to end.

    Args:
        parts: (lane, position of the first token, token ids, whose logits are wanted) for each sequence
        soft: images and sounds of the sequence in a lane; rows outside of the new tokens are left out, so
            that those of a whole prompt can be given with every chunk of it
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
    batch = Batch(*(np.concatenate(a).astype(np.int32) for a in (token_ids, positions, seq_ids, logit_rows)))
    return _with_soft_tokens(batch, soft) if soft else batch


def _with_soft_tokens(batch: Batch, soft: Mapping[int, Sequence[SoftTokens]]) -> Batch:
    """The same batch with the rows that fall on its tokens."""
    token_ids, ends = batch.token_ids.copy(), batch.positions.copy()
    rows, at = [], []
    for lane, items in soft.items():
        tokens = np.nonzero(batch.seq_ids == lane)[0]
        if not len(tokens):
            continue
        first = int(batch.positions[tokens[0]])
        _check_items(lane, items)
        for item in items:
            low, high = max(item.start, first), min(item.stop, first + len(tokens))
            if low >= high:
                continue
            mine = tokens[low - first : high - first]
            rows.append(item.rows[low - item.start : high - item.start])
            at.append(mine)
            token_ids[mine] = PAD
            if item.vision:
                ends[mine] = item.stop - 1
    if not rows:
        return batch
    return replace(
        batch,
        token_ids=token_ids,
        soft=np.concatenate(rows),
        soft_rows=np.concatenate(at).astype(np.int32),
        ends=ends if (ends != batch.positions).any() else None,
    )


def _check_items(lane: int, items: Sequence[SoftTokens]) -> None:
    for before, item in pairwise(items):
        if before.stop > item.start:
            raise ValueError(
                f"batch, lane {lane}: soft tokens {before.start} .. {before.stop - 1} and from {item.start} "
                "on, expected them in order and apart. Number the placeholders again"
            )


def check_soft(batch: Batch, model_dim: int, *, whole: bool) -> None:
    """Refuse soft tokens of another width, and, where images must be `whole` (plan_chunks), a cut one."""
    if batch.soft is None:
        return
    if batch.soft.ndim != 2 or batch.soft.shape[1] != model_dim:
        raise ValueError(
            f"batch: soft tokens of width {batch.soft.shape[-1]}, expected {model_dim}. "
            "Encode with the projector of this model"
        )
    if batch.ends is None or not whole:
        return
    for lane in np.unique(batch.seq_ids):
        mine = batch.seq_ids == lane
        last = batch.positions[mine][-1]
        if batch.ends[mine].max() > last:
            raise ValueError(
                f"batch: the image that ends at position {batch.ends[mine].max()} is cut after {last}, "
                "expected all of it in one call. Cut the prompt with plan_chunks(..., whole=True)"
            )


def plan_chunks(
    start: int, stop: int, chunk: int, soft: Sequence[SoftTokens] = (), *, whole: bool = False
) -> list[tuple[int, int]]:
    """Cut the positions start .. stop-1 of a prompt into calls of at most `chunk` tokens.

    Args:
        soft: images and sounds of the prompt
        whole: never cut an image or a frame, as models with "bidirectional" media attention need it; one that
            is larger than `chunk` is a call of its own, of its size
    """
    out = []
    while start < stop:
        end = min(start + chunk, stop)
        for item in soft:
            if whole and item.vision and item.start < end < item.stop:
                end = item.start if item.start > start else item.stop
        out.append((start, end))
        start = end
    return out


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
