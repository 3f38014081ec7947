"""QTensor: shapes, views, and how little it touches."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quant

RNG = np.random.default_rng(6)


def make(shape, name="Q8_0"):
    return quant.QTensor.from_array(RNG.standard_normal(shape).astype(np.float32), name, "blk.0.w")


def test_geometry():
    t = make((3, 5, 64), "Q4_0")
    assert (t.ndim, t.n_rows, t.row_len, t.row_bytes, t.nbytes) == (3, 15, 64, 36, 540)
    assert t.data.shape == (3, 5, 36)
    v = make((7,), "F32")
    assert (v.ndim, v.n_rows, v.row_len, v.row_bytes, v.nbytes) == (1, 1, 7, 28, 28)


@pytest.mark.parametrize("shape", [(64,), (5, 64), (3, 5, 64), (2, 3, 5, 64)])
def test_values_have_the_shape_and_equal_the_blocks(shape):
    t = make(shape, "Q5_1")
    expected = t.format.dequantize_blocks(t.data.reshape(-1, t.format.block_bytes)).reshape(shape)
    values = t.dequantize()
    assert values.shape == shape and values.dtype == np.float32 and values.flags.writeable
    np.testing.assert_array_equal(values, expected)
    wide = t.dequantize(np.float64)
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(wide, expected)


def test_a_tensor_bigger_than_a_chunk():
    t = make((700, 512), "Q8_0")
    assert t.nbytes > quant.registry.CHUNK_BYTES
    np.testing.assert_array_equal(t.dequantize()[-1], t.rows([699])[0])


@given(ids=st.lists(st.integers(0, 14), max_size=20))
def test_rows_are_rows_of_the_whole(ids):
    t = make((3, 5, 64), "Q4_0")
    np.testing.assert_array_equal(t.rows(ids), t.dequantize().reshape(15, 64)[np.array(ids, int)])
    np.testing.assert_array_equal(t.rows(np.array(ids, np.int32)), t.rows(ids))


def test_rows_touches_only_its_rows():
    seen = []

    def watch(blocks):
        seen.append(len(blocks))
        return fmt.dequantize_blocks(blocks)

    fmt = quant.FORMATS["Q4_0"]
    t = make((1000, 96), "Q4_0")
    watched = quant.QTensor(dataclasses.replace(fmt, dequantize_blocks=watch), t.shape, t.data)
    watched.rows([999, 3])
    assert sum(seen) == 2 * 3


def test_rows_of_a_vector_and_of_a_slice():
    v = make((32,), "Q8_0")
    np.testing.assert_array_equal(v.rows([0, 0]), np.stack([v.dequantize()] * 2))
    t = make((3, 8, 32))
    part = t.take_rows(2, 5)
    np.testing.assert_array_equal(part.rows(range(9)), t.dequantize()[:, 2:5].reshape(9, 32))


@pytest.mark.parametrize("ids", [[-1], [15], [0, 99]])
def test_rows_that_are_not_there(ids):
    with pytest.raises(ValueError, match=r"blk\.0\.w: row -?\d+, but it has 15 rows, 0 \.\. 14"):
        make((3, 5, 64)).rows(ids)


def test_slices_are_views():
    t = make((4, 6, 64), "Q5_0")
    values = t.dequantize()
    part, expert = t.take_rows(1, 4), t.expert(2)
    assert part.shape == (4, 3, 64) and expert.shape == (6, 64)
    assert np.shares_memory(part.data, t.data) and np.shares_memory(expert.data, t.data)
    np.testing.assert_array_equal(part.dequantize(), values[:, 1:4])
    np.testing.assert_array_equal(expert.dequantize(), values[2])
    np.testing.assert_array_equal(expert.take_rows(5, 6).dequantize(), values[2, 5:6])
    assert t.take_rows(0, 0).dequantize().shape == (4, 0, 64)


def test_slices_that_are_not_there():
    t = make((4, 6, 64))
    for bad in (lambda: t.take_rows(3, 7), lambda: t.take_rows(-1, 2), lambda: t.take_rows(3, 2)):
        with pytest.raises(ValueError, match=r"blk\.0\.w: rows .* of a tensor of shape \[4, 6, 64\]"):
            bad()
    for bad in (lambda: t.expert(4), lambda: t.expert(-1), lambda: t.expert(0).expert(0)):
        with pytest.raises(ValueError, match=r"blk\.0\.w: expert .* of a tensor of shape"):
            bad()
    with pytest.raises(ValueError, match="rows 0:1 of a tensor"):
        make((32,)).take_rows(0, 1)


def test_data_must_fit_the_shape():
    fmt = quant.FORMATS["Q4_0"]
    with pytest.raises(
        ValueError, match=r"w: data is uint8\[2, 18\] but Q4_0 of shape \[3, 32\] is uint8\[3, 18\]"
    ):
        quant.QTensor(fmt, (3, 32), np.zeros((2, 18), np.uint8), "w")
    with pytest.raises(ValueError, match=r"w: row of 40 values is not a multiple of the Q4_0 block of 32"):
        quant.QTensor(fmt, (3, 40), np.zeros((3, 20), np.uint8), "w")
    with pytest.raises(ValueError, match=r"w: shape \(\) has no rows"):
        quant.QTensor(fmt, (), np.zeros(18, np.uint8), "w")
