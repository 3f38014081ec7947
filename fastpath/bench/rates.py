"""What the machine can do, measured in the run that is judged by it: plain reading, int8 dot products.

Read      work item: a piece of at most 1 MB     traffic: every byte once, nothing written
Dot       work item: ROUNDS times 12 dot products of 64 bytes, in registers; no traffic
Fma       the same of 16 float32
Tiles     the same of tiles of 16 x 64 by 64 x 16 bytes, on CPUs with a matrix unit
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass

import numpy as np

from fastpath.cpu import machine, threads
from fastpath.cpu.buffers import address
from fastpath.cpu.kernel import kernel
from fastpath.cpu.simd import (
    add_f32,
    add_i32,
    as_i8,
    fma_f32,
    ld_i64,
    load_f32,
    load_i32,
    splat_i32,
    store_f32,
    store_i32,
)
from fastpath.cpu.simd_dot import dot_spread
from fastpath.cpu.tile import STATE, TILE, Tiles

PIECE = 1 << 20
LINE = 512  # bytes per round of the reading loop; tails are left out, and do not count
PASSES = 3  # of a plain read, wherever it is measured: a single one is often slowed by somebody else
ROUNDS = 1 << 16
DOT_OPS, FMA_OPS, TILE_OPS = 12 * 128, 12 * 32, 6 * 2 * 16 * 64 * 16  # of a round: mul and add


@kernel
def read_plain(args, lo, hi, thread):
    pieces, out = ld_i64(args), ld_i64(args + 8) + 64 * thread
    for i in range(lo, hi):
        begin, size = ld_i64(pieces + 16 * i), ld_i64(pieces + 16 * i + 8)
        a = splat_i32(0)
        b, c, d = a, a, a
        for p in range(begin, begin + size, 512):
            a, b = add_i32(a, load_i32(p)), add_i32(b, load_i32(p + 64))
            c, d = add_i32(c, load_i32(p + 128)), add_i32(d, load_i32(p + 192))
            a, b = add_i32(a, load_i32(p + 256)), add_i32(b, load_i32(p + 320))
            c, d = add_i32(c, load_i32(p + 384)), add_i32(d, load_i32(p + 448))
        store_i32(out, add_i32(add_i32(a, b), add_i32(c, d)))  # somebody wants the sums: nothing is left out


@kernel
def dot_peak(args, lo, hi, thread):
    words, out = ld_i64(args), ld_i64(args + 8) + 64 * thread
    for _ in range(lo, hi):
        a = splat_i32(0)
        b, c, d, e, f, g, h, i, j, k, l = a, a, a, a, a, a, a, a, a, a, a
        for n in range(ROUNDS):
            u = as_i8(splat_i32(n))  # another one each time: equal sums could be taken out of the loop
            a, b, c = dot_spread(a, u, words), dot_spread(b, u, words + 4), dot_spread(c, u, words + 8)
            d, e, f = dot_spread(d, u, words + 12), dot_spread(e, u, words + 16), dot_spread(f, u, words + 20)
            g, h, i = dot_spread(g, u, words + 24), dot_spread(h, u, words + 28), dot_spread(i, u, words + 32)
            j, k, l = dot_spread(j, u, words + 36), dot_spread(k, u, words + 40), dot_spread(l, u, words + 44)
        first = add_i32(add_i32(add_i32(a, b), add_i32(c, d)), add_i32(e, f))
        store_i32(out, add_i32(first, add_i32(add_i32(add_i32(g, h), add_i32(i, j)), add_i32(k, l))))


@kernel
def fma_peak(args, lo, hi, thread):
    words, out = ld_i64(args), ld_i64(args + 8) + 64 * thread
    for _ in range(lo, hi):
        x, y = load_f32(words), load_f32(words + 64)  # halves: sums stay small
        a = x
        b, c, d, e, f, g, h, i, j, k, l = a, a, a, a, a, a, a, a, a, a, a
        for _ in range(ROUNDS):
            a, b, c, d = fma_f32(a, x, y), fma_f32(b, x, y), fma_f32(c, x, y), fma_f32(d, x, y)
            e, f, g, h = fma_f32(e, x, y), fma_f32(f, x, y), fma_f32(g, x, y), fma_f32(h, x, y)
            i, j, k, l = fma_f32(i, x, y), fma_f32(j, x, y), fma_f32(k, x, y), fma_f32(l, x, y)
        first = add_f32(add_f32(add_f32(a, b), add_f32(c, d)), add_f32(e, f))
        store_f32(out, add_f32(first, add_f32(add_f32(add_f32(g, h), add_f32(i, j)), add_f32(k, l))))


_unit = Tiles({tile: (16, 64) for tile in range(8)})
_configure, _release, _load_a, _load_b, _store = (
    _unit.configure(), _unit.release(), _unit.load(0), _unit.load(1), _unit.store(2),
)  # fmt: skip
_zero_2, _zero_3, _zero_4, _zero_5, _zero_6, _zero_7 = (_unit.zero(c) for c in range(2, 8))
_dot_2, _dot_3, _dot_4, _dot_5, _dot_6, _dot_7 = (_unit.dot(c, 0, 1) for c in range(2, 8))


@kernel
def tile_peak(args, lo, hi, thread):
    words, rounds = ld_i64(args), ld_i64(args + 16)
    out = ld_i64(args + 8) + (TILE + STATE) * thread
    state = out + TILE
    _configure(state)
    _load_a(state, words, 64)
    _load_b(state, words, 64)
    for _ in range(lo, hi):
        _zero_2(state)
        _zero_3(state)
        _zero_4(state)
        _zero_5(state)
        _zero_6(state)
        _zero_7(state)
        for _ in range(rounds):
            _dot_2(state)
            _dot_3(state)
            _dot_4(state)
            _dot_5(state)
            _dot_6(state)
            _dot_7(state)
        _store(state, out)
    _release(state)


class PlainRead:
    """Reads memory that is already there, such as a model's weights, on all threads."""

    def __init__(self, arrays: Iterable[np.ndarray]):
        self.arrays = list(arrays)
        pieces = [piece for array in self.arrays for piece in _pieces(array)]
        self.pieces = np.array(pieces, np.int64).reshape(-1, 2)
        self.nbytes = int(self.pieces[:, 1].sum())
        self._out = np.zeros((threads.num_threads(), 16), np.int32)
        read_plain.load()

    def best(self) -> float:
        """Bytes per second of the fastest of PASSES passes: what the memory can do, a yardstick."""
        return max(self.bytes_per_s() for _ in range(PASSES))

    def bytes_per_s(self) -> float:
        """One pass."""
        n_threads = len(self._out)
        begin = time.perf_counter()
        threads.run(read_plain, (address(self.pieces), address(self._out)), len(self.pieces), 1, n_threads)
        return self.nbytes / (time.perf_counter() - begin)


def _pieces(array: np.ndarray) -> Iterator[tuple[int, int]]:
    begin, size = array.__array_interface__["data"][0], array.nbytes
    for offset in range(0, size, PIECE):
        length = min(PIECE, size - offset) // LINE * LINE
        if length:
            yield begin + offset, length


def int8_ops_per_s(seconds: float = 0.1) -> float:
    """int8 multiplications and additions of the best instruction that the kernels use here, from registers,
    on all threads."""
    if machine.TILES == "registers":
        return _peak(tile_peak, np.ones(TILE, np.int8), TILE_OPS, seconds)
    return _peak(dot_peak, np.arange(64, dtype=np.int8), DOT_OPS, seconds)


def fma_ops_per_s(seconds: float = 0.1) -> float:
    """float32 multiplications and additions, likewise."""
    return _peak(fma_peak, np.full(32, 0.5, np.float32), FMA_OPS, seconds)


def _peak(kernel, words: np.ndarray, ops_per_round: int, seconds: float) -> float:
    n_threads = threads.num_threads()
    out = np.zeros(n_threads * (TILE + STATE), np.uint8)
    args, n_items = (address(words), address(out), ROUNDS), 4 * n_threads
    kernel.load()
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        threads.run(kernel, args, n_items, 1, n_threads)
        best = max(best, n_items * ROUNDS * ops_per_round / (time.perf_counter() - begin))
    return best


def product_weights(weights) -> list:
    """All matrices that products read, each once: not the tables that rows are looked up in."""
    tables = {id(weights.per_layer_token_embd)}
    if weights.output is not weights.token_embd:
        tables.add(id(weights.token_embd))
    return list({id(t): t for t in matrices_of(weights) if id(t) not in tables}.values())


def weight_memory(weights) -> list[np.ndarray]:
    """Their bytes, packed or as the file holds them."""
    return [t.memory if hasattr(t, "memory") else t.data for t in product_weights(weights)]


def matrices_of(node) -> Iterator:
    """Every tensor in the weights of a model or of an encoder."""
    if hasattr(node, "format"):
        yield node
    elif is_dataclass(node):
        for each in fields(node):
            yield from matrices_of(getattr(node, each.name))
    elif isinstance(node, tuple | dict):
        for part in node.values() if isinstance(node, dict) else node:
            yield from matrices_of(part)
