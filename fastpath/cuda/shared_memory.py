"""Shared memory by 32-bit addresses, with offsets that stand in the instruction: no arithmetic for a place.

    at = shared_address(array) + bytes           an int32, once
    a, b, c, d = load_words(4, 1024)(at)         16 bytes from at + 1024 on
"""

from functools import cache

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing import signature
from numba.cuda.extending import intrinsic

from fastpath.cuda.intrinsics import I32, I64, _emit, _group, _shared

_WIDTH = {1: "u32", 2: "v2.u32", 4: "v4.u32"}


@intrinsic
def shared_address(typingctx, array):
    """Where a shared array begins."""

    def codegen(context, builder, sig, args):
        return _shared(context, builder, sig.args[0], args[0], ir.Constant(I64, 0))

    return signature(types.int32, array), codegen


def _place(number, offset):
    return f"[${number} + {offset}]"


def _load(opcode, n, offset):
    kind = types.UniTuple(types.int32, n) if n > 1 else types.int32

    @intrinsic
    def function(typingctx, at):
        def codegen(context, builder, sig, args):
            results = _group(0, n) if n > 1 else "$0"
            text = f"{opcode} {results}, {_place(n, offset)};"
            words = _emit(builder, text, [I32] * n, args, touches_memory=True)
            return cgutils.pack_array(builder, words) if n > 1 else words[0]

        return signature(kind, types.int32), codegen

    return function


@cache
def load_words(n, offset):
    """(address) -> 1, 2 or 4 words, an int32 or a tuple of them."""
    return _load(f"ld.shared.{_WIDTH[n]}", n, offset)


@cache
def load_matrices(n, offset):
    """(address) -> a word of each of 2 or 4 8x8 matrices; lane 8m + i says where row i of matrix m is."""
    return _load(f"ldmatrix.sync.aligned.m8n8.x{n}.shared.b16", n, offset)


@cache
def store_words(n, offset):
    """(address, 1, 2 or 4 words: an int32 or a tuple of them)"""
    kind = types.UniTuple(types.int32, n) if n > 1 else types.int32

    @intrinsic
    def function(typingctx, at, words):
        def codegen(context, builder, sig, args):
            words = cgutils.unpack_tuple(builder, args[1]) if n > 1 else [args[1]]
            text = f"st.shared.{_WIDTH[n]} {_place(0, offset)}, {_group(1, n) if n > 1 else '$1'};"
            _emit(builder, text, [], [args[0], *words], touches_memory=True)
            return context.get_dummy_value()

        return signature(types.void, types.int32, kind), codegen

    return function


@cache
def load_addresses(offset):
    """(address) -> two int64"""

    @intrinsic
    def function(typingctx, at):
        def codegen(context, builder, sig, args):
            text = f"ld.shared.v2.u64 {_group(0, 2)}, {_place(2, offset)};"
            return cgutils.pack_array(builder, _emit(builder, text, [I64] * 2, args, touches_memory=True))

        return signature(types.UniTuple(types.int64, 2), types.int32), codegen

    return function


@cache
def store_addresses(offset):
    """(address, two int64)"""

    @intrinsic
    def function(typingctx, at, words):
        def codegen(context, builder, sig, args):
            values = [args[0], *cgutils.unpack_tuple(builder, args[1])]
            text = f"st.shared.v2.u64 {_place(0, offset)}, {_group(1, 2)};"
            _emit(builder, text, [], values, touches_memory=True)
            return context.get_dummy_value()

        return signature(types.void, types.int32, types.UniTuple(types.int64, 2)), codegen

    return function


@intrinsic
def afresh(typingctx, x):
    """x.  What is computed from this is computed here, and takes no register before."""

    def codegen(context, builder, sig, args):
        return _emit(builder, "mov.b32 $0, $1;", [I32], args, touches_memory=True)[0]

    return signature(types.int32, types.int32), codegen


@cache
def copy_16(offset):
    """(shared address, global address as an int64): 16 bytes, there once `wait_copies` says so."""

    @intrinsic
    def function(typingctx, to, source):
        def codegen(context, builder, sig, args):
            text = f"cp.async.cg.shared.global {_place(0, offset)}, [$1], 16;"
            _emit(builder, text, [], args, touches_memory=True)
            return context.get_dummy_value()

        return signature(types.void, types.int32, types.int64), codegen

    return function
