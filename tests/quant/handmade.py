"""GGUF files put together byte by byte, independently of the writer under test."""

import struct

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)

_LAYOUT = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "B",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def text(s: str | bytes) -> bytes:
    raw = s.encode() if isinstance(s, str) else s
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, v: object) -> bytes:
    return text(v) if kind == STRING else struct.pack("<" + _LAYOUT[kind], v)


def pair(key: str | bytes, kind: int, v: object) -> bytes:
    return text(key) + struct.pack("<I", kind) + value(kind, v)


def pair_array(key: str, kind: int, items: list, count: int | None = None) -> bytes:
    head = struct.pack("<IIQ", ARRAY, kind, len(items) if count is None else count)
    return text(key) + head + b"".join(value(kind, item) for item in items)


def tensor(name: str | bytes, dims: list[int], type_id: int, offset: int, n_dims: int | None = None) -> bytes:
    n = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", n, *dims, type_id, offset)


def file(
    pairs=(),
    tensors=(),
    data: bytes = b"",
    *,
    magic=b"GGUF",
    version=3,
    n_keys=None,
    n_tensors=None,
    alignment=32,
) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_keys is None else n_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data if data else head


def small_file() -> bytes:
    """One value of every kind, two tensors; the last tensor ends with the file."""
    pairs = [
        pair("general.architecture", STRING, "gemma4"),
        *(pair(f"k.{kind}", kind, 1) for kind in _LAYOUT),
        *(pair_array(f"a.{kind}", kind, [1, 0, 1]) for kind in _LAYOUT),
        pair_array("a.text", STRING, ["", "a", "Größe", "▁the"]),
        pair_array("a.none", STRING, []),
    ]
    tensors = [tensor("norm.weight", [16], 0, 0), tensor("blk.0.attn_q.weight", [32, 3], 8, 64)]
    data = struct.pack("<16f", *range(16)) + bytes(range(102))
    return file(pairs, tensors, data)
