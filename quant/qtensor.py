"""QTensor: the one weight type, a shape and a format on bytes that may lie in a memory-mapped file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from quant.format import Format
from quant.registry import as_format, dequantize, quantize


@dataclass(frozen=True, eq=False)
class QTensor:
    """A tensor as a file holds it.

    Shapes:
        shape  NumPy order: the last axis is a row, stored as contiguous blocks
        data   u8[*shape[:-1], row_bytes], a view: making, slicing and passing a QTensor copies nothing
    """

    format: Format
    shape: tuple[int, ...]
    data: np.ndarray = field(repr=False)
    name: str = ""

    def __post_init__(self):
        where = self._where
        if not self.shape:
            raise ValueError(f"{where}: shape () has no rows; expected at least one axis")
        expected = (*self.shape[:-1], self.format.row_bytes(self.shape[-1], where))
        if self.data.dtype != np.uint8 or self.data.shape != expected:
            raise ValueError(
                f"{where}: data is {self.data.dtype}{list(self.data.shape)} but {self.format.name} of shape "
                f"{list(self.shape)} is uint8{list(expected)}"
            )

    @classmethod
    def from_array(cls, x, format_name: str | Format, name: str = "") -> QTensor:
        """Quantise an array."""
        fmt = as_format(format_name)
        return cls(fmt, tuple(np.shape(x)), quantize(x, fmt, name), name)

    @property
    def _where(self) -> str:
        return self.name or "tensor"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def row_len(self) -> int:
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        return self.data.shape[-1]

    @property
    def n_rows(self) -> int:
        """Rows of all leading axes together."""
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.n_rows * self.row_bytes

    def dequantize(self, dtype=np.float32):
        """All values as a fresh array of `shape`; float32 arithmetic, then a cast to `dtype`."""
        return dequantize(self.data, self.format, dtype)

    def rows(self, ids):
        """Dequantise the rows with these numbers and touch no others; leading axes count as one.

        Shapes:
            ids  i[M]
        Returns:
            f32[M, row_len]
        """
        ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        if ids.size and (ids.min() < 0 or ids.max() >= self.n_rows):
            bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise ValueError(
                f"{self._where}: row {bad}, but it has {self.n_rows} rows, 0 .. {self.n_rows - 1}"
            )
        # Indexing by coordinates, because flattening the data of a sliced tensor would copy all of it.
        chosen = self.data[np.unravel_index(ids, self.shape[:-1])] if self.ndim > 1 else self.data[None][ids]
        return dequantize(chosen, self.format)

    def take_rows(self, start: int, stop: int) -> QTensor:
        """Rows start .. stop-1 of axis -2, as a view; for a tensor with an expert axis, of every expert."""
        if self.ndim < 2 or not 0 <= start <= stop <= self.shape[-2]:
            raise ValueError(f"{self._where}: rows {start}:{stop} of a tensor of shape {list(self.shape)}")
        shape = (*self.shape[:-2], stop - start, self.shape[-1])
        return QTensor(self.format, shape, self.data[..., start:stop, :], self.name)

    def expert(self, e: int) -> QTensor:
        """Matrix e of a 3-D tensor, as a view."""
        if self.ndim != 3 or not 0 <= e < self.shape[0]:
            raise ValueError(f"{self._where}: expert {e} of a tensor of shape {list(self.shape)}")
        return QTensor(self.format, self.shape[1:], self.data[e], self.name)
