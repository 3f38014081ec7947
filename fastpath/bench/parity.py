"""A quick look at the kernels in use: does each still compute what it is defined to?

Every format and row length of the model's matrices with one, a few and many rows, those of its tables, and
every other op, on random numbers, against the reference's op table; for `--kernels` one product of each
format and the attention of both kinds of layers, for encoders their matrices and their ops. `bench` prints
no figure when one is wrong: a fast wrong kernel is no news. The test suite looks at the same with many more
shapes; this takes a second.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from fastpath.backend import ops_for
from fastpath.kv.arrays import zeros
from fastpath.kv.geometry import KVType
from quant import FORMATS, QTensor
from refimpl.kv_types import dtypes_of, names_of, own_pages, shapes_of

ROWS = (1, 3, 8, 40)  # matrix-vector, small batch, matrix-matrix: the routes that a product may take
BLOCKS = 64  # different ones in a matrix
M = 37  # two whole groups of 16 rows, and a rest
# Normalised RMS error that float32 kernels may have against float64. Roundings of sums in 16 lanes grow like
# the root of their number: sqrt(22528 / 16) * 2^-24 = 2e-6 for the longest published row (measured: 2e-7).
FLOAT_ERROR = 3e-6


REPLAY_STEPS = 3  # the first is recorded
REPORT = "Run the tests (make test), and say on which processor this was."


Case = tuple[str, Callable[[], str]]  # what it is; "" or what is wrong with it


class ParityError(ValueError):
    """A kernel is wrong."""


def check(model, ops, kv_type: KVType, *, activations: str = "int8") -> int:
    """The number of cases that were looked at; ParityError names the first that is wrong.

    kv_type  what the cache stores keys and values as
    """
    reference, rng = ops_for("ref"), np.random.default_rng(0)
    return _all_green(_cases(model, ops, reference, rng, kv_type, activations))


def check_products(ops, formats: Iterable[str], columns: Iterable[int]) -> int:
    """The same for packed matrices of these formats and row lengths, which no model names."""
    reference, rng = ops_for("ref"), np.random.default_rng(0)
    return _all_green(
        (f"linear, {fmt}, {C} columns", partial(_linear, ops, reference, rng, fmt, C, True, "int8"))
        for fmt in formats
        for C in columns
    )


def check_attention(ops, layers: Iterable[tuple[int, bool]], kv_type: KVType) -> int:
    """The same for attention; layers: head size, and whether there is a window."""
    return _all_green(_attention_cases(ops, ops_for("ref"), np.random.default_rng(0), layers, kv_type))


def check_encoders(ops, vision, audio, *, activations: str = "int8") -> int:
    """The same for encoders: (configuration, weights) of each, or None for one that is not measured."""
    reference, rng = ops_for("ref"), np.random.default_rng(0)
    return _all_green(_encoder_cases(ops, reference, rng, vision, audio, activations))


def _all_green(cases: Iterable[Case]) -> int:
    n = 0
    for what, wrong in cases:
        n += 1
        if fault := wrong():
            raise ParityError(
                f"parity: {what}: {fault}. No figure is printed for kernels that are wrong. {REPORT}"
            )
    return n


def check_replay(engine, n_seqs: Sequence[int]) -> int:
    """A recorded step against the same ops called one by one: equal bytes, for each number of sequences."""
    rng, V = np.random.default_rng(1), engine.model.config.vocab_size
    if engine.replay is None:
        return 0
    for n in n_seqs:
        steps = [[(lane, [int(rng.integers(V))]) for lane in range(n)] for _ in range(REPLAY_STEPS)]
        replayed = _extended(engine, steps)
        replay, engine.replay = engine.replay, None
        try:
            eager = _extended(engine, steps)
        finally:
            engine.replay = replay
        if replayed.tobytes() != eager.tobytes():
            raise ParityError(
                f"parity: a replayed step of {n} tokens gives other bytes than its ops called one by one. "
                f"No figure is printed for it: --no-replay measures without. {REPORT}"
            )
    return len(n_seqs)


def _extended(engine, steps) -> np.ndarray:
    """The logits of all steps, from position 0 on."""
    for lane, _ in steps[0]:
        engine.reset(lane)
    logits = [engine.extend(pieces) for pieces in steps]
    for lane, _ in steps[0]:
        engine.reset(lane)
    return np.concatenate(logits)


def _cases(model, ops, ref, rng, kv_type, activations) -> Iterator[Case]:
    for fmt, C, is_packed in _formats(model, experts=False):
        yield f"linear, {fmt}, {C} columns", partial(_linear, ops, ref, rng, fmt, C, is_packed, activations)
    for fmt, C, is_packed in _formats(model, experts=True):
        what = f"expert_linear, {fmt}, {C} columns"
        yield what, partial(_experts, ops, ref, rng, fmt, C, is_packed, activations)
    heads = {(layer.head_dim, layer.window is not None) for layer in model.config.layers}
    yield from _attention_cases(ops, ref, rng, sorted(heads), kv_type)
    for table in _tables(model):
        what = f"embed, {table.format.name}, {table.row_len} columns"
        yield what, partial(_embed, ops, ref, rng, table.format.name, table.row_len)
    for name, case in _small_cases(rng).items():
        yield name, partial(_against, getattr(ops, name), getattr(ref, name), case)
    yield "set_rows", partial(_set_rows, ops, ref, rng)


def _attention_cases(ops, ref, rng, layers, kv_type) -> Iterator[Case]:
    for H, is_windowed in layers:
        kind, types = "sliding" if is_windowed else "global", "/".join(names_of(kv_type))
        what = f"attention, heads of {H}, {kind}, {types}"
        yield what, partial(_attention, ops, ref, rng, H, is_windowed, kv_type)


def _encoder_cases(ops, ref, rng, vision, audio, activations) -> Iterator[Case]:
    from fastpath.bench.rates import matrices_of

    measured = [encoder for encoder in (vision, audio) if encoder is not None]
    matrices = [m for _, weights in measured for m in matrices_of(weights) if m.ndim == 2]
    for fmt, C in sorted({(m.format.name, m.row_len) for m in matrices}):
        yield f"linear, {fmt}, {C} columns", partial(_linear, ops, ref, rng, fmt, C, False, activations)
    cases = _small_cases(rng, of_experts=False)
    if vision is not None:
        cases |= _vision_cases(rng)
        config, weights = vision
        if config.kind == "gemma4v":  # the other kind has no layers
            H = config.head_dim
            yield f"attention, heads of {H}, both ways", partial(_attention_both_ways, ops, ref, rng, H)
        table = weights.position_embd
        what = f"embed, {table.format.name}, {table.row_len} columns"
        yield what, partial(_embed, ops, ref, rng, table.format.name, table.row_len)
    if audio is not None and audio[0].kind == "gemma4a":
        config, weights = audio
        cases |= _audio_cases(rng, config.dim // config.n_heads)
        for kernel in weights.convs:
            M, C = kernel.shape[:2]
            case = {"x": _normal(rng, 9, 16, C), "weight": _normal(rng, M, C, 3, 3)}
            yield f"conv2d, {C} to {M} channels", partial(_against, ops.conv2d, ref.conv2d, case)
    for name, case in cases.items():
        yield name, partial(_against, getattr(ops, name), getattr(ref, name), case)


def _formats(model, *, experts: bool) -> list[tuple[str, int, bool]]:
    """(format, row length, whether it is packed) of the matrices that products read."""
    from fastpath.bench.rates import product_weights

    wanted = (t for t in product_weights(model.weights) if (len(t.shape) == 3) == experts)
    return sorted({(t.format.name, t.row_len, not isinstance(t, QTensor)) for t in wanted})


def _tables(model) -> list[QTensor]:
    """The tables that rows are looked up in, one of each format and row length."""
    w = model.weights
    tables = [t for t in (w.token_embd, w.per_layer_token_embd) if t is not None]
    return list({(t.format.name, t.row_len): t for t in tables}.values())


def _embed(ops, ref, rng, fmt, C) -> str:
    table, ids = _weight(rng, fmt, M, C), np.array([M - 1, 0, 7], np.int32)
    return _difference(ops.embed(table, ids, 39.2), ref.embed(table, ids, 39.2))


def _set_rows(ops, ref, rng) -> str:
    """In place."""
    x, rows, values = _normal(rng, 5, 70), np.array([4, 1], np.int32), _normal(rng, 2, 70)
    mine, its = x.copy(), x.copy()
    ops.set_rows(mine, rows, values)
    ref.set_rows(its, rows, values)
    return _difference(mine, its, exact=True)


def _linear(ops, ref, rng, fmt, C, is_packed, activations) -> str:
    weight = _weight(rng, fmt, M, C)
    mine = _packed(weight) if is_packed else weight
    x = rng.standard_normal((max(ROWS), C)).astype(np.float32)
    many = ops.linear(x, mine, activations)
    for T in ROWS:
        if fault := _product(ops.linear(x[:T], mine, activations), ref, x[:T], weight, activations):
            return f"{T} rows: {fault}"
        if not np.array_equal(ops.linear(x[:T], mine, activations), many[:T]):
            return f"{T} rows give other bytes than {max(ROWS)}"
    return ""


def _product(got, ref, x, weight, activations) -> str:
    if activations == "int8" and weight.format.integer_parts is not None:
        return _difference(got, ref.linear(x, weight, activations), exact=True)
    return _difference(got, ref.linear(x.astype(np.float64), weight, "float"))


def _experts(ops, ref, rng, fmt, C, is_packed, activations) -> str:
    E, A = 4, 2
    weight = _weight(rng, fmt, E, M, C)
    mine = _packed(weight) if is_packed else weight
    exact = activations == "int8" and weight.format.integer_parts is not None
    for T in ROWS:
        x = rng.standard_normal((T, C)).astype(np.float32)
        ids = np.stack([rng.permutation(E)[:A] for _ in range(T)]).astype(np.int32)
        got = ops.expert_linear(x, mine, ids, activations)
        if exact:
            want = ref.expert_linear(x, weight, ids, activations)
        else:
            want = ref.expert_linear(x.astype(np.float64), weight, ids, "float")
        if fault := _difference(got, want, exact=exact):
            return f"{T} tokens: {fault}"
    return ""


def _weight(rng, fmt, *shape) -> QTensor:
    """Blocks as in a model, drawn from some."""
    blocks = _blocks(rng, FORMATS[fmt])
    n = math.prod(shape) // FORMATS[fmt].block_size
    data = blocks[rng.integers(0, len(blocks), n)]
    return QTensor(FORMATS[fmt], shape, data.reshape(*shape[:-1], -1))


def _blocks(rng, fmt) -> np.ndarray:
    """u8[n, block_bytes]; where there is no quantiser, bytes that are finite numbers"""
    if fmt.quantize_blocks is not None:
        n_values = max(BLOCKS, 1024) if fmt.block_size == 1 else BLOCKS * fmt.block_size
        values = rng.standard_normal((1, n_values), np.float32) * np.float32(0.05)
        return QTensor.from_array(values, fmt).data.reshape(-1, fmt.block_bytes)
    blocks = rng.integers(0, 256, (100 * BLOCKS, fmt.block_bytes), dtype=np.uint8)
    values = fmt.dequantize_blocks(blocks)
    return blocks[np.isfinite(values).all(axis=1) & (np.abs(values).max(axis=1) < 1e3)]


def _packed(weight: QTensor):
    from fastpath.cpu import packing

    return packing.packed(weight)


def _attention(ops, ref, rng, H, is_windowed, kv_type) -> str:
    """Also what fills the cache: a ring that has wrapped, or a line."""
    R, S, K, G, n = 2, 96, 2, 4, 130 if is_windowed else 80
    window = 50 if is_windowed else None
    mine, its = [(*_empty(R, S, K, H, kv_type), own_pages(R)) for _ in range(2)]
    lanes, T = np.ones(20, np.int32), 20
    for first in range(0, n, T):
        positions = np.arange(first, min(n, first + T), dtype=np.int32)
        k, v = (rng.standard_normal((len(positions), K, H)).astype(np.float32) for _ in range(2))
        ops.write_kv(k, v, *mine, lanes[: len(k)], positions)
        ref.write_kv(k, v, *its, lanes[: len(k)], positions)
    if any(a.tobytes() != b.tobytes() for a, b in zip(mine, its, strict=True)):
        return "write_kv stores other bytes than its definition"
    q = (rng.standard_normal((T, K * G, H)) / np.sqrt(H)).astype(np.float32)
    positions = np.arange(n - T, n, dtype=np.int32)
    many = ops.attention(q, *mine, lanes, positions, window)
    if fault := _difference(many, ref.attention(q.astype(np.float64), *its, lanes, positions, window)):
        return fault
    for rows in (1, 2):
        last = slice(T - rows, T)
        few = ops.attention(q[last].copy(), *mine, lanes[last], positions[last], window)
        if not np.array_equal(few, many[last]):
            return f"{rows} rows give other bytes than {T}"
    return ""


def _attention_both_ways(ops, ref, rng, H) -> str:
    """As in the vision tower: numbers stay float32, every patch sees all of them."""
    T, N = 70, 3
    mine, its = [(*_empty(1, 96, N, H, "f32"), own_pages(1)) for _ in range(2)]
    q, k, v = (_normal(rng, T, N, H) for _ in range(3))
    q /= np.float32(math.sqrt(H))
    lanes, order, ends = np.zeros(T, np.int32), np.arange(T, dtype=np.int32), np.full(T, T - 1, np.int32)
    ops.write_kv(k, v, *mine, lanes, order)
    ref.write_kv(k, v, *its, lanes, order)
    got = ops.attention(q, *mine, lanes, order, None, ends)
    return _difference(got, ref.attention(q.astype(np.float64), *its, lanes, order, None, ends))


def _empty(R, S, K, H, kv_type):
    """Pages of S positions: refimpl/ops/attention.py."""
    return map(zeros, shapes_of(R, S, K, H, kv_type), dtypes_of(kv_type))


def _normal(rng, *shape) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _small_cases(rng, *, of_experts: bool = True) -> dict[str, dict]:
    x, angles = partial(_normal, rng), rng.uniform(-3, 3, (3, 32))
    cases: dict[str, dict] = {
        "rms_norm": {"x": x(3, 300), "weight": x(300), "eps": 1e-6},
        "rope": {"x": x(3, 2, 64), "cos": np.cos(angles), "sin": np.sin(angles)},
        "rope_table": {"positions": np.array([0, 5, 4000], np.int32), "inv_freq": 0.9 ** np.arange(32.0)},
        "geglu": {"gate": x(3, 700), "up": x(3, 700)},
        "softcap": {"x": 20 * x(3, 700), "cap": 30.0},
        "top_k": {"logits": 20 * x(3, 700), "k": 9, "cap": 30.0},
        "add": {"x": x(3, 70), "y": x(3, 70)},
        "scale": {"x": x(3, 70), "factor": 0.7},
        "get_rows": {"x": x(5, 70), "rows": np.array([4, 0, 0], np.int32)},
        "swap_axes": {"x": x(3, 5, 70)},
    }
    if not of_experts:
        return cases
    return cases | {
        "route": {"router_logits": x(3, 128), "n_active": 8, "expert_scale": x(128)},
        "expert_sum": {"y": x(3, 8, 70), "expert_weights": x(3, 8)},
    }


def _vision_cases(rng) -> dict[str, dict]:
    x = partial(_normal, rng)
    return {
        "layer_norm": {"x": x(3, 300) + np.float32(2), "weight": x(300), "bias": x(300), "eps": 1e-6},
        "clip": {"x": x(3, 70), "low": -0.5, "high": 1.1},
        "add_bias": {"x": x(3, 70), "bias": x(70)},
        "mean_pool": {"x": x(54, 70), "n_columns": 9, "side": 3},
        "standardize": {"x": x(3, 70), "mean": x(70), "factor": x(70)},
    }


def _audio_cases(rng, H: int) -> dict[str, dict]:
    x, (T, N, W) = partial(_normal, rng), (30, 2, 12)
    return {
        "layer_norm": {"x": x(3, 300) + np.float32(2), "weight": x(300), "bias": None, "eps": 1e-6},
        "clip": {"x": x(3, 70), "low": -0.5, "high": 1.1},
        "add_bias": {"x": x(3, 70), "bias": x(70)},
        "silu": {"x": x(3, 700)},
        "glu": {"x": x(3, 140)},
        "causal_conv": {"x": x(20, 70), "weight": x(70, 5)},
        "relative_attention": {
            "q": x(T, N, H), "k": x(T, N, H), "v": x(T, N, H), "relative": x(W, N, H),
            "q_scale": np.abs(x(H)) / np.float32(math.sqrt(H)), "k_scale": 1.9, "cap": 50.0,
        },
    }  # fmt: skip


def _against(function, definition, case: dict) -> str:
    """float32 against the definition in float64."""
    wide = {
        name: value.astype(np.float64) if getattr(value, "dtype", None) == np.float32 else value
        for name, value in case.items()
    }
    got, want = function(**case), definition(**wide)
    if not isinstance(got, tuple):
        got, want = (got,), (want,)
    return next(filter(None, (_difference(a, b) for a, b in zip(got, want, strict=True))), "")


def _difference(got, want, *, exact: bool = False) -> str:
    """ "" if they agree, else how they do not."""
    if got.shape != want.shape:
        return f"got shape {list(got.shape)}, expected {list(want.shape)}"
    if exact:
        wrong = np.ascontiguousarray(got).view(np.int32) != np.ascontiguousarray(want).view(np.int32)
        return f"{int(wrong.sum())} of {wrong.size} values differ from the definition" if wrong.any() else ""
    difference = got.astype(np.float64) - want
    error = np.sqrt(np.mean(difference**2) / np.mean(np.square(want, dtype=np.float64)))
    if error <= FLOAT_ERROR:
        return ""
    return f"normalised error {error:.1e}, expected at most {FLOAT_ERROR:.0e}"
