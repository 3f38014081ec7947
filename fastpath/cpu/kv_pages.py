"""Where keys and values of a position lie: in a page that a table names.      part of attention.py

Kernels read the table from memory, so that a recorded program follows it.  Wrappers look whether every page
that a call reads or writes exists; a replay does not, and relies on the cache.
"""

import math

import numpy as np

from fastpath.cpu.kernel import helper
from fastpath.cpu.simd import ld_i32


@helper
def block_at(pages, row, n_entries, page_blocks, block, head, n_kv_heads, block_bytes):
    """Address of the 32 positions of `block`, position // 32, of a head.

    row: address of a lane's n_entries entries in the table;  page_blocks: blocks of a page
    """
    page = ld_i32(row + 4 * (block // page_blocks % n_entries))
    return pages + ((page * n_kv_heads + head) * page_blocks + block % page_blocks) * block_bytes


def block_bytes(pages):
    """Bytes of 32 positions of one head."""
    return math.prod(pages.shape[3:]) * pages.itemsize


def check_table(table, where):
    """int32[R, E] whose rows may lie apart: a table may be the first columns of a wider one."""
    is_int32 = isinstance(table, np.ndarray) and table.dtype == np.int32 and table.ndim == 2
    if not (is_int32 and (table.shape[1] == 1 or (table.shape[1] and table.strides[1] == 4))):
        raise ValueError(
            f"{where}: table is {table.dtype}{list(table.shape)}, expected int32[R, E] with E of at least 1, "
            "rows of neighbours. Make it by KVCache"
        )
    return table


def check_written(table, n_pages, page, lanes, positions):
    """Refuses tokens whose page is not there."""
    found = table[lanes, positions // page % table.shape[1]]
    if found.min() < 0 or found.max() >= n_pages:
        t = int(np.argmax((found < 0) | (found >= n_pages)))
        raise ValueError(_missing("write_kv", lanes[t], positions[t] // page, found[t], n_pages))


def check_read(table, n_pages, page, lanes, positions, firsts, lasts):
    """Refuses queries, of which each sees positions firsts .. lasts, where one of the pages is not there.

    Tokens that follow each other in a lane see, together, pages without gaps: they are one run.
    """
    starts = [0]
    if len(lanes) > 1:
        follows = (lanes[1:] == lanes[:-1]) & (positions[1:] == positions[:-1] + 1)
        starts = np.concatenate([starts, np.flatnonzero(~follows) + 1])
    low = np.minimum.reduceat(firsts, starts) // page
    count = np.minimum(np.maximum.reduceat(lasts, starts) // page + 1 - low, table.shape[1])
    runs = np.repeat(np.arange(len(count)), count)
    numbers = np.arange(len(runs)) + (low - (np.cumsum(count) - count))[runs]
    found = table[lanes[starts][runs], numbers % table.shape[1]]
    if found.min() < 0 or found.max() >= n_pages:
        i = int(np.argmax((found < 0) | (found >= n_pages)))
        raise ValueError(_missing("attention", lanes[starts][runs[i]], numbers[i], found[i], n_pages))


def _missing(where, lane, number, page, n_pages):
    return (
        f"{where}: lane {lane} has page {page} for its page number {number}, expected 0 to {n_pages - 1}. "
        "Reserve room in the cache before the call"
    )
