"""Attention over a cache, for causal, sliding-window and grouped-query layers; that of the audio encoder."""

import numpy as np


def write_kv(k, v, k_cache, v_cache, seq_ids, positions):
    """Store the keys and values of a call: position p of a sequence goes to slot p mod S of its lane.

    Shapes:
        k, v              f[T, K, H]
        k_cache, v_cache  f[R, S, K, H]  written in place
        seq_ids           i[T]  lanes
        positions         i[T]

    Notes:
        One rule serves both kinds of cache.  While S exceeds every position it is a plain array; otherwise it
        is a ring, in which a sliding-window layer overwrites keys that no later query may see.
    """
    slots = positions % k_cache.shape[1]
    k_cache[seq_ids, slots] = k
    v_cache[seq_ids, slots] = v


def attention(q, k_cache, v_cache, seq_ids, positions, window, ends=None):
    """Each query takes the softmax-weighted mean of the values it may see.

        out[t, n] = sum_s softmax_s(q[t, n] · k[s, n // G]) * v[s, n // G]        G = N / K
        over positions s with  max(0, p - window + 1) <= s <= ends[t],          p = positions[t]

    Shapes:
        q                 f[T, N, H]     rotated queries
        k_cache, v_cache  f[R, S, K, H]  the call's own keys and values are already in it
        seq_ids           i[T]
        positions         i[T]
        window            int | None     positions that a query sees, its own included; None: all, in a
                                         global layer
        ends              i[T] | None    the last position that a query sees, its own or a later one; None:
                                         its own
    Returns:
        f[T, N, H]

    Notes:
        Scores are not divided by sqrt(H): queries and keys are normalised per head, and the weights of those
        norms carry the scale.
        The window is a matter of positions.  Where a key is stored only matters for finding it.
        Every query sees itself, so the softmax is never over nothing.
        `ends` is how tokens of one image see each other both ways: all of them see up to the last one.
        A row of the result depends on its own query, keys, values and positions alone.  Implementations that
        must give equal bits for any batch, chunk and number of threads use this order: m, the exact maximum
        of the scores; p_s = exp(score_s - m); the sums of p_s and p_s * v[s] per step of 32 positions (32i ..
        32i + 31, counted from position 0), then over the steps, ascending; one division at the end.
    """
    T, N, H = q.shape
    _, S, K, _ = k_cache.shape
    out = np.empty_like(q)
    for t in range(T):
        p = int(positions[t])
        first = 0 if window is None else max(0, p - window + 1)
        last = p if ends is None else int(ends[t])
        assert last - first < S, f"position {p} sees {last - first + 1} keys, the cache holds {S}"
        slots = np.arange(first, last + 1) % S
        k, v = k_cache[seq_ids[t], slots], v_cache[seq_ids[t], slots]
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
