"""Memory between two pages that nobody may touch, and every kernel run in it.

    python -m tests.laws.guarded before|after [FORMAT ...]

`after` lays each array's last byte against the guard page, `before` its first byte.  A kernel that reads or
writes one byte too many ends the process; the last line it has said on standard error is the case.  Fresh
memory is full of NaN, so a kernel that uses what it has not written gives other results, and ends it too.
"""

import ctypes
import mmap
import sys
import tempfile
from pathlib import Path

import numpy as np

import fastpath.cpu
from fastpath.cpu import recording
from fastpath.lanes import Lanes
from fastpath.load import load_model
from tests import tiny
from tests.parity import cases

PAGE = mmap.PAGESIZE
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PROT_NONE = 0


def memory(n_bytes, side, align=1):
    """u8[n_bytes] of ones bits at a guard page; its address is a multiple of `align`, a power of two."""
    inside = -(-max(1, n_bytes) // PAGE) * PAGE
    mapped = mmap.mmap(-1, inside + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    for guard in (first, first + PAGE + inside):
        if _mprotect(guard, PAGE, PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    at = PAGE + ((inside - n_bytes) // align * align if side == "after" else 0)
    array = np.frombuffer(mapped, np.uint8, n_bytes, at)  # keeps the mapping alive
    array[:] = 0xFF
    return array


class Guard:
    """All memory of the wrappers, and all arguments, at guard pages."""

    def __init__(self, side):
        self.side, self.spaces = side, {}

    def empty(self, shape, dtype=np.float64):
        dtype, shape = np.dtype(dtype), (shape,) if np.isscalar(shape) else tuple(shape)
        n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return memory(n_bytes, self.side).view(dtype).reshape(shape)

    def zeros(self, shape, dtype=np.float64):
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def place(self, array):
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def workspace(self, n_bytes, slot):
        """Like buffers.workspace, without its reserve: aligned to 64 bytes, and not a byte more than that."""
        n_bytes, program = -(-n_bytes // 64) * 64, recording.current()
        spaces = self.spaces if program is None else program.workspaces
        if slot not in spaces or len(spaces[slot]) != n_bytes:
            spaces[slot] = memory(n_bytes, self.side, 64)
            if program is not None:
                program.keep(spaces[slot])
        return spaces[slot].ctypes.data

    def install(self):
        """Into all modules of the wrappers; what is compiled already stays."""
        for name, module in list(sys.modules.items()):
            if name.startswith("fastpath."):
                for old, new in (("np", _NumPy(self)), ("workspace", self.workspace)):
                    if hasattr(module, old):
                        setattr(module, old, new)


class _NumPy:
    """NumPy, whose fresh arrays lie at guard pages."""

    def __init__(self, guard):
        self.empty, self.zeros = guard.empty, guard.zeros

    def __getattr__(self, name):
        return getattr(np, name)


def models():
    """(name, a call that gives logits of a prompt and of tokens after it) for whole models."""
    with tempfile.TemporaryDirectory() as folder:
        for family, size, default in (("e2b", "block256", "Q4_K"), ("26b", "block32", "Q5_1")):
            path = Path(folder) / f"{family}.gguf"
            model = load_model(tiny.make(path, family, size=size, formats={"*": default}))
            yield f"{family} from the file", lambda m=model, f=family: logits(m, tiny.prompt(f))
            yield f"{family} packed", lambda m=model, f=family: logits(m.packed(), tiny.prompt(f))


def logits(model, ids):
    """Chunks, then token by token, once recorded and then replayed; rings wrap, the cache grows."""
    engine, n = Lanes(model, fastpath.cpu, chunk=20), len(ids) - 5
    return np.stack([engine.prefill(ids[:n]), *(engine.decode(token) for token in ids[n:])])


def main(side, *formats):
    formats = formats or cases.EVERY_FORMAT
    plain = cases.digests(formats)  # compiles everything
    plain |= {name: cases.digest(call()) for name, call in models()}
    guard = Guard(side)
    guard.install()
    with np.errstate(all="ignore"):
        for name, call in (*cases.cases(formats, guard.place), *models()):
            print(name, file=sys.stderr, flush=True)
            guard.spaces.clear()
            if cases.digest(call()) != plain[name]:
                sys.exit("other results than in ordinary memory")
    print(len(plain), "cases")


if __name__ == "__main__":
    main(*sys.argv[1:])
