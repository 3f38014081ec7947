"""The integer contract, step by step against exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest

from quant import FORMATS, QTensor
from refimpl import ops
from refimpl.ops.integer import fma, integer_linear, round_activations

RNG = np.random.default_rng(11)
INTEGER_FORMATS = [name for name, fmt in FORMATS.items() if fmt.integer_parts is not None]


def round_to_float32(exact):
    """A Fraction to the nearest float32, ties to even: of three neighbours the nearest, then the even one."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(side)) for side in (-np.inf, np.inf)] + [guess]
    return min(near, key=lambda f: (abs(Fraction(float(f)) - exact), int(f.view(np.int32)) & 1))


def exact_fma(a, b, c):
    return round_to_float32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def assert_fma_is_exact(a, b, c):
    got = fma(a, b, c)
    want = np.array([exact_fma(*abc) for abc in zip(a, b, c)], np.float32)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == np.float32


def integers(n, bits=24):
    return RNG.integers(-(2**bits), 2**bits, n)


def test_fma_on_random_numbers():
    n = 3000
    a, b = (integers((2, n)) * 2.0 ** RNG.integers(-40, 10, (2, n))).astype(np.float32)
    size = 2.0 ** RNG.integers(-26, 27, n)
    c = (-a.astype(np.float64) * b * size * (1 + integers(n, 3) * 2.0**-20)).astype(np.float32)
    assert_fma_is_exact(a, b, c)


def test_fma_next_to_ties():
    """a*b is about half a unit of c: rounding twice, by way of float64, errs on some of these."""
    n = 2000
    a = np.full(n, 1 + 2.0**-23, np.float32)
    b = (2.0**-24 * (1 + RNG.integers(-2, 3, n) * 2.0**-23)).astype(np.float32)
    c = (1 + RNG.integers(0, 4, n) * 2.0**-23).astype(np.float32) * RNG.choice(np.float32([-1, 1]), n)
    assert_fma_is_exact(a, b, c)
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice != fma(a, b, c)).any()


def test_fma_on_denormals_and_zeros():
    a, b = (integers((2, 500)) * 2.0**-90).astype(np.float32)
    assert_fma_is_exact(a, b, (integers(500, 7) * 2.0**-149).astype(np.float32))
    zeros = np.float32([0, 0, -0.0])
    assert np.signbit(fma(zeros, np.float32([1, -1, 1]), np.float32([0, 0, -0.0]))).tolist() == [
        False,
        False,
        True,
    ]


def test_round_activations_by_hand():
    x = np.zeros((1, 96), np.float32)
    x[0, :4] = [127, -126.5, 0.5, 1.5]  # ties go to even numbers
    x[0, 32:34] = [-4, 1]
    x[0, 64] = 1e-31  # too small to say anything
    q, scale = round_activations(x, 32)
    assert q[0, 0, :4].tolist() == [127, -126, 0, 2]
    assert q[0, 1, :2].tolist() == [-127, 32]  # 31.75
    assert not q[0, 2].any()
    np.testing.assert_array_equal(scale, np.float32([[1, np.float32(4) / np.float32(127), 0]]))


def test_round_activations_is_within_half_a_step():
    x = (RNG.standard_normal((5, 512)) * 10.0 ** RNG.integers(-6, 6, (5, 1))).astype(np.float32)
    q, scale = round_activations(x, 256)
    error = np.abs(x.reshape(5, 2, 256) - q.astype(np.float64) * scale[..., None])
    assert (error <= 0.5001 * scale[..., None]).all()
    assert np.abs(q.astype(int)).max() == 127


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_noticed(bad):
    x = np.ones((2, 64), np.float32)
    x[0, 40] = bad
    out = integer_linear(x, QTensor.from_array(np.ones((3, 64), np.float32), "Q8_0"))
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


def chain(x, blocks, fmt):
    """The definition for one output, in Fractions with one rounding per stated step."""
    parts = fmt.integer_parts(blocks)
    q, s = round_activations(x[None], fmt.block_size)
    acc = np.float32(0)
    for b in range(len(blocks)):
        x_q, x_s = q[0, b].astype(int).tolist(), s[0, b]
        w_q = parts[0][b].astype(int).tolist()
        if fmt.block_size == 256:
            _, sc, mn, d, dmin = parts
            total = sum(int(sc[b, i // 16]) * w_q[i] * x_q[i] for i in range(256))
            acc = exact_fma(round_to_float32(Fraction(total)), d[b] * x_s, acc)
            if mn is not None:
                total = sum(int(mn[b, i // 16]) * x_q[i] for i in range(256))
                acc = exact_fma(round_to_float32(Fraction(total)), dmin[b] * -x_s, acc)
        else:
            _, d, m = parts
            acc = exact_fma(np.float32(sum(w * a for w, a in zip(w_q, x_q))), d[b] * x_s, acc)
            if m is not None:
                acc = exact_fma(np.float32(sum(x_q)), m[b] * x_s, acc)
    return acc


@pytest.mark.parametrize("name", INTEGER_FORMATS)
def test_chain(name):
    """Blocks of random bits (scales finite), against the formula."""
    fmt = FORMATS[name]
    blocks = random_blocks(fmt, 4 * 3)
    weight = QTensor(fmt, (4, 3 * fmt.block_size), blocks.reshape(4, -1), "w")
    x = (RNG.standard_normal((2, 3 * fmt.block_size)) * 3).astype(np.float32)
    got = integer_linear(x, weight)
    for t in range(2):
        for m in range(4):
            assert got[t, m] == chain(x[t], blocks.reshape(4, 3, -1)[m], fmt)


def random_blocks(fmt, n):
    blocks = RNG.integers(0, 256, (n, fmt.block_bytes)).astype(np.uint8)
    while True:
        parts = fmt.integer_parts(blocks)
        scales = [part for part in parts[1 if fmt.block_size == 32 else 3 :] if part is not None]
        bad = ~np.all([np.isfinite(part) for part in scales], axis=0)
        if not bad.any():
            return blocks
        blocks[bad] = RNG.integers(0, 256, (bad.sum(), fmt.block_bytes))


@pytest.mark.parametrize("name", INTEGER_FORMATS)
def test_a_row_does_not_feel_its_batch(name):
    fmt = FORMATS[name]
    weight = QTensor(fmt, (7, 2 * fmt.block_size), random_blocks(fmt, 14).reshape(7, -1), "w")
    x = RNG.standard_normal((33, 2 * fmt.block_size)).astype(np.float32)
    together = ops.linear(x, weight, "int8")
    for t in (0, 1, 17, 32):
        np.testing.assert_array_equal(ops.linear(x[t : t + 1], weight, "int8")[0], together[t])
