"""Products with many rows: the definition's bytes for every number of rows, cut of the matrix and thread."""

import numpy as np
import pytest

import fastpath.cpu as cpu
import refimpl.ops
from fastpath.cpu import matmul, matmul_float, packing, panels, threads
from quant import FORMATS, QTensor
from tests import strategies

ROWS = (*range(5, 18), 31, 32, 33, 64, 100)


def _bits(x):
    """Bits of floats; the sign and payload of a NaN are nobody's definition."""
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


def _same(got, want):
    np.testing.assert_array_equal(_bits(got), _bits(want))


def _defined(x, weight):
    with np.errstate(all="ignore"):
        return refimpl.ops.linear(x, weight, "int8")


@pytest.mark.parametrize("name", strategies.INTEGER_FORMATS)
def test_every_number_of_rows_has_the_bytes_of_the_definition(name):
    fmt, rng = FORMATS[name], np.random.default_rng(sum(name.encode()))
    # no whole number of groups of 16 rows, of panels of 256 columns, of tiles
    weight = strategies.random_blocks(rng, fmt, 37, 288 if fmt.block_size == 32 else 768)
    x = strategies.normal(rng, max(ROWS), weight.shape[1])
    want = _defined(x, weight)
    for form in (weight, packing.packed(weight)):
        for T in ROWS:
            _same(cpu.linear(x[-T:], form, "int8"), want[-T:])


@pytest.mark.parametrize("name", ("Q4_0", "Q5_1", "Q4_K", "Q6_K"))
def test_rows_beyond_one_pass_and_columns_beyond_one_slab(name):
    fmt, rng = FORMATS[name], np.random.default_rng(3)
    T = matmul.MOST_ROWS + 25  # two passes over the rows
    few = strategies.weights(rng, fmt, 41, 1312 if fmt.block_size == 32 else 1280)
    M = 16 * 2 * matmul.SPAN + 5
    weight = QTensor(fmt, (M, few.shape[1]), few.data[np.arange(M) % 41], name)
    x = strategies.normal(rng, T, weight.shape[1])
    got = cpu.linear(x, packing.packed(weight), "int8")
    for first in (0, 300, T - 7):
        _same(got[first : first + 7], cpu.linear(x[first : first + 7], weight, "int8"))
    _same(got[-2:, -40:], _defined(x[-2:], weight.take_rows(M - 40, M)))


@pytest.mark.parametrize("name", ("Q8_0", "Q5_K"))
def test_threads_do_not_matter(name):
    rng, before = np.random.default_rng(4), threads.num_threads()
    weight = packing.packed(strategies.weights(rng, FORMATS[name], 700, 512))
    x, results = strategies.normal(rng, 40, 512), []
    try:
        for n_threads in (1, 2, 3):
            threads.set_num_threads(n_threads)
            results.append(cpu.linear(x, weight, "int8"))
    finally:
        threads.set_num_threads(before)
    _same(results[1], results[0])
    _same(results[2], results[0])


def test_experts_with_no_one_some_and_many_rows():
    rng, counts = np.random.default_rng(5), (0, 1, 5, 17, 41, 0, 6)
    ids = rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int32)[:, None]
    x = strategies.normal(rng, len(ids), 256)
    for name in ("Q4_1", "Q4_K"):
        weight = strategies.weights(rng, FORMATS[name], len(counts), 35, 256)
        for form in (weight, packing.packed(weight)):
            got = cpu.expert_linear(x, form, ids, "int8")
            for expert in np.flatnonzero(counts):
                rows = ids[:, 0] == expert
                _same(got[rows, 0], _defined(x[rows], weight.expert(int(expert))))


@pytest.mark.parametrize("name", [name for name in panels.SHAPES if panels.SHAPES[name].run])
def test_a_run_of_columns_fits_in_16_bits(name):
    """Its largest sum does, and twice as many columns would not."""
    blocks = strategies.random_blocks(np.random.default_rng(6), FORMATS[name], 64, 2560).data
    most = np.abs(FORMATS[name].integer_parts(blocks.reshape(-1, FORMATS[name].block_bytes))[0]).max()
    shape = panels.SHAPES[name]
    assert 127 * int(most) * 4 * shape.run <= 32767
    whole_sub_block = shape.run == shape.form.width
    assert whole_sub_block or 127 * int(most) * 8 * shape.run > 32767


@pytest.mark.parametrize("name", [name for name in panels.SHAPES if panels.SHAPES[name].run])
def test_the_largest_integers(name):
    """All weights and all activations at the same end of their range."""
    fmt = FORMATS[name]
    for byte in (0x00, 0xFF):
        data = np.full((16, fmt.row_bytes(512)), byte, np.uint8)
        blocks = data.reshape(-1, fmt.block_bytes)
        for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(name, (0, 2)):
            blocks[:, at : at + 2] = np.array([1.5], "<f2").view(np.uint8)
        weight = QTensor(fmt, (16, 512), data, name)
        x = np.ones((17, 512), np.float32) * np.where(np.arange(17) % 2, 1, -1)[:, None].astype(np.float32)
        _same(cpu.linear(x, weight, "int8"), _defined(x, weight))


@pytest.mark.parametrize("fmt", ["F32", "F16", "BF16"])
def test_plain_numbers_in_many_rows(fmt):
    """Slabs, blocks, tiles and parts of columns, all of them ragged: the bytes of four rows at a time."""
    rng = np.random.default_rng(9)
    for M, C in ((70, 1600), (33, 77), (16, 15), (1, 2307)):
        weight = strategies.weights(rng, FORMATS[fmt], M, C)
        for T in (matmul_float.MANY, 97, 200):
            x = strategies.normal(rng, T, C)
            few = [cpu.linear(x[t : t + 4], weight, "float") for t in range(0, T, 4)]
            assert cpu.linear(x, weight, "float").tobytes() == np.concatenate(few).tobytes(), (M, C, T)
