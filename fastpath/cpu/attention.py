"""Attention over a cache, writing into it, and over neighbours.        definition: refimpl/ops/attention.py

    few tokens    attention_few.py: three steps, for decoding
    many tokens   attention_many.py: one step, for prompts and images
    writing       write_kv.py
    relative      attention_relative.py

    arithmetic    scores: fma chains over 128 components, added up, ascending (kv_product.py)
                  exp(score - max), and their sum by steps of 32 positions (softmax.py)
                  values: fma chains over steps of 32 absolute positions, added up, ascending; one division
                  at the end.  Keys and values are widened, exactly, to float32.

Nothing in this depends on other tokens, on the slots where keys lie, or on who computes what: both ways give
the same bytes.  The last position that a token sees is read from memory: it is its own where nothing else is
given.
"""

import numpy as np

from fastpath.cpu import kv_types, threads
from fastpath.cpu.attention_few import few_tokens
from fastpath.cpu.attention_many import many_tokens
from fastpath.cpu.attention_relative import relative_kernel, scratch_of
from fastpath.cpu.buffers import address, floats, integers, output, shaped, workspace
from fastpath.cpu.kernel import f32_word
from fastpath.cpu.write_kv import write_kv_kernel
from refimpl.kv_types import COLUMNS, STEP, shapes_of

FEW = 16  # tokens that are computed in three steps
SCORES_LIMIT = 1 << 26  # bytes of scores beyond which they are computed like many
EVERYTHING = 1 << 40  # the window of a global layer
GRAIN = 4  # tokens to write that a second thread is worth


def write_kv(k, v, k_cache, v_cache, seq_ids, positions):
    T, K, H = k.shape
    k_type, v_type = _types(k_cache, v_cache, K, H, "write_kv")
    k, v = floats(k, "write_kv: k"), shaped(v, (T, K, H), "write_kv: v")
    lanes = integers(seq_ids, (T,), "write_kv: seq_ids")
    positions = integers(positions, (T,), "write_kv: positions")
    if T and not (0 <= lanes.min() and lanes.max() < len(k_cache) and positions.min() >= 0):
        raise ValueError(
            f"write_kv: lanes {lanes.min()}..{lanes.max()}, positions from {positions.min()}, but the cache "
            f"has {len(k_cache)} lanes. Make it with more sequences"
        )
    n_threads = threads.num_threads()
    args = (
        address(k), address(v), address(k_cache), address(v_cache), address(lanes), address(positions),
        k_cache.shape[2] * STEP, K, H, k_type.code, v_type.code, workspace(64 * n_threads, "write_kv"),
    )  # fmt: skip
    threads.run(write_kv_kernel, args, T, GRAIN, n_threads)


def attention(q, k_cache, v_cache, seq_ids, positions, window, ends=None, *, out=None):
    T, N, H = q.shape
    R, K, S = *k_cache.shape[:2], k_cache.shape[2] * STEP
    k_type, v_type = _types(k_cache, v_cache, K, H, "attention")
    if N % K:
        raise ValueError(f"attention: {N} query heads, {K} key heads; expected a multiple of those")
    q, out = floats(q, "attention: q"), output(out, q.shape, "attention")
    lanes = integers(seq_ids, (T,), "attention: seq_ids")
    positions = integers(positions, (T,), "attention: positions")
    if T == 0:
        return out
    last = positions if ends is None else integers(ends, (T,), "attention: ends")
    _check_reach(lanes, positions, last, window, R, S)
    seen = S if window is None or ends is not None else min(window, S)  # most positions that a query sees
    words = (
        address(q), 0, address(lanes), address(positions), address(last), T,
        EVERYTHING if window is None else window, S, K, N, H,
    )  # fmt: skip
    pitch = 4 * (seen // STEP + 2) * STEP + 64  # of a row of scores; not a power of two
    if T > FEW or T * N * pitch > SCORES_LIMIT:
        many_tokens(words, k_cache, v_cache, k_type, v_type, seen, out)
    else:
        few_tokens(words, k_cache, v_cache, k_type, v_type, pitch, out)
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


def _types(k_cache, v_cache, K, H, where):
    """The types of both arrays, if they have the shapes of a cache of K heads of size H."""
    shapes = shapes_of(len(k_cache), k_cache.shape[2] * STEP, K, H)
    if (k_cache.shape, v_cache.shape) != shapes:
        raise ValueError(
            f"{where}: k_cache {k_cache.shape}, v_cache {v_cache.shape}; expected [R, {K}, S/32, {H}, 32] "
            f"and [R, {K}, S/32, {-(-H // COLUMNS)}, 32, 32]. Make them by KVCache"
        )
    return kv_types.of(k_cache, f"{where}: k_cache"), kv_types.of(v_cache, f"{where}: v_cache")


def _check_reach(lanes, positions, ends, window, R, S):
    low, high = int(positions.min()), int(ends.max())
    if ends is positions:
        seen = high + 1 if window is None else min(window, high + 1)
    else:
        firsts = 0 if window is None else np.maximum(0, positions - (window - 1))
        seen = int((ends - firsts).max()) + 1 if (ends >= positions).all() else 0
    if low < 0 or lanes.min() < 0 or lanes.max() >= R or not 1 <= seen <= S:
        raise ValueError(
            f"attention: positions {low}..{high}, lanes {lanes.min()}..{lanes.max()}, window {window}, "
            f"{seen} seen at most, but the cache has {R} lanes of {S} slots. Grow the cache, or reset it"
        )
