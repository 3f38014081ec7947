"""Cases for the op table: one strategy per op, of the op's name; a case is its keyword arguments.

Arrays come from a drawn seed and shape, so that shapes and special rows shrink and numbers stay realistic.
Sizes are odd on purpose and small, so that a failure can be read.  Special rows (zero, huge, tiny, equal) are
behind branches and shrink away.
"""

import numpy as np
from hypothesis import strategies as st

import refimpl.ops
from quant import FORMATS, QTensor
from refimpl.kv_types import dtypes_of, own_pages, shapes_of

NORMAL_FORMATS = [f.name for f in FORMATS.values() if f.name not in ("F64", "I8", "I16", "I32", "I64")]
INTEGER_FORMATS = [f.name for f in FORMATS.values() if f.integer_parts is not None]
SPECIAL_ROWS = ("none", "zero", "huge", "tiny", "denormal", "equal", "one outlier")


def generators():
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


def sizes(low, high):
    return st.integers(low, high)


def normal(rng, *shape, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def with_special_row(rng, x, kind):
    """One row of x becomes an edge case."""
    row = x.reshape(-1, x.shape[-1])[rng.integers(0, max(1, x.size // x.shape[-1]))]
    if kind == "zero":
        row[:] = 0
    elif kind == "huge":
        row *= np.float32(1e15)
    elif kind == "tiny":
        row *= np.float32(1e-25)
    elif kind == "denormal":
        row *= np.float32(1e-40)
    elif kind == "equal":
        row[:] = row[0]
    elif kind == "one outlier":
        row[rng.integers(0, len(row))] = 3e4
    return x


@st.composite
def floats(draw, *shape, scales=(1.0, 1e-3, 30.0), special=SPECIAL_ROWS):
    rng = draw(generators())
    x = normal(rng, *shape, scale=draw(st.sampled_from(scales)))
    return with_special_row(rng, x, draw(st.sampled_from(special)))


def random_blocks(rng, fmt, *shape):
    """Any bytes: scales may be negative, denormal, huge, infinite or NaN, integers are at all extremes."""
    data = rng.integers(0, 256, (*shape[:-1], fmt.row_bytes(shape[-1])), dtype=np.uint8)
    return QTensor(fmt, shape, data, f"{fmt.name} of random bytes")


def weights(rng, fmt, *shape):
    """Numbers as in a model; formats without a quantiser get random bytes whose values are finite."""
    if fmt.quantize_blocks is not None:
        return QTensor.from_array(normal(rng, *shape, scale=0.1), fmt)
    for _ in range(1000):
        tensor = random_blocks(rng, fmt, *shape)
        values = tensor.dequantize()
        if np.isfinite(values).all() and np.abs(values).max() < 1e6:
            return tensor
        data = tensor.data.reshape(-1, fmt.block_bytes)
        # half-precision scales lie at either end of a block: make their exponents moderate
        for at in (1, fmt.block_bytes - 1):
            data[:, at] = data[:, at] & 0x83 | 0x20
        values = tensor.dequantize()
        if np.isfinite(values).all() and np.abs(values).max() < 1e6:
            return tensor
    raise AssertionError(f"no finite random blocks of {fmt.name}")


@st.composite
def formats(draw, names=None):
    return FORMATS[draw(st.sampled_from(names or NORMAL_FORMATS))]


@st.composite
def columns(draw, fmt):
    """A row length that the format can hold."""
    most = 3 if fmt.block_size > 32 else 9 if fmt.block_size > 1 else 100
    return fmt.block_size * draw(sizes(1, most))


# -- the ops


@st.composite
def embed(draw):
    fmt, rng, V = draw(formats()), draw(generators()), draw(sizes(1, 20))
    tables = draw(st.sampled_from([(), (), (2,)]))  # two: their rows follow each other
    table = weights(rng, fmt, *tables, V, draw(columns(fmt)))
    ids = rng.integers(0, table.n_rows, draw(sizes(1, 5))).astype(np.int32)
    return {"table": table, "ids": ids, "scale": draw(st.sampled_from([1.0, 39.191835884530846, 0.7]))}


@st.composite
def rms_norm(draw):
    shape = draw(st.sampled_from([(3,), (1,), (2, 3)]))
    D = draw(sizes(1, 300))
    x = draw(floats(*shape, D, special=("none", "zero", "tiny", "equal", "one outlier")))
    weight = draw(st.none() | floats(D, special=("none", "zero")))
    return {"x": x, "weight": weight, "eps": draw(st.sampled_from([1e-6, 1e-5]))}


def _row_shapes():
    return st.tuples(sizes(1, 6), st.sampled_from([(1,), (7,), (3, 5), (2, 600)]))


@st.composite
def get_rows(draw):
    (T, row), rng = draw(_row_shapes()), draw(generators())
    return {"x": draw(floats(T, *row)), "rows": rng.integers(0, T, draw(sizes(0, 9))).astype(np.int32)}


@st.composite
def set_rows(draw):
    (T, row), rng = draw(_row_shapes()), draw(generators())
    rows = rng.permutation(T)[: draw(sizes(0, T))].astype(np.int32)
    return {"x": draw(floats(T, *row)), "rows": rows, "values": normal(rng, len(rows), *row)}


@st.composite
def swap_axes(draw):
    A, row = draw(_row_shapes())
    return {"x": draw(floats(A, draw(sizes(1, 4)), *row))}


@st.composite
def top_k(draw, ks=(1, 2, 17, 64, 256), Vs=(1, 5, 255, 4097, 9001)):
    """Equal ones, both zeros, and what is not finite; one piece of 4,096, and several.

    No cap: with one, what is equal hangs on the roundings of a backend.
    """
    rng, T, V = draw(generators()), draw(sizes(1, 3)), draw(st.sampled_from(Vs))
    logits = rng.integers(-20, 20, (T, V)).astype(np.float32) if draw(st.booleans()) else normal(rng, T, V)
    for special in draw(st.sets(st.sampled_from([np.nan, np.inf, -np.inf, -0.0, 20.0, 3e38]))):
        logits[rng.integers(0, T), rng.integers(0, V, 2)] = special
    return {"logits": logits, "k": draw(st.sampled_from(ks))}


@st.composite
def linear(draw):
    fmt, rng = draw(formats()), draw(generators())
    T, M, C = draw(sizes(1, 9)), draw(sizes(1, 40)), draw(columns(fmt))
    x = draw(floats(T, C))
    return {
        "x": x,
        "weight": weights(rng, fmt, M, C),
        "activations": draw(st.sampled_from(["int8", "float"])),
    }


@st.composite
def expert_linear(draw):
    fmt, rng = (
        draw(formats(["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "F32", "BF16", "IQ2_XS"])),
        draw(generators()),
    )
    T, A, E, M, C = (
        draw(sizes(1, 7)),
        draw(sizes(1, 3)),
        draw(sizes(1, 5)),
        draw(sizes(1, 20)),
        draw(columns(fmt)),
    )
    whole = weights(rng, fmt, E, M + 3, C)
    weight = (
        whole.take_rows(2, 2 + M) if draw(st.booleans()) else whole.take_rows(0, M)
    )  # strided over experts
    ids = rng.integers(0, E, (T, A)).astype(np.int32)
    if draw(st.booleans()):
        ids[:] = ids[0, 0]
    x = draw(floats(T, C) if draw(st.booleans()) else floats(T, A, C))
    return {
        "x": x,
        "weight": weight,
        "expert_ids": ids,
        "activations": draw(st.sampled_from(["int8", "float"])),
    }


@st.composite
def rope_table(draw):
    rng, T, pairs = draw(generators()), draw(sizes(1, 5)), draw(sizes(1, 40))
    inv_freq = 1.0 / draw(st.sampled_from([1e4, 1e6])) ** (np.arange(pairs) / pairs)
    inv_freq[draw(sizes(0, pairs)) :] = 0.0  # pairs that do not rotate
    return {"positions": rng.integers(0, 131072, T).astype(np.int32), "inv_freq": inv_freq}


@st.composite
def rope(draw):
    T, N, pairs = draw(sizes(1, 4)), draw(sizes(1, 3)), draw(sizes(1, 40))
    angles = draw(generators()).uniform(-3, 3, (T, pairs))
    return {"x": draw(floats(T, N, 2 * pairs)), "cos": np.cos(angles), "sin": np.sin(angles)}


def kv_caches(k, v, k_type="f32", v_type="f32", page=None):
    """Pages and table (refimpl/ops/attention.py) with k[R, S, K, H] and v[R, S, K, H].

    page: positions, that divide S: pages in any order, with others between them; None: one page a lane
    """
    R, S, K, H = k.shape
    table = own_pages(R)
    if page is not None:
        n = R * S // page
        table = np.random.default_rng(n).permutation(2 * n)[:n].astype(np.int32).reshape(R, -1)
    pages = poisoned(table.max() + 1, page or S, K, H, (k_type, v_type))
    for lane in range(R):
        refimpl.ops.write_kv(k[lane], v[lane], *pages, table, np.full(S, lane), np.arange(S))
    return *pages, table


def poisoned(n_pages, page, n_kv_heads, head_dim, kv_type):
    """Keys and values that are NaN wherever nobody writes, in every type."""
    shapes = shapes_of(n_pages, page, n_kv_heads, head_dim, kv_type)
    arrays = tuple(map(np.zeros, shapes, dtypes_of(kv_type)))
    for array in arrays:
        array.view(np.uint8)[...] = 0xFF
    return arrays


KV_TYPES = st.sampled_from(["f32", "f16", "bf16", "q8_0", "q4_0"])


@st.composite
def _cache(draw, types=KV_TYPES):
    """Caches, lanes and positions: linear, or a ring that has wrapped; every visible slot holds numbers."""
    rng = draw(generators())
    R, K, G = draw(sizes(1, 3)), draw(sizes(1, 2)), draw(sizes(1, 3))
    H = draw(st.sampled_from([2, 6, 16, 32, 40, 64, 80, 130]))
    S = 32 * draw(sizes(1, 4))
    window = draw(st.none() | sizes(1, S))
    last = S - 1 if window is None else 3 * S
    T = draw(sizes(1, 4) | sizes(17, 30))
    if draw(st.booleans()) or T > S:  # anywhere, or one after the other
        lanes = np.sort(rng.integers(0, R, T)).astype(np.int32)
        positions = rng.integers(0, last + 1, T).astype(np.int32)
    else:
        lanes = np.full(T, rng.integers(0, R), np.int32)
        positions = np.arange(T, dtype=np.int32) + rng.integers(0, last + 2 - T, dtype=np.int32)
    page = draw(st.sampled_from([None, *(size for size in (32, 64, 96) if S % size == 0)]))
    k, v = normal(rng, R, S, K, H), normal(rng, R, S, K, H)
    caches = kv_caches(k, v, draw(types), draw(types), page)
    return rng, caches, lanes, positions, window, (T, K, G, H)


@st.composite
def attention(draw, **types):
    rng, (k_pages, v_pages, table), lanes, positions, window, (T, K, G, H) = draw(_cache(**types))
    q = normal(rng, T, K * G, H, scale=draw(st.sampled_from([0.1, 1.0, 8.0])) / np.sqrt(H))
    ends = draw(st.none() | st.just(rng))
    if ends is not None:  # up to some later position whose slots are not those of an earlier one
        S = 32 * k_pages.shape[2] * table.shape[1]
        firsts = 0 * positions if window is None else np.maximum(0, positions - window + 1)
        ends = (positions + rng.integers(0, S + firsts - positions)).astype(np.int32)
    return {
        "q": q, "k_pages": k_pages, "v_pages": v_pages, "table": table,
        "seq_ids": lanes, "positions": positions, "window": window, "ends": ends,
    }  # fmt: skip


@st.composite
def write_kv(draw, **types):
    rng, (k_pages, v_pages, table), lanes, _, _, (T, K, _, H) = draw(_cache(**types))
    S = 32 * k_pages.shape[2] * table.shape[1]
    T = min(T, S)  # one call never writes a slot twice
    positions = (np.arange(T) + draw(sizes(0, 2 * S))).astype(np.int32)
    return {
        "k": normal(rng, T, K, H), "v": normal(rng, T, K, H),
        "k_pages": k_pages, "v_pages": v_pages, "table": table,
        "seq_ids": np.full(T, lanes[0]), "positions": positions,
    }  # fmt: skip


@st.composite
def geglu(draw):
    shape = (draw(sizes(1, 3)), draw(st.sampled_from([1, 15, 16, 33, 700, 1024, 1025, 2100])))
    gate = draw(floats(*shape, scales=(1.0, 5.0, 1e-3), special=("none", "zero", "tiny", "huge")))
    return {"gate": gate, "up": draw(floats(*shape, special=("none", "zero")))}


@st.composite
def softcap(draw):
    shape = (draw(sizes(1, 3)), draw(st.sampled_from([1, 17, 300, 1030])))
    x = draw(floats(*shape, scales=(1.0, 30.0, 1e-4), special=("none", "zero", "huge", "tiny")))
    return {"x": x, "cap": draw(st.sampled_from([30.0, 1.5]))}


@st.composite
def add(draw):
    shape = (draw(sizes(1, 4)), draw(sizes(1, 70)))
    return {"x": draw(floats(*shape)), "y": draw(floats(*shape))}


@st.composite
def scale(draw):
    return {
        "x": draw(floats(draw(sizes(1, 4)), draw(sizes(1, 70)))),
        "factor": draw(st.sampled_from([0.5, 0.1234567])),
    }


@st.composite
def route(draw):
    T, E = draw(sizes(1, 5)), draw(sizes(1, 130))
    A = draw(sizes(1, min(E, 20)))
    logits = draw(floats(T, E, scales=(1.0, 5.0), special=("none", "zero", "equal")))
    return {
        "router_logits": logits,
        "n_active": A,
        "expert_scale": draw(st.none() | floats(E, special=("none",))),
    }


@st.composite
def expert_sum(draw):
    T, A, D = draw(sizes(1, 4)), draw(sizes(1, 8)), draw(sizes(1, 70))
    return {"y": draw(floats(T, A, D)), "expert_weights": draw(floats(T, A))}


# --- ops of the encoders -----------------------------------------------------------------------------


@st.composite
def _rows_and_vectors(draw):
    rng = draw(generators())
    shape = (draw(sizes(1, 4)), draw(st.sampled_from([1, 15, 16, 33, 700, 1025])))
    x = draw(floats(*shape, special=("none", "zero", "huge", "tiny", "one outlier")))
    return rng, x, shape[1]


@st.composite
def add_bias(draw):
    rng, x, C = draw(_rows_and_vectors())
    return {"x": x, "bias": normal(rng, C)}


@st.composite
def standardize(draw):
    rng, x, C = draw(_rows_and_vectors())
    return {
        "x": x,
        "mean": normal(rng, C, scale=draw(st.sampled_from([1.0, 5.4e4]))),
        "factor": normal(rng, C),
    }


@st.composite
def clip(draw):
    _, x, _ = draw(_rows_and_vectors())
    low, high = sorted((draw(st.floats(-3, 3, width=32)), draw(st.floats(-3, 3, width=32))))
    return {"x": x, "low": low, "high": draw(st.sampled_from([high, float("inf")]))}


@st.composite
def silu(draw):
    return {"x": draw(_rows_and_vectors())[1]}


@st.composite
def glu(draw):
    _, x, C = draw(_rows_and_vectors())
    return {
        "x": np.concatenate(
            [x, draw(floats(len(x), C, scales=(1.0, 10.0), special=("none", "huge")))], axis=1
        )
    }


@st.composite
def layer_norm(draw):
    rng = draw(generators())
    shape = (draw(sizes(1, 4)), draw(st.sampled_from([2, 15, 16, 33, 700, 1025])))
    x = normal(rng, *shape, scale=draw(st.sampled_from([1e-3, 1.0, 300.0])))
    x += np.float32(draw(st.sampled_from([0.0, 3.0])))
    bias = draw(st.sampled_from([None, normal(rng, shape[1])]))
    return {"x": x, "weight": normal(rng, shape[1]), "bias": bias, "eps": draw(st.sampled_from([1e-5, 1e-6]))}


@st.composite
def conv2d(draw):
    rng = draw(generators())
    T, F, C, M = (draw(sizes(1, 9)), draw(sizes(1, 9)), draw(st.sampled_from([1, 5, 16])), draw(sizes(1, 17)))
    return {"x": normal(rng, T, F, C), "weight": normal(rng, M, C, 3, 3, scale=0.3)}


@st.composite
def causal_conv(draw):
    rng, x, C = draw(_rows_and_vectors())
    return {"x": x, "weight": normal(rng, C, draw(st.sampled_from([1, 4, 5])))}


@st.composite
def mean_pool(draw):
    rng = draw(generators())
    side, rows, columns = draw(sizes(1, 3)), draw(sizes(1, 4)), draw(sizes(1, 4))
    x = normal(rng, side * rows * side * columns, draw(st.sampled_from([1, 15, 48])))
    return {"x": x, "n_columns": side * columns, "side": side}


@st.composite
def relative_attention(draw):
    rng = draw(generators())
    T, N, H, W = (
        draw(sizes(1, 30)),
        draw(sizes(1, 3)),
        draw(st.sampled_from([2, 16, 33, 128])),
        draw(sizes(1, 13)),
    )
    q, k, v = (normal(rng, T, N, H, scale=scale) for scale in (draw(st.sampled_from([0.3, 3.0])), 1.0, 1.0))
    return {
        "q": q, "k": k, "v": v, "relative": normal(rng, W, N, H), "q_scale": normal(rng, H, scale=H**-0.5),
        "k_scale": 1.8946, "cap": draw(st.sampled_from([50.0, 3.0])),
    }  # fmt: skip
