"""Products with quantised matrices, and rows of tables, equal their definitions in every bit."""

import numpy as np
import pytest

import refimpl.ops
from fastpath.cuda import device, embedding, layout, linear, quantize
from quant import FORMATS
from refimpl.ops import integer
from tests import strategies
from tests.cuda.executors import EXECUTORS

BLOCKS = ("random", "finite")


def _weight(rng, fmt, M, C, blocks):
    return (strategies.random_blocks if blocks == "random" else strategies.weights)(rng, fmt, M, C)


def _check_product(executor, x, weight):
    with np.errstate(all="ignore"), device.use(EXECUTORS[executor]):
        got = linear.linear(x, layout.device_matrix(weight), "int8")
        np.testing.assert_array_equal(got, refimpl.ops.linear(x, weight, "int8"))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", layout.CODINGS)
def test_products(name, executor):
    """Blocks that bytes can spell, and numbers; a row count that fills no tile, columns that fill no step."""
    fmt, rng = FORMATS[name], np.random.default_rng(sum(name.encode()))
    for blocks, T in (("random", 1), ("finite", 6)) if executor == "ir" else (("random", 5),):
        M = int(rng.integers(5, 12))
        C = fmt.block_size * int(rng.integers(9, 12) if fmt.block_size == 256 else rng.integers(65, 80))
        _check_product(executor, strategies.normal(rng, T, C), _weight(rng, fmt, M, C, blocks))


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
    pieces = got.q.reshape(len(x), -1, 2, 8, 16)  # halves of sub-blocks: first ones, second ones
    got_q = np.ascontiguousarray(pieces.swapaxes(2, 3)).reshape(len(x), -1)
    np.testing.assert_array_equal(got_q[:, :C], q.reshape(len(x), C))
    np.testing.assert_array_equal(got.scale[:, : C // block_size], scale)
    np.testing.assert_array_equal(got.sums[:, : C // 16], q.reshape(len(x), -1, 16).sum(-1, dtype=np.int32))
    assert (
        not got_q[:, C:].any()
        and not got.scale[:, C // block_size :].any()
        and not got.sums[:, C // 16 :].any()
    )


@pytest.mark.parametrize("name", layout.CODINGS)
def test_a_row_does_not_feel_its_batch(name):
    """Bytes: of a token among others and alone, of a weight row in another tile."""
    fmt, rng = FORMATS[name], np.random.default_rng(1)
    weight, x = strategies.weights(rng, fmt, 11, 768), strategies.normal(rng, 7, 768)
    with device.use(EXECUTORS["ir"]):
        whole = linear.linear(x, layout.device_matrix(weight), "int8")
        alone = linear.linear(x[5:6], layout.device_matrix(weight.take_rows(3, 10)), "int8")
    assert whole[5, 3:10].tobytes() == alone.tobytes()


@pytest.mark.parametrize("executor", ["ir", "sm_90"])
@pytest.mark.parametrize("name", layout.CODINGS)
def test_rows_of_a_table(name, executor):
    fmt, rng = FORMATS[name], np.random.default_rng(2)
    table = strategies.random_blocks(rng, fmt, 9, fmt.block_size * (5 if fmt.block_size == 256 else 37))
    ids = np.array([8, 0, 3, 3, 6], np.int32)
    with np.errstate(all="ignore"), device.use(EXECUTORS[executor]):
        got = embedding.embed(layout.device_matrix(table), ids, 39.25)
        np.testing.assert_array_equal(got, refimpl.ops.embed(table, ids, np.float32(39.25)))


@pytest.mark.parametrize("name", layout.CODINGS)
def test_bytes_of_the_layout(name):
    """Those of the file, and 4 more per block where 6-bit scales become bytes."""
    fmt = FORMATS[name]
    weight = strategies.random_blocks(np.random.default_rng(0), fmt, 8, 1024)
    more = 8 * 4 * (4 if name in ("Q3_K", "Q4_K", "Q5_K") else 0)
    with np.errstate(all="ignore"):
        made = layout.device_matrix(weight)
    unused = sum(plane.nbytes for plane in made.planes if plane.size == 1)
    assert made.nbytes - unused == weight.nbytes + more


def test_what_has_no_layout_says_so():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"blk\.0: F16 has no layout"):
        weight = strategies.weights(rng, FORMATS["F16"], 2, 32)
        layout.device_matrix(type(weight)(weight.format, weight.shape, weight.data, "blk.0"))
    with pytest.raises(ValueError, match="no matrix"):
        layout.device_matrix(strategies.weights(rng, FORMATS["Q8_0"], 2, 2, 32))
