"""Matrix products on quantised weights, for many rows.        definition: refimpl/ops/integer.py

    work item   SPAN weight rows of one matrix, against all rows of activations that use this matrix
    steps       slab after slab of 512 columns, GROUPS times 16 weight rows at a time:
                  fill    unpack the weights to panels in the first-level cache (panels.py)
                  rows    all tiles of activations against the panels (matmul_rows.py)
                each a kernel of its own, called by its address: there is one for each format and kernel set
    traffic     weights are read and unpacked once per 576 rows of activations; while tiles are computed, the
                bytes of the next panels are asked for.  The activations of a few slabs stay in the second-
                level cache for all weight rows of the item, and so do the sums, f32[rows][SPAN]

Each output is one chain over its own weight row and its own activations, so its bits do not depend on other
rows, on the number of threads or on the cut into items and slabs.

Arguments, int64 words:
    matrices     weights, bytes of a matrix, bytes of a row, n_rows, n_cols
    blocks       columns, bytes from one to the next
    activations  address, bytes of a row, most rows of a tile (activations.py)
    output       y, row stride in bytes
    routing      numbers of the matrices in use; where each one's entries start (n + 1); output rows
    kernels      fill, rows
    cut          groups of an item, slabs at a time, tiles at a time
    ahead        bytes of weights of a slab to ask for, for each of the GROUPS
    scratch      address, bytes per thread
    tiles        offset of the unpacked weights, where in a thread's scratch there is room (matmul_tiles.py)
"""

from collections.abc import Callable
from dataclasses import dataclass

from fastpath.cpu import machine, matmul_rows, matmul_tiles, panels, threads
from fastpath.cpu.activations import (
    PIECE,
    SPARE,
    first_of_tile,
    firsts_and_pairs,
    lanes_of_32,
    lanes_of_256,
    n_tiles_of,
    tiles_of_32,
    tiles_of_256,
    words_of_block,
    words_of_tile,
)
from fastpath.cpu.buffers import address, workspace
from fastpath.cpu.kernel import Kernel, call, helper, inlined, kernel
from fastpath.cpu.packing import PackedTensor
from fastpath.cpu.panels import GROUPS, PANEL, SHAPES
from fastpath.cpu.simd import ld_i64, load_f32, splat_f32, st_i64, store_f32, store_first_f32

SLAB = 2  # panels: with GROUPS of them, 26 KiB
SPAN = 16 * GROUPS  # groups of an item at most
MOST_ROWS = 576  # of activations at a time, their sums in the second-level cache
ACTIVATIONS = 1 << 19  # bytes that should stay in the second-level cache
FEW = 8  # rows of a matrix for which vectors are faster than tiles of 16 rows
MIN_WORK = 1 << 19  # multiplications below which a second thread does not pay
MIN_VALUES = 1 << 13  # of activations, likewise

# layout of a thread's scratch, in bytes
FILL, PRODUCT, PANELS = 0, 128, 256
SUMS = PANELS + GROUPS * SLAB * PANEL


@helper
def _clear(sums, n):
    for at in range(sums, sums + 64 * n, 64):
        store_f32(at, splat_f32(0.0))


@helper
def _put(sums, room, n_entries, out_rows, y, y_stride, first_row, n_rows, n_groups):
    """f32[groups / GROUPS][room][GROUPS][16] -> rows of y."""
    for e in range(n_entries):
        target = y + ld_i64(out_rows + 8 * e) * y_stride + 4 * first_row
        for g in range(n_groups):
            source = sums + 64 * ((g // GROUPS * room + e) * GROUPS + g % GROUPS)
            n = min(16, n_rows - first_row - 16 * g)
            if n == 16:
                store_f32(target + 64 * g, load_f32(source))
            else:
                store_first_f32(target + 64 * g, n, load_f32(source))


@inlined
def _fill(args, matrix, group, work, first_panel, n_panels):
    """Panels of GROUPS groups; the last group of the matrix stands for those behind it."""
    row_bytes, n_rows = ld_i64(args + 16), ld_i64(args + 24)
    last_group = (n_rows - 1) // 16
    st_i64(work + FILL + 8, row_bytes)
    st_i64(work + FILL + 24, ld_i64(args + 48))
    st_i64(work + FILL + 32, ld_i64(args + 32) // ld_i64(args + 40))
    for g in range(GROUPS):
        row = 16 * min(group + g, last_group)
        st_i64(work + FILL, matrix + row * row_bytes)
        st_i64(work + FILL + 16, min(15, n_rows - 1 - row))
        st_i64(work + FILL + 40, work + PANELS + PANEL * g)
        call(ld_i64(args + 120), work + FILL, first_panel, first_panel + n_panels, 0)


@helper
def _item(args, matrix, first_group, n_groups, used, tile, n_of_tiles, work):
    """Some groups against some tiles of all entries of the matrix in use with this number."""
    n_cols, block_size, n_rows = ld_i64(args + 32), ld_i64(args + 40), ld_i64(args + 24)
    group_bytes, step = 16 * ld_i64(args + 16), ld_i64(args + 48)
    x, x_bytes, most = ld_i64(args + 56), ld_i64(args + 64), ld_i64(args + 72)
    entry = ld_i64(ld_i64(args + 104) + 8 * used)
    n_entries = ld_i64(ld_i64(args + 104) + 8 * used + 8) - entry
    n_panels, n_blocks, per_panel = (n_cols + 255) // 256, n_cols // block_size, 256 // block_size
    first = first_of_tile(tile, n_entries, most)
    n = first_of_tile(tile + n_of_tiles, n_entries, most) - first
    room = n_of_tiles * most
    at_once = SLAB * ld_i64(args + 144)
    product, sums = work + PRODUCT, work + SUMS
    _clear(sums, (n_groups + GROUPS - 1) // GROUPS * GROUPS * room)
    st_i64(product, work + PANELS)
    st_i64(product + 8, x + x_bytes * (entry + most * used))
    st_i64(product + 16, x_bytes)
    st_i64(product + 24, n_entries)
    st_i64(product + 32, most)
    st_i64(product + 72, ld_i64(args + 160))
    st_i64(product + 80, group_bytes)
    st_i64(product + 88, ld_i64(args + 184))
    st_i64(product + 96, work + ld_i64(args + 192))
    for columns in range(0, n_panels, at_once):
        stop = min(columns + at_once, n_panels)
        for g in range(0, n_groups, GROUPS):
            st_i64(product + 56, sums + 64 * g * room)
            for panel in range(columns, stop, SLAB):
                count = min(SLAB, stop - panel)
                _fill(args, matrix, first_group + g, work, panel, count)
                st_i64(product + 40, per_panel * panel)
                st_i64(product + 48, min(per_panel * count, n_blocks - per_panel * panel))
                group, following = first_group + g, panel + SLAB
                if following >= stop:  # the next groups, or the next columns, or the next item
                    group, following = group + GROUPS, columns
                    if group >= first_group + n_groups:
                        more = stop < n_panels
                        group, following = (first_group, stop) if more else (group, 0)
                st_i64(product + 64, matrix + group * group_bytes + following * per_panel * step)
                call(ld_i64(args + 128), product, tile, tile + n_of_tiles, 0)
    out_rows = ld_i64(args + 112) + 8 * (entry + first)
    _put(sums, room, n, out_rows, ld_i64(args + 80), ld_i64(args + 88), 16 * first_group, n_rows, n_groups)


@kernel
def matmul(args, lo, hi, thread):
    weights, matrix_bytes, n_rows = ld_i64(args), ld_i64(args + 8), ld_i64(args + 24)
    matrices, starts, most = ld_i64(args + 96), ld_i64(args + 104), ld_i64(args + 72)
    span, at_once = ld_i64(args + 136), ld_i64(args + 152)
    work = ld_i64(args + 168) + thread * ld_i64(args + 176)
    n_groups = (n_rows + 15) // 16
    per_matrix = (n_groups + span - 1) // span
    for item in range(lo, hi):
        used, first_group = item // per_matrix, span * (item % per_matrix)
        n_entries = ld_i64(starts + 8 * used + 8) - ld_i64(starts + 8 * used)
        matrix = weights + ld_i64(matrices + 8 * used) * matrix_bytes
        n_tiles = n_tiles_of(n_entries, most)
        parts = (n_tiles + at_once - 1) // at_once
        for part in range(parts):
            tile = part * n_tiles // parts
            n_of_tiles = (part + 1) * n_tiles // parts - tile
            count = min(span, n_groups - first_group)
            _item(args, matrix, first_group, count, used, tile, n_of_tiles, work)


# -- wrapper


@dataclass(frozen=True)
class Route:
    """Kernels that put activations in order and multiply them, by the format's name.

    rows       of a tile
    words      per row and block, of a Shape
    is_padded  a tile with fewer rows is filled up
    """

    rows: int
    words: Callable
    order_32: Kernel
    order_256: Kernel
    product: Callable
    is_padded: bool

    def order(self, shape):
        return self.order_32 if shape.is_32 else self.order_256


VECTORS = Route(
    matmul_rows.ROWS, words_of_block, lanes_of_32, lanes_of_256, matmul_rows.product_kernel, False
)
TILES = Route(matmul_tiles.ROWS, words_of_tile, tiles_of_32, tiles_of_256, matmul_tiles.product_kernel, True)


def multiply(x, weight, memory, out, groups, most):
    """out[out_rows[i]] = x[x_rows[i]] @ weight[matrix].T for the entries of each matrix in use.

    memory  address, bytes from one matrix to the next, bytes of a row
    most    entries that a matrix has at most, as far as shapes tell
    """
    if groups.n_entries == 0:
        return
    (M, C), name, form = weight.shape[-2:], weight.format.name, weight.format
    shape, n_threads, label = SHAPES[name], threads.num_threads(), weight.name or weight.format.name
    is_packed = isinstance(weight, PackedTensor)
    expected = groups.n_entries // max(1, groups.n_groups)  # of a matrix
    route = TILES if machine.TILES and expected > FEW else VECTORS
    activations, x_bytes = ordered(route, x, shape, groups, most, n_threads, label)
    step = form.block_bytes * (16 if is_packed else 1)
    ahead = SLAB * 256 // form.block_size * step if is_packed else 0  # rows of a file do it on their own
    n_groups, at_once = -(-M // 16), MOST_ROWS // route.rows
    span = _span(n_groups, groups.n_groups, n_threads)
    room = route.rows * min(at_once, -(-groups.n_entries // route.rows))
    slabs = max(1, ACTIVATIONS // (min(most, room) * SLAB * 320))
    tiles = SUMS + 64 * (span + GROUPS) * room
    per_thread = tiles + (matmul_tiles.SCRATCH if route is TILES else 0)
    fill = (panels.PACKED if is_packed else panels.ROWS)[name]
    matrices, starts, _, out_rows = groups.addresses
    args = (
        *memory, M, C, form.block_size, step, activations, x_bytes, route.rows,
        address(out), 4 * out.shape[-1], matrices, starts, out_rows,
        fill.address, route.product(name).address,
        span, slabs, at_once, ahead, workspace(per_thread * n_threads, "matmul"), per_thread,
        shape.form.offset, tiles,
    )  # fmt: skip
    n_items = groups.n_groups * -(-n_groups // span)
    grain = max(1, MIN_WORK // (16 * span * C * max(1, expected)))
    threads.run(matmul, args, n_items, grain, n_threads, label=label)


def _span(n_groups, n_matrices, n_threads):
    """Groups of an item: many, so that activations are read seldom, but some items for each thread."""
    wanted = n_groups * n_matrices // (4 * n_threads)
    return min(SPAN, max(GROUPS, wanted // GROUPS * GROUPS))


def ordered(route, x, shape, groups, most, n_threads, label):
    """The activations of all entries in tiles; (address, bytes of a row)."""
    C, rows, form = x.shape[1], route.rows, shape.form
    row_bytes = 4 * route.words(shape) * (C // (32 if shape.is_32 else 256))
    scratch = -(-SPARE * n_threads // 64) * 64
    space = workspace(scratch + row_bytes * (groups.n_entries + rows * groups.n_groups), "tiles")
    parameters = (form.offset, shape.has_minima) if shape.is_32 else (*firsts_and_pairs(shape), form.offset)
    per_matrix = -(-most // rows) if groups.n_groups == 1 else 1
    _, starts, x_rows, _ = groups.addresses
    args = (
        address(x), C, starts, x_rows, per_matrix, rows, route.is_padded, space + scratch, row_bytes, space,
        *parameters,
    )  # fmt: skip
    n_items = groups.n_groups * per_matrix * -(-C // PIECE)
    grain = max(1, MIN_VALUES // (min(C, PIECE) * rows))
    threads.run(route.order(shape), args, n_items, grain, n_threads, label=label)
    return space + scratch, row_bytes
