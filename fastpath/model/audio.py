"""Sounds to soft tokens over an op table: a conformer (`gemma4a`), or one projection (`gemma4ua`)."""

import math

import numpy as np

from fastpath import arrays
from fastpath.model.block import Trace, ignore
from fastpath.model.encoder import EncoderPass
from refimpl.config.media import AUDIO_CAP, AUDIO_EPS, AUDIO_WINDOW
from refimpl.frontend.audio import MIN_SAMPLES, SAMPLE_RATE, log_mel, waveform_frames

K_SCALE = math.log(1 + math.e) / math.log(2)  # softplus(1) / ln 2


def encode_audio(
    ops, config, weights, samples, dtype=np.float32, *, activations: str = "int8", trace: Trace | None = None
):
    """Soft tokens of one sound.

    Shapes:
        samples  f[n]  16 kHz, at most 30 s
        dtype    float32; float64 on the reference's op table
    Returns:
        f[T, D of the text model], one row for each 40 ms
    """
    least = 1 if config.kind == "gemma4ua" else MIN_SAMPLES
    if len(samples) < least:
        raise ValueError(
            f"sound: {len(samples)} samples, expected at least {least} "
            f"({1000 * least / SAMPLE_RATE:.3g} ms). Send a longer one"
        )
    place = arrays.of(ops)
    run = EncoderPass(ops, AUDIO_EPS, activations, arrays.on_host(ops, trace) or ignore)
    if config.kind == "gemma4ua":
        x = place.put(waveform_frames(samples).astype(dtype))
        run.trace("a.frames", x)
    else:
        mel = log_mel(samples, dtype)
        run.trace("a.mel", mel)
        x = _conformer(run, config, weights, place.put(mel))
    x = run.project(x, weights.input_projection)
    run.trace("a.projected", x)
    return place.get(x)


def _conformer(run: EncoderPass, config, weights, mel):
    """f[T, 128] -> f[ceil(ceil(T/2)/2), width before the projection]"""
    ops = run.ops
    x = mel.reshape(*mel.shape, 1)
    for i, (kernel, norm) in enumerate(zip(weights.convs, weights.conv_norms, strict=True)):
        x = ops.layer_norm(ops.conv2d(x, kernel), norm, None, run.eps)
        x = ops.clip(x, 0.0, math.inf)
        run.trace(f"a.conv-{i}", x)
    x = run.linear(x.reshape(len(x), -1), weights.inp)
    run.trace("a.inp", x)
    places = arrays.of(ops).put(_distances(config.dim).astype(x.dtype))
    for i, w in enumerate(weights.layers):
        x = _layer(run, config, w, places, x, i)
    x = ops.add_bias(run.linear(x, weights.out), weights.out_bias)
    run.trace("a.out", x)
    return x


def _distances(dim):
    """Sines, then cosines, of each distance at slower and slower rates: f64[12, dim]."""
    half = dim // 2
    rates = 1e4 ** -(np.arange(half) / max(half - 1, 1))
    angles = np.arange(AUDIO_WINDOW)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def _layer(run: EncoderPass, config, w, places, x, i):
    ops = run.ops
    x = ops.add(x, ops.scale(_ffn(run, w, "", x), 0.5))
    run.trace(f"a.ffn_out-{i}", x)
    x = ops.add(x, _attention(run, config, w, places, x, i))
    run.trace(f"a.attn_out-{i}", x)
    x = ops.add(x, _convolution(run, w, x, i))
    run.trace(f"a.conv_out-{i}", x)
    x = ops.add(x, ops.scale(_ffn(run, w, "_1", x), 0.5))
    run.trace(f"a.ffn_out_1-{i}", x)
    x = run.norm(x, w["ln2"])
    run.trace(f"a.l_out-{i}", x)
    return x


def _ffn(run: EncoderPass, w, which, x):
    z = run.between_clips(w[f"ffn_up{which}"], run.norm(x, w[f"ffn_norm{which}"]))
    out = run.between_clips(w[f"ffn_down{which}"], run.ops.silu(z))
    return run.norm(out, w[f"ffn_post_norm{which}"])


def _attention(run: EncoderPass, config, w, places, x, i):
    """A frame sees itself and the eleven before it.  The file holds the softplus of the queries' scales."""
    T, N, H = len(x), config.n_heads, config.head_dim
    u, matrices = run.norm(x, w["attn_pre_norm"]), (w["attn_q"], w["attn_k"], w["attn_v"])
    q, k, v = (
        run.clipped(matrix, part).reshape(T, N, H)
        for matrix, part in zip(matrices, run.clip_input(u, *matrices), strict=True)
    )
    for name, heads in (("Qcur", q), ("Kcur", k), ("Vcur", v)):
        run.trace(f"a.{name}-{i}", heads)
    relative = run.linear(places, w["attn_k_rel"]).reshape(-1, N, H)
    q_scale = w["per_dim_scale"].astype(np.float64) * (H**-0.5 / math.log(2))
    out = run.ops.relative_attention(q, k, v, relative, q_scale.astype(x.dtype), K_SCALE, AUDIO_CAP)
    out = out.reshape(T, N * H)
    run.trace(f"a.kqv_out-{i}", out)
    return run.norm(run.between_clips(w["attn_out"], out), w["attn_post_norm"])


def _convolution(run: EncoderPass, w, x, i):
    x = run.ops.glu(run.between_clips(w["conv_pw1"], run.norm(x, w["conv_norm"])))
    run.trace(f"a.glu-{i}", x)
    x = run.ops.causal_conv(x, w["conv_dw"])
    run.trace(f"a.conv_dw-{i}", x)
    return run.between_clips(w["conv_pw2"], run.ops.silu(run.norm(x, w["norm_conv"])))
