"""Rows of a quantised table on CUDA.        definition: refimpl/ops/embedding.py

grid       groups of 32 sub-blocks of a row; tokens
block      a warp; a lane has 32 columns, which it reads as a product does (layout.py): one table serves both
arithmetic that of the format's definition (quant), in float32, then one product with the factor
traffic    of a row its codes; 128 bytes side by side at a time
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint16

from fastpath.cuda import device
from fastpath.cuda.codes import codes_of, scales_of
from fastpath.cuda.intrinsics import add_rn, f16_to_f32, mul_rn, sar32, shl32, sub32
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.layout import CODINGS, COLUMNS, LANES, ROWS, SUB_BLOCKS, WIDTH


def embed(table, ids, scale, *, out=None):
    """`table` is a layout.DeviceMatrix, `ids` i32[T] on the device."""
    T, C = len(ids), table.shape[1]
    out = device.current().empty((T, C), np.float32) if out is None else out
    grid = -(-C // (LANES * WIDTH)), T
    device.current().launch(
        EMBEDDINGS[table.format_name], grid, LANES, *table.planes, ids, np.float32(scale), out
    )
    return out


@cuda.jit(device=True)
def _code(words, i):
    """Number i of 32; bytes are below 128, or signed."""
    return sar32(shl32(words[i >> 2], 24 - 8 * (i & 3)), 24)


def _embed(coding):
    load_codes, load_scales = codes_of(coding), scales_of(coding)
    offset, has_minimum, is_256 = coding.offset, coding.has_minimum, coding.is_256
    planes = 2 if has_minimum else 1

    def kernel(low, high, sub, block, ids, factor, out):
        t, C = cuda.blockIdx.y, out.shape[1]
        first = (cuda.blockIdx.x * LANES + cuda.threadIdx.x) * WIDTH
        if first >= C:
            return
        row, j = ids[t] & (ROWS - 1), (first // WIDTH) & (SUB_BLOCKS - 1)
        step = int64(ids[t] // ROWS) * ((C + COLUMNS - 1) // COLUMNS) + first // COLUMNS
        lane = row * SUB_BLOCKS + j
        words = load_codes(low, high, step, lane)
        if is_256:
            sc0, sc1, mn0, mn1 = load_scales(sub, step, lane)
            at = step * planes * ROWS + row
            d = f16_to_f32(int32(block[at]))
            scale0, scale1 = mul_rn(d, float32(sc0)), mul_rn(d, float32(sc1))
            if has_minimum:
                dmin = f16_to_f32(int32(block[at + ROWS]))
                m0, m1 = -mul_rn(dmin, float32(mn0)), -mul_rn(dmin, float32(mn1))
        else:
            scale0, m0 = load_scales(sub, step, lane)
            scale1, m1 = scale0, m0
        for i in range(WIDTH):
            code = float32(sub32(_code(words, i), int32(offset)))
            value = mul_rn(scale0 if i < 16 else scale1, code)
            if has_minimum:
                value = add_rn(value, m0 if i < 16 else m1)
            out[t, first + i] = mul_rn(value, factor)

    return kernel


def _kernel(name, coding):
    half = uint16[::1]
    signature = (int32[::1], int32[::1], half, half, int32[::1], float32, float32[:, ::1])
    return Kernel(_embed(coding), signature, ("LDG.E.NA",), registers=96, name=f"embed_{name.lower()}")


EMBEDDINGS = {name: _kernel(name, coding) for name, coding in CODINGS.items()}
KERNELS = tuple(EMBEDDINGS.values())
