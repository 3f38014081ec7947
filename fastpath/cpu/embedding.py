"""Rows of a table, one per token.        definition: refimpl/ops/embedding.py

work item   4,096 columns of a token's row, seen as 16 rows of 256: so the unpacking of products (panels.py)
            serves here too; of float formats, a token
arithmetic  that of the format's definition (quant), then one product with the factor
traffic     a row of the file per token

Formats without a kernel, and rows that are no multiple of 256, are few and run in Python, a host step.
"""

import numba
import numpy as np

from fastpath.cpu import panels, recording, threads
from fastpath.cpu.buffers import address, integers, output, workspace
from fastpath.cpu.kernel import call, f32_word, helper, kernel
from fastpath.cpu.simd import (
    ld_f32,
    ld_i32,
    ld_i64,
    ld_u8,
    ld_u16,
    load_f32,
    load_u16,
    low_bf16,
    low_f16,
    mul_f32,
    splat_f32,
    st_f32,
    st_i64,
    store_f32,
)

F32 = numba.float32
ROW = 256  # columns
WORDS = 64  # bytes for the argument words of the kernel that unpacks
CODES = {"F32": 0, "F16": 1, "BF16": 2}


@helper
def _spread_32(panel, r, offset, has_minima, factor, target):
    """Row r of a panel of blocks of 32: 256 floats."""
    for block in range(8):
        d = ld_f32(panel + panels.SCALES + 64 * block + 4 * r)
        m = ld_f32(panel + panels.MINIMA + 64 * block + 4 * r) if has_minima else F32(0.0)
        for c in range(32 * block, 32 * block + 32):
            value = d * F32(ld_u8(panel + c // 4 * 64 + 4 * r + c % 4) - offset)
            if has_minima:
                value = value + m
            st_f32(target + 4 * c, value * factor)


@helper
def _spread_256(panel, r, offset, has_minima, n_sub, factor, target):
    """Row r of a panel of blocks of 256: 256 floats."""
    d = ld_f32(panel + panels.SCALES + 4 * r)
    dmin = ld_f32(panel + panels.MINIMA + 4 * r)
    width = ROW // n_sub
    for s in range(n_sub):
        sub_scale = (ld_u16(panel + panels.SUB_SCALES + 64 * s + 4 * r) ^ 0x8000) - 0x8000
        scale = d * F32(sub_scale)
        m = F32(0.0)
        if has_minima:
            m = dmin * F32(ld_u16(panel + panels.MIN_PAIRS + s // 2 * 64 + 4 * r + s % 2 * 2))
        for c in range(width * s, width * s + width):
            value = scale * F32(ld_u8(panel + c // 4 * 64 + 4 * r + c % 4) - offset)
            if has_minima:
                value = value - m
            st_f32(target + 4 * c, value * factor)


@kernel
def _embed_kernel(args, lo, hi, thread):
    table, row_stride, ids = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    out, width, factor = ld_i64(args + 24), ld_i64(args + 32), ld_f32(args + 40)
    fill, block_bytes, n_blocks = ld_i64(args + 48), ld_i64(args + 56), ld_i64(args + 64)
    offset, has_minima, n_sub = ld_i64(args + 72), ld_i64(args + 80), ld_i64(args + 88)
    words = ld_i64(args + 96) + thread * (WORDS + panels.PANEL)
    panel, stride, n_rows = words + WORDS, n_blocks * block_bytes, width // ROW
    per_token = (n_rows + 15) // 16
    for item in range(lo, hi):
        t, first = item // per_token, item % per_token * 16
        count = min(16, n_rows - first)
        st_i64(words, table + row_stride * ld_i32(ids + 4 * t) + stride * first)
        st_i64(words + 8, stride)
        st_i64(words + 16, count - 1)
        st_i64(words + 24, block_bytes)
        st_i64(words + 32, n_blocks)
        st_i64(words + 40, panel)
        call(fill, words, 0, 1, thread)
        for r in range(count):
            target = out + 4 * (width * t + ROW * (first + r))
            if n_sub:
                _spread_256(panel, r, offset, has_minima, n_sub, factor, target)
            else:
                _spread_32(panel, r, offset, has_minima, factor, target)


@kernel
def _embed_float_kernel(args, lo, hi, thread):
    table, row_stride, ids = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16)
    out, width, factor = ld_i64(args + 24), ld_i64(args + 32), splat_f32(ld_f32(args + 40))
    code = ld_i64(args + 48)
    for t in range(lo, hi):
        row, target = table + row_stride * ld_i32(ids + 4 * t), out + 4 * width * t
        for c in range(0, width, 16):
            if code == 0:
                value = load_f32(row + 4 * c)
            elif code == 1:
                value = low_f16(load_u16(row + 2 * c))
            else:
                value = low_bf16(load_u16(row + 2 * c))
            store_f32(target + 4 * c, mul_f32(value, factor))


def embed(table, ids, scale, *, out=None):
    name, width, data = table.format.name, table.row_len, table.data
    in_rows = table.ndim == 2 and data.strides[1] == data.itemsize
    if in_rows and name in panels.SHAPES and width % ROW == 0:
        run = _embed_integers
    elif in_rows and name in CODES and width % 16 == 0:
        run = _embed_floats
    else:
        out = output(out, (len(ids), width), "embed", of_host=True)
        recording.host(lambda: np.multiply(table.rows(ids), np.float32(scale), out=out))
        return out
    ids = integers(ids, (len(ids),), "embed: ids")
    if ids.size and not 0 <= ids.min() <= ids.max() < table.n_rows:
        table.rows(ids)  # says which one
    out = output(out, (len(ids), width), "embed")
    words = (address(data), data.strides[0], address(ids), address(out), width, f32_word(scale))
    run(table, len(ids), words)
    return out


def _embed_integers(table, T, words):
    shape, n_threads = panels.SHAPES[table.format.name], threads.num_threads()
    args = (
        *words, panels.ROWS[table.format.name].address, table.format.block_bytes,
        ROW // table.format.block_size, shape.form.offset, shape.has_minima,
        0 if shape.is_32 else shape.form.n_sub,
        workspace(n_threads * (WORDS + panels.PANEL), "embed"),
    )  # fmt: skip
    n_items = T * -(-table.row_len // (16 * ROW))
    threads.run(_embed_kernel, args, n_items, 1, n_threads, label=f"rows of {table.name}")


def _embed_floats(table, T, words):
    args = (*words, CODES[table.format.name])
    threads.run(
        _embed_float_kernel, args, T, max(1, (1 << 13) // table.row_len), label=f"rows of {table.name}"
    )
