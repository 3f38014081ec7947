"""What wrappers check, and the arrays they make: outputs, workspace, words of arguments."""

import threading

import numpy as np

_local = threading.local()


def floats(x, where):
    """float32, C-contiguous; a view with gaps is copied, another dtype is an error."""
    if x.dtype != np.float32:
        raise ValueError(f"{where}: got {x.dtype}, expected float32. Convert it, or use the reference's op table")
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
            f"{where}: out is {out.dtype}{list(out.shape)}, expected a writable, contiguous float32{list(shape)}"
        )
    return out


def address(array):
    return array.__array_interface__["data"][0]


def workspace(n_bytes, slot=0):
    """Address of scratch memory, aligned to 64 bytes and kept for the next call of the same thread.

    `slot` tells apart the workspaces of one op that live at the same time.
    """
    kept = _local.__dict__.setdefault("kept", {})
    memory = kept.get(slot)
    if memory is None or memory.nbytes < n_bytes + 64:
        memory = kept[slot] = np.empty(n_bytes + n_bytes // 4 + 64, np.uint8)
    return -(-address(memory) // 64) * 64


def words(*values):
    """The int64 words that a kernel reads as its arguments."""
    return np.array(values, np.int64)
