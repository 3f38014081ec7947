"""How a kernel asks for what later ones read: a list, and the code that goes through it.

What for is read_ahead.py's matter; when, early.py's.  The list is i32[4 n], rows of four.  A launch has a
part of it, from a row `first` on:

    pieces    a row each: address (lower half, upper half), bytes, 0
    pages     PAGE_ROWS rows for each time that a launch of attention is asked for (read_ahead.Pages)
    chosen    where the ids of the experts are that were chosen, how many, 0; then a row each: address in the
              first expert, bytes, bytes from one expert to the next.  Asked for once for every id

A thread of each warp takes what there is in turn.  Nothing is written: bytes come to the second-level cache.
"""

from numba import cuda, int32, int64

from fastpath.cuda.intrinsics import (
    add32,
    and32,
    div32,
    load_weights_v4,
    loads_at,
    mul32,
    prefetch_at,
    sar32,
    sub32,
)
from fastpath.cuda.kv_types import column_of

PAGE_ROWS = 6
_input_at = loads_at("ld.global.nc.u32", 1, 1, 4)  # what is written before a graph starts, by nobody in it
_made_at = loads_at("ld.global.u32", 1, 1, 4)  # what a kernel before wrote


@cuda.jit(device=True)
def block_number():
    """Blocks that are there only to ask have the last ones: they lie behind the others in z."""
    return cuda.blockIdx.x + cuda.gridDim.x * (cuda.blockIdx.y + cuda.gridDim.y * cuda.blockIdx.z)


@cuda.jit(device=True)
def _turns():
    """(number of a warp's first thread, how many there are)"""
    blocks = cuda.gridDim.x * cuda.gridDim.y * cuda.gridDim.z
    first = int32(block_number() + blocks * (cuda.threadIdx.x >> 5))
    return first, int32(blocks * ((cuda.blockDim.x + 31) >> 5))


@cuda.jit(device=True)
def _address(low, high):
    return int64(high) << 32 | int64(low) & 0xFFFFFFFF


@cuda.jit(device=True)
def ask(listed, first, n_pieces, n_pages):
    """Pieces and pages."""
    if cuda.threadIdx.x & 31:
        return
    mine, step = _turns()
    i = mine
    while i < n_pieces:
        low, high, n_bytes, _ = load_weights_v4(listed, 4 * int64(first + i))
        prefetch_at(_address(low, high), n_bytes)
        i = add32(i, step)
    row, end = int32(first + n_pieces), int32(first + n_pieces + PAGE_ROWS * n_pages)
    while row < end:
        _ask_for_pages(listed, 4 * int64(row), mine, step)
        row = add32(row, PAGE_ROWS)


@cuda.jit(device=True)
def _ask_for_pages(listed, at, i, step):
    """Blocks begin .. end - 1 of each token, from the first that it sees on; none that the token before it
    sees as well; of each head the keys and the values.
    """
    keys_low, keys_high, key_bytes, K = load_weights_v4(listed, at)
    values_low, values_high, value_bytes, blocks = load_weights_v4(listed, at + 4)
    table_low, table_high, width, held = load_weights_v4(listed, at + 8)
    ids_low, ids_high, T, window = load_weights_v4(listed, at + 12)
    positions_low, positions_high, begin, end = load_weights_v4(listed, at + 16)
    ends_low, ends_high, _, _ = load_weights_v4(listed, at + 20)
    ids, ends = _address(ids_low, ids_high), _address(ends_low, ends_high)
    positions, table = _address(positions_low, positions_high), _address(table_low, table_high)
    n = sub32(end, begin)
    per_token = mul32(mul32(n, K), 2)
    while i < mul32(per_token, T):
        t = div32(i, per_token)
        rest = sub32(i, mul32(t, per_token))
        head, is_value = div32(sar32(rest, 1), n), and32(rest, 1)
        j = sub32(sar32(rest, 1), mul32(head, n))
        (lane,) = _input_at(ids + 4 * int64(t))
        (position,) = _input_at(positions + 4 * int64(t))
        (last,) = _input_at(ends + 4 * int64(t))
        block = add32(sar32(max(sub32(position, sub32(window, 1)), int32(0)), 5), add32(begin, j))
        is_wanted = block <= sar32(last, 5)
        if is_wanted and t > 0:
            (other,) = _input_at(ids + 4 * int64(sub32(t, 1)))
            (seen,) = _input_at(ends + 4 * int64(sub32(t, 1)))
            (before,) = _input_at(positions + 4 * int64(sub32(t, 1)))
            from_before = sar32(max(sub32(before, sub32(window, 1)), int32(0)), 5)
            is_wanted = not (other == lane and from_before <= block and block <= sar32(seen, 5))
        if is_wanted:
            column, place = column_of(block, blocks, held)
            (page,) = _input_at(table + 4 * (int64(lane) * width + column))
            number = add32(mul32(add32(mul32(page, K), head), blocks), place)
            if is_value:
                prefetch_at(_address(values_low, values_high) + int64(number) * value_bytes, value_bytes)
            else:
                prefetch_at(_address(keys_low, keys_high) + int64(number) * key_bytes, key_bytes)
        i = add32(i, step)


@cuda.jit(device=True)
def ask_for_chosen(listed, first, n_pieces, n_pages, n_chosen):
    """Behind the wait: ids are what a kernel before has written."""
    if n_chosen == 0 or cuda.threadIdx.x & 31:
        return
    row = int32(first + n_pieces + PAGE_ROWS * n_pages)
    low, high, n_ids, _ = load_weights_v4(listed, 4 * int64(row))
    ids = _address(low, high)
    i, step = _turns()
    while i < mul32(n_ids, n_chosen):
        k = div32(i, n_ids)
        (chosen,) = _made_at(ids + 4 * int64(sub32(i, mul32(k, n_ids))))
        low, high, n_bytes, stride = load_weights_v4(listed, 4 * int64(row + 1 + k))
        prefetch_at(_address(low, high) + int64(chosen) * stride, n_bytes)
        i = add32(i, step)
