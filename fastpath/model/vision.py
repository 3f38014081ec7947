"""Images to soft tokens over an op table: a tower of layers (`gemma4v`), or one projection (`gemma4uv`)."""

import numpy as np

from fastpath import arrays
from fastpath.model.block import Trace, ignore
from fastpath.model.encoder import EncoderPass
from refimpl.config.media import LAYER_NORM_EPS, VISION_THETA
from refimpl.kv_types import own_pages, shapes_of


def encode_image(
    ops, config, weights, canvas, dtype=np.float32, *, activations: str = "int8", trace: Trace | None = None
):
    """Soft tokens of one image, or of one frame of a video.

    Shapes:
        canvas  u8[h, w, 3]  both sides multiples of 48
        dtype   float32; float64 on the reference's op table
    Returns:
        f[h/48 * w/48, D of the text model], row by row
    """
    rows, columns = _grid(config, canvas)
    place = arrays.of(ops)
    run = EncoderPass(ops, config.eps, activations, arrays.on_host(ops, trace) or ignore)
    x = place.put(_patches(canvas, config.patch).astype(dtype) / dtype(255))
    at = np.mgrid[:rows, :columns].reshape(2, -1)[::-1].astype(np.int32)  # column and row of every patch
    return place.get((_tower if config.kind == "gemma4v" else _unified)(run, config, weights, x, at))


def _grid(config, canvas):
    """Rows and columns of patches."""
    token = config.patch * config.pool
    h, w = canvas.shape[:2]
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


def _patches(canvas, side):
    """u8[h, w, 3] -> u8[patches, 3*side*side]: of each the reds, then greens, then blues."""
    h, w, _ = canvas.shape
    grid = canvas.reshape(h // side, side, w // side, side, 3).transpose(0, 2, 4, 1, 3)
    return grid.reshape(-1, 3 * side * side)


def _add_positions(run, config, weights, at, x):
    """A learnt vector for the column of each patch, and one for its row: patches' places int[2, patches]."""
    one = x.dtype.type(1)
    across = run.ops.embed(weights.position_embd, at[0], one)
    down = run.ops.embed(weights.position_embd, config.n_positions + at[1], one)
    x = run.ops.add(x, run.ops.add(across, down))
    run.trace("v.pos_embd", x)
    return x


def _tower(run: EncoderPass, config, weights, x, at):
    ops = run.ops
    x = run.linear(ops.add_bias(ops.scale(x, 2.0), x.dtype.type(-1)), weights.patch_embd)
    run.trace("v.patch_embd", x)
    x = _add_positions(run, config, weights, at, x)
    rope, everything = _rope(ops, config, at), _Everything(ops, len(x), config, x.dtype)
    for i, w in enumerate(weights.layers):
        x = _layer(run, config, w, rope, everything, x, i)
    x = ops.scale(ops.mean_pool(x, int(at[0].max()) + 1, config.pool), config.dim**0.5)
    run.trace("v.pooled", x)
    if config.standardize:
        x = ops.standardize(x, weights.std_bias, weights.std_scale)
        run.trace("v.std_scaled", x)
    x = run.project(x, weights.input_projection)
    run.trace("v.projected", x)
    return x


def _unified(run: EncoderPass, config, weights, x, at):
    ops = run.ops
    first, second, third = weights.norms
    x = ops.layer_norm(x, *first, LAYER_NORM_EPS)
    run.trace("v.patch_norm-1", x)
    x = ops.add_bias(run.linear(x, weights.patch_embd), weights.patch_bias)
    run.trace("v.patch_embd", x)
    x = ops.layer_norm(x, *second, LAYER_NORM_EPS)
    run.trace("v.patch_norm-2", x)
    x = ops.layer_norm(_add_positions(run, config, weights, at, x), *third, LAYER_NORM_EPS)
    run.trace("v.patch_norm-3", x)
    x = run.project(x, weights.input_projection)
    run.trace("v.projected", x)
    return x


class _Everything:
    """Patches as the tokens of one lane that all see up to the last one; one cache for all layers."""

    def __init__(self, ops, T, config, dtype):
        place = arrays.of(ops)
        pages = (place.pages(shape, dtype) for shape in shapes_of(1, T, config.n_heads, config.head_dim))
        self.kv = *pages, place.put(own_pages(1))
        self.lanes, self.order = place.put(np.zeros(T, np.int32)), place.put(np.arange(T, dtype=np.int32))
        self.ends = place.put(np.full(T, T - 1, np.int32))

    def attention(self, ops, q, k, v):
        ops.write_kv(k, v, *self.kv, self.lanes, self.order)
        return ops.attention(q, *self.kv, self.lanes, self.order, None, self.ends)


def _rope(ops, config, at):
    """Cosines and sines of every half of every head, as if each half were a token: f[T * 2N, H/4].

    The first half of a head turns with the column of its patch, the second half with the row; `ops.rope` has
    one set of angles per token.
    """
    quarter, T = config.head_dim // 4, at.shape[1]
    inv_freq = VISION_THETA ** -(np.arange(quarter) / quarter)
    of_patches = ops.rope_table(at.T.reshape(-1), inv_freq)
    of_heads = np.arange(2 * T, dtype=np.int32).reshape(T, 1, 2).repeat(config.n_heads, axis=1).reshape(-1)
    return [ops.get_rows(part, of_heads) for part in of_patches]


def _rotate(ops, x, rope):
    T, N, H = x.shape
    return ops.rope(x.reshape(T * N * 2, 1, H // 2), *rope).reshape(T, N, H)


def _layer(run: EncoderPass, config, w, rope, everything, x, i):
    ops = run.ops
    u = run.norm(x, w["ln1"])
    run.trace(f"v.attn_norm-{i}", u)
    out = _attention(run, config, w, rope, everything, u, i)
    x = ops.add(x, run.norm(out, w["attn_post_norm"]))
    run.trace(f"v.attn_out-{i}", x)

    z = run.norm(x, w["ln2"])
    run.trace(f"v.ffn_norm-{i}", z)
    matrices = w["ffn_gate"], w["ffn_up"]
    hidden = ops.geglu(*map(run.clipped, matrices, run.clip_input(z, *matrices)))
    run.trace(f"v.ffn_geglu-{i}", hidden)
    out = run.between_clips(w["ffn_down"], hidden)
    run.trace(f"v.ffn_out-{i}", out)
    x = ops.add(x, run.norm(out, w["ffn_post_norm"]))
    run.trace(f"v.l_out-{i}", x)
    return x


def _attention(run: EncoderPass, config, w, rope, everything, u, i):
    T, N, H = len(u), config.n_heads, config.head_dim
    matrices = w["attn_q"], w["attn_k"], w["attn_v"]
    q, k, v = map(run.clipped, matrices, run.clip_input(u, *matrices))
    q = _rotate(run.ops, run.norm(q.reshape(T, N, H), w["attn_q_norm"]), rope)
    k = _rotate(run.ops, run.norm(k.reshape(T, N, H), w["attn_k_norm"]), rope)
    v = run.norm(v.reshape(T, N, H), None)
    for name, heads in (("Qcur_pos", q), ("Kcur_pos", k), ("Vcur_normed", v)):
        run.trace(f"v.{name}-{i}", heads)
    out = everything.attention(run.ops, q, k, v).reshape(T, N * H)
    run.trace(f"v.kqv_out-{i}", out)
    return run.between_clips(w["attn_out"], out)
