"""Weights as they lie in device memory: the codes of a format, in the order in which a warp reads them.

A warp's step is 4 rows times 8 units of 128 columns.  Lane 8r + u has unit u of row r.  What a unit needs is
cut into pieces of 16 bytes; piece p of all lanes lies side by side, so that one load of a warp is one stretch
of 512 bytes.  Rows are padded to a multiple of 4, columns to one of 256, with codes and scales of 0; the last
step of a row has the units that are left, 2, 4, 6 or 8, and its pieces are as much shorter.

    low    int32  the lower bits of 4 sub-blocks of 32 codes, one after the other: 8, 4 or 2 pieces of a unit
           for bytes, nibbles and pairs of bits; 32 and 16 bits: numbers as they are, 32 and 16 pieces
    high   int32  the bits above them: 1 piece of single bits, 2 of pairs of bits, or none
    sub    uint16 4 per unit, in pieces of 8 bytes.  Formats of 32 values: float16 scales of the sub-blocks;
                  with minima 8 in pieces of 16 bytes, scales first.  Formats of 256: bytes, the integer
                  scales of 4 sub-blocks and then their minima ("8 sc mn"); or those of 8 halves of
                  sub-blocks, signed ("16 sc") or a nibble of scale and one of minimum above it ("16 sc mn")
    block  uint16 formats of 256: float16 d, or d and dmin, of 4 rows: [tiles, blocks, 4 rows, 1 or 2]

Codes of 4 bits lie as in Q4_0: value i in the low, value i + 16 in the high nibbles of byte i; other fields
likewise: with n of them to a byte, value i + 32/n * k is field k of byte i.  Bytes per value are those of the
file, but for Q3_K, Q4_K and Q5_K, whose 12 bytes of scales become 16 (3.6, 2.8 and 2.3 % more).
"""

import weakref
from dataclasses import dataclass

import numpy as np

from fastpath.cuda import device
from quant import QTensor
from quant.fp4 import LEVELS as LEVELS_FP4
from quant.i_quantize import LEVELS as LEVELS_IQ4

ROWS, UNITS, UNIT, WIDTH = (
    4,
    8,
    128,
    32,
)  # of a step: rows, units of a row, columns of one, and of a sub-block
LANES, COLUMNS = ROWS * UNITS, UNITS * UNIT
PADDED = 256  # columns come in multiples of this
SLAB_VALUES = 1 << 24  # laid out at a time


@dataclass(frozen=True)
class Coding:
    """How the codes of a format are stored; value of a code = code - offset."""

    low_bits: int
    high_bits: int
    offset: int
    scales: str  # "d", "d m", "8 sc", "8 sc mn", "16 sc mn": what `sub` holds; "f32", "f16", "bf16": no codes
    levels: tuple[int, ...] | None = None  # a code stands for the integer of this number

    @property
    def is_256(self):
        return self.scales[0] in "81"

    @property
    def is_plain(self):
        """Numbers as they are."""
        return "f" in self.scales

    @property
    def has_minimum(self):
        return self.scales.endswith(("m", "mn"))


CODINGS = {
    "Q4_0": Coding(4, 0, 8, "d"),
    "Q4_1": Coding(4, 0, 0, "d m"),
    "Q5_0": Coding(4, 1, 16, "d"),
    "Q5_1": Coding(4, 1, 0, "d m"),
    "Q8_0": Coding(8, 0, 0, "d"),
    "Q2_K": Coding(2, 0, 0, "16 sc mn"),
    "Q3_K": Coding(2, 1, 4, "16 sc"),
    "Q4_K": Coding(4, 0, 0, "8 sc mn"),
    "Q5_K": Coding(4, 1, 0, "8 sc mn"),
    "Q6_K": Coding(4, 2, 32, "16 sc"),
    "MXFP4": Coding(4, 0, 0, "e", tuple(LEVELS_FP4.tolist())),
    "IQ4_NL": Coding(4, 0, 0, "d", tuple(LEVELS_IQ4.tolist())),
    "IQ4_XS": Coding(4, 0, 0, "16 sc", tuple(LEVELS_IQ4.tolist())),
    "F32": Coding(32, 0, 0, "f32"),
    "F16": Coding(16, 0, 0, "f16"),
    "BF16": Coding(16, 0, 0, "bf16"),
}


@dataclass(frozen=True, eq=False)
class DeviceMatrix:
    """A weight matrix [M, C], or a stack of them [E, M, C], in device memory; for the planes see above."""

    coding_name: str
    shape: tuple[int, ...]
    low: np.ndarray
    high: np.ndarray
    sub: np.ndarray
    block: np.ndarray
    name: str = ""

    @property
    def coding(self):
        return CODINGS[self.coding_name]

    @property
    def n_tiles(self):
        """Of one matrix."""
        return -(-self.shape[-2] // ROWS)

    @property
    def n_units(self):
        """Of a row."""
        return padded_columns(self.shape[-1]) // UNIT

    @property
    def nbytes(self):
        return sum(plane.nbytes for plane in self.planes)

    @property
    def read_bytes(self):
        """Without the one number that stands for a plane that there is not."""
        return sum(plane.nbytes for plane in self.planes if plane.size > 1)

    @property
    def planes(self):
        return self.low, self.high, self.sub, self.block


_known: weakref.WeakKeyDictionary[QTensor, tuple[object, DeviceMatrix]] = weakref.WeakKeyDictionary()


def on_device(weight) -> DeviceMatrix:
    """A weight as kernels read it: laid out and brought to the device once, as long as the tensor lives."""
    if isinstance(weight, DeviceMatrix):
        return weight
    here, known = device.real(), _known.get(weight)
    if known is None or known[0] is not here:
        made = device_matrix(weight)
        low, high, sub, block = (here.constant(plane, plane.dtype) for plane in made.planes)
        there = DeviceMatrix(made.coding_name, made.shape, low, high, sub, block, made.name)
        known = _known[weight] = here, there
    return known[1]


def matrices_on(here) -> list[DeviceMatrix]:
    """All that were brought to a device and are used somewhere."""
    return [made for its, made in list(_known.values()) if its is here]


def padded_columns(C):
    return -(-C // PADDED) * PADDED


def device_matrix(weight: QTensor) -> DeviceMatrix:
    """Lay a matrix, or a stack of them, out for the device, on the host.

    Formats without a layout of their own become float32: right, and large.

    Raises:
        ValueError: no matrix
    """
    if weight.ndim not in (2, 3):
        raise ValueError(
            f"{weight.name or 'tensor'}: shape {list(weight.shape)}, expected a matrix [M, C] or a stack of "
            "them [E, M, C]"
        )
    name = weight.format.name if weight.format.name in CODINGS else "F32"
    M, C = weight.shape[-2:]
    step = max(1, SLAB_VALUES // C // ROWS) * ROWS
    matrices = [weight] if weight.ndim == 2 else [weight.expert(e) for e in range(weight.shape[0])]
    slabs = [
        _planes(part.take_rows(start, min(start + step, M)), CODINGS[name])
        for part in matrices
        for start in range(0, M, step)
    ]
    low, high, sub, block = (_joined(plane) for plane in zip(*slabs, strict=True))
    return DeviceMatrix(name, weight.shape, low, high, sub, block, weight.name)


def _joined(slabs):
    """A plane of all tiles; of one that a format does not have, one number."""
    return np.concatenate([slab.reshape(-1) for slab in slabs]) if slabs[0].size > 1 else slabs[0].reshape(-1)


def _planes(rows: QTensor, coding):
    """low, high, sub, block of some rows, whole tiles of them."""
    M, C = rows.shape
    nothing = np.zeros(1, np.uint16)
    if coding.is_plain:
        return _tiled(_units(_plain(rows, coding))).view(np.int32), nothing.astype(np.int32), nothing, nothing
    assert rows.format.integer_parts is not None, f"{rows.format.name} has no integers, and a coding for them"
    parts = rows.format.integer_parts(rows.data.reshape(-1, rows.format.block_bytes))
    codes = parts[0].reshape(M, C)
    codes = codes + np.int16(coding.offset) if coding.levels is None else _numbers_of(codes, coding.levels)
    codes = _units(codes).astype(np.uint8)
    codes = codes.reshape(*codes.shape[:2], UNIT // WIDTH, WIDTH)
    low = _tiled(_fields(codes & np.uint8((1 << coding.low_bits) - 1), coding.low_bits)).view(np.int32)
    high = nothing.astype(np.int32)
    if coding.high_bits:
        high = _tiled(_fields(codes >> np.uint8(coding.low_bits), coding.high_bits)).view(np.int32)
    return low, high, *(_scales_256(M, parts, coding) if coding.is_256 else _scales_32(M, parts, coding))


def _plain(rows, coding):
    """Numbers in the bytes that they keep on the device."""
    if rows.format.name.lower() != coding.scales:
        return rows.dequantize(np.float32)
    return np.ascontiguousarray(rows.data).view("<f4" if coding.low_bits == 32 else "<u2")


def _numbers_of(values, levels):
    """Which level each value is."""
    number = np.zeros(256, np.int16)
    number[np.array(levels[::-1]) + 128] = np.arange(len(levels))[::-1]
    return number[values.astype(np.int16) + 128]


def _units(values, per_unit=UNIT):
    """[M, n] -> [tiles * 4, units, per_unit], padded with zeros; a unit has `per_unit` of the values."""
    M, n = values.shape
    per_padded = per_unit * PADDED // UNIT
    whole = np.zeros((-(-M // ROWS) * ROWS, -(-n // per_padded) * per_padded), values.dtype)
    whole[:M, :n] = values
    return whole.reshape(len(whole), -1, per_unit)


def _tiled(units):
    """[tiles * 4, units, ...] -> the pieces of step after step, bytes [tiles, all]."""
    n_rows, n_units = units.shape[:2]
    units = np.ascontiguousarray(units).reshape(n_rows, n_units, -1).view(np.uint8)
    piece = min(16, units.shape[-1])
    units = units.reshape(n_rows // ROWS, ROWS, n_units, -1, piece)
    steps = [units[:, :, first : first + UNITS] for first in range(0, n_units, UNITS)]
    in_order = (step.transpose(0, 3, 1, 2, 4).reshape(len(step), -1) for step in steps)
    return np.concatenate(list(in_order), axis=1)


def _fields(codes, bits):
    """32 codes of so many bits, several to a byte: value i + 32/n * k is field k of byte i."""
    per_byte = 8 // bits
    fields = codes.reshape(*codes.shape[:-1], per_byte, -1)
    shifts = np.uint8(bits) * np.arange(per_byte, dtype=np.uint8)
    return np.bitwise_or.reduce(fields << shifts[:, None], axis=-2)


def _halves(values):
    """float32 numbers that were float16 once, as bits."""
    with np.errstate(invalid="ignore", over="ignore"):
        return values.astype(np.float16).view(np.uint16)


def _upper_halves(powers):
    """Powers of two, which float16 does not hold, as bfloat16."""
    return (powers.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _scales_32(M, parts, coding):
    narrow = _upper_halves if coding.scales == "e" else _halves
    planes = [_units(narrow(part).reshape(M, -1), UNIT // WIDTH) for part in parts[1:] if part is not None]
    return _tiled(np.concatenate(planes, axis=2)).view(np.uint16), np.zeros(1, np.uint16)


def _scales_256(M, parts, coding):
    _, sc, mn, d, dmin = parts
    planes = [
        _units(part.reshape(M, -1).astype(np.int16), UNIT // 16) for part in (sc, mn) if part is not None
    ]  # one per 16 values
    if coding.scales == "8 sc mn":
        sub = np.concatenate([plane[..., ::2] for plane in planes], axis=2)
    elif coding.scales == "16 sc mn":
        sub = planes[0] | planes[1] << 4
    else:  # signed bytes
        sub = planes[0] & 0xFF
    blocks = []
    for part in (d, dmin):
        if part is not None:
            rows = np.zeros((-(-M // ROWS) * ROWS, len(part) // M), np.uint16)
            rows[:M] = _halves(part).reshape(M, -1)
            blocks.append(rows.reshape(-1, ROWS, rows.shape[1]).swapaxes(1, 2))
    return _tiled(sub.astype(np.uint8)).view(np.uint16), np.stack(blocks, axis=-1)
