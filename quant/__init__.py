"""Bytes and numbers: the GGUF container and the tensor formats in it.  Needs NumPy only."""

from quant.format import Format
from quant.gguf import GGUFFile, open_gguf, write_gguf
from quant.qtensor import QTensor
from quant.registry import FORMATS, dequantize, format_by_id, quantize

__all__ = [
    "FORMATS",
    "Format",
    "GGUFFile",
    "QTensor",
    "dequantize",
    "format_by_id",
    "open_gguf",
    "quantize",
    "write_gguf",
]
