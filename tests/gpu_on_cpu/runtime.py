"""Builds runtime.c once per content, and declares its functions."""

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from tests.gpu_on_cpu import needs

SOURCE = Path(__file__).with_name("runtime.c")
SHARED_LIMIT = 227 * 1024  # bytes that a block may have on sm_90; sm_80 has 163 KB
SHARED_ROOM = 512 * 1024
GAP = 64  # bytes between shared arrays that nobody may write
FLAGS = ("-O2", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-w")


def build(source, *flags):
    """Path of the shared library of a C text; built once for each text and flags."""
    command = [needs.compiler(), *FLAGS, *flags]
    key = hashlib.sha256("\0".join([source, *command]).encode()).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / f"twinpath-gpu-on-cpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            text, made = Path(work) / "text.c", Path(work) / "made.so"
            text.write_text(source)
            done = subprocess.run(
                [*command, "-o", made, text, "-lm"], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}: {done.stderr[:2000]}")
            made.rename(library)  # whole or not at all: another process may build it too
    return library


@functools.cache
def library():
    runtime = ctypes.CDLL(str(build(SOURCE.read_text())), mode=ctypes.RTLD_GLOBAL)
    pointer, integer, long, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_size_t
    runtime.run_shared_memory.argtypes, runtime.run_shared_memory.restype = [long], ctypes.c_uint64
    runtime.run_error.restype = ctypes.c_char_p
    runtime.run_guarded.argtypes = [size, ctypes.POINTER(size)]
    runtime.run_guarded.restype = pointer
    runtime.run_guarded_free.argtypes = [pointer, size, size]
    runtime.run_log.argtypes = [pointer, long]
    runtime.run_log_length.restype = runtime.run_issued_so_far.restype = long
    runtime.run_prefetched_so_far.restype = runtime.run_prefetches.restype = long
    runtime.run_log_prefetches.argtypes = [pointer, long]
    runtime.run_launch.argtypes = [
        pointer, pointer, pointer, pointer, integer, pointer, integer, integer, pointer, integer, long,
    ]  # fmt: skip
    runtime.shared_memory = runtime.run_shared_memory(SHARED_ROOM)  # every launch fills it with NaN
    if not runtime.shared_memory:
        raise RuntimeError("no memory below 4 GiB for shared memory")
    return runtime


def shared_memory():
    """Address of the shared memory, below 4 GiB."""
    return library().shared_memory


@functools.cache
def has(name):
    """Does runtime.c define this function?"""
    return hasattr(library(), name)


class SharedLayout:
    """Where the shared arrays of a kernel lie: each behind a gap that is checked after every block."""

    def __init__(self):
        self.addresses, self.gaps, self.top = {}, [], 0

    def place(self, name, n_bytes):
        start = -(-(self.top + GAP) // 128) * 128
        self.gaps.append((self.top, start - self.top))
        self.addresses[name] = shared_memory() + start
        self.top = start + n_bytes
        return self.addresses[name]
