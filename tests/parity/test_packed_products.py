"""Packed weights: the same bytes as weights in the file's order, and those of the definition.

Row counts lie on both sides of every border: one or two rows and those of experts are multiplied in registers
one by one (matvec.py), up to eight in tiles (matvec_few.py), more through panels (matmul.py).
"""

import sys

import numpy as np
import pytest

import fastpath.cpu as cpu
import refimpl.ops
from fastpath.cpu import packing, threads
from fastpath.cpu.activations import PIECE
from fastpath.cpu.matvec import MATVEC_ROWS
from fastpath.cpu.packing import PackedTensor
from quant import FORMATS, QTensor
from tests import strategies

ROWS = (*range(1, 10), 15, 16, 17, 33)
KEPT = ("F32", "F16", "BF16", "IQ3_S", "TQ2_0")  # formats that keep their rows


def _finite(rng, fmt, *shape):
    return strategies.weights(rng, fmt, *shape)


def _extreme(rng, fmt, *shape):
    """Random bytes with special halves where most formats have a scale: zero, denormal, largest, infinite."""
    tensor = strategies.random_blocks(rng, fmt, *shape)
    halves = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x3C00, 0x7C00], "<u2").view(np.uint8)
    blocks = tensor.data.reshape(-1, fmt.block_bytes)
    for block in blocks[::2]:
        at, pick = int(rng.choice([0, 2, fmt.block_bytes - 2])), 2 * int(rng.integers(0, 8))
        block[at : at + 2] = halves[pick : pick + 2]
    return tensor


def _all_bits(rng, fmt, *shape):
    """The largest codes; as halves they are NaN, so every other block has scale 1."""
    tensor = strategies.random_blocks(rng, fmt, *shape)
    tensor.data[:] = 0xFF
    for at in (0, fmt.block_bytes - 2):
        tensor.data.reshape(-1, fmt.block_bytes)[::2, at : at + 2] = (0x00, 0x3C)
    return tensor


def _activations(rng, T, C):
    x = strategies.normal(rng, T, C)
    for row, kind in zip(x[::-1], strategies.SPECIAL_ROWS, strict=False):
        strategies.with_special_row(rng, row[None], kind)
    x[0, : C // 2] = np.where(rng.random(C // 2) < 0.5, 127, -127)  # both ends of int8
    return x


def _assert_same(got, want):
    """Equal in every bit; the sign and payload of a NaN are nobody's definition."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(
        np.where(np.isnan(got), 0, got).view(np.uint32), np.where(np.isnan(want), 0, want).view(np.uint32)
    )


@pytest.fixture
def n_threads():
    before = threads.num_threads()
    yield threads.set_num_threads
    threads.set_num_threads(before)


def test_every_format_with_integers_has_a_layout_that_fills_its_blocks():
    assert set(packing.SEGMENTS) == set(strategies.INTEGER_FORMATS)
    for name, segments in packing.SEGMENTS.items():
        assert sum(unit * count for unit, count in segments) == FORMATS[name].block_bytes


@pytest.mark.parametrize("name", (*packing.SEGMENTS, *KEPT))
def test_packing_is_a_permutation(name):
    fmt, rng = FORMATS[name], np.random.default_rng(1)
    for shape in ((1, 256), (16, 512), (37, 768), (3, 21, 256)):
        tensor = strategies.random_blocks(rng, fmt, *shape)
        packed = packing.packed(tensor)
        assert packed.memory.nbytes == packing.packed_bytes(tensor)
        assert (packed.nbytes, packed.ndim, packed.row_len) == (tensor.nbytes, tensor.ndim, tensor.row_len)
        assert np.array_equal(packed.unpack().data, tensor.data)
        if packed.is_grouped:
            matrices = tensor.data.reshape(-1, *tensor.data.shape[-2:])
            for m, first, stop in ((0, 0, 1), (len(matrices) - 1, shape[-2] // 3, shape[-2])):
                part = packed.unpack_rows(first, stop, m)
                assert part.shape == (stop - first, shape[-1])
                assert np.array_equal(part.data, matrices[m, first:stop])


def test_byte_o_of_a_block_lies_at_16_times_o():
    """Q4_0 by hand: 16 halves, then four times the same four bytes of 16 rows."""
    rows = np.arange(16 * 18, dtype=np.int64).astype(np.uint8).reshape(16, 18)
    packed = packing.packed(QTensor(FORMATS["Q4_0"], (16, 32), rows)).memory
    assert packed[:32].tobytes() == rows[:, :2].tobytes()
    for word in range(4):
        at = 2 + 4 * word
        assert packed[16 * at : 16 * at + 64].tobytes() == rows[:, at : at + 4].tobytes()


def test_packing_in_parts():
    tensor = strategies.random_blocks(np.random.default_rng(2), FORMATS["Q5_K"], 2, 50, 256)
    whole, parts = packing.packed(tensor).memory, packing.packed(tensor).memory
    parts[:] = 0
    n = packing.n_groups(tensor)
    for first in range(n):
        packing.pack(tensor, parts, (first, first + 1))
    assert n == 8
    assert np.array_equal(whole, parts)


def test_memory_that_does_not_fit_is_one_clear_error():
    tensor = strategies.random_blocks(np.random.default_rng(3), FORMATS["Q8_0"], 16, 32)
    with pytest.raises(ValueError, match=r"Q8_0 \[16, 32\] packs to uint8\[576\]"):
        packing.pack(tensor, np.empty(544, np.uint8))


@pytest.mark.parametrize("blocks", (_finite, _extreme, _all_bits))
@pytest.mark.parametrize("name", packing.SEGMENTS)
def test_products_are_those_of_the_definition(name, blocks):
    fmt = FORMATS[name]
    rng = np.random.default_rng(sum(name.encode()))
    for M, n_blocks in ((37, 3), (16, 1), (5, 2)):
        weight = blocks(rng, fmt, M, n_blocks * fmt.block_size)
        packed = packing.packed(weight)
        x = _activations(rng, 33, n_blocks * fmt.block_size)
        with np.errstate(all="ignore"):
            want = refimpl.ops.linear(x, weight, "int8")
        for T in ROWS:
            _assert_same(cpu.linear(x[:T], packed, "int8"), want[:T])
            _assert_same(cpu.linear(x[:T], weight, "int8"), want[:T])


@pytest.mark.parametrize("name", ("Q4_0", "Q5_1", "Q4_K", "Q6_K"))
def test_activations_are_rounded_in_pieces_of_a_row(name):
    """One more block than whole pieces, and two more than one."""
    fmt = FORMATS[name]
    rng = np.random.default_rng(8)
    for n_cols in (2 * PIECE + fmt.block_size, PIECE + 2 * fmt.block_size):
        weight, x = strategies.weights(rng, fmt, 19, n_cols), strategies.normal(rng, 14, n_cols)
        packed, want = packing.packed(weight), refimpl.ops.linear(x, weight, "int8")
        for T in (1, 3, 5, 7, 8, 9, 14):
            _assert_same(cpu.linear(x[:T], packed, "int8"), want[:T])


@pytest.mark.parametrize("name", KEPT)
def test_formats_that_keep_their_rows(name):
    rng = np.random.default_rng(4)
    weight = strategies.weights(rng, FORMATS[name], 37, 512)
    packed = packing.packed(weight)
    x = strategies.normal(rng, 9, 512)
    whole = cpu.linear(x, weight, "int8")
    for T in range(1, 10):
        for form in (weight, packed):
            assert cpu.linear(x[:T], form, "int8").tobytes() == whole[:T].tobytes()


@pytest.mark.parametrize("name", ("Q4_0", "Q4_K"))
def test_float_activations_do_not_see_the_packing(name):
    rng = np.random.default_rng(5)
    weight, x = strategies.weights(rng, FORMATS[name], 37, 512), strategies.normal(rng, 3, 512)
    packed = packing.packed(weight)
    assert cpu.linear(x, packed, "float").tobytes() == cpu.linear(x, weight, "float").tobytes()


def test_float_activations_unpack_chosen_experts_alone_some_rows_at_a_time(monkeypatch):
    rng = np.random.default_rng(7)
    weight, x = strategies.weights(rng, FORMATS["Q5_K"], 6, 37, 256), strategies.normal(rng, 3, 256)
    packed, ids = packing.packed(weight), np.array([[4, 1], [4, 0], [1, 4]], np.int32)
    monkeypatch.setattr(sys.modules["fastpath.cpu.linear"], "DEQUANTIZED_VALUES", 16 * 256)
    want = cpu.expert_linear(x, weight, ids, "float")
    right, seen = PackedTensor.unpack_rows, []

    def unpack_rows(self, first, stop, matrix):
        seen.append((matrix, first, stop))
        return right(self, first, stop, matrix)

    monkeypatch.setattr(PackedTensor, "unpack_rows", unpack_rows)
    assert cpu.expert_linear(x, packed, ids, "float").tobytes() == want.tobytes()
    assert sorted(seen) == [(m, a, b) for m in (0, 1, 4) for a, b in ((0, 16), (16, 32), (32, 37))]


@pytest.mark.parametrize("name", ("Q4_0", "Q5_1", "Q4_K", "Q6_K", "F16"))
def test_experts(name):
    """Each expert is a matrix; one that nobody chose is not read, one chosen twice is."""
    rng = np.random.default_rng(6)
    weight = strategies.weights(rng, FORMATS[name], 5, 21, 256)
    packed = packing.packed(weight)
    for T in (1, 2, MATVEC_ROWS, MATVEC_ROWS + 1, 12):
        ids = np.argsort(rng.random((T, 5)), axis=1)[:, :3].astype(np.int32)
        ids[0] = 2  # more entries of one matrix than there are tokens
        for x in (strategies.normal(rng, T, 256), strategies.normal(rng, T, 3, 256)):
            got = cpu.expert_linear(x, packed, ids, "int8")
            assert got.tobytes() == cpu.expert_linear(x, weight, ids, "int8").tobytes()
            for t in range(T):
                for a in range(3):
                    row = x[t : t + 1] if x.ndim == 2 else x[t, a : a + 1]
                    alone = cpu.linear(row, weight.expert(int(ids[t, a])), "int8")
                    assert got[t, a].tobytes() == alone.tobytes()


@pytest.mark.parametrize("name", ("Q8_0", "Q2_K", "BF16"))
def test_threads_do_not_change_a_packed_product(name, n_threads):
    rng = np.random.default_rng(7)
    weight = strategies.weights(rng, FORMATS[name], 1000, 512)
    x, memories, results = strategies.normal(rng, 17, 512), set(), {}
    for n in (1, 2, 3):
        n_threads(n)
        packed = packing.packed(weight)
        memories.add(packed.memory.tobytes())
        for T in (1, 4, 17):
            results.setdefault(T, set()).add(cpu.linear(x[:T], packed, "int8").tobytes())
    assert len(memories) == 1
    assert all(len(each) == 1 for each in results.values())
