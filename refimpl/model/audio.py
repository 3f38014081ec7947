"""Sounds to soft tokens: a conformer on mel energies (`gemma4a`), or one projection (`gemma4ua`)."""

import math

import numpy as np

from refimpl import ops
from refimpl.config.media import AUDIO_CAP, AUDIO_EPS, AUDIO_WINDOW
from refimpl.frontend.audio import MIN_SAMPLES, log_mel, waveform_frames
from refimpl.model.encoder import start


def encode_audio(config, weights, samples, dtype=np.float32, *, activations="float", trace=None):
    """Soft tokens of one sound.

    Shapes:
        config   AudioConfig
        weights  AudioWeights | UnifiedAudioWeights
        samples  f[n]  16 kHz, at most 30 s (frontend/audio.py)
        trace    function of (name, array) | None; names begin with `a.`
    Returns:
        f[T, D of the text model], one row for each 40 ms
    """
    least = 1 if config.kind == "gemma4ua" else MIN_SAMPLES
    if len(samples) < least:
        raise ValueError(
            f"sound: {len(samples)} samples, expected at least {least} ({1000 * least / 16000:.3g} ms). "
            "Send a longer one"
        )
    call = start(AUDIO_EPS, activations, trace)
    if config.kind == "gemma4ua":
        x = waveform_frames(samples).astype(dtype)
        call.trace("a.frames", x)
        x = call.project(x, weights.input_projection)
        call.trace("a.projected", x)
        return x
    mel = log_mel(samples, dtype)
    call.trace("a.mel", mel)
    return _conformer(call, config, weights, mel)


def _conformer(call, config, weights, mel):
    """Two convolutions make one frame of four; layers of feed-forward, attention and convolution follow.

    Shapes:
        mel  f[T, 128]
    Returns:
        f[ceil(ceil(T/2)/2), D of the text model]
    """
    x = mel[:, :, None]
    for i, (kernel, norm) in enumerate(zip(weights.convs, weights.conv_norms, strict=True)):
        x = ops.layer_norm(ops.conv2d(x, kernel), norm, None, call.eps)
        x = ops.clip(x, 0.0, math.inf)  # ReLU
        call.trace(f"a.conv-{i}", x)
    x = call.linear(x.reshape(len(x), -1), weights.inp)
    call.trace("a.inp", x)

    places = distances(config.dim).astype(x.dtype)
    for i, w in enumerate(weights.layers):
        x = _layer(call, config, w, places, x, i)

    x = ops.add_bias(call.linear(x, weights.out), weights.out_bias)
    call.trace("a.out", x)
    x = call.project(x, weights.input_projection)
    call.trace("a.projected", x)
    return x


def distances(dim):
    """What the keys of distances are made from: sines of a distance at slower and slower rates, then cosines.

        out[d] = [sin(d f_0), sin(d f_1), ..., cos(d f_0), ...],   f_i = 10000^(-i / (dim/2 - 1))

    Returns:
        f64[12, dim]
    """
    half = dim // 2
    rates = 1e4 ** -(np.arange(half) / max(half - 1, 1))
    angles = np.arange(AUDIO_WINDOW)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def _layer(call, config, w, places, x, i):
    """A conformer block: half a feed-forward part, attention, convolution, the other half, a norm.

    Notes:
        Unlike in the other stacks of this model the last norm is on the residual stream itself.
        transformers clamps the stream to 1e10 in some places; nothing that it was trained on gets there.
    """
    x = ops.add(x, ops.scale(_ffn(call, w, "", x), 0.5))
    call.trace(f"a.ffn_out-{i}", x)
    x = ops.add(x, _attention(call, config, w, places, x, i))
    call.trace(f"a.attn_out-{i}", x)
    x = ops.add(x, _convolution(call, w, x, i))
    call.trace(f"a.conv_out-{i}", x)
    x = ops.add(x, ops.scale(_ffn(call, w, "_1", x), 0.5))
    call.trace(f"a.ffn_out_1-{i}", x)
    x = call.norm(x, w["ln2"])
    call.trace(f"a.l_out-{i}", x)
    return x


def _ffn(call, w, which, x):
    """norm(Wdown silu(Wup norm(x)))."""
    z = call.clipped(call.norm(x, w[f"ffn_norm{which}"]), w[f"ffn_up{which}"])
    out = call.clipped(ops.silu(z), w[f"ffn_down{which}"])
    return call.norm(out, w[f"ffn_post_norm{which}"])


def _attention(call, config, w, places, x, i):
    """A frame sees itself and the eleven before it.

    Notes:
        Published code multiplies queries by softplus(per_dim_scale) / (sqrt(H) ln 2) and keys by
        ln(1 + e) / ln 2; a file holds the softplus already.
    """
    T, N, H = len(x), config.n_heads, config.head_dim
    u = call.norm(x, w["attn_pre_norm"])
    q, k, v = (call.clipped(u, w[f"attn_{name}"]).reshape(T, N, H) for name in "qkv")
    for name, heads in (("Qcur", q), ("Kcur", k), ("Vcur", v)):
        call.trace(f"a.{name}-{i}", heads)
    relative = call.linear(places, w["attn_k_rel"]).reshape(-1, N, H)
    q_scale = w["per_dim_scale"].astype(np.float64) * (H**-0.5 / math.log(2))
    k_scale = math.log(1 + math.e) / math.log(2)
    out = ops.relative_attention(q, k, v, relative, q_scale.astype(x.dtype), k_scale, AUDIO_CAP)
    out = out.reshape(T, N * H)
    call.trace(f"a.kqv_out-{i}", out)
    return call.norm(call.clipped(out, w["attn_out"]), w["attn_post_norm"])


def _convolution(call, w, x, i):
    """Wpw2 silu(norm(convolution(glu(Wpw1 norm(x))))): each channel looks at its own last five frames."""
    x = ops.glu(call.clipped(call.norm(x, w["conv_norm"]), w["conv_pw1"]))
    call.trace(f"a.glu-{i}", x)
    x = ops.causal_conv(x, w["conv_dw"])
    call.trace(f"a.conv_dw-{i}", x)
    return call.clipped(ops.silu(call.norm(x, w["norm_conv"])), w["conv_pw2"])
