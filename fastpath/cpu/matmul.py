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
"""

from fastpath.cpu import panels, threads
from fastpath.cpu.activations import (
    SPARE,
    first_of_tile,
    firsts_and_pairs,
    lanes_of_32,
    lanes_of_256,
    n_tiles_of,
    words_of_block,
)
from fastpath.cpu.buffers import address, workspace
from fastpath.cpu.kernel import call, helper, inlined, kernel
from fastpath.cpu.matmul_rows import ROWS, product_kernel
from fastpath.cpu.packing import PackedTensor
from fastpath.cpu.panels import GROUPS, PANEL, SHAPES
from fastpath.cpu.simd import (
    ld_i64,
    load_f32,
    splat_f32,
    st_i64,
    store_f32,
    store_first_f32,
)

SLAB = 2  # panels: with GROUPS of them, 28 KiB
SPAN = 16 * GROUPS  # groups of an item at most
TILES = 96  # at a time
ACTIVATIONS = 1 << 19  # bytes that should stay in the second-level cache
MIN_WORK = 1 << 19  # multiplications below which a second thread does not pay

# layout of a thread's scratch, in bytes
FILL, PRODUCT, PANELS = 0, 128, 256
SUMS = PANELS + GROUPS * SLAB * PANEL


@helper
def _clear(sums, n):
    for at in range(sums, sums + 64 * n, 64):
        store_f32(at, splat_f32(0.0))


@helper
def _put(sums, n_entries, out_rows, y, y_stride, first_row, n_rows, n_groups):
    """f32[groups / GROUPS][entries][GROUPS][16] -> rows of y."""
    for e in range(n_entries):
        target = y + ld_i64(out_rows + 8 * e) * y_stride + 4 * first_row
        for g in range(n_groups):
            source = sums + 64 * ((g // GROUPS * n_entries + e) * GROUPS + g % GROUPS)
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
def _item(args, matrix, first_group, n_groups, entry, n_entries, tile, n_of_tiles, work):
    """Some groups against some tiles of all n_entries entries of a matrix, `entry` being the first."""
    n_cols, block_size, n_rows = ld_i64(args + 32), ld_i64(args + 40), ld_i64(args + 24)
    group_bytes, step = 16 * ld_i64(args + 16), ld_i64(args + 48)
    x, x_bytes, most = ld_i64(args + 56), ld_i64(args + 64), ld_i64(args + 72)
    n_tiles = n_tiles_of(n_entries, most)
    n_panels, n_blocks, per_panel = (n_cols + 255) // 256, n_cols // block_size, 256 // block_size
    first = first_of_tile(tile, n_entries, n_tiles)
    n = first_of_tile(tile + n_of_tiles, n_entries, n_tiles) - first
    pair_bytes = 64 * GROUPS * n
    at_once = SLAB * ld_i64(args + 144)
    product, sums = work + PRODUCT, work + SUMS
    _clear(sums, (n_groups + GROUPS - 1) // GROUPS * GROUPS * n)
    st_i64(product, work + PANELS)
    st_i64(product + 8, x + x_bytes * entry)
    st_i64(product + 16, x_bytes)
    st_i64(product + 24, n_entries)
    st_i64(product + 32, n_tiles)
    st_i64(product + 72, ld_i64(args + 160))
    st_i64(product + 80, group_bytes)
    for columns in range(0, n_panels, at_once):
        stop = min(columns + at_once, n_panels)
        for g in range(0, n_groups, GROUPS):
            st_i64(product + 56, sums + g // GROUPS * pair_bytes)
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
    _put(sums, n, out_rows, ld_i64(args + 80), ld_i64(args + 88), 16 * first_group, n_rows, n_groups)


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
        entry = ld_i64(starts + 8 * used)
        n_entries = ld_i64(starts + 8 * used + 8) - entry
        matrix = weights + ld_i64(matrices + 8 * used) * matrix_bytes
        n_tiles = n_tiles_of(n_entries, most)
        parts = (n_tiles + at_once - 1) // at_once
        for part in range(parts):
            tile = part * n_tiles // parts
            n_of_tiles = (part + 1) * n_tiles // parts - tile
            count = min(span, n_groups - first_group)
            _item(args, matrix, first_group, count, entry, n_entries, tile, n_of_tiles, work)


# -- wrapper


def kernels_for(name):
    """The kernels that products with this format need (for warming up)."""
    shape = SHAPES[name]
    order = lanes_of_32 if shape.is_32 else lanes_of_256
    return order, panels.ROWS[name], panels.PACKED[name], product_kernel(name), matmul


def multiply(x, weight, memory, out, groups, most):
    """out[out_rows[i]] = x[x_rows[i]] @ weight[matrix].T for the entries of each matrix in use.

    memory  address, bytes from one matrix to the next, bytes of a row
    most    entries that a matrix has at most, as far as shapes tell
    """
    (M, C), name, form = weight.shape[-2:], weight.format.name, weight.format
    shape, n_threads = SHAPES[name], threads.num_threads()
    label = weight.name or name
    order, rows, packed, product, _ = kernels_for(name)
    is_packed = isinstance(weight, PackedTensor)
    activations, x_bytes = _ordered(order, x, shape, groups, most, n_threads, label)
    step = form.block_bytes * (16 if is_packed else 1)
    n_groups, at_most = -(-M // 16), min(TILES * ROWS, groups.n_entries)
    span = _span(n_groups, groups.n_groups, n_threads)
    slabs = max(1, ACTIVATIONS // (min(most, at_most) * SLAB * 320))
    ahead = SLAB * 256 // form.block_size * step if is_packed else 0  # rows of a file do it on their own
    per_thread = SUMS + 64 * (span + GROUPS) * at_most
    matrices, starts, _, out_rows = groups.addresses
    args = (
        *memory, M, C, form.block_size, step, activations, x_bytes, ROWS,
        address(out), 4 * out.shape[-1], matrices, starts, out_rows,
        (packed if is_packed else rows).address, product.address,
        span, slabs, TILES, ahead, workspace(per_thread * n_threads, "matmul"), per_thread,
    )  # fmt: skip
    n_items = groups.n_groups * -(-n_groups // span)
    work_of_item = 16 * span * C * max(1, groups.n_entries // groups.n_groups)
    threads.run(matmul, args, n_items, max(1, MIN_WORK // work_of_item), n_threads, label=label)


def _span(n_groups, n_matrices, n_threads):
    """Groups of an item: many, so that activations are read seldom, but some items for each thread."""
    wanted = n_groups * n_matrices // (4 * n_threads)
    return min(SPAN, max(GROUPS, wanted // GROUPS * GROUPS))


def _ordered(order, x, shape, groups, most, n_threads, label):
    """The activations of all entries in tiles; (address, bytes of a row)."""
    C = x.shape[1]
    form, block_size = shape.form, 32 if shape.is_32 else 256
    row_bytes = 4 * words_of_block(shape) * (C // block_size)
    scratch = -(-SPARE * n_threads // 64) * 64
    space = workspace(scratch + row_bytes * groups.n_entries, "tiles")
    parameters = (form.offset, shape.has_minima) if shape.is_32 else (*firsts_and_pairs(shape), form.offset)
    per_matrix = -(-most // ROWS) if groups.n_groups == 1 else 1
    _, starts, x_rows, _ = groups.addresses
    args = (
        address(x), C, starts, x_rows, per_matrix, ROWS, space + scratch, row_bytes, space, *parameters,
    )  # fmt: skip
    threads.run(order, args, groups.n_groups * per_matrix, max(1, 8192 // (C * ROWS)), n_threads, label=label)
    return space + scratch, row_bytes
