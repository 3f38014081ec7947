"""Integer dot products equal their definition in every bit, on the worst blocks that bytes can spell."""

import numpy as np
import pytest

import fastpath.cpu
import refimpl.ops
from fastpath.cpu import packing
from quant import FORMATS, QTensor
from tests import strategies

BLOCKS = ("random", "zeros", "ones", "finite")


@pytest.mark.parametrize("name", strategies.INTEGER_FORMATS)
def test_every_format_on_adversarial_blocks(name):
    fmt = FORMATS[name]
    rng = np.random.default_rng(sum(name.encode()))
    for blocks in BLOCKS:
        for T in (1, 4, 5, 9):
            M, C = (
                int(rng.integers(1, 37)),
                fmt.block_size * int(rng.integers(1, 4 if fmt.block_size > 32 else 19)),
            )
            weight = _weight(rng, fmt, M, C, blocks)
            _check(_activations(rng, T, C), weight, packing.packed(weight))


def test_activations_with_infinities_and_nans():
    rng = np.random.default_rng(5)
    for name in ("Q4_0", "Q4_K"):
        x = strategies.normal(rng, 3, 512)
        x[0, 3], x[1, 300], x[2, 511] = np.inf, np.nan, -np.inf
        _check(x, strategies.weights(rng, FORMATS[name], 5, 512))


# where the halves lie that all other numbers of a block are multiplied with
SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,)}
SCALES_AT |= {"Q6_K": (208,), "MXFP4": ()} | dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,))
# zero, -0, the smallest denormals, the largest numbers, 1, infinities, a NaN
ENDS = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0xFBFF, 0x3C00, 0x7C00, 0xFC00, 0x7E00)
EXPONENTS = (0, 1, 2, 126, 127, 128, 253, 254, 255)  # of MXFP4


@pytest.mark.parametrize("name", strategies.INTEGER_FORMATS)
def test_scales_and_codes_at_their_ends(name):
    """Every block of a matrix has one extreme scale, and codes that are all equal (0, the ends) or random."""
    fmt, rng = FORMATS[name], np.random.default_rng(1)
    C = 3 * fmt.block_size
    x = np.concatenate([_activations(rng, 8, C), _signs(rng, 9, C)])
    for end in EXPONENTS if name == "MXFP4" else ENDS:
        for byte in (0x00, 0x7F, 0x80, 0xFF, None):
            weight = strategies.random_blocks(rng, fmt, 17, C)
            blocks = weight.data.reshape(-1, fmt.block_bytes)
            if byte is not None:
                blocks[:] = byte
            if name == "MXFP4":
                blocks[:, 0] = end
            for at in SCALES_AT[name]:
                blocks[:, at : at + 2] = np.array([end], "<u2").view(np.uint8)
            for T in (1, 2, 4, 5, 17):
                _check(x[-T:] if T < 5 else x[:T], weight, packing.packed(weight))


def _signs(rng, T, C):
    """All activations at an end of int8: one row all positive, one all negative, the others mixed."""
    x = np.where(rng.random((T, C)) < 0.5, np.float32(3), np.float32(-3))
    x[-1], x[-2] = 3, -3
    return x


def test_blocks_at_the_border_of_nothing():
    """A block whose largest magnitude is 1e-30 counts, one just below it does not."""
    border, rng = np.float32(1e-30), np.random.default_rng(2)
    largest = np.array([np.nextafter(border, np.float32(0)), border, np.nextafter(border, np.float32(1))])
    for name in ("Q4_0", "Q5_1", "Q4_K", "Q6_K"):
        x = np.repeat(largest[:, None], 256, axis=1) * rng.choice([-1, 1], 256).astype(np.float32)
        weight = strategies.weights(rng, FORMATS[name], 21, 256)
        packed = packing.packed(weight)
        for rows in (x, x[1:2], np.tile(x, (6, 1))):
            _check(rows, weight, packed)
        y = fastpath.cpu.linear(x, weight, "int8")
        assert not y[0].any() and y[1].any() and y[2].any()


def _weight(rng, fmt, M, C, kind):
    if kind == "finite":
        return strategies.weights(rng, fmt, M, C)
    tensor = strategies.random_blocks(rng, fmt, M, C)
    if kind == "zeros":
        tensor.data[:] = 0
    elif (
        kind == "ones"
    ):  # all bits set: largest codes; as halves NaN, so set scales to the largest finite one
        tensor.data[:] = 0xFF
    # put special halves where most formats have a scale
    halves = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x3C00, 0x7C00], "<u2").view(np.uint8)
    blocks = tensor.data.reshape(-1, fmt.block_bytes)
    for b in range(0, len(blocks), 2):
        at = int(rng.choice([0, 2, fmt.block_bytes - 2]))
        pick = 2 * int(rng.integers(0, 8))
        blocks[b, at : at + 2] = halves[pick : pick + 2]
    return QTensor(fmt, tensor.shape, tensor.data, f"{fmt.name} {kind}")


def _activations(rng, T, C):
    x = strategies.normal(rng, T, C, scale=float(rng.choice([1e-3, 1.0, 100.0])))
    for row, kind in zip(x, strategies.SPECIAL_ROWS, strict=False):
        strategies.with_special_row(rng, row[None], kind)
    x[-1, : C // 2] = np.where(rng.random(C // 2) < 0.5, 127, -127)  # both ends of int8
    return x


def _check(x, weight, *others):
    """The definition's bytes from this form of a matrix, and from others."""
    with np.errstate(all="ignore"):
        want = refimpl.ops.linear(x, weight, "int8")
    for form in (weight, *others):
        got = fastpath.cpu.linear(x, form, "int8")
        # the sign and payload of a NaN are nobody's definition
        np.testing.assert_array_equal(
            np.where(np.isnan(got), 0, got).view(np.uint32),
            np.where(np.isnan(want), 0, want).view(np.uint32),
        )
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
