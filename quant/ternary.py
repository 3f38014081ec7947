"""TQ1_0, TQ2_0 and Q1_0: weights of three values, or of two.

    TQ1_0   54  48 bytes of 5 ternary digits, 4 bytes of 4, d      value = d*(digit - 1)
    TQ2_0   66  64 bytes of 2-bit fields, d                        value = d*(field - 1)
    Q1_0    18  d, 16 bytes of bits (128 values)                   value = d or -d

A TQ1_0 byte is the fraction 0.digit digit ... in base 3, scaled to 256 and rounded up: multiplying by 3 moves
the first digit above the byte, so digits are read without division.
"""

from __future__ import annotations

import numpy as np

from quant.bits import pack_fields, read_f16, reciprocal, round_half_away, unpack_fields, write_f16
from quant.format import Format

# Bytes, digits per byte: the digits of the first run come as 5 planes of 32, then 5 of 16, then 4 of 4.
_TQ1_RUNS = ((0, 32, 5), (32, 48, 5), (48, 52, 4))


def _scaled(d, digits):
    with np.errstate(invalid="ignore", over="ignore"):
        return d[:, None] * (digits.astype(np.int8) - np.int8(1)).astype(np.float32)


def _dequantize_tq1_0(blocks):
    planes = []
    for start, stop, n_digits in _TQ1_RUNS:
        powers = np.array([3**k for k in range(n_digits)], np.uint8)[:, None]
        fraction = (blocks[:, None, start:stop] * powers).astype(
            np.uint16
        )  # modulo 256: drops the digits before
        planes.append((fraction * np.uint16(3) >> np.uint16(8)).reshape(len(blocks), -1))
    return _scaled(read_f16(blocks, 52), np.hstack(planes))


def _dequantize_tq2_0(blocks):
    return _scaled(read_f16(blocks, 64), unpack_fields(blocks[:, :64], 32, 2))


def _round_to_digits(x):
    """Divide by the largest magnitude, then round.  Returns d f32[n], digits u8[n, 256] of 0, 1, 2."""
    d = np.abs(x).max(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        digits = round_half_away(x * reciprocal(d)[:, None]).astype(np.int8) + np.int8(1)
    return d, digits.view(np.uint8)


def _quantize_tq1_0(x):
    d, digits = _round_to_digits(x)
    packed, first = [], 0
    for start, stop, n_digits in _TQ1_RUNS:
        width = stop - start
        planes = digits[:, first : first + n_digits * width].reshape(-1, n_digits, width).astype(np.uint32)
        first += n_digits * width
        number = (planes * np.array([3 ** (4 - k) for k in range(n_digits)], np.uint32)[:, None]).sum(axis=1)
        packed.append(((number * 256 + 242) // 243).astype(np.uint8))
    return np.hstack([*packed, write_f16(d)])


def _quantize_tq2_0(x):
    d, digits = _round_to_digits(x)
    return np.hstack([pack_fields(digits, 32, 2), write_f16(d)])


def _dequantize_q1_0(blocks):
    d = read_f16(blocks, 0)[:, None]
    return np.where(unpack_fields(blocks[:, 2:], 1, 1) == 0, -d, d)


FORMATS = (
    Format("TQ1_0", 34, 256, 54, _dequantize_tq1_0, _quantize_tq1_0),
    Format("TQ2_0", 35, 256, 66, _dequantize_tq2_0, _quantize_tq2_0),
    Format("Q1_0", 41, 128, 18, _dequantize_q1_0),
)
