"""What a block of a fused kernel does for one launch that was fused: a row of it, a piece of a row, or all.

    step(t, lo, hi, C, threads, partial, ...)    columns lo .. hi-1 of row t, which has C; hi may lie behind C

`threads` of the block work, the others only meet them at barriers.  A row is an array and the place of its
column 0 in it: in global memory, or in the block's shared memory while nobody else reads it.  The other
arguments are the kernel's.  The arithmetic is that of the kernels themselves, whose device functions these
steps call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda, float32, int32

from fastpath.cuda import (
    activation,
    attention,
    elementwise,
    grouping,
    kv_types,
    linear,
    linear_float,
    linear_some,
    moe,
    norm,
    quantize,
    rotary,
)
from fastpath.cuda.intrinsics import add_rn, mul_rn
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.kv_types import block_of
from refimpl.kv_types import STEP

MOST_TOKENS = 16  # that one block chooses experts for


@dataclass(frozen=True)
class RowStep:
    """
    function  the step
    rows      the arguments that are rows of float32, one column after the other
    shape     launch -> (rows, columns); (None, n): n numbers, rows as its neighbours have them
    whole     it needs a whole row at once
    elsewhere a thread reads, or writes, columns that are not its own: every `threads`-th one
    more      launch -> numbers that the function is given before the arguments
    """

    function: Callable
    rows: tuple[str, ...]
    shape: Callable
    whole: bool = False
    elsewhere: bool = False
    more: Callable = lambda launch: ()


@dataclass(frozen=True)
class TileStep:
    """function(x of the grid, y, the grid's width, arguments): by a block; it needs no other one.

    early  the same, which waits inside until the kernel before it has ended (ready.py)
    """

    function: Callable
    early: Callable


@dataclass(frozen=True)
class BlockStep:
    """function(arguments): all of the launch in one block of 256 threads."""

    function: Callable
    fits: Callable = lambda launch: True


@cuda.jit(device=True)
def columns(lo, hi, threads):
    """Those of this thread."""
    return range(lo + cuda.threadIdx.x if cuda.threadIdx.x < threads else hi, hi, threads)


@cuda.jit(device=True)
def _rms_norm(t, lo, hi, C, threads, partial, x, x0, weight, is_weighted, eps, out, out0):
    norm.norm_row(x, x0, weight, is_weighted, eps, out, out0, C, threads, partial)


@cuda.jit(device=True)
def _add(t, lo, hi, C, threads, partial, x, x0, y, y0, out, out0):
    for c in columns(lo, min(hi, C), threads):
        out[out0 + c] = add_rn(x[x0 + c], y[y0 + c])


@cuda.jit(device=True)
def _scale(t, lo, hi, C, threads, partial, x, x0, factor, out, out0):
    for c in columns(lo, min(hi, C), threads):
        out[out0 + c] = mul_rn(x[x0 + c], factor)


@cuda.jit(device=True)
def _geglu(t, lo, hi, C, threads, partial, gate, gate0, up, up0, out, out0):
    for c in columns(lo, min(hi, C), threads):
        out[out0 + c] = activation.geglu_of(gate[gate0 + c], up[up0 + c])


@cuda.jit(device=True)
def _expert_sum(t, lo, hi, C, threads, partial, y, weights, out, out0):
    for c in columns(lo, min(hi, C), threads):
        out[out0 + c] = moe.expert_sum_of(y, weights, t, c)


@cuda.jit(device=True)
def _join(t, lo, hi, C, threads, partial, parts, peaks, positions, ends, window, out, out0):
    H = parts.shape[3]
    for c in columns(lo, min(hi, C), threads):
        out[out0 + c] = attention.joined(parts, peaks, positions, ends, window, t, c // H, c % H)


def _round(block_size):
    by_warp = quantize.BLOCKS[block_size]

    @cuda.jit(device=True)
    def step(t, lo, hi, C, threads, partial, x, x0, q, scale, sums):
        warp, end = cuda.threadIdx.x >> 5, hi // block_size
        first = lo // block_size + warp if warp < threads >> 5 else end
        for block in range(first, end, threads >> 5):
            by_warp(x, x0, C, t, block, q, scale, sums)

    return step


@cuda.jit(device=True)
def _spread(t, lo, hi, C, threads, partial, x, x0, out):
    for c in columns(lo, hi, threads):
        out[t, linear_float.place_of(c)] = x[x0 + c] if c < C else float32(0)


@cuda.jit(device=True)
def _rope(t, lo, hi, C, threads, partial, N, x, x0, cos, sin, out, out0):
    token, half = t // N, cos.shape[1]
    for i in columns(0, half, threads):
        a, b = rotary.rotated(x[x0 + i], x[x0 + i + half], cos[token, i], sin[token, i])
        out[out0 + i], out[out0 + i + half] = a, b


def _write_keys(kind):
    store = kv_types.STORES[kind][0]

    @cuda.jit(device=True)
    def step(t, lo, hi, C, threads, partial, K, k, k0, k_pages, blocks, table, seq_ids, positions):
        token, head = t // K, t % K
        p, n = positions[token], (C + STEP - 1) // STEP
        block = block_of(table, seq_ids[token], p, K, head, blocks)
        for c in columns(0, n * STEP, threads):
            key = k[k0 + c] if c < C else float32(0)
            store(key, float32(0), False, k_pages, block, C, n, c, p % STEP)

    return step


def _write_values(kind):
    store = kv_types.STORES[kind][1]

    @cuda.jit(device=True)
    def step(t, lo, hi, C, threads, partial, K, v, v0, v_pages, blocks, table, seq_ids, positions):
        token, head = t // K, t % K
        p, n = positions[token], (C + STEP - 1) // STEP
        block = block_of(table, seq_ids[token], p, K, head, blocks)
        for c in columns(0, n * STEP, threads):
            value = v[v0 + c] if c < C else float32(0)
            store(value, v_pages, block, n, c, p % STEP)

    return step


@cuda.jit(device=True)
def _route(logits, scale, is_scaled, ids, weights):
    for t in range(cuda.threadIdx.x >> 5, logits.shape[0], cuda.blockDim.x >> 5):
        moe.route_token(t, logits, scale, is_scaled, ids, weights)


# -- halves of write_kv: what it does for keys, and for values, of at most 16 tokens


def _half(step):
    def kernel(x, pages, blocks, table, seq_ids, positions):
        t, head, K, H = cuda.blockIdx.y, cuda.blockIdx.x, x.shape[1], x.shape[2]
        row = t * K + head
        step(
            row,
            0,
            H,
            H,
            cuda.blockDim.x,
            float32(0),
            K,
            x[t, head],
            0,
            pages,
            blocks,
            table,
            seq_ids,
            positions,
        )

    return kernel


@cache
def write_half(kind, which):
    """The kernel that writes keys ("k") or values ("v") of this type."""
    step = (_write_keys if which == "k" else _write_values)(kind)
    signature = (
        attention._HEADS, kv_types.BITS[kind], int32, attention._TABLE, attention._I, attention._I,
    )  # fmt: skip
    return Kernel(_half(step), signature, name=f"write_{which}_{kind}", writes=("pages",))


def _of_rows(name):
    return lambda launch: launch.argument(name).shape


def _of_heads(name):
    def shape(launch):
        T, N, H = launch.argument(name).shape
        return T * N, H

    return shape


def _of_tokens(name):
    def shape(launch):
        T, N, H = launch.argument(name).shape
        return T, N * H

    return shape


def _of_sums(launch):
    y = launch.argument("y")
    return y.shape[0], y.shape[2]


def _of_numbers(launch):
    return None, launch.argument("out").size


def _heads_of(name):
    return lambda launch: (launch.argument(name).shape[1],)


STEPS: dict[str, Any] = {  # kernel name -> RowStep, TileStep or BlockStep
    norm.RMS_NORM.name: RowStep(_rms_norm, ("x", "out"), _of_rows("x"), whole=True),
    elementwise.ADD.name: RowStep(_add, ("x", "y", "out"), _of_numbers),
    elementwise.SCALE.name: RowStep(_scale, ("x", "out"), _of_numbers),
    activation.GEGLU.name: RowStep(_geglu, ("gate", "up", "out"), _of_numbers),
    moe.EXPERT_SUM.name: RowStep(_expert_sum, ("out",), _of_sums),
    attention.JOIN.name: RowStep(_join, ("out",), _of_tokens("out")),
    quantize.ROUND_32.name: RowStep(_round(32), ("x",), _of_rows("x"), elsewhere=True),
    quantize.ROUND_256.name: RowStep(_round(256), ("x",), _of_rows("x"), elsewhere=True),
    linear_float.SPREAD.name: RowStep(_spread, ("x",), _of_rows("x"), elsewhere=True),
    rotary.ROPE.name: RowStep(
        _rope, ("x", "out"), _of_heads("x"), whole=True, elsewhere=True, more=_heads_of("x")
    ),
    moe.ROUTE.name: BlockStep(_route, lambda launch: launch.argument("ids").shape[0] <= MOST_TOKENS),
    grouping.GROUP.name: BlockStep(grouping.group),
}
STEPS |= {
    kind.PRODUCTS[name].name: TileStep(tile, kind.EARLY_TILES[name])
    for kind in (linear, linear_some, linear_float)
    for name, tile in kind.TILES.items()
}
STEPS |= {
    write_half(kind, which).name: RowStep(make(kind), ("x",), _of_heads("x"), whole=True, more=_heads_of("x"))
    for kind in kv_types.STORES
    for which, make in (("k", _write_keys), ("v", _write_values))
}
