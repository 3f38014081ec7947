"""Products of many tokens with quantised matrices on tensor cores.        definition: refimpl/ops/integer.py

grid       tiles of 32 weight rows; groups of 64 tokens
block      8 warps, 2 by 4: a warp has 16 rows and 16 tokens of the result, a lane 8 numbers of it
step       256 columns.  Each warp unpacks 4 weight rows to int8 in shared memory, while the activations of
           the step come by cp.async; the next step's are on their way during the products
arithmetic mma.sync m16n8k32, exact integers: a multiplication of matrices is a block of 32 values, or a
           sub-block of 256.  Then the definition's chain of float32 roundings, blocks ascending: the same
           bytes as linear.py's, whatever the number of tokens
shared     at most 48 KB, which a kernel has without asking for more.  A row of 256 bytes is 16 chunks, the
           first halves of 8 sub-blocks, then the second halves (as quantize.Rounded has them); rows are 17
           chunks apart, so that eight of them spread over the banks
traffic    weights are read once for 64 tokens, activations once for 32 rows
"""

import numpy as np
from numba import cuda, float32, int16, int32, int64, uint16

from fastpath.cuda import device
from fastpath.cuda.codes import codes_of, scales_of
from fastpath.cuda.intrinsics import (
    add32,
    commit_copies,
    copy_async_16,
    f16_to_f32,
    fma_rn,
    load_matrix_x4,
    load_v2,
    mma_s8,
    mul32,
    mul_rn,
    store_shared_v4,
    wait_copies,
    xor32,
)
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS, ROWS, SUB_BLOCKS, WIDTH

WARPS = 8
THREADS = 32 * WARPS
MANY_ROWS, MANY_TOKENS = 32, 64
CHUNK_WORDS, CHUNKS = 4, 16
ROW_WORDS = (CHUNKS + 1) * CHUNK_WORDS
WEIGHT_WORDS = MANY_ROWS * ROW_WORDS
TOKEN_WORDS = MANY_TOKENS * ROW_WORDS
BOTH_TOKEN_WORDS = 2 * TOKEN_WORDS
OF_ROWS, OF_TOKENS = MANY_ROWS + 4, MANY_TOKENS + 4  # from one sub-block to the next
NUMBERS = 8  # of a lane


def multiply(weight, rounded, out):
    """rounded: quantize.Rounded, of all tokens; out f32[T, M]."""
    T, M = out.shape
    grid = -(-M // MANY_ROWS), -(-T // MANY_TOKENS)
    arguments = rounded.q.view(np.int32), rounded.scale, rounded.sums, np.int32(weight.shape[1] // WIDTH)
    kernel = PRODUCTS[weight.coding_name]
    device.current().launch(kernel, grid, THREADS, *weight.planes, *arguments, np.int32(weight.n_tiles), out)


def _signed(coding):
    """(word of four codes) -> the same less the format's offset, as signed bytes."""
    above = (128 - coding.offset) * 0x01010101  # no carry: codes are below 64 where there is an offset

    @cuda.jit(device=True)
    def signed(word):
        return xor32(add32(word, above), -0x7F7F7F80)  # 0x80808080

    @cuda.jit(device=True)
    def same(word):
        return word

    return signed if coding.offset else same


@cuda.jit(device=True)
def _copy_tokens(q, step, tokens, half):
    """Start copying 256 columns of 64 tokens; those behind the last one are the last one again."""
    T = q.shape[0]
    for i in range(cuda.threadIdx.x, MANY_TOKENS * CHUNKS, THREADS):
        row, chunk = i >> 4, i & 15
        t = min(cuda.blockIdx.y * MANY_TOKENS + row, T - 1)
        source = int64(t) * q.shape[1] + step * 64 + chunk * CHUNK_WORDS
        copy_async_16(tokens, half + row * ROW_WORDS + chunk * CHUNK_WORDS, q, source)


@cuda.jit(device=True)
def _keep_scales(x_scales, scale, step, n):
    """n scales of each of 64 tokens."""
    for i in range(cuda.threadIdx.x, MANY_TOKENS * n, THREADS):
        row, j = i // n, i % n
        t = min(cuda.blockIdx.y * MANY_TOKENS + row, scale.shape[0] - 1)
        x_scales[j * OF_TOKENS + row] = scale[t, step * n + j]


@cuda.jit(device=True)
def _keep_sums(x_sums, sums, step, n):
    """n sums of each of 64 tokens: of 16 values, or of 32."""
    for i in range(cuda.threadIdx.x, MANY_TOKENS * 8, THREADS):
        row, j = i >> 3, i & 7
        t = min(cuda.blockIdx.y * MANY_TOKENS + row, sums.shape[0] - 1)
        a, b = load_v2(sums, int64(t) * sums.shape[1] + step * 16 + 2 * j)
        if n == 8:
            x_sums[j * OF_TOKENS + row] = add32(a, b)
        else:
            x_sums[2 * j * OF_TOKENS + row], x_sums[(2 * j + 1) * OF_TOKENS + row] = a, b


@cuda.jit(device=True)
def _keep_codes(weights, words, row, j):
    a, b, c, d, e, f, g, h = words
    store_shared_v4(weights, row * ROW_WORDS + j * CHUNK_WORDS, (a, b, c, d))
    store_shared_v4(weights, row * ROW_WORDS + (8 + j) * CHUNK_WORDS, (e, f, g, h))


@cuda.jit(device=True)
def _fragment(words, first, row, chunk):
    return load_matrix_x4(words, first + row * ROW_WORDS + chunk * CHUNK_WORDS)


def _product(coding):
    load_codes, load_scales, signed = codes_of(coding), scales_of(coding), _signed(coding)
    has_minimum, is_256 = coding.has_minimum, coding.is_256
    is_16 = coding.scales.startswith("16")
    n_sub = 16 if is_16 else 8
    planes = 2 if has_minimum else 1
    of_scales = (1 if is_256 else 8) * OF_TOKENS
    of_sums = n_sub * OF_TOKENS if has_minimum else 1
    of_d, of_m = (1 if is_256 else 8) * OF_ROWS, (1 if is_256 else 8) * OF_ROWS if has_minimum else 1
    of_sc, of_mn = n_sub * OF_ROWS if is_256 else 1, n_sub * OF_ROWS if is_256 and has_minimum else 1

    def kernel(low, high, sub, block, q, scale, sums, n_sub_blocks, n_tiles, out):
        weights = cuda.shared.array(WEIGHT_WORDS, int32, alignment=16)
        tokens = cuda.shared.array(BOTH_TOKEN_WORDS, int32, alignment=16)
        x_scales = cuda.shared.array(of_scales, float32)
        x_sums = cuda.shared.array(of_sums, int16)
        ds = cuda.shared.array(of_d, float32)
        ms = cuda.shared.array(of_m, float32)
        scs = cuda.shared.array(of_sc, int16)
        mns = cuda.shared.array(of_mn, int16)
        T, M = out.shape
        steps = q.shape[1] // 64
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        tile = min(cuda.blockIdx.x * (MANY_ROWS // ROWS) + warp, n_tiles - 1)
        base, j_mine, row_mine = int64(tile) * steps, lane & 7, warp * ROWS + (lane >> 3)
        of_warp, of_lane = (warp & 1) * 16, lane >> 2  # rows of the result
        to_warp, to_lane = (warp >> 1) * 16, 2 * (lane & 3)  # its tokens
        matrix, inside = lane >> 3, lane & 7
        acc = cuda.local.array(NUMBERS, float32)
        dots, minima = cuda.local.array(NUMBERS, int32), cuda.local.array(NUMBERS, int32)
        for i in range(NUMBERS):
            acc[i] = float32(0)

        half, zero = 0, int32(0)
        nothing = (zero, zero, zero, zero)
        codes = load_codes(low, high, base, lane)
        _copy_tokens(q, 0, tokens, half)
        commit_copies()
        for step in range(steps):
            a, b, c, d, e, f, g, h = codes
            words = signed(a), signed(b), signed(c), signed(d), signed(e), signed(f), signed(g), signed(h)
            _keep_codes(weights, words, row_mine, j_mine)
            if is_256:
                sc0, sc1, mn0, mn1 = load_scales(sub, base + step, lane)
                if is_16:
                    scs[2 * j_mine * OF_ROWS + row_mine], scs[(2 * j_mine + 1) * OF_ROWS + row_mine] = (
                        sc0,
                        sc1,
                    )
                else:
                    scs[j_mine * OF_ROWS + row_mine] = sc0
                if has_minimum:
                    if is_16:
                        mns[2 * j_mine * OF_ROWS + row_mine] = mn0
                        mns[(2 * j_mine + 1) * OF_ROWS + row_mine] = mn1
                    else:
                        mns[j_mine * OF_ROWS + row_mine] = mn0
                if j_mine == 0:
                    at = (base + step) * planes * ROWS + (lane >> 3)
                    ds[row_mine] = f16_to_f32(int32(block[at]))
                    if has_minimum:
                        ms[row_mine] = f16_to_f32(int32(block[at + ROWS]))
            else:
                of_block, minimum = load_scales(sub, base + step, lane)
                ds[j_mine * OF_ROWS + row_mine] = of_block
                if has_minimum:
                    ms[j_mine * OF_ROWS + row_mine] = minimum
            _keep_scales(x_scales, scale, step, 1 if is_256 else 8)
            if has_minimum:
                _keep_sums(x_sums, sums, step, n_sub)
            wait_copies()
            cuda.syncthreads()
            if step + 1 < steps:
                _copy_tokens(q, step + 1, tokens, TOKEN_WORDS - half)
                commit_copies()
                codes = load_codes(low, high, base + step + 1, lane)

            if is_256:
                for i in range(NUMBERS):
                    dots[i], minima[i] = zero, zero
            for j in range(min(SUB_BLOCKS, n_sub_blocks - step * SUB_BLOCKS)):
                left = _fragment(weights, 0, of_warp + (matrix & 1) * 8 + inside, j + 8 * (matrix >> 1))
                right = _fragment(tokens, half, to_warp + (matrix >> 1) * 8 + inside, j + 8 * (matrix & 1))
                for n in range(2):
                    pair = (right[0], right[1]) if n == 0 else (right[2], right[3])
                    if is_16:
                        first = mma_s8((left[0], left[1], zero, zero), (pair[0], zero), nothing)
                        second = mma_s8((left[2], left[3], zero, zero), (pair[1], zero), nothing)
                    else:
                        first = mma_s8(left, pair, nothing)
                    for i in range(4):
                        row, token = of_warp + of_lane + 8 * (i >> 1), to_warp + 8 * n + to_lane + (i & 1)
                        k = 4 * n + i
                        if is_16:
                            at, x_at = 2 * j * OF_ROWS + row, 2 * j * OF_TOKENS + token
                            dots[k] = add32(dots[k], mul32(int32(scs[at]), first[i]))
                            dots[k] = add32(dots[k], mul32(int32(scs[at + OF_ROWS]), second[i]))
                            if has_minimum:
                                minima[k] = add32(minima[k], mul32(int32(mns[at]), int32(x_sums[x_at])))
                                more = mul32(int32(mns[at + OF_ROWS]), int32(x_sums[x_at + OF_TOKENS]))
                                minima[k] = add32(minima[k], more)
                        elif is_256:
                            dots[k] = add32(dots[k], mul32(int32(scs[j * OF_ROWS + row]), first[i]))
                            if has_minimum:
                                more = mul32(
                                    int32(mns[j * OF_ROWS + row]), int32(x_sums[j * OF_TOKENS + token])
                                )
                                minima[k] = add32(minima[k], more)
                        else:
                            x_scale = x_scales[j * OF_TOKENS + token]
                            factor = mul_rn(ds[j * OF_ROWS + row], x_scale)
                            acc[k] = fma_rn(float32(first[i]), factor, acc[k])
                            if has_minimum:
                                factor = mul_rn(ms[j * OF_ROWS + row], x_scale)
                                acc[k] = fma_rn(float32(x_sums[j * OF_TOKENS + token]), factor, acc[k])
            if is_256:
                for k in range(NUMBERS):
                    row = of_warp + of_lane + 8 * (k >> 1 & 1)
                    x_scale = x_scales[to_warp + 8 * (k >> 2) + to_lane + (k & 1)]
                    acc[k] = fma_rn(float32(dots[k]), mul_rn(ds[row], x_scale), acc[k])
                    if has_minimum:
                        acc[k] = fma_rn(float32(minima[k]), mul_rn(ms[row], -x_scale), acc[k])
            half = TOKEN_WORDS - half
            cuda.syncthreads()
        for k in range(NUMBERS):
            m = cuda.blockIdx.x * MANY_ROWS + of_warp + of_lane + 8 * (k >> 1 & 1)
            t = cuda.blockIdx.y * MANY_TOKENS + to_warp + 8 * (k >> 2) + to_lane + (k & 1)
            if m < M and t < T:
                out[t, m] = acc[k]

    return kernel


def _kernel(name, coding):
    half = uint16[::1]
    signature = (
        int32[::1], int32[::1], half, half,
        int32[:, ::1], float32[:, ::1], int32[:, ::1], int32, int32, float32[:, ::1],
    )  # fmt: skip
    wants = ("IMMA.16832.S8.S8", "LDGSTS", "LDSM.16.M88.4", "STS.128", "FFMA")
    function, bounds = _product(coding), (THREADS, 2)
    return Kernel(function, signature, wants, registers=128, bounds=bounds, name=f"many_{name.lower()}")


PRODUCTS = {name: _kernel(name, coding) for name, coding in CODINGS.items() if not coding.is_plain}
KERNELS = tuple(PRODUCTS.values())
