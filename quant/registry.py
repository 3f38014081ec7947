"""All formats by name and by ggml id, and whole-array quantisation."""

from __future__ import annotations

import numpy as np

from quant import floats, fp4, i_quants, k_quants, legacy, ternary
from quant.format import Format

_FAMILIES = (floats, legacy, k_quants, i_quants, ternary, fp4)

FORMATS: dict[str, Format] = {f.name: f for family in _FAMILIES for f in family.FORMATS}

_BY_ID = {f.ggml_id: f for f in FORMATS.values()}

# Bytes converted at a time: keeps the intermediate arrays of a big tensor small.
CHUNK_BYTES = 1 << 18


def format_by_id(ggml_id: int) -> Format:
    """The format of a tensor-type number in a file."""
    try:
        return _BY_ID[ggml_id]
    except KeyError:
        raise ValueError(f"tensor type {ggml_id} is not supported; supported: {', '.join(FORMATS)}") from None


def as_format(fmt: Format | str) -> Format:
    """Accept a format or its name."""
    if isinstance(fmt, Format):
        return fmt
    try:
        return FORMATS[fmt]
    except KeyError:
        raise ValueError(f"no format named {fmt!r}; there are: {', '.join(FORMATS)}") from None


def dequantize(data, fmt: Format | str, dtype=np.float32):
    """Bytes of whole rows to numbers: u8[..., row_bytes] -> f[..., row_len], computed in float32."""
    fmt = as_format(fmt)
    if data.dtype != np.uint8 or data.shape[-1] % fmt.block_bytes:
        raise ValueError(
            f"{fmt.name} bytes: got {data.dtype}{list(data.shape)}, expected uint8 rows of a multiple of "
            f"{fmt.block_bytes} bytes"
        )
    row_len = data.shape[-1] // fmt.block_bytes * fmt.block_size
    out = np.empty((*data.shape[:-1], row_len), dtype)
    _convert(data, out, fmt.block_bytes, fmt.block_size, fmt.dequantize_blocks)
    return out


def quantize(x, fmt: Format | str, name: str = ""):
    """Numbers to bytes: f[..., row_len] -> u8[..., row_bytes]; `name` is the tensor's, for messages."""
    fmt = as_format(fmt)
    x = np.asarray(x, dtype=np.float32)
    where = f"{name}: " if name else ""
    if fmt.quantize_blocks is None:
        can = ", ".join(f.name for f in FORMATS.values() if f.quantize_blocks)
        raise ValueError(f"{where}there is no quantiser for {fmt.name}; there is one for {can}")
    if x.ndim == 0:
        raise ValueError(f"{where}a single number has no rows to quantise; expected at least one axis")
    out = np.empty((*x.shape[:-1], fmt.row_bytes(x.shape[-1], name)), np.uint8)
    if fmt.block_size > 1 and not np.isfinite(x).all():
        bad = tuple(int(i) for i in np.argwhere(~np.isfinite(x))[0])
        raise ValueError(
            f"{where}{x[bad]} at {bad} has no place in a {fmt.name} block; expected finite numbers"
        )
    with np.errstate(all="ignore"):
        _convert(x, out, fmt.block_size, fmt.block_bytes, fmt.quantize_blocks)
    _check_range(x, out, fmt, where)
    return out


def _check_range(x, out, fmt: Format, where: str) -> None:
    """A float16 scale ends at 65504: bigger values may have made it infinite."""
    peak = float(np.abs(x).max(initial=0))
    if fmt.block_size > 1 and peak > 65504 and not np.isfinite(dequantize(out, fmt)).all():
        raise ValueError(f"{where}values up to {peak:.3g} overflow the scale of {fmt.name}. Use BF16 or F32")


def _convert(source, target, source_width, target_width, function):
    """Apply a function of blocks to all blocks of `source`, a few rows at a time.

    Shapes:
        source  [..., n * source_width]    target  [..., n * target_width], C-contiguous
    """
    if source.flags.c_contiguous:
        source, target = source.reshape(-1, source.shape[-1]), target.reshape(-1, target.shape[-1])
    if source.ndim > 2:  # a sliced tensor: flattening it would copy it
        for source_part, target_part in zip(source, target, strict=True):
            _convert(source_part, target_part, source_width, target_width, function)
        return
    step = max(1, CHUNK_BYTES // max(1, source.shape[1]))
    for start in range(0, source.shape[0], step):
        rows = np.ascontiguousarray(source[start : start + step])
        target[start : start + step] = function(rows.reshape(-1, source_width)).reshape(len(rows), -1)
