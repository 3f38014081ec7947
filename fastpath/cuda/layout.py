"""Weights as they lie in device memory: the codes of a format, in the order in which a warp reads them.

A warp's step is 4 rows times 256 columns.  Lane 8r + j holds the 32 columns of sub-block j of row r; what
they all need next lies side by side, so that one load of a warp is one piece of 512 (or 128, or 64) bytes.
Rows are padded to a multiple of 4, columns to one of 256, with codes and scales of 0.

    low    int32  the lower bits of 32 codes: 8 words of bytes, 4 of nibbles, 2 of pairs of bits per lane;
                  16-byte pieces of the 32 lanes follow each other
    high   int32  the bits above them: 1 word of single bits, 2 of pairs of bits per lane, or none
    sub    uint16 per lane and plane: formats of 32 values have a float16 scale and perhaps a minimum, those
                  of 256 their integer scales and minima
    block  uint16 formats of 256: float16 d and perhaps dmin, of 4 rows

Codes of 4 bits lie as in Q4_0: value i in the low, value i + 16 in the high nibbles of byte i; other fields
likewise: with n of them to a byte, value i + 32/n * k is field k of byte i.  Bytes per value are those of the
file, but for Q3_K, Q4_K and Q5_K, whose 12 bytes of scales become 16 (3.6, 2.8 and 2.3 % more).
"""

from dataclasses import dataclass

import numpy as np

from quant import QTensor

ROWS, SUB_BLOCKS, WIDTH = 4, 8, 32
LANES, COLUMNS = ROWS * SUB_BLOCKS, SUB_BLOCKS * WIDTH


@dataclass(frozen=True)
class Coding:
    """How the codes of a format are stored; value of a code = code - offset."""

    low_bits: int
    high_bits: int
    offset: int
    scales: str  # "d", "d m", "8 sc", "8 sc mn", "16 sc mn": what `sub` holds

    @property
    def is_256(self):
        return self.scales[0] in "81"

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
}


@dataclass(frozen=True, eq=False)
class DeviceMatrix:
    """A weight matrix [M, C] in device memory; for the planes see above."""

    format_name: str
    shape: tuple[int, int]
    low: np.ndarray
    high: np.ndarray
    sub: np.ndarray
    block: np.ndarray
    name: str = ""

    @property
    def coding(self):
        return CODINGS[self.format_name]

    @property
    def n_tiles(self):
        return -(-self.shape[0] // ROWS)

    @property
    def nbytes(self):
        return sum(plane.nbytes for plane in (self.low, self.high, self.sub, self.block))

    @property
    def planes(self):
        return self.low, self.high, self.sub, self.block


def padded_columns(C):
    return -(-C // COLUMNS) * COLUMNS


def device_matrix(weight: QTensor) -> DeviceMatrix:
    """Lay a matrix out for the device, on the host.

    Raises:
        ValueError: no layout for this format, or no matrix
    """
    where = weight.name or "tensor"
    if weight.format.name not in CODINGS:
        raise ValueError(
            f"{where}: {weight.format.name} has no layout on the device. It has: {', '.join(CODINGS)}"
        )
    if weight.ndim != 2:
        raise ValueError(
            f"{where}: shape {list(weight.shape)} is no matrix [M, C]. Lay out one expert at a time"
        )
    coding = CODINGS[weight.format.name]
    parts = weight.format.integer_parts(weight.data.reshape(-1, weight.format.block_bytes))
    M, C = weight.shape
    codes = _lanes(parts[0].reshape(M, C) + np.int16(coding.offset), WIDTH).astype(np.uint8)
    mask = np.uint8((1 << coding.low_bits) - 1)
    low = _fields(codes & mask, coding.low_bits)  # u8[tiles, steps, 32 lanes, bytes]
    pieces = low.reshape(*low.shape[:-1], -1, min(16, low.shape[-1]))
    low = np.ascontiguousarray(np.moveaxis(pieces, -2, -3)).view(np.int32)
    if coding.high_bits:
        high = _fields(codes >> np.uint8(coding.low_bits), coding.high_bits).view(np.int32)
    else:
        high = np.zeros(1, np.int32)
    sub, block = _scales_256(M, parts, coding) if coding.is_256 else _scales_32(M, parts)
    return DeviceMatrix(
        weight.format.name,
        (M, C),
        low.reshape(-1),
        high.reshape(-1),
        sub.reshape(-1),
        block.reshape(-1),
        weight.name,
    )


def _lanes(values, per_lane):
    """[M, n * per_lane] -> [tiles, steps, 32 lanes, per_lane], padded with zeros."""
    M, n = values.shape[0], values.shape[1] // per_lane
    steps = -(-n // SUB_BLOCKS)
    whole = np.zeros((-(-M // ROWS) * ROWS, steps * SUB_BLOCKS, per_lane), values.dtype)
    whole[:M, :n] = values.reshape(M, n, per_lane)
    tiles = whole.reshape(-1, ROWS, steps, SUB_BLOCKS, per_lane).swapaxes(1, 2)
    return np.ascontiguousarray(tiles).reshape(len(tiles), steps, LANES, per_lane)


def _fields(codes, bits):
    """32 codes of so many bits, several to a byte: value i + 32/n * k is field k of byte i."""
    per_byte = 8 // bits
    fields = codes.reshape(*codes.shape[:-1], per_byte, -1)
    shifts = np.uint8(bits) * np.arange(per_byte, dtype=np.uint8)
    return np.ascontiguousarray(np.bitwise_or.reduce(fields << shifts[:, None], axis=-2))


def _halves(values):
    """float32 numbers that were float16 once, as bits."""
    with np.errstate(invalid="ignore", over="ignore"):
        return values.astype(np.float16).view(np.uint16)


def _scales_32(M, parts):
    planes = [_lanes(_halves(part).reshape(M, -1), 1) for part in parts[1:] if part is not None]
    return np.stack(planes, axis=2), np.zeros(1, np.uint16)  # [tiles, steps, planes, 32 lanes]


def _scales_256(M, parts, coding):
    _, sc, mn, d, dmin = parts
    planes = [part.reshape(M, -1, 8, 2) for part in (sc, mn) if part is not None]  # two per 32 values
    if coding.scales == "8 sc mn":
        words = planes[0][..., 0] | planes[1][..., 0] << 8
    elif coding.scales == "16 sc mn":
        nibbles = planes[0] | planes[1] << 4
        words = nibbles[..., 0] | nibbles[..., 1] << 8
    else:  # signed bytes
        words = (planes[0][..., 0] & 0xFF) | (planes[0][..., 1] & 0xFF) << 8
    sub = _lanes(words.astype(np.int16).view(np.uint16).reshape(M, -1), 1)
    blocks = []
    for part in (d, dmin):
        if part is not None:
            rows = np.zeros((-(-M // ROWS) * ROWS, len(part) // M), np.uint16)
            rows[:M] = _halves(part).reshape(M, -1)
            blocks.append(rows.reshape(-1, ROWS, rows.shape[1]).swapaxes(1, 2))
    return sub, np.stack(blocks, axis=2)  # [tiles, steps, planes, 4 rows]
