"""Products with quantised matrices, and rows of tables, equal their definitions in every bit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refimpl.ops
from fastpath.cuda import device, layout, linear, ops, quantize
from quant import FORMATS
from refimpl.ops import integer
from tests import strategies, tolerances
from tests.cuda.executors import EXECUTORS, ONCE
from tests.gpu_on_cpu import needs, sass
from tests.gpu_on_cpu.traffic import Profiler

INTEGER = [name for name, coding in layout.CODINGS.items() if not coding.is_plain]
OTHER_WAYS = (
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q6_K",
    "MXFP4",
    "F32",
    "F16",
    "BF16",
    "IQ2_XS",
)  # the last has no layout


def _weight(rng, fmt, M, C, blocks):
    return (strategies.random_blocks if blocks == "random" else strategies.weights)(rng, fmt, M, C)


def _check_product(executor, x, weight):
    with np.errstate(all="ignore"), device.use(EXECUTORS[executor]):
        got = linear.linear(x, layout.device_matrix(weight), "int8")
        np.testing.assert_array_equal(got, refimpl.ops.linear(x, weight, "int8"))


def test_activations_with_infinities_and_nans():
    rng = np.random.default_rng(5)
    for name in ("Q4_0", "Q4_K"):
        x = strategies.normal(rng, 3, 512)
        x[0, 3], x[1, 300], x[2, 511] = np.inf, np.nan, -np.inf
        _check_product("ir", x, strategies.weights(rng, FORMATS[name], 5, 512))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("block_size", [32, 256])
def test_rounded_activations(block_size, executor):
    """The border of nothing, denormals, NaN and infinity; sums; zeros behind the last column."""
    rng = np.random.default_rng(block_size)
    x = strategies.normal(rng, 7, 3 * 256)
    x[1], x[2], x[3, 5], x[4, 300] = 0, x[2] * np.float32(1e-38), np.nan, np.inf
    x[5, :32] = np.nextafter(np.float32(1e-30), np.float32(0))
    x[6] = np.float32(1e-30)
    x = np.ascontiguousarray(x[:, : 2 * 256 + block_size])
    with np.errstate(all="ignore"), device.use(EXECUTORS[executor]):
        got = quantize.round_activations(x, block_size)
        q, scale = integer.round_activations(x, block_size)
    C = x.shape[1]
    pieces = got.q.reshape(len(x), -1, 8, 8, 16)  # of 1024 columns: of 8 units their first 16 values, ...
    got_q = np.ascontiguousarray(pieces.swapaxes(2, 3)).reshape(len(x), -1)[:, : layout.padded_columns(C)]
    np.testing.assert_array_equal(got_q[:, :C], q.reshape(len(x), C))
    np.testing.assert_array_equal(got.scale[:, : C // block_size], scale)
    np.testing.assert_array_equal(got.sums[:, : C // 16], q.reshape(len(x), -1, 16).sum(-1, dtype=np.int32))
    assert (
        not got_q[:, C:].any()
        and not got.scale[:, C // block_size :].any()
        and not got.sums[:, C // 16 :].any()
    )


@pytest.mark.parametrize("name", INTEGER)
def test_odd_sizes(name):
    """Units that are no whole steps, rows that are no whole tiles, every number of tokens; experts with slots
    of 1 to 8 entries, one of them with several slots."""
    fmt = FORMATS[name]

    @settings(max_examples=12)
    @given(rng=strategies.generators(), n_blocks=st.integers(1, 2300 // fmt.block_size), M=st.integers(1, 21),
           T=st.integers(1, 17), are_experts=st.booleans())  # fmt: skip
    def check(rng, n_blocks, M, T, are_experts):
        C = n_blocks * fmt.block_size
        if not are_experts:
            x, weight = strategies.normal(rng, T, C), strategies.random_blocks(rng, fmt, M, C)
            got, want = (f.linear(x, weight, "int8") for f in (ops, refimpl.ops))
        else:
            x, weight = strategies.normal(rng, T, C), strategies.weights(rng, fmt, 4, M, C)
            ids = rng.choice(4, (T, 3), p=[0.6, 0.2, 0.15, 0.05]).astype(np.int32)
            got, want = (f.expert_linear(x, weight, ids, "int8") for f in (ops, refimpl.ops))
        np.testing.assert_array_equal(got, want)

    with np.errstate(all="ignore"), device.use(ONCE):
        check()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_products_that_wait_for_the_kernel_before(name, monkeypatch):
    """Their weights are on their way by then; nothing else changes."""
    kernel = linear.PRODUCTS[name]
    early = replace(kernel, function=kernel.early)
    monkeypatch.setitem(linear.PRODUCTS, name, early)
    rng = np.random.default_rng(3)
    weight = strategies.weights(rng, FORMATS[name], 3, 7, 1280)
    x, ids = strategies.normal(rng, 3, 1280), rng.integers(0, 3, (3, 2)).astype(np.int32)
    with device.use(ONCE):
        for T in (1, 3):
            got = linear.linear(x[:T], weight.expert(1), "int8")
            np.testing.assert_array_equal(got, refimpl.ops.linear(x[:T], weight.expert(1), "int8"))
        got = linear.expert_linear(x, weight, ids, "int8")
        np.testing.assert_array_equal(got, refimpl.ops.expert_linear(x, weight, ids, "int8"))
    if not needs.missing_assembler():
        assert not sass.faults(replace(early, wants=(*early.wants, "ACQBULK", "PREEXIT")), (9, 0))


@pytest.mark.parametrize("op", ["linear", "expert_linear"])
@pytest.mark.parametrize(
    ("executor", "name"),
    [*(("ir", name) for name in OTHER_WAYS), ("sm_90", "F16"), ("sm_90", "Q4_K"), ("sm_80", "Q5_1")],
)
def test_float_activations_and_experts(name, executor, op):
    """Against the definition in float64, or in bits; experts of a token with one input, and with one each."""
    fmt, rng = FORMATS[name], np.random.default_rng(sum(name.encode()))
    C = fmt.block_size * {1: 301, 32: 9, 256: 3}[fmt.block_size]
    for activations in ("int8", "float"):
        for shape in ((6, C),) if op == "linear" else ((6, C), (6, 3, C)):
            case = {"x": strategies.normal(rng, *shape), "activations": activations}
            if op == "linear":
                case["weight"] = strategies.weights(rng, fmt, 7, C)
            else:
                case["weight"] = strategies.weights(rng, fmt, 5, 9, C).take_rows(1, 8)
                case["expert_ids"] = rng.integers(0, 5, (6, 3)).astype(np.int32)
            with device.use(EXECUTORS[executor]):
                got = getattr(ops, op)(**case)
            exact = case if tolerances.is_exact(op, case) else {**case, "x": case["x"].astype(np.float64)}
            tolerances.check(op, case, (got,), (getattr(refimpl.ops, op)(**exact),))


@pytest.mark.parametrize("name", INTEGER)
def test_a_row_does_not_feel_its_batch(name):
    """Bytes: of a token alone, among 2, 8, 11 and 20, for which there are other kernels; of a weight row in
    another tile."""
    fmt, rng = FORMATS[name], np.random.default_rng(1)
    weight, x = strategies.weights(rng, fmt, 11, 768), strategies.normal(rng, 20, 768)
    part = layout.device_matrix(weight.take_rows(3, 10))
    with device.use(EXECUTORS["ir"]):
        few, some, more, many = (
            linear.linear(x[:T], layout.device_matrix(weight), "int8") for T in (2, 8, 11, 20)
        )
        for row in (0, 1, 7):
            alone = linear.linear(x[row : row + 1], part, "int8").tobytes()
            assert all(whole[row, 3:10].tobytes() == alone for whole in (few, some, more, many)[row > 1 :])


OF_SOME = ("Q8_0", "Q5_0", "Q4_1", "Q4_K", "Q6_K", "Q2_K")


@pytest.mark.parametrize(
    ("executor", "name"), [*(("ir", name) for name in OF_SOME), ("sm_90", "Q8_0"), ("sm_80", "Q6_K")]
)
def test_some_tokens(name, executor):
    """One of every way that codes and scales lie; last steps of 2, 4 and 6 units; half a warp's tiles."""
    fmt, rng = FORMATS[name], np.random.default_rng(len(name))
    for T, M, C in ((3, 21, 256), (8, 4, 1536), (16, 9, 2816)):
        C -= 32 if fmt.block_size == 32 else 0  # the last unit is not whole
        x, weight = strategies.normal(rng, T, C), strategies.random_blocks(rng, fmt, M, C)
        _check_product(executor, x, weight)


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q4_K", "Q6_K"])
def test_sectors_of_some_tokens(name):
    """Whole ones of codes, each of them once, in whole steps and in narrow ones."""
    fmt, rng = FORMATS[name], np.random.default_rng(0)
    weight = layout.device_matrix(strategies.weights(rng, fmt, 16, 2816))
    with device.use(Profiler()) as profiler:
        linear.linear(strategies.normal(rng, 5, 2816), weight, "int8")
    sites = [s for s in profiler.sites[f"some_{name.lower()}"] if "no_allocate" in s.instruction]
    codes = weight.low.nbytes + (weight.high.nbytes if weight.coding.high_bits else 0)
    scales = weight.sub.nbytes + (weight.block.nbytes if weight.coding.is_256 else 0)
    n_bytes = sum(s.requests * s.cost * 32 for s in sites)
    assert codes + scales <= n_bytes <= codes + 2 * scales


@pytest.mark.parametrize("name", layout.CODINGS)
def test_bytes_of_the_layout(name):
    """Those of the file, and some more per block where 6-bit scales become bytes, or 8-bit powers 16 bits."""
    fmt = FORMATS[name]
    weight = strategies.weights(np.random.default_rng(0), fmt, 8, 1024)
    n_blocks = 8 * 1024 // fmt.block_size
    more = n_blocks * {"Q3_K": 4, "Q4_K": 4, "Q5_K": 4, "IQ4_XS": 10, "MXFP4": 1}.get(name, 0)
    made = layout.device_matrix(weight)
    unused = sum(plane.nbytes for plane in made.planes if plane.size == 1)
    assert made.nbytes - unused == weight.nbytes + more


def test_what_is_no_matrix():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"blk\.0: shape \[32\], expected a matrix"):
        weight = strategies.weights(rng, FORMATS["Q8_0"], 32)
        layout.device_matrix(type(weight)(weight.format, weight.shape, weight.data, "blk.0"))
