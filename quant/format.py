"""The record that describes one tensor format: its block geometry and its functions on blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Format:
    """One ggml tensor type.

    A row of a tensor is cut into blocks of `block_size` values; each block is `block_bytes` bytes.

    Shapes:
        dequantize_blocks  u8[n, block_bytes] -> f32[n, block_size]
        quantize_blocks    f32[n, block_size] -> u8[n, block_bytes]; None when nobody defines it
        integer_parts      u8[n, block_bytes] -> the integers and scales of integer dot products; None for
                           formats without them.  Two shapes of answer:
            32-value blocks   (q i8[n, 32], d f32[n], m f32[n] | None)          value = d*q + m
            256-value blocks  (q i8[n, 256], sc i16[n, 16], mn i16[n, 16] | None,
                               d f32[n], dmin f32[n] | None)
                              value = d*sc*q - dmin*mn, one sc and mn per 16 values
    """

    name: str
    ggml_id: int
    block_size: int
    block_bytes: int
    dequantize_blocks: Callable[[np.ndarray], np.ndarray] = field(repr=False)
    quantize_blocks: Callable[[np.ndarray], np.ndarray] | None = field(default=None, repr=False)
    integer_parts: Callable[[np.ndarray], tuple] | None = field(default=None, repr=False)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_size

    def row_bytes(self, row_len: int, name: str = "") -> int:
        """Bytes of a row of `row_len` values; ValueError when the row is not whole blocks."""
        if row_len % self.block_size:
            where = f"{name}: " if name else ""
            raise ValueError(
                f"{where}row of {row_len} values is not a multiple of the {self.name} block of "
                f"{self.block_size}. "
                "Choose a format with a smaller block, or pad the row"
            )
        return row_len // self.block_size * self.block_bytes
