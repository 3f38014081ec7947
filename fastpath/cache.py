"""Keys and values of the tokens seen so far: a ring for sliding layers, a growing line for global ones."""

import math
from collections.abc import Iterator

import numpy as np

from refimpl.kv_types import STEP, dtypes_of, own_pages, shapes_of

LINE, HUGE_PAGE = 64, 2 << 20  # bytes
FIRST_SLOTS = 256  # a fresh cache; it doubles when a longer sequence comes

KVType = str | tuple[str, str]  # a name of refimpl.kv_types.KV_TYPES, or one for keys and one for values


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def layer_slots(window: int | None, slots: int, chunk: int) -> int:
    """Slots one layer needs when the global layers hold `slots` positions.

    A sliding layer keeps the `window - 1` keys before a chunk plus the chunk itself: keys are written before
    they are read, so the oldest key of the chunk's first token must survive the writing of its last.
    """
    return slots if window is None else min(slots, round_up(window - 1 + chunk, STEP))


def cache_bytes(config, n_seqs: int, capacity: int, chunk: int, kv_type: KVType = "f16") -> int:
    """Bytes of a cache grown to `capacity` positions; the one formula for estimates and allocation."""
    slots = round_up(capacity, STEP)
    return sum(
        math.prod(shape) * dtype.itemsize
        for layer in config.layers
        if layer.owns_kv
        for shape, dtype in zip(_shapes(layer, n_seqs, slots, chunk), dtypes_of(kv_type), strict=True)
    )


def _shapes(layer, n_seqs: int, slots: int, chunk: int) -> tuple[tuple[int, ...], ...]:
    return shapes_of(n_seqs, layer_slots(layer.window, slots, chunk), layer.n_kv_heads, layer.head_dim)


class KVCache:
    """One (keys, values) pair per layer that owns its keys; shared-KV layers read the pair of `kv_from`.

        position p of lane r lives in slot s = p % S  of

            k[r, :, s // 32, :, s % 32]     k: [R, K, S/32, H, 32]
            v[r, :, s // 32, :, s % 32]     v: [R, K, S/32, H/32, 32, 32]

    S is the same formula for both kinds (`layer_slots`). A line never wraps because S covers every position;
    a ring wraps only at its final size, so that growing is a copy of the front part for both.

    dtype    float32 or float64: the precision of every call on this cache
    kv_type  what keys and values are rounded to; None: the call's precision

    Notes:
        A lane needs no clearing before it is used again: a query at position p reads positions <= p only,
        and a new sequence writes each of them first.
    """

    def __init__(self, config, n_seqs: int, capacity: int, chunk: int, *, dtype=np.float32, kv_type=None):
        assert capacity >= 1 and chunk >= 1 and n_seqs >= 1
        self.config, self.n_seqs, self.chunk, self.dtype = config, n_seqs, chunk, np.dtype(dtype)
        self.capacity, self.kv_type = capacity, kv_type
        self.dtypes = (self.dtype, self.dtype) if kv_type is None else dtypes_of(kv_type)
        self.slots = min(FIRST_SLOTS, round_up(capacity, STEP))
        self.n_growths = 0
        self.table = own_pages(n_seqs)
        self._pairs = {
            layer.index: self._allocate(layer, self.slots) for layer in config.layers if layer.owns_kv
        }

    def _allocate(self, layer, slots: int) -> tuple[np.ndarray, np.ndarray]:
        k_shape, v_shape = _shapes(layer, self.n_seqs, slots, self.chunk)
        return zeros(k_shape, self.dtypes[0]), zeros(v_shape, self.dtypes[1])

    def layer(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys, values and table of layer `index`, its own ones only; callers pass `kv_from`."""
        return *self._pairs[index], self.table

    def owners(self) -> Iterator[int]:
        return iter(self._pairs)

    def check(self, batch) -> None:
        """Refuse a batch that this cache cannot hold, before anything of it is written."""
        last, lanes = int(batch.positions.max()), batch.seq_ids
        if last >= self.capacity:
            raise ValueError(
                f"batch: position {last}, expected at most {self.capacity - 1}. "
                "The context is full: shorten the prompt, or make the engine with a longer context"
            )
        if lanes.min() < 0 or lanes.max() >= self.n_seqs:
            raise ValueError(
                f"batch: lanes {lanes.min()} to {lanes.max()}, expected 0 to {self.n_seqs - 1}. "
                "Make the engine with more sequences (n_seqs)"
            )
        longest = int(np.bincount(lanes).max())
        if longest > self.chunk:  # its last token would overwrite keys that its first one sees
            raise ValueError(
                f"batch: {longest} tokens of one sequence, expected at most {self.chunk}, the chunk. Cut it"
            )

    def reserve(self, n_positions: int) -> None:
        """Makes room for positions 0 .. n_positions - 1; doubles, so that growing costs O(1) per token.

        An interrupt in the middle leaves some layers larger than `slots` says, which is as good as before:
        the next call goes on from there.  Recorded programs are told first, since they hold old arrays.
        """
        assert n_positions <= self.capacity, f"{n_positions} positions in a cache of {self.capacity}"
        if n_positions <= self.slots:
            return
        slots = self.slots
        while slots < n_positions:
            slots *= 2
        slots = min(slots, round_up(self.capacity, STEP))
        self.n_growths += 1
        for layer in self.config.layers:
            if layer.owns_kv:
                self._grow(layer, slots)
        self.slots = slots

    def _grow(self, layer, slots: int) -> None:
        old_k, old_v = self._pairs[layer.index]
        n_blocks = old_k.shape[2]
        if layer_slots(layer.window, slots, self.chunk) <= n_blocks * STEP:
            return
        k, v = self._allocate(layer, slots)
        k[:, :, :n_blocks], v[:, :, :n_blocks] = old_k, old_v
        self._pairs[layer.index] = k, v

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self._pairs.values())


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Aligned to cache lines, and large ones to huge pages, which NumPy asks Linux for.

    Costs no memory until touched.
    """
    size = math.prod(shape) * dtype.itemsize
    align = HUGE_PAGE if size >= HUGE_PAGE else LINE
    memory = np.zeros(size + align, np.uint8)
    start = -memory.ctypes.data % align
    return memory[start : start + size].view(dtype).reshape(shape)
