"""KVCache: the keys and values of all tokens that later tokens can still see."""

import numpy as np

from refimpl.kv_types import dtypes_of, exact_type, own_pages, shapes_of


class KVCache:
    """Keys and values per layer that has its own, for R sequences: arrays as in ops/attention.py.

    Layers that share keys have no storage: `layer(kv_from)` is that of their donor.

    A global layer has a slot for every position.  A sliding layer never looks back further than its window W,
    so its slots are a ring: position p is in slot p mod S.  After the *last* token of a call was written, the
    *first* one must still find what it sees: S is W - 1 + chunk.  Four of five layers then need the memory of
    a short conversation, however long it gets.  S is a multiple of 32, the positions of a block of keys.

    Shapes:
        n_seqs    R, sequences kept apart ("lanes")
        capacity  positions that a sequence may have
        chunk     most tokens of one sequence in one call
        dtype     float32 or float64: the precision of every call on this cache
        kv_type   what keys and values are rounded to: a name of KV_TYPES, or a pair of names; None: nothing,
                  they have the call's precision
        ring      False: sliding layers keep every position as well; nothing else changes
    """

    def __init__(self, config, n_seqs, capacity, chunk, dtype=np.float32, *, kv_type=None, ring=True):
        self.n_seqs, self.capacity, self.chunk = n_seqs, capacity, chunk
        self.dtype = np.dtype(dtype)
        kv_type = exact_type(dtype) if kv_type is None else kv_type
        self._layers, self._table = {}, own_pages(n_seqs)
        for layer in config.layers:
            if layer.owns_kv:
                n_slots = capacity
                if ring and layer.window is not None:
                    n_slots = min(capacity, layer.window - 1 + chunk)
                shapes = shapes_of(n_seqs, n_slots, layer.n_kv_heads, layer.head_dim, kv_type)
                self._layers[layer.index] = tuple(map(np.zeros, shapes, dtypes_of(kv_type)))

    def layer(self, i):
        """(k, v, table) of a layer that has its own keys; a lane has one page there."""
        return *self._layers[i], self._table

    @property
    def nbytes(self):
        return sum(k.nbytes + v.nbytes for k, v in self._layers.values())

    def check(self, batch):
        """Refuse a batch that this cache cannot hold."""
        if batch.positions.max() >= self.capacity:
            raise ValueError(
                f"batch: position {batch.positions.max()}, expected at most {self.capacity - 1}. "
                "The context is full: shorten the prompt or give the cache a larger capacity"
            )
        if batch.seq_ids.min() < 0 or batch.seq_ids.max() >= self.n_seqs:
            raise ValueError(
                f"batch: lanes {sorted(set(batch.seq_ids.tolist()))}, expected 0 .. {self.n_seqs - 1}"
            )
        longest = np.bincount(batch.seq_ids).max()
        if longest > self.chunk:
            raise ValueError(
                f"batch: {longest} tokens of one sequence, expected at most {self.chunk}. "
                "Split it in chunks of that size"
            )
