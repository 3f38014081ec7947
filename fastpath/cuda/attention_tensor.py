"""A piece of attention over float16 pages on tensor cores.        definition: refimpl/ops/attention.py

grid       pieces of 64 positions, counted from position 0, from the first that is seen, once for every HEADS
           query heads of a head of keys; heads of keys; tokens
block      a warp per 32 components, 8 warps or 16; what they have too many, they do with zeros
numbers    a float32 becomes two float16, hi + lo, which keep 22 bits or more of it.  mma.sync m16n8k16 has hi
           of 8 heads as rows 0 .. 7, and lo as rows 8 .. 15; their sums are added.  Products of float16 are
           exact, sums are float32
           Queries are first made large: 32 components of a head by the power of two that brings the largest
           of them to 2^14 .. 2^15, whatever it was.  Weights, at most 1, are 2^15 times as large, and so is
           their sum
lanes      lane 4g + t has head g of every result.  Multiplication i has as its column g: of keys, position
           8g + i; of values, component 4g + i.  So a load of 16 bytes, 8 positions of a component, or of 8
           bytes, 4 components of a position, is a lane's part of 8 or 4 multiplications.  Numbers that must
           stand side by side in a register come from two loads
scores     a warp: its components of 64 positions.  Warps, ascending, are added in shared memory
weights    a warp per head
values     a warp: its components, 64 positions
loads      a lane has all it needs of keys and values on their way before it needs any of it: 64 words
traffic    keys and values once per HEADS heads; float32 sums of a piece, once

Positions that are not seen have weight 0, and their values are 0 and not read: what lies in memory there may
be anything.  A stored infinity that is seen meets lo = 0, and gives NaN.
The order of all sums hangs on positions and components alone.  attention.py joins the pieces.
"""

from numba import cuda, float32, int32, int64, uint32

from fastpath.cuda.intrinsics import (
    add32,
    add_rn,
    and32,
    as_f32,
    as_i32,
    exp2_approx,
    fma_rn,
    load_rows_v2,
    load_rows_v4,
    load_shared_rows_v2,
    load_shared_rows_v4,
    load_v1,
    load_v4,
    mma_f16,
    mul32,
    mul_rn,
    pack_f16,
    permute_bytes,
    sar32,
    shl32,
    store_rows_v4,
    store_shared_rows_v4,
    store_v1,
    store_v2,
    sub32,
)
from fastpath.cuda.kv_types import block_of
from fastpath.cuda.warp import WHOLE_WARP, warp_max, warp_sum
from refimpl.kv_types import COLUMNS, STEP

PIECE, HEADS = 64, 8
WARPS, MAX_WARPS = 8, 16  # of 256 components, of 512
THREADS, MAX_THREADS = 32 * WARPS, 32 * MAX_WARPS
NOT_SEEN = float("-inf")  # a score whose weight is 0
# Scores of a warp: four times 4 numbers of each lane, and 16 free ones, that readers meet no bank twice
PART = 32 * 4 + 16
OF_WARP = 4 * PART
SCORES = MAX_WARPS * OF_WARP
# Factors of a head's warps, and words of a head's weights, hi or lo; behind them free ones, as above
OF_FACTORS, OF_WEIGHTS = MAX_WARPS + 4, PIECE // 2 + 4
FACTORS, LOW_WEIGHTS, WEIGHTS = HEADS * OF_FACTORS, HEADS * OF_WEIGHTS, 2 * HEADS * OF_WEIGHTS
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # of two words
EXPONENT, MANTISSA_BITS = 0x7F800000, 23
LARGE, LARGEST_EXPONENT = 32768.0, 14
SMALLEST = LARGEST_EXPONENT + 1 << MANTISSA_BITS  # an exponent whose factor is still a number
TO_LARGE = (2 * 127 + LARGEST_EXPONENT << MANTISSA_BITS) - (1 << 32)  # less an exponent: 2^14 over its power
FROM_LARGE = LARGEST_EXPONENT << MANTISSA_BITS
LOG2_E = 1.4426950408889634

row_bytes = 2 * STEP
load_queries = load_rows_v4(2, 16)
load_8_keys, load_16_values = load_rows_v4(8, row_bytes), load_rows_v2(16, row_bytes)
keep_scores, load_scores = store_shared_rows_v4(4, 4 * PART), load_shared_rows_v2(WARPS, 4 * OF_WARP)
load_16, store_8 = load_shared_rows_v4(2, 16), store_rows_v4(2, 16)


def threads_of(H):
    return THREADS if H <= COLUMNS * WARPS else MAX_THREADS


# -- float16


@cuda.jit(device=True)
def _split(x, y):
    """(hi, lo) of two numbers, y in the upper halves: 11 bits, rounded, and 11 of the rest."""
    upper_x = as_f32(and32(add32(as_i32(x), 0x1000), -0x2000))
    upper_y = as_f32(and32(add32(as_i32(y), 0x1000), -0x2000))
    return pack_f16(upper_y, upper_x), pack_f16(y - upper_y, x - upper_x)


@cuda.jit(device=True)
def _multiply(a, halves, w, x, y, z, sums):
    """Four rows of a lane of b: the chosen halves of four words."""
    return mma_f16(a, (permute_bytes(w, x, halves), permute_bytes(y, z, halves)), sums)


# -- scores


@cuda.jit(device=True)
def _load_some(q, at, pages, keys_at, c, H):
    """Where the number of components is no multiple of 8: those behind the last are it again, times 0."""
    a, b = _load_one(q, at, pages, keys_at, c, H), _load_one(q, at, pages, keys_at, c + 1, H)
    d, e = _load_one(q, at, pages, keys_at, c + 2, H), _load_one(q, at, pages, keys_at, c + 3, H)
    f, g = _load_one(q, at, pages, keys_at, c + 4, H), _load_one(q, at, pages, keys_at, c + 5, H)
    h, i = _load_one(q, at, pages, keys_at, c + 6, H), _load_one(q, at, pages, keys_at, c + 7, H)
    queries = a[0], b[0], d[0], e[0], f[0], g[0], h[0], i[0]
    return queries, a[1] + b[1] + d[1] + e[1] + f[1] + g[1] + h[1] + i[1]


@cuda.jit(device=True)
def _load_one(q, at, pages, keys_at, c, H):
    there = int64(min(c, H - 1))
    number = load_v1(q, at + there)[0] if c < H else int32(0)
    return number, load_v4(pages, keys_at + there * STEP)


@cuda.jit(device=True)
def _largest(queries):
    """Of a head's 32 components, 8 of which each of four lanes has: the bits of its magnitude."""
    q, size = queries, 0x7FFFFFFF
    top = max(max(and32(q[0], size), and32(q[1], size)), max(and32(q[2], size), and32(q[3], size)))
    top = max(top, max(max(and32(q[4], size), and32(q[5], size)), max(and32(q[6], size), and32(q[7], size))))
    top = max(top, cuda.shfl_xor_sync(WHOLE_WARP, top, 1))
    return max(top, cuda.shfl_xor_sync(WHOLE_WARP, top, 2))


@cuda.jit(device=True)
def _scores_of_word(a, b, w0, w1, w2, w3, w4, w5, w6, w7):
    """Of two positions of each lane's eight: a word of each of 8 components."""
    zero = float32(0)
    none = (zero, zero, zero, zero)
    low = _multiply(b, LOW_HALVES, w4, w5, w6, w7, _multiply(a, LOW_HALVES, w0, w1, w2, w3, none))
    high = _multiply(b, HIGH_HALVES, w4, w5, w6, w7, _multiply(a, HIGH_HALVES, w0, w1, w2, w3, none))
    return (
        as_i32(low[0] + low[2]), as_i32(high[0] + high[2]),
        as_i32(low[1] + low[3]), as_i32(high[1] + high[3]),
    )  # fmt: skip


@cuda.jit(device=True)
def _keep_scores(scores, at, queries, factor, k):
    """Of a lane: 16 positions of head lane // 4, times what its queries were multiplied by."""
    f, q = factor, queries
    hi01, lo01 = _split(as_f32(q[0]) * f, as_f32(q[1]) * f)
    hi23, lo23 = _split(as_f32(q[2]) * f, as_f32(q[3]) * f)
    hi45, lo45 = _split(as_f32(q[4]) * f, as_f32(q[5]) * f)
    hi67, lo67 = _split(as_f32(q[6]) * f, as_f32(q[7]) * f)
    a, b = (hi01, lo01, hi23, lo23), (hi45, lo45, hi67, lo67)
    s = _scores_of_word(a, b, k[0], k[4], k[8], k[12], k[16], k[20], k[24], k[28])
    t = _scores_of_word(a, b, k[1], k[5], k[9], k[13], k[17], k[21], k[25], k[29])
    u = _scores_of_word(a, b, k[2], k[6], k[10], k[14], k[18], k[22], k[26], k[30])
    v = _scores_of_word(a, b, k[3], k[7], k[11], k[15], k[19], k[23], k[27], k[31])
    keep_scores(scores, at, (
        s[0], s[1], t[0], t[1], u[0], u[1], v[0], v[1],
        s[2], s[3], t[2], t[3], u[2], u[3], v[2], v[3],
    ))  # fmt: skip


# -- weights


@cuda.jit(device=True)
def _add_warps(scores, at, factors, of_head, low, high):
    """8 warps' parts of two positions, each times the warp's factor."""
    f, s = load_16(factors, of_head), load_scores(scores, at)
    low, high = fma_rn(as_f32(s[0]), as_f32(f[0]), low), fma_rn(as_f32(s[1]), as_f32(f[0]), high)
    low, high = fma_rn(as_f32(s[2]), as_f32(f[1]), low), fma_rn(as_f32(s[3]), as_f32(f[1]), high)
    low, high = fma_rn(as_f32(s[4]), as_f32(f[2]), low), fma_rn(as_f32(s[5]), as_f32(f[2]), high)
    low, high = fma_rn(as_f32(s[6]), as_f32(f[3]), low), fma_rn(as_f32(s[7]), as_f32(f[3]), high)
    low, high = fma_rn(as_f32(s[8]), as_f32(f[4]), low), fma_rn(as_f32(s[9]), as_f32(f[4]), high)
    low, high = fma_rn(as_f32(s[10]), as_f32(f[5]), low), fma_rn(as_f32(s[11]), as_f32(f[5]), high)
    low, high = fma_rn(as_f32(s[12]), as_f32(f[6]), low), fma_rn(as_f32(s[13]), as_f32(f[6]), high)
    return fma_rn(as_f32(s[14]), as_f32(f[7]), low), fma_rn(as_f32(s[15]), as_f32(f[7]), high)


@cuda.jit(device=True)
def _weigh(scores, factors, weights, h, lane, lo, hi):
    """Two positions of a lane, side by side: (largest score of the head, a lane's sum of weights)."""
    at = add32(mul32(sar32(lane, 3), PART), add32(shl32(h, 4), shl32(and32(lane, 7), 1)))
    of_head = mul32(h, OF_FACTORS)
    low, high = _add_warps(scores, at, factors, of_head, float32(0), float32(0))
    if cuda.blockDim.x > THREADS:
        low, high = _add_warps(scores, at + WARPS * OF_WARP, factors, of_head + WARPS, low, high)
    word = add32(add32(shl32(and32(sar32(lane, 1), 3), 3), shl32(sar32(lane, 3), 1)), and32(lane, 1))
    place = shl32(word, 1)
    sees_low, sees_high = lo <= place and place <= hi, lo <= add32(place, 1) and add32(place, 1) <= hi
    low, high = low if sees_low else float32(NOT_SEEN), high if sees_high else float32(NOT_SEEN)
    peak = warp_max(max(low, high))
    low, high = _weight(low, peak), _weight(high, peak)
    at = uint32(add32(mul32(h, OF_WEIGHTS), word))
    weights[at], weights[at + LOW_WEIGHTS] = _split(low, high)
    return peak, add_rn(low, high)


@cuda.jit(device=True)
def _weight(score, peak):
    return mul_rn(exp2_approx(mul_rn(score - peak, float32(LOG2_E))), float32(LARGE))


# -- values


def _seen_from(row):
    """(pages, at, first, last) -> words of 16 - row positions, 0 outside of first .. last; `at`: of row 0."""
    load = load_rows_v2(1, row_bytes, row * row_bytes)
    rest = _seen_from(row + 1) if row < 15 else None

    @cuda.jit(device=True)
    def one(pages, at, first, last):
        a, b = int32(0), int32(0)
        if first <= row and row <= last:
            a, b = load(pages, at)
        return a, b

    @cuda.jit(device=True)
    def rows(pages, at, first, last):
        return one(pages, at, first, last) + rest(pages, at, first, last)

    return rows if rest else one


load_seen_values = _seen_from(0)


@cuda.jit(device=True)
def _column(a, b, c, d, halves, v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15):
    """Of 64 positions: (a component of the lane's first four, the same of its last four)."""
    zero = float32(0)
    sums = _multiply(a, halves, v0, v1, v2, v3, (zero, zero, zero, zero))
    sums = _multiply(b, halves, v4, v5, v6, v7, sums)
    sums = _multiply(c, halves, v8, v9, v10, v11, sums)
    sums = _multiply(d, halves, v12, v13, v14, v15, sums)
    return as_i32(sums[0] + sums[2]), as_i32(sums[1] + sums[3])


@cuda.jit(device=True)
def _mean(weights, h, t, v):
    """Weights of head h times values: 8 components, as words."""
    at = add32(mul32(h, OF_WEIGHTS), shl32(t, 3))
    hi, lo = load_16(weights, at), load_16(weights, at + LOW_WEIGHTS)
    a, b = (hi[0], lo[0], hi[1], lo[1]), (hi[2], lo[2], hi[3], lo[3])
    c, d = (hi[4], lo[4], hi[5], lo[5]), (hi[6], lo[6], hi[7], lo[7])
    i, m = _column(
        a, b, c, d, LOW_HALVES, v[0], v[2], v[4], v[6], v[8], v[10], v[12], v[14],
        v[16], v[18], v[20], v[22], v[24], v[26], v[28], v[30],
    )  # fmt: skip
    j, n = _column(
        a, b, c, d, HIGH_HALVES, v[0], v[2], v[4], v[6], v[8], v[10], v[12], v[14],
        v[16], v[18], v[20], v[22], v[24], v[26], v[28], v[30],
    )  # fmt: skip
    k, o = _column(
        a, b, c, d, LOW_HALVES, v[1], v[3], v[5], v[7], v[9], v[11], v[13], v[15],
        v[17], v[19], v[21], v[23], v[25], v[27], v[29], v[31],
    )  # fmt: skip
    l, p = _column(
        a, b, c, d, HIGH_HALVES, v[1], v[3], v[5], v[7], v[9], v[11], v[13], v[15],
        v[17], v[19], v[21], v[23], v[25], v[27], v[29], v[31],
    )  # fmt: skip
    return i, j, k, l, m, n, o, p


@cuda.jit(device=True)
def _store_some(parts, at, n, numbers):
    """The first n, if there are so many."""
    for i in range(8):
        if i < n:
            store_v1(parts, at + i, (numbers[i],))


# -- the kernel


@cuda.jit(device=True)
def piece_and_heads(n_pieces, heads):
    """(piece of a block, its first query head of the head of keys)"""
    piece, first = cuda.blockIdx.x, int32(0)
    while piece >= n_pieces:  # a division would take longer than this does for any model
        piece, first = sub32(piece, n_pieces), add32(first, heads)
    return piece, first


@cuda.jit(device=True)
def _load(q, q_at, k_pages, v_pages, block, c, H, lo, hi):
    """(8 queries, 32 words of keys, 32 of values); c: a lane's first component, block: of its keys."""
    warp, lane = sar32(cuda.threadIdx.x, 5), and32(cuda.threadIdx.x, 31)
    g, t = sar32(lane, 2), and32(lane, 3)
    keys_at = int64(block) * shl32(H, 5) + shl32(and32(g, 3), 3)
    if and32(H, 7) == 0:
        there = min(c, sub32(H, 8))
        queries = load_queries(q, add32(q_at, there))
        keys = load_8_keys(k_pages, keys_at + shl32(there, 5))
    else:
        queries, keys = _load_some(q, q_at, k_pages, keys_at, c, H)
    # a lane's 16 positions lie in one half; the lanes of the first key of each half know where that is
    block = cuda.shfl_sync(WHOLE_WARP, block, shl32(and32(t, 2), 3))
    columns = sar32(add32(H, COLUMNS - 1), 5)
    tile = add32(mul32(block, columns), min(warp, sub32(columns, 1)))
    values_at = int64(tile) * (STEP * COLUMNS) + add32(shl32(and32(t, 1), 9), shl32(g, 2))
    if lo == 0 and hi >= PIECE - 1:
        values = load_16_values(v_pages, values_at)
    else:
        values = load_seen_values(v_pages, values_at, sub32(lo, shl32(t, 4)), sub32(hi, shl32(t, 4)))
    return queries, keys, values


def part(q, k_pages, v_pages, K, group, blocks, table, seq_ids, positions, ends, window, parts, peaks):
    scores = cuda.shared.array(SCORES, float32, alignment=16)
    factors = cuda.shared.array(FACTORS, float32, alignment=16)
    weights = cuda.shared.array(WEIGHTS, int32, alignment=16)
    N, H, n_pieces = int32(q.shape[1]), int32(q.shape[2]), int32(parts.shape[2])
    piece, from_first = piece_and_heads(n_pieces, HEADS)
    head, token = cuda.blockIdx.y, uint32(cuda.blockIdx.z)
    last, of_token = ends[token], seq_ids[token]
    first = max(sub32(positions[token], sub32(window, 1)), int32(0))
    start = shl32(add32(sar32(first, 6), piece), 6)
    if start > last:
        return
    lo, hi = max(sub32(first, start), int32(0)), sub32(last, start)  # positions of the piece that are seen
    n_heads = min(sub32(group, from_first), int32(HEADS))
    n0 = add32(mul32(cuda.blockIdx.z, N), add32(mul32(head, group), from_first))  # of all heads of all tokens
    warp, lane = sar32(cuda.threadIdx.x, 5), and32(cuda.threadIdx.x, 31)
    g, t = sar32(lane, 2), and32(lane, 3)
    c = add32(shl32(warp, 5), shl32(t, 3))
    # a half of the piece that is not seen stands for the other
    half = min(max(sar32(lane, 4), sar32(lo, 5)), sar32(hi, 5))
    block = block_of(table, of_token, add32(start, shl32(half, 5)), K, head, blocks)
    q_at = mul32(add32(n0, min(g, sub32(n_heads, 1))), H)
    queries, keys, values = _load(q, q_at, k_pages, v_pages, block, c, H, lo, hi)

    exponent = max(and32(_largest(queries), EXPONENT), int32(SMALLEST))
    factor = as_f32(sub32(TO_LARGE, exponent)) if c < H else float32(0)
    if t == 0:
        factors[uint32(add32(mul32(g, OF_FACTORS), warp))] = as_f32(sub32(exponent, FROM_LARGE))
    _keep_scores(scores, add32(mul32(warp, OF_WARP), shl32(lane, 2)), queries, factor, keys)
    cuda.syncthreads()

    peak, total = float32(0), float32(0)
    if warp < n_heads:
        peak, total = _weigh(scores, factors, weights, warp, lane, lo, hi)
    cuda.syncthreads()

    numbers = _mean(weights, g, t, values)
    if g < n_heads and c < H:
        at = add32(mul32(add32(mul32(add32(n0, g), n_pieces), piece), H), c)
        if and32(H, 7) == 0:
            store_8(parts, at, numbers)
        else:
            _store_some(parts, at, sub32(H, c), numbers)
    if warp < n_heads:
        total = warp_sum(total)
        if lane == 0:
            at = add32(mul32(add32(n0, warp), n_pieces), piece)
            store_v2(peaks, shl32(at, 1), (as_i32(peak), as_i32(total)))
