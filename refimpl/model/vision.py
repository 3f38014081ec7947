"""Images to soft tokens: a transformer on patches (`gemma4v`), or one projection (`gemma4uv`, 12B)."""

import numpy as np

from refimpl import ops
from refimpl.config.media import LAYER_NORM_EPS, VISION_THETA
from refimpl.kv_types import own_pages, shapes_of
from refimpl.model.encoder import start


def encode_image(config, weights, canvas, dtype=np.float32, *, activations="float", trace=None):
    """Soft tokens of one image, or of one frame of a video.

    Shapes:
        config   VisionConfig
        weights  VisionWeights | UnifiedVisionWeights
        canvas   u8[h, w, 3]  both sides multiples of 48 (frontend/image.py)
        dtype    float32, or float64 for the truth
        trace    function of (name, array) | None; names begin with `v.`
    Returns:
        f[h/48 * w/48, D of the text model], row by row
    """
    rows, columns = _grid(config, canvas)
    call = start(config.eps, activations, trace)
    x = patches(canvas, config.patch).astype(dtype) / dtype(255)
    at = np.mgrid[:rows, :columns].reshape(2, -1)[::-1]  # column and row of every patch
    encode = _tower if config.kind == "gemma4v" else _unified
    return encode(call, config, weights, x, at)


def patches(canvas, side):
    """u8[h, w, 3] -> u8[h/side * w/side, 3*side*side]: squares, each with its reds first, then greens, then
    blues."""
    h, w, _ = canvas.shape
    grid = canvas.reshape(h // side, side, w // side, side, 3).transpose(0, 2, 4, 1, 3)
    return grid.reshape(-1, 3 * side * side)


def _grid(config, canvas):
    h, w = canvas.shape[:2]
    token = config.patch * config.pool
    if canvas.dtype != np.uint8 or canvas.shape[2:] != (3,) or not h or not w or h % token or w % token:
        raise ValueError(
            f"canvas: {canvas.dtype}{list(canvas.shape)}, expected uint8, multiples of {token}, 3 colors. "
            "Resize it with frontend.image.fit"
        )
    rows, columns = h // config.patch, w // config.patch
    if max(rows, columns) > config.n_positions:
        raise ValueError(
            f"canvas: {columns} x {rows} patches, expected at most {config.n_positions} along a side, as "
            "many as the encoder has positions. Choose a smaller number of image tokens"
        )
    return rows, columns


def _positions(config, weights, at, dtype):
    """Learnt vectors: one for the column of a patch and one for its row, f[T, D] each."""
    one = dtype.type(1)
    across = ops.embed(weights.position_embd, at[0], one)
    return across, ops.embed(weights.position_embd, config.n_positions + at[1], one)


def _tower(call, config, weights, x, at):
    """gemma4v.

        x = Wpatch (2 pixels - 1) + X[column] + Y[row];   x = layer_i(x);   soft = project(pool(x))

    Notes:
        Pooled rows are multiplied by sqrt(D).  With standardisation that matters; without it the norm of the
        projection takes it out again, but for its epsilon.
    """
    x = call.linear(ops.add_bias(ops.scale(x, 2.0), x.dtype.type(-1)), weights.patch_embd)
    call.trace("v.patch_embd", x)
    across, down = _positions(config, weights, at, x.dtype)
    x = ops.add(x, ops.add(across, down))
    call.trace("v.pos_embd", x)

    quarter = config.head_dim // 4
    inv_freq = VISION_THETA ** -(np.arange(quarter) / quarter)
    ropes = [ops.rope_table(place, inv_freq) for place in at]
    for i, w in enumerate(weights.layers):
        x = _layer(call, config, w, ropes, x, i)

    x = ops.scale(ops.mean_pool(x, at[0].max() + 1, config.pool), config.dim**0.5)
    call.trace("v.pooled", x)
    if config.standardize:
        x = ops.standardize(x, weights.std_bias, weights.std_scale)
        call.trace("v.std_scaled", x)
    x = call.project(x, weights.input_projection)
    call.trace("v.projected", x)
    return x


def _layer(call, config, w, ropes, x, i):
    """As in the text model, norms before and after each part; no experts, no scalar.  f[T, D] -> f[T, D]."""
    u = call.norm(x, w["ln1"])
    call.trace(f"v.attn_norm-{i}", u)
    x = ops.add(x, call.norm(_attention(call, config, w, ropes, u, i), w["attn_post_norm"]))
    call.trace(f"v.attn_out-{i}", x)

    z = call.norm(x, w["ln2"])
    call.trace(f"v.ffn_norm-{i}", z)
    hidden = ops.geglu(call.clipped(z, w["ffn_gate"]), call.clipped(z, w["ffn_up"]))
    call.trace(f"v.ffn_geglu-{i}", hidden)
    out = call.clipped(hidden, w["ffn_down"])
    call.trace(f"v.ffn_out-{i}", out)
    x = ops.add(x, call.norm(out, w["ffn_post_norm"]))
    call.trace(f"v.l_out-{i}", x)
    return x


def _attention(call, config, w, ropes, u, i):
    """Every patch sees every patch.

    Notes:
        Queries and keys are normalised per head with a weight, values without; scores are not divided.
        Half of a head turns with the column of a patch, the other half with its row.
        It is the text model's op: patches are the tokens of one lane, and all of them see up to the last one.
    """
    T, N, H = len(u), config.n_heads, config.head_dim
    q = call.norm(call.clipped(u, w["attn_q"]).reshape(T, N, H), w["attn_q_norm"])
    k = call.norm(call.clipped(u, w["attn_k"]).reshape(T, N, H), w["attn_k_norm"])
    v = call.norm(call.clipped(u, w["attn_v"]).reshape(T, N, H), None)
    q, k = rope_2d(q, ropes), rope_2d(k, ropes)
    for name, heads in (("Qcur_pos", q), ("Kcur_pos", k), ("Vcur_normed", v)):
        call.trace(f"v.{name}-{i}", heads)

    lane, order = np.zeros(T, np.int32), np.arange(T, dtype=np.int32)
    last = np.full(T, T - 1, np.int32)
    kv = *(np.zeros(shape, q.dtype) for shape in shapes_of(1, T, N, H)), own_pages(1)
    ops.write_kv(k, v, *kv, lane, order)
    out = ops.attention(q, *kv, lane, order, None, last).reshape(T, N * H)
    call.trace(f"v.kqv_out-{i}", out)
    return call.clipped(out, w["attn_out"])


def rope_2d(x, ropes):
    """The first half of every head by the columns' angles, the second half by the rows'."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([ops.rope(first, *ropes[0]), ops.rope(second, *ropes[1])], axis=-1)


def _unified(call, config, weights, x, at):
    """gemma4uv: no tower at all.

        x = norm_2(Wpatch norm_1(pixels) + b);   x = norm_3(x + X[column] + Y[row]);   soft = project(x)

    Notes:
        These norms shift to a mean of 0 as well.  Pixels stay in 0 .. 1.
    """
    first, second, third = weights.norms
    x = ops.layer_norm(x, *first, LAYER_NORM_EPS)
    call.trace("v.patch_norm-1", x)
    x = ops.add_bias(call.linear(x, weights.patch_embd), weights.patch_bias)
    call.trace("v.patch_embd", x)
    x = ops.layer_norm(x, *second, LAYER_NORM_EPS)
    call.trace("v.patch_norm-2", x)
    across, down = _positions(config, weights, at, x.dtype)
    x = ops.add(x, ops.add(across, down))
    call.trace("v.pos_embd", x)
    x = ops.layer_norm(x, *third, LAYER_NORM_EPS)
    call.trace("v.patch_norm-3", x)
    x = call.project(x, weights.input_projection)
    call.trace("v.projected", x)
    return x
