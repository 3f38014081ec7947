"""One layer of Gemma 4.

Four things happen to the residual stream x:

    x = x + norm(attention(norm(x)))                  what other tokens know
    x = x + norm(ffn(norm(x)))                        what the weights know; in one size experts help
    x = x + norm(proj(gelu(gate x) * per_layer))      what this layer knows of the token; small sizes only
    x = x * layer_output_scale                        the whole stream, not what was added

Unlike in most transformers there is a norm before *and* after each part.  The residual stream itself is never
normalised, so its size grows with depth; the layer scalar holds it in check.
"""

from dataclasses import dataclass
from typing import Any

from refimpl import ops


@dataclass(frozen=True)
class Call:
    """What all layers of one model call share."""

    batch: Any
    ends: Any  # i[T] | None: the last position that each token sees in sliding layers; None: its own
    eps: float
    activations: str  # how `linear` reads its input: "float" or "int8"
    trace: Any  # function of (name, array)

    def norm(self, x, weight):
        return ops.rms_norm(x, weight, self.eps)

    def linear(self, x, weight):
        return ops.linear(x, weight, self.activations)


def block(call, layer, w, kv, rope, per_layer, x):
    """Apply one layer.

    Shapes:
        call       Call
        layer      LayerConfig
        w          LayerWeights
        kv         (k, v, table) of layer `layer.kv_from`, which writes them: ops/attention.py
        rope       (cos, sin), f[T, H/2] each
        per_layer  f[T, P] | None  this layer's own embedding of the tokens
        x          f[T, D]
    Returns:
        f[T, D]
    """
    i = layer.index
    x = ops.add(attention(call, layer, w, kv, rope, x), x)
    call.trace(f"attn_out-{i}", x)

    y = dense_ffn(call, layer, w, x) if layer.moe is None else dense_and_experts(call, layer, w, x)
    y = call.norm(y, w.post_ffw_norm)
    call.trace(f"ffn_post_norm-{i}", y)
    x = ops.add(y, x)

    if per_layer is not None:
        call.trace(f"pe_in-{i}", x)
        x = ops.add(x, per_layer_embedding(call, layer, w, per_layer, x))

    x = ops.scale(x, w.layer_output_scale)
    call.trace(f"out_scaled-{i}", x)
    call.trace(f"l_out-{i}", x)
    return x


def attention(call, layer, w, kv, rope, x):
    """Queries of this layer meet the keys and values of layer `layer.kv_from`.

        q = rope(norm(Wq u)),   k = rope(norm(Wk u)),   v = norm(Wv u),   u = norm(x)
        out = norm(Wo attention(q, k, v))

    Returns:
        f[T, D]

    Notes:
        Queries and keys are normalised per head, with a weight: it replaces the usual 1/sqrt(H) of the
        scores. Values are normalised per head too, without a weight, and are not rotated.
        Where there is no Wv, the values are Wk u: the raw projection, before the key's norm and rotation.
        The last layers of the small models have no keys of their own.  They read those of the last layer
        before them that has the same window: it saw the same positions, rotated the same way.
    """
    i, T = layer.index, len(x)
    N, K, H = layer.n_heads, layer.n_kv_heads, layer.head_dim
    u = call.norm(x, w.attn_norm)
    call.trace(f"attn_norm-{i}", u)

    q = call.linear(u, w.attn_q).reshape(T, N, H)
    call.trace(f"Qcur-{i}", q)
    q = call.norm(q, w.attn_q_norm)
    call.trace(f"Qcur_normed-{i}", q)
    q = ops.rope(q, *rope)
    call.trace(f"Qcur_pos-{i}", q)

    if layer.owns_kv:
        k = call.linear(u, w.attn_k).reshape(T, K, H)
        v = k if layer.k_is_v else call.linear(u, w.attn_v).reshape(T, K, H)
        call.trace(f"Kcur-{i}", k)
        call.trace(f"Vcur-{i}", v)
        k, v = call.norm(k, w.attn_k_norm), call.norm(v, None)
        call.trace(f"Kcur_normed-{i}", k)
        call.trace(f"Vcur_normed-{i}", v)
        k = ops.rope(k, *rope)
        call.trace(f"Kcur_pos-{i}", k)
        ops.write_kv(k, v, *kv, call.batch.seq_ids, call.batch.positions)

    ends = None if layer.window is None else call.ends  # global layers are causal for images too
    out = ops.attention(q, *kv, call.batch.seq_ids, call.batch.positions, layer.window, ends)
    out = out.reshape(T, N * H)
    call.trace(f"kqv_out-{i}", out)
    out = call.norm(call.linear(out, w.attn_output), w.post_attention_norm)
    call.trace(f"attn_post_norm-{i}", out)
    return out


def mlp(call, layer, w, z):
    """f[T, D] -> f[T, D]:  Wdown(gelu(Wgate z) * (Wup z))."""
    i = layer.index
    up = call.linear(z, w.ffn_up)
    call.trace(f"ffn_up-{i}", up)
    gate = call.linear(z, w.ffn_gate)
    call.trace(f"ffn_gate-{i}", gate)
    hidden = ops.geglu(gate, up)
    call.trace(f"ffn_geglu-{i}", hidden)
    return call.linear(hidden, w.ffn_down)


def dense_ffn(call, layer, w, x):
    """f[T, D] -> f[T, D]: the FFN of a layer without experts."""
    i = layer.index
    z = call.norm(x, w.ffn_norm)
    call.trace(f"ffn_norm-{i}", z)
    out = mlp(call, layer, w, z)
    call.trace(f"ffn_out-{i}", out)
    return out


def dense_and_experts(call, layer, w, x):
    """A dense FFN that every token uses, and experts that few tokens use, from the same residual.

        out = norm(mlp(norm(x))) + norm(experts(norm(x)))             four norms, four weights

    Shapes:
        x  f[T, D]
    Returns:
        f[T, D]

    Notes:
        Elsewhere a "shared expert" is one of the experts.  Here it is a whole FFN with norms of its own.
    """
    i = layer.index
    z = call.norm(x, w.ffn_norm)
    call.trace(f"ffn_norm_1-{i}", z)
    dense = call.norm(mlp(call, layer, w, z), w.post_ffw_norm_1)
    call.trace(f"ffn_mlp-{i}", dense)

    z = call.norm(x, w.pre_ffw_norm_2)
    call.trace(f"ffn_norm_2-{i}", z)
    routed = call.norm(experts(call, layer, w, x, z), w.post_ffw_norm_2)
    call.trace(f"ffn_moe-{i}", routed)
    out = ops.add(dense, routed)
    call.trace(f"ffn_moe_combined-{i}", out)
    return out


def experts(call, layer, w, x, z):
    """Route by x, compute on z.

        router logits = Wr (rms(x) * ffn_gate_inp_scale / sqrt(D))
        out = sum over the chosen experts e of  weight_e * Wdown_e(gelu(Wgate_e z) * (Wup_e z))

    Shapes:
        x  f[T, D]  the residual stream
        z  f[T, D]  the same, normalised for the experts
    Returns:
        f[T, D]

    Notes:
        The router does not see z.  It normalises the residual by itself, with a weight of its own; 1/sqrt(D)
        undoes the size that the norm gave to the vector.
    """
    i = layer.index
    r = ops.scale(call.norm(x, w.ffn_gate_inp_scale), x.shape[1] ** -0.5)
    logits = call.linear(r, w.ffn_gate_inp)
    call.trace(f"ffn_moe_logits-{i}", logits)
    expert_ids, expert_weights = ops.route(logits, layer.moe.n_active, w.ffn_down_exps_scale)
    call.trace(f"ffn_moe_topk-{i}", expert_ids)
    call.trace(f"ffn_moe_weights_scaled-{i}", expert_weights)

    up = ops.expert_linear(z, w.ffn_up_exps, expert_ids, call.activations)
    call.trace(f"ffn_moe_up-{i}", up)
    gate = ops.expert_linear(z, w.ffn_gate_exps, expert_ids, call.activations)
    call.trace(f"ffn_moe_gate-{i}", gate)
    hidden = ops.geglu(gate, up)
    call.trace(f"ffn_moe_geglu-{i}", hidden)
    down = ops.expert_linear(hidden, w.ffn_down_exps, expert_ids, call.activations)
    out = ops.expert_sum(down, expert_weights)
    call.trace(f"ffn_moe_out-{i}", out)
    return out


def per_layer_embedding(call, layer, w, per_layer, x):
    """What this layer knows about the token by itself, let through by a gate.

        out = norm(Wproj(gelu(Wgate x) * per_layer))

    Shapes:
        per_layer  f[T, P]
        x          f[T, D]  as it is: the gate reads the stream without a norm
    Returns:
        f[T, D]
    """
    gated = ops.geglu(call.linear(x, w.inp_gate), per_layer)
    out = call.norm(call.linear(gated, w.proj), w.post_norm)
    call.trace(f"per_layer_embd_out-{layer.index}", out)
    return out
