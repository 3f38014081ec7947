"""What wrappers check, and the memory they make: outputs and workspace."""

import ctypes
import threading

import numpy as np

from fastpath.cpu import pool, recording

_local = threading.local()


def floats(x, where):
    """float32, C-contiguous; a view with gaps is copied, another dtype is an error."""
    if x.dtype != np.float32:
        raise ValueError(
            f"{where}: got {x.dtype}, expected float32. Convert it, or use the reference's op table"
        )
    return x if x.flags.c_contiguous else _copied(x, np.float32, where)


def rounded(x, where):
    """`floats` that takes float64 too."""
    return floats(x if x.dtype == np.float32 else _copied(x, np.float32, where), where)


def shaped(x, shape, where):
    """`floats` of exactly this shape."""
    if x.shape != tuple(shape):
        raise ValueError(f"{where}: got shape {x.shape}, expected {tuple(shape)}")
    return floats(x, where)


def integers(ids, shape, where):
    """int32 of this shape from integer ids; those of a batch are that already."""
    shape = tuple(shape)
    if (
        isinstance(ids, np.ndarray)
        and ids.dtype == np.int32
        and ids.shape == shape
        and ids.flags.c_contiguous
    ):
        return ids
    ids = np.asarray(ids)
    if ids.shape != shape or ids.dtype.kind not in "iu":
        raise ValueError(f"{where}: got {ids.dtype}{list(ids.shape)}, expected integers of shape {shape}")
    if ids.size and not -(1 << 31) <= ids.min() <= ids.max() < 1 << 31:
        raise ValueError(f"{where}: {ids.min()} to {ids.max()}, expected numbers that fit in 32 bits")
    return _copied(ids, np.int32, where)


def _copied(x, dtype, where):
    if recording.current() is not None:  # the copy would hold the values of this call for ever
        raise recording.UnableError(
            f"{where}: {x.dtype}{list(x.shape)} with strides {x.strides} cannot be recorded, expected "
            f"contiguous {np.dtype(dtype)}. Pass it so, or run without replay"
        )
    return np.ascontiguousarray(x, dtype=dtype)


def output(out, shape, where, dtype=np.float32, *, of_host=False):
    """`out` if it fits; a new array if it is None, in the program's memory while one is recorded.

    of_host  a host step writes it (recording.py): before all kernels, so that none may have used its memory
    """
    shape = tuple(shape)
    if out is None:
        program = recording.current()
        return pool.empty(shape, dtype) if program is None else program.array(shape, dtype, of_host)
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"{where}: out is {out.dtype}{list(out.shape)}, "
            f"expected a writable, contiguous {np.dtype(dtype)}{list(shape)}"
        )
    return out


def address(array):
    """Where an array's first value lies.  A program that is recorded keeps the array.

    Of the two ways, which agree, the second takes three times as long.
    """
    program = recording.current()
    if program is not None:
        program.keep(array)
    flags = array.flags
    if flags.writeable and flags.c_contiguous and array.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))
    return array.__array_interface__["data"][0]


def workspace(n_bytes, slot):
    """Address of scratch memory, aligned to 64 bytes and kept for the next call of the same thread.

    `slot` names the use: two workspaces of one name are the same memory.  A program has its own.
    """
    program = recording.current()
    kept = _local.__dict__.setdefault("kept", {}) if program is None else program.workspaces
    if slot not in kept or kept[slot][0] < n_bytes:
        size = n_bytes + n_bytes // 4
        memory = np.empty(size + 64, np.uint8)
        kept[slot] = size, -(-memory.ctypes.data // 64) * 64, memory
        if program is not None:
            program.keep(memory)  # also when a later step wants a larger one
    return kept[slot][1]
