"""Kernels: compiled functions over a range of work items, made at first use and kept on disk.

Every kernel has one signature, so that one pool of threads can run any of them:

    void(args, lo, hi, thread)    work items lo .. hi-1;  args: address of int64 words, the kernel's arguments

An args word is an address, a count or the bits of a float32 (`f32_word`).  Kernels check nothing and allocate
nothing: their wrappers do.  A kernel writes only what its own items own and the scratch of its thread.
"""

import struct

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fastpath import locks
from fastpath.cpu import kernel_cache
from fastpath.cpu.simd import I64

SIGNATURE = types.void(types.intp, types.intp, types.intp, types.intp)
_lock = locks.lock()
KERNELS = {}


def helper(function):
    """A function that kernels call: compiled into each of them."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def inlined(function):
    """A helper whose body is copied to where it is called, so that constant arguments are constants in it."""
    return numba.njit(inline="always", error_model="numpy")(function)


class Kernel:
    """A range function and, after the first use, the address of its machine code."""

    def __init__(self, function):
        self.function = function
        self.name = kernel_cache.name_of(function)
        self.was_cached = False
        self._address = 0
        self._code = None
        KERNELS[self.name] = self

    @property
    def address(self):
        return self._address or self.load()

    @property
    def is_loaded(self):
        return self._address != 0

    def load(self):
        """Compile, or take from the cache; returns the address of the machine code."""
        with _lock:
            if not self._address:
                self._code = kernel_cache.machine_code(self.function, SIGNATURE)
                self.was_cached = self._code.was_cached
                self._address = self._code.address
        return self._address


def kernel(function):
    """Declare a kernel (decorator)."""
    return Kernel(function)


def f32_word(value):
    """The int64 word that carries a float32 to a kernel (read it back with ld_f32)."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


@intrinsic
def call(typingctx, function, args, lo, hi, thread):
    """Call the compiled range function at an address: void(args, lo, hi, thread)."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [I64] * 4)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), codegen
