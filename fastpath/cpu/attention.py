"""Attention over a cache, writing into it, and over neighbours.        definition: refimpl/ops/attention.py

    few tokens    attention_few.py: three steps, for decoding
    many tokens   attention_many.py: one step, for prompts and images
    writing       write_kv.py
    pages         kv_pages.py: where a position lies
    relative      attention_relative.py

    arithmetic    scores: fma chains over 128 components, added up, ascending (kv_product.py)
                  exp(score - max), and their sum by steps of 32 positions (softmax.py)
                  values: fma chains over steps of 32 absolute positions, added up, ascending; one division
                  at the end.  Keys and values are widened, exactly, to float32; of q8_0 and q4_0 that is
                  a scale times a code.

Nothing in this depends on other tokens, on the pages where keys lie, or on who computes what: both ways give
the same bytes.  Read from memory are lanes, positions, the last position that a token sees (its own where
nothing else is given) and the table of pages; a recorded program is right for any of these, as long as no
query sees more than the table's columns hold.
"""

import numpy as np

from fastpath.cpu import kv_types, threads
from fastpath.cpu.attention_few import few_tokens
from fastpath.cpu.attention_many import many_tokens
from fastpath.cpu.attention_relative import relative_kernel, scratch_of
from fastpath.cpu.buffers import address, floats, integers, output, shaped, workspace
from fastpath.cpu.kernel import f32_word
from fastpath.cpu.kv_pages import check_read, check_table, check_written
from fastpath.cpu.write_kv import write_all
from refimpl.kv_types import STEP, shapes_of

FEW = 16  # tokens that are computed in three steps
SCORES_LIMIT = 1 << 26  # bytes of scores beyond which they are computed like many
EVERYTHING = 1 << 40  # the window of a global layer
GRAIN = 4  # frames of the audio encoder that a second thread is worth


def write_kv(k, v, k_pages, v_pages, table, seq_ids, positions):
    T, K, H = k.shape
    k_type, v_type = _types(k_pages, v_pages, K, H, "write_kv")
    check_table(table, "write_kv")
    k, v = floats(k, "write_kv: k"), shaped(v, (T, K, H), "write_kv: v")
    lanes = integers(seq_ids, (T,), "write_kv: seq_ids")
    positions = integers(positions, (T,), "write_kv: positions")
    if T == 0:
        return
    if not (0 <= lanes.min() and lanes.max() < len(table) and positions.min() >= 0):
        raise ValueError(
            f"write_kv: lanes {lanes.min()}..{lanes.max()}, positions from {positions.min()}, but the cache "
            f"has {len(table)} lanes. Make it with more sequences"
        )
    check_written(table, len(k_pages), k_pages.shape[2] * STEP, lanes, positions)
    write_all(k, v, k_pages, v_pages, k_type, v_type, lanes, positions, _table_words(table, k_pages))


def attention(q, k_pages, v_pages, table, seq_ids, positions, window, ends=None, *, out=None):
    T, N, H = q.shape
    K, R, E = k_pages.shape[1], *check_table(table, "attention").shape
    S = E * k_pages.shape[2] * STEP  # positions that a lane holds
    k_type, v_type = _types(k_pages, v_pages, K, H, "attention")
    if N % K:
        raise ValueError(f"attention: {N} query heads, {K} key heads; expected a multiple of those")
    q, out = floats(q, "attention: q"), output(out, q.shape, "attention")
    lanes = integers(seq_ids, (T,), "attention: seq_ids")
    positions = integers(positions, (T,), "attention: positions")
    if T == 0:
        return out
    last = positions if ends is None else integers(ends, (T,), "attention: ends")
    firsts = np.zeros_like(positions) if window is None else np.maximum(0, positions - (window - 1))
    _check_reach(lanes, positions, firsts, last, window, R, S)
    check_read(table, len(k_pages), k_pages.shape[2] * STEP, lanes, positions, firsts, last)
    seen = S if window is None or ends is not None else min(window, S)  # most positions that a query sees
    words = (
        address(q), 0, address(lanes), address(positions), address(last), T,
        EVERYTHING if window is None else window, *_table_words(table, k_pages), K, N, H,
    )  # fmt: skip
    pitch = 4 * (seen // STEP + 2) * STEP + 64  # of a row of scores; not a power of two
    if T > FEW or T * N * pitch > SCORES_LIMIT:
        many_tokens(words, k_pages, v_pages, k_type, v_type, seen, out)
    else:
        few_tokens(words, k_pages, v_pages, k_type, v_type, pitch, out)
    return out


def relative_attention(q, k, v, relative, q_scale, k_scale, cap, *, out=None):
    T, N, H = q.shape
    W = len(relative)
    q, k = floats(q, "relative_attention: q"), shaped(k, (T, N, H), "relative_attention: k")
    v = shaped(v, (T, N, H), "relative_attention: v")
    relative = shaped(relative, (W, N, H), "relative_attention: relative")
    q_scale = shaped(q_scale, (H,), "relative_attention: q_scale")
    out = output(out, (T, N, H), "relative_attention")
    n_threads, per_thread = threads.num_threads(), scratch_of(W, H)
    args = (
        address(q), address(k), address(v), address(relative), address(q_scale), address(out), W, N, H,
        f32_word(k_scale), f32_word(cap), workspace(per_thread * n_threads, "relative"), per_thread,
    )  # fmt: skip
    threads.run(relative_kernel, args, T, GRAIN, n_threads)
    return out


def _table_words(table, k_pages):
    """What kernels know of a table: where it is, bytes from lane to lane, columns, blocks of a page."""
    return address(table), table.strides[0], table.shape[1], k_pages.shape[2]


def _types(k_pages, v_pages, K, H, where):
    """The types of both arrays, if they have the shapes of pages of K heads of size H."""
    kinds = kv_types.of(k_pages, f"{where}: k_pages"), kv_types.of(v_pages, f"{where}: v_pages")
    names = kinds[0].name, kinds[1].name
    shapes = shapes_of(len(k_pages), k_pages.shape[2] * STEP, K, H, names)
    are_whole = k_pages.flags.c_contiguous and v_pages.flags.c_contiguous
    if (k_pages.shape, v_pages.shape) != shapes or not are_whole:
        k_block, v_block = (", ".join(map(str, shape[3:])) for shape in shapes)
        raise ValueError(
            f"{where}: k_pages {k_pages.shape}, v_pages {v_pages.shape}; expected [N, {K}, P/32, {k_block}] "
            f"and [N, {K}, P/32, {v_block}] of {' and '.join(names)}, contiguous. Make them by KVCache"
        )
    return kinds


def _check_reach(lanes, positions, firsts, lasts, window, R, S):
    low, high = int(positions.min()), int(lasts.max())
    is_behind = lasts is not positions and (lasts < positions).any()
    seen = 0 if is_behind else int((lasts - firsts).max()) + 1
    if low < 0 or lanes.min() < 0 or lanes.max() >= R or not 1 <= seen <= S:
        raise ValueError(
            f"attention: positions {low}..{high}, lanes {lanes.min()}..{lanes.max()}, window {window}, "
            f"{seen} seen at most, but the cache has {R} lanes of {S} slots. Grow the cache, or reset it"
        )
