"""Fixed calls of every op, format and row count, for tests that compare whole processes.

    python -m tests.parity.cases [FORMAT ...]     prints {case: hash of its results} as JSON

The kernel sets must agree on these hashes (test_kernel_sets.py), and so must runs in memory that ends at a
guard page (test_guard_pages.py).  A case is (name, call); the arrays that it takes come through `place`.
"""

import hashlib
import json
import sys
from functools import partial

import numpy as np

import fastpath.cpu as cpu
from fastpath.cpu import packing
from quant import FORMATS, QTensor
from tests import strategies

ROWS = (1, 2, 3, 4, 5, 8, 17, 40)  # matrix-vector, a few rows, panels, more than two tiles of rows
FLOAT_FORMATS = ("F32", "F16", "BF16")
# halves that a scale may be: zeros, denormals, the largest, one, powers of two, infinities
HALVES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x3C00, 0x2E66, 0xAE66, 0x7C00, 0xFC00)


EVERY_FORMAT = (
    *strategies.INTEGER_FORMATS,
    *FLOAT_FORMATS,
    "IQ2_XS",
)  # the last one has no kernel of its own
# one with minima, in blocks of 32, and one of 256 with sub-blocks of 16: their kernels compile in a third of
# the time that all take
SOME_FORMATS = ("Q5_1", "Q6_K", "F16")


def identity(array):
    return array


def cases(formats=EVERY_FORMAT, place=identity):
    for name in formats:
        yield from products(name, place)
    for name in ("Q4_0", "Q4_K", "Q6_K", "BF16"):
        if name in formats:
            yield from experts(name, place)
    yield from attentions(("f16", "bf16", "f32") if "BF16" in formats else ("f16",), place)
    yield from attentions(("q8_0", "q4_0"), place)
    yield from others(place)
    yield from of_encoders(place)


def bind(op, place, *args):
    """A call without arguments; arrays are put in their place when it is made."""
    return lambda: op(*(place(a) if isinstance(a, np.ndarray) else a for a in args))


def forms(weight, place):
    """(name, weight) as in the file and as packed, each in its place."""
    rows = QTensor(weight.format, weight.shape, place(weight.data), weight.name)
    yield "rows", rows
    memory = place(aligned(packing.packed_bytes(weight)))
    packing.pack(rows, memory)
    yield "packed", packing.PackedTensor(weight.format, weight.shape, memory, weight.name)


def aligned(n_bytes):
    """u8[n_bytes] of zeros at a multiple of packing.ALIGNMENT."""
    memory = np.zeros(n_bytes + packing.ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % packing.ALIGNMENT :][:n_bytes]


def products(name, place):
    fmt, rng = FORMATS[name], np.random.default_rng(sum(name.encode()))
    # an odd number of blocks and of rows, and one group of 16 that is almost empty
    for kind, M, n_blocks in (("finite", 33, 9 if fmt.block_size < 256 else 3), ("extreme", 21, 3)):
        C = n_blocks * fmt.block_size if fmt.block_size > 1 else 77
        weight, x = matrix(rng, fmt, M, C, kind), activations(rng, max(ROWS), C)
        for form, w in forms(weight, place):
            for T in ROWS:
                call = partial(cpu.linear, activations="int8")
                yield f"linear {name} {kind} {form} int8 {T} rows", bind(call, place, x[:T], w)
        for T in (1, 5):
            call = partial(cpu.linear, activations="float")
            yield f"linear {name} {kind} float {T} rows", bind(call, place, x[:T], w)


def matrix(rng, fmt, M, C, kind):
    """`finite`: numbers of a model; `extreme`: any bytes, and halves from HALVES where a scale may be."""
    if kind == "finite":
        return strategies.weights(rng, fmt, M, C)
    tensor = strategies.random_blocks(rng, fmt, M, C)
    blocks = tensor.data.reshape(-1, fmt.block_bytes)
    halves = np.array(HALVES, "<u2").view(np.uint8).reshape(-1, 2)
    if fmt.block_bytes > 2:
        for at in (0, 2, fmt.block_bytes - 2):
            blocks[:, at : at + 2] = halves[rng.integers(0, len(halves) - 2, len(blocks))]
        blocks[0, :2] = halves[-1]  # one row of infinities is enough: its results say little else
    return tensor


def activations(rng, T, C):
    """Rows of size 1, two of them with outliers or at the ends of int8, one zero, one tiny, one huge."""
    x = strategies.normal(rng, T, C)
    kinds = ("none", "one outlier", "zero", "equal", "tiny", "huge", "denormal")
    for row, kind in zip(x, kinds, strict=False):
        strategies.with_special_row(rng, row[None], kind)
    x[-1, : C // 2] = np.where(rng.random(C // 2) < 0.5, 127, -127)
    return x


def experts(name, place):
    rng = np.random.default_rng(7)
    weight = strategies.weights(rng, FORMATS[name], 5, 21, 256)
    x, ids = strategies.normal(rng, 26, 256), rng.integers(0, 5, (26, 3)).astype(np.int32)
    ids[:19, 0] = 2  # one expert with many rows, others with few
    for form, w in forms(weight, place):
        for T in (1, 3, 26):
            call = partial(cpu.expert_linear, activations="int8")
            yield f"expert_linear {name} {form} {T} rows", bind(call, place, x[:T], w, ids[:T])


def attentions(types, place):
    rng = np.random.default_rng(8)
    shapes = ((256, 1, 4, 96, None), (512, 1, 2, 64, 40), (40, 2, 1, 96, 33), (6, 1, 3, 64, None))
    for i, (H, K, G, S, window) in enumerate(shapes):
        k_type, v_type = types[i % len(types)], types[(i + i // 3) % len(types)]
        name = f"H {H} window {window} {k_type} {v_type}"
        q = strategies.normal(rng, 40, K * G, H, scale=H**-0.5)
        k, v = strategies.normal(rng, 2, S, K, H), strategies.normal(rng, 2, S, K, H)
        caches = strategies.kv_caches(k, v, k_type, v_type, page=(None, 32, 96, 64)[i])
        lanes = np.array([0] * 37 + [1, 1, 1], np.int32)
        last = S - 1 if window is None else 3 * S
        positions = np.array([*range(last - 36, last + 1), 0, 31, 32], np.int32)
        for T in (1, 2, 4, 40):
            arrays = (q[-T:], *caches, lanes[-T:], positions[-T:])
            yield f"attention {name} {T} rows", bind(cpu.attention, place, *arrays, window)
            if window is None:
                call = partial(cpu.attention, window=window, ends=np.full(T, S - 1, np.int32))
                yield f"attention {name} {T} rows to the end", bind(call, place, *arrays)
            rows = (k[0, :T], v[0, :T], *caches, np.zeros(T, np.int32), positions[:T])
            yield f"write_kv {name} {T} rows", bind(partial(written, place), place, *rows)


def written(place, k, v, k_pages, v_pages, table, seq_ids, positions):
    """The pages after `write_kv`."""
    k_pages, v_pages = place(k_pages.copy()), place(v_pages.copy())
    cpu.write_kv(k, v, k_pages, v_pages, table, seq_ids, positions)
    return k_pages, v_pages


def others(place):
    rng = np.random.default_rng(9)
    for D in (1, 15, 77, 1030):
        x, y = strategies.normal(rng, 6, D, scale=3), strategies.normal(rng, 6, D)
        strategies.with_special_row(rng, y[:1], "zero")
        shares = np.abs(strategies.normal(rng, 2, 3))
        for name, op, args in (
            ("rms_norm", cpu.rms_norm, (x, y[1], 1e-6)),
            ("geglu", cpu.geglu, (x, y)),
            ("softcap", cpu.softcap, (x, 2.0)),
            ("add", cpu.add, (x, y)),
            ("scale", cpu.scale, (x, 0.37)),
            ("route", cpu.route, (x, min(D, 7), np.abs(y[1]))),
            ("expert_sum", cpu.expert_sum, (x.reshape(2, 3, D), shares)),
        ):
            yield f"{name} {D}", bind(op, place, *args)
    for pairs in (1, 20, 128):
        x, angles = strategies.normal(rng, 3, 2, 2 * pairs), rng.uniform(-3, 3, (3, pairs))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        yield f"rope {pairs} pairs", bind(cpu.rope, place, x, cos, sin)


def of_encoders(place):
    rng = np.random.default_rng(10)
    for D in (1, 15, 77, 1030):
        x, y = strategies.normal(rng, 6, D, scale=3), strategies.normal(rng, 6, D)
        for name, op, args in (
            ("silu", cpu.silu, (x,)),
            ("glu", cpu.glu, (np.concatenate([x, y], axis=1),)),
            ("clip", cpu.clip, (x, -1.5, 2.0)),
            ("add_bias", cpu.add_bias, (x, y[0])),
            ("standardize", cpu.standardize, (x, y[0], y[1])),
            ("layer_norm", cpu.layer_norm, (x, y[0], y[1], 1e-6)),
            ("causal_conv", cpu.causal_conv, (x, strategies.normal(rng, D, 5))),
            ("mean_pool", cpu.mean_pool, (x, 3, 1)),
        ):
            yield f"{name} {D}", bind(op, place, *args)
    for T, F, C, M in ((1, 1, 1, 1), (5, 4, 3, 33), (4, 20, 16, 70)):
        x, weight = strategies.normal(rng, T, F, C), strategies.normal(rng, M, C, 3, 3)
        yield f"conv2d {T} {F} {C} {M}", bind(cpu.conv2d, place, x, weight)
    for H in (6, 128):
        q, k, v = strategies.normal(rng, 3, 15, 2, H)
        args = (q, k, v, strategies.normal(rng, 12, 2, H), strategies.normal(rng, H), 1.9, 50.0)
        yield f"relative_attention {H}", bind(cpu.relative_attention, place, *args)


def digest(results):
    """The sign and payload of a NaN are nobody's definition; everything else counts."""
    state = hashlib.sha256()
    for part in results if isinstance(results, tuple) else (results,):
        part = np.where(np.isnan(part), np.float32(np.nan), part) if part.dtype.kind == "f" else part
        state.update(part.tobytes())
    return state.hexdigest()


def digests(formats=EVERY_FORMAT, place=identity):
    with np.errstate(all="ignore"):
        return {name: digest(call()) for name, call in cases(formats, place)}


if __name__ == "__main__":
    json.dump(digests(sys.argv[1:] or EVERY_FORMAT), sys.stdout)
