"""What wrappers check, and the memory they make: outputs and workspace."""

import ctypes
import threading

import numpy as np

_local = threading.local()


def floats(x, where):
    """float32, C-contiguous; a view with gaps is copied, another dtype is an error."""
    if x.dtype != np.float32:
        raise ValueError(
            f"{where}: got {x.dtype}, expected float32. Convert it, or use the reference's op table"
        )
    return x if x.flags.c_contiguous else np.ascontiguousarray(x)


def shaped(x, shape, where):
    """`floats` of exactly this shape."""
    if x.shape != tuple(shape):
        raise ValueError(f"{where}: got shape {x.shape}, expected {tuple(shape)}")
    return floats(x, where)


def numbers(ids, n, where):
    """int64[n] from integer ids."""
    ids = np.asarray(ids)
    if ids.shape != (n,) or ids.dtype.kind not in "iu":
        raise ValueError(f"{where}: got {ids.dtype}{list(ids.shape)}, expected integers of shape ({n},)")
    return np.ascontiguousarray(ids, dtype=np.int64)


def output(out, shape, where):
    """`out` if it fits, a new float32 array if it is None."""
    shape = tuple(shape)
    if out is None:
        return np.empty(shape, np.float32)
    if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"{where}: out is {out.dtype}{list(out.shape)}, "
            f"expected a writable, contiguous float32{list(shape)}"
        )
    return out


def address(array):
    """Where an array's first value lies.  Of two equal ways the second takes three times as long."""
    if array.flags.writeable and array.flags.c_contiguous and array.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    return array.__array_interface__["data"][0]


def workspace(n_bytes, slot):
    """Address of scratch memory, aligned to 64 bytes and kept for the next call of the same thread.

    `slot` names the use: two workspaces of one name are the same memory.
    """
    kept = _local.__dict__.setdefault("kept", {})
    if slot not in kept or kept[slot][0] < n_bytes:
        size = n_bytes + n_bytes // 4
        memory = np.empty(size + 64, np.uint8)
        kept[slot] = size, -(-address(memory) // 64) * 64, memory
    return kept[slot][1]
