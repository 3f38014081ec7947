"""One layer of the text model over an op table.

The names handed to `trace` are llama.cpp's callback names: traces of both engines compare name by name.
The same ops are called as in refimpl/model: on the reference's table both compositions give the same bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Trace = Callable[[str, np.ndarray], None]


def ignore(name: str, array: np.ndarray) -> None:
    """The trace of a call that nobody watches."""


@dataclass(frozen=True)
class Pass:
    """What every layer of one forward call shares. Its arrays are the op table's (fastpath/arrays.py)."""

    ops: Any  # the op table
    eps: float
    activations: str  # "int8" | "float": how linear layers see their input
    trace: Trace
    positions: Any  # i32[T]
    seq_ids: Any  # i32[T]
    ends: Any = None  # i32[T]: what a token sees in sliding layers; None: up to itself

    def norm(self, x, weight):
        return self.ops.rms_norm(x, weight, self.eps)

    def linear(self, x, weight):
        return self.ops.linear(x, weight, self.activations)

    def expert_linear(self, x, weight, expert_ids):
        return self.ops.expert_linear(x, weight, expert_ids, self.activations)


def block(run: Pass, layer, w, kv, rope, per_layer_input, x):
    """x -> the layer's output.

    Shapes:
        x                f[T, D]      the residual stream
        kv               (k, v, table) of the layer whose keys this one reads (`layer.kv_from`)
        rope             (cos, sin)   f[T, H/2]
        per_layer_input  f[T, P] | None
    Returns:
        f[T, D]
    """
    il = layer.index
    x = run.ops.add(_attention(run, layer, w, kv, rope, x), x)
    run.trace(f"attn_out-{il}", x)
    ffn = _dense_ffn(run, layer, w, x) if layer.moe is None else _dense_and_expert_ffn(run, layer, w, x)
    ffn = run.norm(ffn, w.post_ffw_norm)
    run.trace(f"ffn_post_norm-{il}", ffn)
    x = run.ops.add(ffn, x)
    if per_layer_input is not None:
        x = _per_layer_embedding(run, layer, w, per_layer_input, x)
    x = run.ops.scale(x, w.layer_output_scale)
    run.trace(f"out_scaled-{il}", x)
    run.trace(f"l_out-{il}", x)
    return x


def _attention(run: Pass, layer, w, kv, rope, x):
    """Normed projections, rotation, the cache, attention, output projection, norm; no residual yet."""
    il, T = layer.index, len(x)
    N, K, H = layer.n_heads, layer.n_kv_heads, layer.head_dim
    u = run.norm(x, w.attn_norm)
    run.trace(f"attn_norm-{il}", u)

    q = run.linear(u, w.attn_q).reshape(T, N, H)
    run.trace(f"Qcur-{il}", q)
    q = run.norm(q, w.attn_q_norm)
    run.trace(f"Qcur_normed-{il}", q)
    q = run.ops.rope(q, *rope)
    run.trace(f"Qcur_pos-{il}", q)

    if layer.owns_kv:
        k = run.linear(u, w.attn_k).reshape(T, K, H)
        v = k if layer.k_is_v else run.linear(u, w.attn_v).reshape(T, K, H)  # k before its norm and rotation
        run.trace(f"Kcur-{il}", k)
        run.trace(f"Vcur-{il}", v)
        k, v = run.norm(k, w.attn_k_norm), run.norm(v, None)
        run.trace(f"Kcur_normed-{il}", k)
        run.trace(f"Vcur_normed-{il}", v)
        k = run.ops.rope(k, *rope)
        run.trace(f"Kcur_pos-{il}", k)
        run.ops.write_kv(k, v, *kv, run.seq_ids, run.positions)

    ends = None if layer.window is None else run.ends  # in global layers images are read in order too
    out = run.ops.attention(q, *kv, run.seq_ids, run.positions, layer.window, ends).reshape(T, N * H)
    run.trace(f"kqv_out-{il}", out)
    out = run.norm(run.linear(out, w.attn_output), w.post_attention_norm)
    run.trace(f"attn_post_norm-{il}", out)
    return out


def _mlp(run: Pass, layer, w, z):
    il = layer.index
    up = run.linear(z, w.ffn_up)
    run.trace(f"ffn_up-{il}", up)
    gate = run.linear(z, w.ffn_gate)
    run.trace(f"ffn_gate-{il}", gate)
    hidden = run.ops.geglu(gate, up)
    run.trace(f"ffn_geglu-{il}", hidden)
    return run.linear(hidden, w.ffn_down)


def _dense_ffn(run: Pass, layer, w, x):
    z = run.norm(x, w.ffn_norm)
    run.trace(f"ffn_norm-{layer.index}", z)
    out = _mlp(run, layer, w, z)
    run.trace(f"ffn_out-{layer.index}", out)
    return out


def _dense_and_expert_ffn(run: Pass, layer, w, x):
    """A dense MLP and the routed experts side by side, from the same residual; each has its own norms."""
    il = layer.index
    z = run.norm(x, w.ffn_norm)
    run.trace(f"ffn_norm_1-{il}", z)
    dense = run.norm(_mlp(run, layer, w, z), w.post_ffw_norm_1)
    run.trace(f"ffn_mlp-{il}", dense)

    z = run.norm(x, w.pre_ffw_norm_2)
    run.trace(f"ffn_norm_2-{il}", z)
    routed = run.norm(_experts(run, layer, w, x, z), w.post_ffw_norm_2)
    run.trace(f"ffn_moe-{il}", routed)
    out = run.ops.add(dense, routed)
    run.trace(f"ffn_moe_combined-{il}", out)
    return out


def _experts(run: Pass, layer, w, x, z):
    """The router reads the residual x with its own norm; the experts read z."""
    il = layer.index
    r = run.ops.scale(run.norm(x, w.ffn_gate_inp_scale), x.shape[1] ** -0.5)
    logits = run.linear(r, w.ffn_gate_inp)
    run.trace(f"ffn_moe_logits-{il}", logits)
    expert_ids, expert_weights = run.ops.route(logits, layer.moe.n_active, w.ffn_down_exps_scale)
    run.trace(f"ffn_moe_topk-{il}", expert_ids)
    run.trace(f"ffn_moe_weights_scaled-{il}", expert_weights)

    up = run.expert_linear(z, w.ffn_up_exps, expert_ids)
    run.trace(f"ffn_moe_up-{il}", up)
    gate = run.expert_linear(z, w.ffn_gate_exps, expert_ids)
    run.trace(f"ffn_moe_gate-{il}", gate)
    hidden = run.ops.geglu(gate, up)
    run.trace(f"ffn_moe_geglu-{il}", hidden)
    down = run.expert_linear(hidden, w.ffn_down_exps, expert_ids)
    out = run.ops.expert_sum(down, expert_weights)
    run.trace(f"ffn_moe_out-{il}", out)
    return out


def _per_layer_embedding(run: Pass, layer, w, per_layer_input, x):
    """What this layer alone knows about the token, gated by the residual."""
    il = layer.index
    run.trace(f"pe_in-{il}", x)
    gated = run.ops.geglu(run.linear(x, w.inp_gate), per_layer_input)
    out = run.norm(run.linear(gated, w.proj), w.post_norm)
    run.trace(f"per_layer_embd_out-{il}", out)
    return run.ops.add(x, out)
