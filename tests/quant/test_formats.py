"""Every format against the gguf package (bit for bit), ggml's recorded answers, and hand arithmetic."""

import json

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

import quant
from oracles import record_quant
from tests import tolerances

PLAIN = ("I8", "I16", "I32", "I64", "F64")
NOT_IN_GGUF = ("Q1_0",)
CHECKED = [name for name in quant.FORMATS if name not in PLAIN + NOT_IN_GGUF]
QUANTIZED_BY_GGUF = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 TQ1_0 TQ2_0 MXFP4".split()
WITH_INTEGER_PARTS = [name for name, fmt in quant.FORMATS.items() if fmt.integer_parts]

# float16 patterns: 0, -0, smallest and largest denormal, smallest normal, 1, largest, infinities, NaNs.
EXTREMES = [
    0x0000,
    0x8000,
    0x0001,
    0x83FF,
    0x0400,
    0x3C00,
    0x7BFF,
    0xFBFF,
    0x7C00,
    0xFC00,
    0x7E00,
    0xFE01,
    0x7C01,
]


def gguf_type(name: str) -> GGMLQuantizationType:
    if not hasattr(GGMLQuantizationType, name):
        pytest.skip(f"this gguf package does not know {name}")
    return GGMLQuantizationType[name]


def by_gguf(data: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, gguf_type(name))


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == theirs.dtype == np.float32
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def random_blocks(name: str, seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, quant.FORMATS[name].block_bytes), dtype=np.uint8)


@pytest.mark.parametrize("name", sorted({*CHECKED, *NOT_IN_GGUF, *PLAIN}))
def test_ids_and_sizes_are_ggufs(name):
    fmt = quant.FORMATS[name]
    kind = gguf_type(name)
    assert (fmt.ggml_id, (fmt.block_size, fmt.block_bytes)) == (kind.value, gguf.GGML_QUANT_SIZES[kind])
    assert quant.format_by_id(kind.value) is fmt


@pytest.mark.parametrize("name", CHECKED)
@settings(max_examples=20)
@given(data=st.data())
def test_dequantize_equals_gguf(name, data):
    width = quant.FORMATS[name].block_bytes
    n = data.draw(st.integers(1, 4))
    raw = data.draw(st.binary(min_size=n * width, max_size=n * width))
    blocks = np.frombuffer(raw, np.uint8).reshape(n, width)
    assert_same_bits(quant.dequantize(blocks, name), by_gguf(blocks, name))


@pytest.mark.parametrize("name", CHECKED)
def test_dequantize_equals_gguf_on_many_rows(name):
    rows = random_blocks(name, 1, 3000).reshape(300, -1)
    assert_same_bits(quant.dequantize(rows, name), by_gguf(rows, name))


@pytest.mark.parametrize("name", CHECKED)
def test_dequantize_equals_gguf_for_extreme_scales(name):
    """Each extreme float16 pattern at every byte of a block, so also where the scales are."""
    width = quant.FORMATS[name].block_bytes
    for pattern in EXTREMES:
        blocks = random_blocks(name, pattern, width)
        for at in range(width):
            blocks[at, at : at + 2] = np.frombuffer(np.uint16(pattern).tobytes(), np.uint8)[: width - at]
        assert_same_bits(quant.dequantize(blocks, name), by_gguf(blocks, name))


@pytest.mark.parametrize("name", record_quant.FORMATS)
def test_dequantize_equals_ggml(name):
    """The C code agrees, on the random blocks whose values are finite."""
    golden = json.loads(record_quant.GOLDEN.read_text())["dequantized"][name]
    values = quant.dequantize(record_quant.random_blocks(name), name)
    assert record_quant.digest(values) == golden


@pytest.mark.parametrize("name", QUANTIZED_BY_GGUF)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_quantize_equals_gguf(name, scale):
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((40, 512)) * scale * np.exp(rng.standard_normal((40, 1)))).astype(np.float32)
    x[0], x[1, :256], x[2, ::2] = 0, -0.0, 0
    x[3] = np.round(x[3] / scale * 4) / 4  # ties
    x[4, 7] = -40 * scale
    assert_quantized_as_by_gguf(x, name)


@pytest.mark.parametrize("name", QUANTIZED_BY_GGUF)
@settings(max_examples=20)
@given(data=st.data())
def test_quantize_equals_gguf_for_drawn_values(name, data):
    size = quant.FORMATS[name].block_size
    magnitudes = st.floats(2**-10, 2**12, width=32)
    numbers = st.one_of(
        st.just(0.0), magnitudes, magnitudes.map(lambda v: -v), st.integers(-40, 40).map(float)
    )
    few = data.draw(st.lists(numbers, min_size=1, max_size=min(size, 16)))
    assert_quantized_as_by_gguf(np.resize(np.array(few, np.float32), (1, size)), name)


def assert_quantized_as_by_gguf(x: np.ndarray, name: str) -> None:
    with np.errstate(all="ignore"):
        theirs = gguf.quants.quantize(x, gguf_type(name))
    np.testing.assert_array_equal(quant.quantize(x, name), theirs.view(np.uint8).reshape(len(x), -1))


def test_special_floats_survive_the_float_formats():
    bits = [
        0x7FC00000,
        0x7F800001,
        0xFFFFFFFF,
        0x7F800000,
        0xFF800000,
        0x80000000,
        0x00000001,
        0x7F7FFFFF,
        0x3F808000,
    ]
    x = np.array([bits], np.uint32).view(np.float32)
    for name in ("F32", "BF16"):
        assert_quantized_as_by_gguf(x, name)
    x = np.array([[np.nan, np.inf, -np.inf, -0.0, 6e-8, 65504, 65536, 1e-9]], np.float32)
    assert_quantized_as_by_gguf(x, "F16")


@pytest.mark.parametrize("name", WITH_INTEGER_PARTS)
def test_integer_parts_give_the_values(name):
    fmt = quant.FORMATS[name]
    blocks = random_blocks(name, 9, 400)
    values = fmt.dequantize_blocks(blocks)
    q, *rest = fmt.integer_parts(blocks)
    assert (q.dtype, q.shape) == (np.int8, (400, fmt.block_size))
    if fmt.block_size == 32:
        d, m = rest
        sc, mn, dmin = np.ones((400, 2), np.int16), None if m is None else -np.ones((400, 2), np.int16), m
    else:
        sc, mn, d, dmin = rest
        assert (sc.dtype, sc.shape) == (np.int16, (400, 16)) and (mn is None) == (dmin is None)
    assert d.dtype == np.float32 and d.shape == (400,)
    width = fmt.block_size // sc.shape[1]
    with np.errstate(invalid="ignore"):
        first = d.astype(np.float64)[:, None] * np.repeat(sc, width, axis=1) * q
        second = 0 if mn is None else dmin.astype(np.float64)[:, None] * np.repeat(mn, width, axis=1)
        exact, bound = first - second, tolerances.INTEGER_PARTS_REL * (np.abs(first) + np.abs(second))
    finite = np.isfinite(values).all(axis=1)
    assert finite.mean() > 0.8
    assert (np.abs(values - exact) <= bound)[finite].all()


# Blocks worked out by hand: format, block, first values.  0x3C00 is 1.0 and 0x4000 is 2.0 in float16.
F16_ONE, F16_TWO = bytes([0x00, 0x3C]), bytes([0x00, 0x40])
BY_HAND = [
    ("Q8_0", F16_TWO + bytes([1, 2, 0xFF, *range(3, 32)]), [2, 4, -2, 6]),
    ("Q4_0", F16_TWO + bytes([0x80, 0x9F]) + bytes(14), [2 * (0 - 8), 2 * (15 - 8), -16]),
    ("Q4_1", F16_TWO + F16_ONE + bytes([0x80, 0x9F]) + bytes(14), [1, 31, 1]),
    ("Q5_0", F16_ONE + bytes([0b10, 0, 0, 0]) + bytes([0x03, 0x03]) + bytes(14), [3 - 16, 3 + 16 - 16, -16]),
    ("Q5_1", F16_TWO + F16_ONE + bytes([0b10, 0, 0, 0]) + bytes([0x03, 0x03]) + bytes(14), [7, 39, 1]),
    (
        "Q2_K",
        bytes([0x32] + [0] * 15) + bytes([0b11, 0b10]) + bytes(62) + F16_ONE + F16_TWO,
        [6 - 6, 4 - 6, -6],
    ),
    (
        "Q6_K",
        bytes([0x05]) + bytes(127) + bytes([0b10]) + bytes(63) + bytes([2] * 16) + F16_ONE,
        [2 * (37 - 32), -64],
    ),
    ("IQ4_NL", F16_ONE + bytes([0x10, 0xF8]) + bytes(14), [-127, 1, -127]),
    ("TQ2_0", bytes([0b10, 0b01]) + bytes(62) + F16_TWO, [2, 0, -2]),
    ("Q1_0", F16_TWO + bytes([0b101]) + bytes(15), [2, -2, 2, -2]),
    ("MXFP4", bytes([128]) + bytes([0x07, 0x0F, 0x01]) + bytes(13), [12, -12, 1, 0]),
    ("NVFP4", bytes([0x38, 0x40, 0, 0]) + bytes([0x07, 0x0F, 0x01]) + bytes(29), [6, -6, 0.5, 0]),
    ("BF16", bytes([0x80, 0x3F]), [1]),
]


@pytest.mark.parametrize("name, block, expected", BY_HAND, ids=[row[0] for row in BY_HAND])
def test_blocks_worked_out_by_hand(name, block, expected):
    values = quant.dequantize(np.frombuffer(block, np.uint8), name)
    np.testing.assert_array_equal(values[: len(expected)], np.float32(expected))


@pytest.mark.parametrize("name", PLAIN)
def test_plain_types_become_float32(name):
    dtype = name.lower().replace("i", "int").replace("f", "float")
    numbers = np.array([[0, 1, -2, 100]], dtype)
    np.testing.assert_array_equal(quant.dequantize(numbers.view(np.uint8), name), np.float32(numbers))


def test_unknown_formats_are_named():
    with pytest.raises(ValueError, match=r"tensor type 99 is not supported; supported: F32, F16"):
        quant.format_by_id(99)
    with pytest.raises(ValueError, match=r"no format named 'Q9_9'"):
        quant.quantize(np.zeros(32), "Q9_9")
    with pytest.raises(ValueError, match=r"blk.0: there is no quantiser for IQ1_S"):
        quant.quantize(np.zeros(256), "IQ1_S", "blk.0")


@pytest.mark.parametrize(
    "x, name, message",
    [
        (np.zeros((2, 33)), "Q4_0", "w: row of 33 values is not a multiple of the Q4_0 block of 32"),
        (np.float32(1), "F32", "w: a single number has no rows"),
        (np.array([[0.0] * 31 + [np.nan]]), "Q8_0", r"w: nan at \(0, 31\) has no place in a Q8_0 block"),
        (np.full((1, 256), 1e30), "Q4_K", "w: values up to 1e.30 overflow the scale of Q4_K"),
        (np.full((1, 32), -1e9), "Q8_0", "w: values up to 1e.09 overflow the scale of Q8_0"),
    ],
)
def test_what_cannot_be_quantized_is_said(x, name, message):
    with pytest.raises(ValueError, match=message):
        quant.quantize(x, name, "w")


def test_dequantize_refuses_partial_blocks():
    with pytest.raises(
        ValueError, match=r"Q4_0 bytes: got uint8\[2, 19\], expected uint8 rows of a multiple of 18"
    ):
        quant.dequantize(np.zeros((2, 19), np.uint8), "Q4_0")
