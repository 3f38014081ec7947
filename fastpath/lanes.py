"""Lanes: sequences that grow by chunks, on one cache, through one forward call.  Who runs when: engine/.

Its specification is one sentence: how a sequence is cut into calls, what it is batched with and how many
threads run never changes a byte of its logits.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from fastpath import arrays, locks
from fastpath.kv.cache import KVCache
from fastpath.kv.geometry import PAGE, KVType, PageCounts
from fastpath.largest import Largest
from fastpath.model.text import forward
from fastpath.replay import Replay
from refimpl.batch import Batch, LogitRows, SoftTokens, make_batch, plan_chunks

Progress = Callable[[int, int], None]
WATCHED_TOKENS = 32  # per call of the second run: all its rows want logits, 1 MB each in a real model


class NotFiniteError(ValueError):
    """The model produced NaN or infinity; the message names the first place."""


def default_chunk(config) -> int:
    """Prompt tokens per call: enough for the matrix kernels, at least twice the window, bounded in memory."""
    window = max((layer.window or 0 for layer in config.layers), default=0)
    return min(2048, max(2 * window, 1024))


class Lanes:
    """`n_seqs` lanes, each a sequence of tokens whose keys and values are in the cache.

    context_len  tokens a sequence may hold; None = what the model was made for
    chunk        most tokens of one sequence per call; None = `default_chunk`
    largest_image  soft tokens of the largest image or frame to come: large models take each in one call, even
                 where that is more than `chunk`
    activations  "int8" | "float"
    dtype        of numbers; float64 makes the reference's table exact (no other table knows it)
    kv_type      what keys and values are stored as: a name, or one for keys and one for values;
                 None: "f16", and "f64" for float64
    page         positions of a page of the cache
    n_pages      kind ("global", "sliding") -> pages of the cache, or a function of the geometry of `n_seqs`
                 full sequences that says so; None: what these take
    replay       calls of few tokens run as recorded programs, where the op table can record: same bytes
    """

    def __init__(
        self,
        model,
        ops,
        *,
        context_len: int | None = None,
        chunk: int | None = None,
        largest_image: int = 0,
        n_seqs: int = 1,
        activations: str = "int8",
        dtype=np.float32,
        kv_type: KVType | None = None,
        page: int = PAGE,
        n_pages: PageCounts | None = None,
        replay: bool = True,
    ):
        self.model, self.ops, self.activations = model, ops, activations
        self.context_len = context_len or model.config.context_len
        self.chunk = min(chunk or default_chunk(model.config), self.context_len)
        if self.context_len > model.config.context_len:
            raise ValueError(
                f"context of {self.context_len} tokens asked for, but the model was made for "
                f"{model.config.context_len}. Ask for at most that."
            )
        self.whole_images = model.config.media_attention == "bidirectional"
        self._largest_call = max(self.chunk, min(largest_image, self.context_len) if self.whole_images else 0)
        self.kv_type = kv_type or ("f64" if np.dtype(dtype) == np.float64 else "f16")
        self._new_cache = partial(
            KVCache,
            model.config,
            capacity=self.context_len,
            chunk=self._largest_call,
            dtype=dtype,
            kv_type=self.kv_type,
            page=page,
            arrays=arrays.of(ops),
        )
        self.cache = self._new_cache(n_seqs, n_pages=n_pages)
        self._one_at_a_time = locks.reentrant()  # threads may share these, each with lanes of its own
        self.tokens: list[list[int]] = [[] for _ in range(n_seqs)]
        self.soft: list[list[SoftTokens]] = [[] for _ in range(n_seqs)]
        recorder = getattr(ops, "program", None)
        self.replay = Replay(recorder, self._eagerly, self._state) if replay and recorder else None

    def forward(self, batch: Batch, trace=None) -> np.ndarray:
        """The model on a batch of the caller's making: f32[M, V]. The lanes' token lists are not touched."""
        if trace is not None:
            return self._run(self.cache, batch, arrays.on_host(self.ops, trace))
        return self._forward(batch, None)

    def largest(self, batch: Batch, k: int) -> Largest:
        """The same, but of each row of logits its k largest."""
        return self._forward(batch, k)

    def _forward(self, batch: Batch, k: int | None):
        if self.replay is None or not self.replay.takes(batch, self.model.config.vocab_size):
            return self._run(self.cache, batch, None, k)
        self.cache.check(batch)
        self.cache.reserve(batch)
        with np.errstate(all="ignore"):
            return self.replay.run(batch, k)

    def _eagerly(self, batch: Batch, trace, k: int | None):
        return self._run(self.cache, batch, trace, k)

    def _state(self) -> tuple[tuple, tuple]:
        """(objects, values) whose arrays and numbers recorded programs hold."""
        return (self.model, self.cache), (self.cache.depth, self.activations)

    def _run(self, cache: KVCache, batch: Batch, trace, k: int | None = None):
        """Ops may meet NaN and infinity, and pass them on: `_check_finite` says what NumPy would warn of."""
        with np.errstate(all="ignore"):
            return forward(
                self.ops,
                self.model.config,
                self.model.weights,
                cache,
                batch,
                activations=self.activations,
                trace=trace,
                k=k,
            )

    def extend(
        self,
        pieces: Sequence[tuple[int, Sequence[int]]],
        rows: LogitRows = "last",
        trace=None,
        *,
        soft: Mapping[int, Sequence[SoftTokens]] | None = None,
    ) -> np.ndarray:
        """One call that appends ids to lanes.

        Shapes:
            pieces  (lane, ids), at most `chunk` ids each (`plan`), every lane at most once
            rows    "last" | "all" | "none": whose logits are wanted, for each piece
            soft    images and sounds of a lane; those that do not stand on its new tokens are left out
        Returns:
            f32[M, V] in the order of the pieces
        """
        with self._one_at_a_time:
            return self._extend(pieces, rows, trace, soft)

    def _extend(self, pieces, rows, trace, soft) -> np.ndarray:
        for lane, ids in pieces:
            self.check_room(len(ids), lane)
            self.model.check_ids(ids)
        batch = make_batch([(lane, len(self.tokens[lane]), list(ids), rows) for lane, ids in pieces], soft)
        logits = self.forward(batch, trace)
        for lane, ids in pieces:
            self.tokens[lane].extend(int(i) for i in ids)
            known = self.soft[lane][-1].start if self.soft[lane] else -1
            given = soft.get(lane, ()) if soft else ()
            self.soft[lane] += [item for item in given if known < item.start < self.length(lane)]
        self._check_finite(logits, batch.seq_ids[batch.logit_rows])
        return logits

    def plan(
        self, n: int, *, lane: int = 0, soft: Sequence[SoftTokens] = (), chunk: int | None = None
    ) -> list[tuple[int, int]]:
        """How n more tokens of a lane are cut into calls: (first, stop), counted from the first new one.

        soft  positions are in the sequence
        """
        held = self.length(lane)
        cuts = plan_chunks(held, held + n, chunk or self.chunk, soft, whole=self.whole_images)
        self._check_largest(cuts)
        return [(start - held, stop - held) for start, stop in cuts]

    def check_cuts(self, n: int, soft: Sequence[SoftTokens] = ()) -> None:
        """No image of a prompt of n tokens is larger than a call, or ValueError."""
        self._check_largest(plan_chunks(0, n, self.chunk, soft, whole=self.whole_images))

    def _check_largest(self, cuts: Sequence[tuple[int, int]]) -> None:
        largest = max((stop - start for start, stop in cuts), default=0)
        if largest > self._largest_call:
            raise ValueError(
                f"an image of {largest} soft tokens, but these lanes take at most {self._largest_call} "
                "tokens in one call. Make them with a larger chunk, or say largest_image"
            )

    def prefill(
        self,
        ids: Sequence[int],
        *,
        lane: int = 0,
        soft: Sequence[SoftTokens] = (),
        progress: Progress | None = None,
    ) -> np.ndarray:
        """Appends a prompt to a lane, chunk by chunk; f32[V], the logits after its last token.

        soft  images and sounds, by their positions in the sequence
        progress(done, total) is called after each chunk; an exception from it ends the prefill there.
        """
        if len(ids) == 0:
            raise ValueError("the prompt has no tokens. Give at least one.")
        self.check_room(len(ids), lane)
        cuts = self.plan(len(ids), lane=lane, soft=soft)
        for start, stop in cuts:
            wanted: LogitRows = "last" if stop == len(ids) else "none"
            logits = self.extend([(lane, ids[start:stop])], wanted, soft={lane: soft})
            if progress is not None:
                progress(stop, len(ids))
        return logits[0]

    def decode(self, token_id: int, *, lane: int = 0) -> np.ndarray:
        """Appends one token; f32[V]."""
        return self.extend([(lane, [token_id])])[0]

    def reset(self, lane: int = 0) -> None:
        """Forgets a lane's tokens, and gives its pages back."""
        with self._one_at_a_time:
            self.tokens[lane], self.soft[lane] = [], []
            self.cache.release(lane)

    def truncate(self, n: int, lane: int = 0) -> None:
        """Keeps a lane's first n tokens.

        Raises:
            ValueError: there are fewer, or the sliding window before n is gone
        """
        with self._one_at_a_time:
            self._forget_unwritten(lane)
            self.cache.truncate(lane, n)
            self.tokens[lane] = self.tokens[lane][:n]
            self.soft[lane] = [item for item in self.soft[lane] if item.start < n]

    def adopt(
        self,
        ids: Sequence[int],
        pages: Mapping[str, Iterable[tuple[int, int]]],
        lane: int = 0,
        soft: Sequence[SoftTokens] = (),
    ) -> None:
        """An empty lane starts with tokens whose keys are in these pages (KVCache.adopt).

        soft  images and sounds, by their positions; those behind the ids are left out
        """
        with self._one_at_a_time:
            self._forget_unwritten(lane)
            self.cache.adopt(lane, len(ids), pages)
            self.tokens[lane] = [int(i) for i in ids]
            self.soft[lane] = [item for item in soft if item.start < len(ids)]

    def _forget_unwritten(self, lane: int) -> None:
        """A call that did not end leaves pages that were reserved for it."""
        if self.cache.length(lane) > self.length(lane):
            self.cache.truncate(lane, self.length(lane))

    def length(self, lane: int = 0) -> int:
        return len(self.tokens[lane])

    def room(self, lane: int = 0) -> int:
        """Tokens that still fit."""
        return self.context_len - len(self.tokens[lane])

    @property
    def cache_bytes(self) -> int:
        """Of the pages that were used so far."""
        return self.cache.used_bytes

    @property
    def max_cache_bytes(self) -> int:
        """Of all pages: what the cache may come to hold."""
        return self.cache.nbytes

    def check_room(self, n: int, lane: int = 0, *, advice: str | None = None) -> None:
        """n more tokens fit, or ValueError. advice: how the prompt gets shorter."""
        if n > self.room(lane):
            raise ValueError(self.too_long(n, self.length(lane), advice))

    def too_long(self, n: int, n_held: int = 0, advice: str | None = None) -> str:
        """What is wrong with a prompt of n tokens after n_held others. advice: how it gets shorter."""
        held = f", of which {n_held} are taken" if n_held else ""
        most = self.model.config.context_len
        longer = ": the model was made for no more"
        if self.context_len < most:
            longer = f", or ask for a longer context (the model allows {most})"
        return (
            f"the prompt has {n} tokens, the context holds {self.context_len}{held}. "
            f"{advice or 'Shorten it'}{longer}."
        )

    def _check_finite(self, logits: np.ndarray, lanes: np.ndarray) -> None:
        """lanes i32[M]: whose row is whose."""
        for row in rows_not_finite(logits):
            lane = int(lanes[row])
            raise self.not_finite(self.tokens[lane], self.soft[lane])

    def not_finite(self, ids: Sequence[int], soft: Sequence[SoftTokens] = ()) -> NotFiniteError:
        """Runs a sequence once more, watched: the error says where NaN or infinity first appears."""
        return NotFiniteError(self._first_not_finite(ids, soft))

    def _first_not_finite(self, ids: Sequence[int], soft: Sequence[SoftTokens]) -> str:
        fresh = self._new_cache(1)
        step = min(self.chunk, WATCHED_TOKENS)
        for start, stop in plan_chunks(0, len(ids), step, soft, whole=self.whole_images):
            batch = make_batch([(0, start, ids[start:stop], "all")], {0: soft})
            try:
                self._run(fresh, batch, arrays.on_host(self.ops, _StopAtNotFinite(batch.positions)))
            except _FoundNotFinite as found:
                return str(found)
        return "the logits held NaN or infinity, a second run did not. Is the memory of this machine sound?"


def rows_not_finite(logits: np.ndarray) -> list[int]:
    """Rows with NaN or infinity. Maximum and minimum pass them on, cheaper than a look at each number."""
    if logits.size == 0 or (math.isfinite(logits.max()) and math.isfinite(logits.min())):
        return []
    return np.flatnonzero(~np.isfinite(logits).all(axis=1)).tolist()


class _FoundNotFinite(Exception):
    pass


class _StopAtNotFinite:
    """A trace that ends the forward call at the first value that is no number."""

    def __init__(self, positions: np.ndarray):
        self.positions = positions

    def __call__(self, name: str, array: np.ndarray) -> None:
        rows = array.reshape(len(array), -1)
        finite = np.isfinite(rows).all(axis=1)
        if finite.all():
            return
        row = int(np.argmin(finite))
        where, _, layer = name.partition("-")
        place = f"layer {layer}, {where}" if layer else where
        raise _FoundNotFinite(
            f"{place}: NaN or infinity at position {self.positions[row]}, the first in the order of "
            "computation. The weights that it multiplies by are damaged: download the model again."
        )
