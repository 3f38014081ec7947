"""Attention over a cache, for causal, sliding-window and grouped-query layers; that of the audio encoder."""

import numpy as np

from refimpl import kv_tiles
from refimpl.kv_types import COLUMNS, STEP


def write_kv(k, v, k_pages, v_pages, table, seq_ids, positions):
    """Store the keys and values of a call.

        position p of lane r goes to slot p mod P of page table[r, p // P mod E]

    Shapes:
        k, v       f[T, K, H]
        k_pages    [N, K, P/32, H, 32]         written in place; slot s is [s // 32, :, s % 32]
        v_pages    [N, K, P/32, H/32, 32, 32]  written in place; slot s is [s // 32, :, s % 32, :]
                   u8[N, K, P/32, H/32, bytes] either of them, in tiles (kv_tiles.py)
        table      i[R, E]                     pages of P positions, by lane and page number; -1: none
        seq_ids    i[T]  lanes
        positions  i[T]

    Notes:
        One rule serves both kinds of cache.  While E pages hold every position, they are a line; otherwise a
        ring, in which a sliding-window layer overwrites keys that no later query may see.  Without paging,
        every lane has one page (E = 1) as long as all that it keeps.
        A table may be the first columns of a wider one: as many as the positions in use need.
        Both lie in blocks of 32 positions.  Keys are transposed there: a vector register then holds one
        component of 16 positions, and the sums of q·k for all of them need no sums across lanes.  Values are
        cut into columns of 32 components, so that who computes some columns reads one piece per block.
        Pages may have a smaller type than the call (`narrow`, `kv_tiles.quantize`).
    """
    found = _find(k_pages, table, seq_ids, positions)
    _store(k, k_pages, found, of_keys=True)
    _store(v, v_pages, found, of_keys=False)


def _store(x, pages, found, of_keys):
    T, K, H = x.shape
    if pages.dtype == np.uint8:
        kv_tiles.store(x, pages, found, of_keys)
        return
    if not of_keys:
        x = np.pad(x, ((0, 0), (0, 0), (0, -H % COLUMNS))).reshape(T, K, -1, COLUMNS)
    number, blocks, places = found
    pages[number, :, blocks, :, places] = narrow(x, pages.dtype)


def _load(pages, found, of_keys, dtype):
    """f[n, K, H or more]: what n positions have stored; components from H on are 0."""
    number, blocks, places = found
    if pages.dtype == np.uint8:
        return kv_tiles.load(pages, found, of_keys).astype(dtype)
    x = widen(pages[number, :, blocks, :, places], dtype)
    return x if of_keys else x.reshape(*x.shape[:2], -1)


def _find(pages, table, seq_ids, positions):
    """(page, block, place in the block) of positions."""
    P = pages.shape[2] * STEP
    found = table[seq_ids, positions // P % table.shape[1]]
    assert (found >= 0).all(), f"lane {seq_ids}: no page for some of positions {positions}"
    return found, *np.divmod(positions % P, STEP)


def attention(q, k_pages, v_pages, table, seq_ids, positions, window, ends=None):
    """Each query takes the softmax-weighted mean of the values it may see.

        out[t, n] = sum_s softmax_s(q[t, n] · k[s, n // G]) * v[s, n // G]        G = N / K
        over positions s with  max(0, p - window + 1) <= s <= ends[t],          p = positions[t]

    Shapes:
        q          f[T, N, H]                  rotated queries
        k_pages    [N, K, P/32, H, 32]         the call's own keys and values are already in it
        v_pages    [N, K, P/32, H/32, 32, 32]
        table      i[R, E]                     where position p is: see `write_kv`
        seq_ids    i[T]
        positions  i[T]
        window     int | None                  positions that a query sees, its own included; None: all, in
                                               a global layer
        ends       i[T] | None                 the last position that a query sees, its own or a later one;
                                               None: its own
    Returns:
        f[T, N, H]

    Notes:
        Scores are not divided by sqrt(H): queries and keys are normalised per head, and the weights of those
        norms carry the scale.
        The window is a matter of positions.  Where a key is stored only matters for finding it.
        Every query sees itself, so the softmax is never over nothing.
        `ends` is how tokens of one image see each other both ways: all of them see up to the last one.
        A row of the result depends on its own query, keys, values and positions alone.  Implementations that
        must give equal bits for any batch, chunk and number of threads use this order: scores as sums over
        128 components, added ascending; m, their exact maximum; p_s = exp(score_s - m); the sums of p_s and
        p_s * v[s] per step of 32 positions (32i .. 32i + 31, counted from position 0), then over the steps,
        ascending; one division at the end.
    """
    T, N, H = q.shape
    K, P = k_pages.shape[1], k_pages.shape[2] * STEP
    S = table.shape[1] * P
    out = np.empty_like(q)
    for t in range(T):
        p = int(positions[t])
        first = 0 if window is None else max(0, p - window + 1)
        last = p if ends is None else int(ends[t])
        assert last - first < S, f"position {p} sees {last - first + 1} keys, a lane holds {S}"
        found = _find(k_pages, table, seq_ids[t], np.arange(first, last + 1))
        k = _load(k_pages, found, True, q.dtype)[..., :H]  # [keys, K, H]
        v = _load(v_pages, found, False, q.dtype)[..., :H]
        scores = q[t].reshape(K, N // K, H) @ k.transpose(1, 2, 0)  # [K, G, keys]
        probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
        probs /= probs.sum(axis=-1, keepdims=True)
        out[t] = (probs @ v.transpose(1, 0, 2)).reshape(N, H)
    return out


def relative_attention(q, k, v, relative, q_scale, k_scale, cap):
    """Attention of the audio encoder: the last few frames, with a learnt key for each distance.

        score[t, d] = cap * tanh((q[t] * q_scale) · (k[t - d] * k_scale + relative[d]) / cap)
        out[t] = sum_d softmax_d(score[t, d]) * v[t - d]         over d < W with t - d >= 0

    Shapes:
        q, k, v   f[T, N, H]
        relative  f[W, N, H]  the key of distance d, whatever the frames hold
        q_scale   f[H]        learnt, one factor for each component
        k_scale   float
        cap       float       50
    Returns:
        f[T, N, H]

    Notes:
        Published code works on blocks of W queries with 2 W keys and shifts a matrix of positions into place;
        what it computes is this.  Distance W, for which it has a position, is masked there.
        The cap comes before the mask: a key that is not seen has no score.
    """
    T, (W, _, _) = len(q), relative.shape
    out = np.empty_like(q)
    for t in range(T):
        n = min(W, t + 1)
        keys = k[t - n + 1 : t + 1][::-1] * q.dtype.type(k_scale) + relative[:n]  # by distance
        scores = np.einsum("nh,dnh->nd", q[t] * q_scale, keys)
        scores = cap * np.tanh(scores / cap)
        probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
        probs /= probs.sum(axis=-1, keepdims=True)
        out[t] = np.einsum("nd,dnh->nh", probs, v[t - n + 1 : t + 1][::-1])
    return out


def narrow(x, dtype):
    """Numbers in the type of a cache, rounded to nearest, ties to even; uint16 stands for bfloat16."""
    if dtype != np.uint16:
        with np.errstate(over="ignore"):  # beyond 65504 a float16 is infinite
            return x.astype(dtype)
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # the upper half of a float32
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def widen(stored, dtype):
    """What `narrow` stored, exactly."""
    if stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(dtype)
