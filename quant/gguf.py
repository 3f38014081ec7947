"""The GGUF container: open, write, and the value types that both use."""

from quant.gguf_read import GGUFFile, open_gguf
from quant.gguf_values import F32, F64, I8, I16, I32, I64, U8, U16, U32, U64, Metadata, StringArray
from quant.gguf_write import write_gguf

__all__ = [
    "F32",
    "F64",
    "I8",
    "I16",
    "I32",
    "I64",
    "U8",
    "U16",
    "U32",
    "U64",
    "GGUFFile",
    "Metadata",
    "StringArray",
    "open_gguf",
    "write_gguf",
]
