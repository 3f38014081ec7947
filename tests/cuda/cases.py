"""One launch of every kernel at a small size with everything in it: for mutants and for reports on memory."""

import numpy as np

from fastpath.cuda import (
    activation,
    attention,
    elementwise,
    embedding,
    kv_types,
    layout,
    linear,
    moe,
    norm,
    quantize,
    rotary,
    sampling,
)
from quant import FORMATS
from tests import strategies

FLOAT = ("F32", "F16", "BF16", "Q4_0", "Q5_K")  # a way of reading each
MANY = ("Q8_0", "Q4_1", "Q4_K", "Q6_K", "Q2_K")


def calls():
    """{case: call}; each gives an array, or a tuple of arrays."""
    rng = np.random.default_rng(0)
    x, y = strategies.normal(rng, 3, 2048), strategies.normal(rng, 3, 2048)
    row = strategies.normal(rng, 2048)
    angles = strategies.normal(rng, 3, 128)
    found = {
        "rms_norm": lambda: norm.rms_norm(x, row, 1e-6),
        "layer_norm": lambda: norm.layer_norm(x, row, row, 1e-6),
        "add": lambda: elementwise.add(x, y),
        "add_bias": lambda: elementwise.add_bias(x, row),
        "scale": lambda: elementwise.scale(x, 0.5),
        "standardize": lambda: elementwise.standardize(x, row, row),
        "geglu": lambda: activation.geglu(x, y),
        "softcap": lambda: activation.softcap(x, 30.0),
        "silu": lambda: activation.silu(x),
        "glu": lambda: activation.glu(x),
        "clip": lambda: activation.clip(x, -1.0, 1.0),
        "rope": lambda: rotary.rope(x.reshape(3, 8, 256), angles, angles),
        "route": lambda: moe.route(x[:, :128].copy(), 8, row[:128].copy()),
        "expert_sum": lambda: moe.expert_sum(x.reshape(3, 8, 256), y[:, :8].copy()),
        "argmax": lambda: sampling.argmax(np.tile(x, (1, 3))),
        "round_32": lambda: tuple(quantize.round_activations(x, 32)),
        "round_256": lambda: tuple(quantize.round_activations(x, 256)),
    }
    for name in layout.CODINGS:
        C = 4352  # 17 steps: three turns of 8 warps, the last of them with one step
        matrix = layout.device_matrix(strategies.weights(rng, FORMATS[name], 8, C))
        long = strategies.normal(rng, 3, C)
        if name in FLOAT:
            found[f"linear_float_{name}"] = lambda w=matrix, a=long: linear.linear(a, w, "float")
        if not matrix.coding.is_plain:
            found[f"linear_{name}"] = lambda w=matrix, a=long: linear.linear(a, w, "int8")
        found[f"embed_{name}"] = lambda w=matrix: embedding.embed(w, np.array([0, 5, 7], np.int32), 39.25)
        if name in MANY:
            many = np.tile(long, (6, 1))
            found[f"linear_many_{name}"] = lambda w=matrix, a=many: linear.linear(a, w, "int8")
    experts = layout.device_matrix(strategies.weights(rng, FORMATS["Q4_K"], 6, 8, 512))
    chosen = rng.integers(0, 6, (5, 2)).astype(np.int32)
    found["linear_experts"] = lambda: linear.expert_linear(
        strategies.normal(np.random.default_rng(0), 5, 512), experts, chosen, "int8"
    )
    for kind in kv_types.LOADS:
        found |= _attention(rng, kind)
    return found


def _attention(rng, kind):
    """Two lanes, 600 positions in a ring of pages of 64, heads of 256 in groups of 2."""
    k, v = strategies.normal(rng, 2, 640, 2, 256), strategies.normal(rng, 2, 640, 2, 256)
    *pages, table = strategies.kv_caches(k, v, kind, kind, 64)
    q = strategies.normal(rng, 2, 4, 256, scale=1 / 16)
    lanes, positions = np.array([0, 1], np.int32), np.array([599, 1000], np.int32)

    def write():
        written = pages[0].copy(), pages[1].copy()
        attention.write_kv(k[0, :2], v[0, :2], *written, table, lanes, positions)
        return written

    return {
        f"attention_{kind}": lambda: attention.attention(q, *pages, table, lanes, positions, 512),
        f"write_kv_{kind}": write,
    }
