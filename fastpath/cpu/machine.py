"""Which kernels run here: the best set that the CPU has, or the one that TWINPATH_KERNELS names.

    amx           int8 tiles of the matrix unit, and all of the next line
    avx512vnni    int8 dot products on 512 bits
    avxvnni       the same on 256 bits
    avx2          256-bit vectors with fused multiply-add
    generic       any CPU: no vector instruction is taken for granted
    neon          AArch64
    amx-emulated  the kernels for tiles, with tiles in memory: slow, for tests on CPUs without them

All sets give the same bytes.  A set below the CPU's own is more than a choice of kernels: everything is
compiled for that feature level, as on a CPU that has no more.  Numba reads its settings when it compiles for
the first time, so they are made here, and this file is imported before anything compiles.
"""

import ctypes
import os
import platform
import sys
from functools import cache

import llvmlite.binding as llvm
from numba.core import config
from numba.core.registry import cpu_target

SETTING = "TWINPATH_KERNELS"
_AVX2 = ("ssse3", "sse4.1", "sse4.2", "avx", "avx2", "f16c", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
_X86_SETS = {  # best first: name -> what a CPU must have
    "amx": (*_AVX512, "amx-tile", "amx-int8"),
    "avx512vnni": _AVX512,
    "avxvnni": (*_AVX2, "avxvnni"),
    "avx2": _AVX2,
    "generic": (),
}
_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 0x1023, 18
_SYS_ARCH_PRCTL = 158

IS_AARCH64 = platform.machine().lower() in ("aarch64", "arm64")
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def _compiled_for():
    """Features of the CPU that Numba compiles for: this one, or that of NUMBA_CPU_NAME and _FEATURES."""
    if config.CPU_FEATURES is not None:
        names = config.CPU_FEATURES.split(",")
    elif config.CPU_NAME is not None and config.CPU_NAME != "host":
        return frozenset()  # another CPU was asked for without its features: assume the least
    else:
        names = llvm.get_host_cpu_features().flatten().split(",")
    return frozenset(name[1:] for name in names if name.startswith("+"))


def _may_use_tiles():
    """Ask the kernel for the 8 KB of tile registers, once and for all threads to come."""
    if not sys.platform.startswith("linux"):
        return False
    answer = ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return answer == 0


def _lacks(name, features):
    """What this CPU, or its system, does not have of an x86 set's needs."""
    missing = [feature for feature in _X86_SETS[name] if feature not in features]
    return missing or ([] if name != "amx" or _may_use_tiles() else ["permission to use its tiles"])


def _own(features):
    """The best set for a CPU with these features."""
    if IS_X86:
        return next(name for name in _X86_SETS if not _lacks(name, features))
    return "neon" if IS_AARCH64 else "generic"


def _available(own, features):
    """The sets that can run here, best first."""
    x86 = [name for name in _X86_SETS if not _lacks(name, features)] if IS_X86 else []
    return (*(x86 or dict.fromkeys((own, "generic"))), "amx-emulated")


def _force(name, own, features):
    """Check that the CPU has the set, and let Numba compile for what the set needs."""
    if name not in AVAILABLE:
        is_known = IS_X86 and name in _X86_SETS
        lacking = f", but this CPU lacks {', '.join(_lacks(name, features))}" if is_known else ""
        raise ValueError(
            f"{SETTING}: got {name!r}{lacking}; expected one of {', '.join(AVAILABLE)}. "
            f"Choose one of them, or unset it for {own}"
        )
    if name in (own, "amx-emulated") or not IS_X86:
        return  # compiled for the CPU as it is
    if "_toplevel_target_context" in vars(cpu_target):
        raise ValueError(f"{SETTING}={name}: Numba has compiled before. Import fastpath.cpu before that")
    config.CPU_NAME, config.CPU_FEATURES = "x86-64", ",".join("+" + need for need in _X86_SETS[name])


def _keep_pair_products():
    """LLVM makes two instructions of one sum of pair products (vpdpwssd) where that shortens a chain, unless
    it is told that the one is fast.  What counts here is how many there are."""
    if IS_X86 and "avx512vnni" in FEATURES and config.CPU_FEATURES is None and config.CPU_NAME is None:
        config.CPU_FEATURES = llvm.get_host_cpu_features().flatten() + ",+fast-dpwssd"


_host = _compiled_for()
_own_set = _own(_host)
AVAILABLE = _available(_own_set, _host)
KERNELS = os.environ.get(SETTING) or _own_set
_force(KERNELS, _own_set, _host)
FEATURES = _compiled_for()
_keep_pair_products()

# What sets differ in: the int8 dot product of 16 lanes ("avx512vnni", "avxvnni", "neon" or "generic"), and
# where the tiles of matrix products lie ("registers", "memory", or None without tiles).
_base = _own_set if KERNELS == "amx-emulated" else KERNELS
DOT = {"amx": "avx512vnni", "avx2": "generic"}.get(_base, _base)
TILES = {"amx": "registers", "amx-emulated": "memory"}.get(KERNELS)


def describe():
    """For people: 'avx512vnni on 2 threads'."""
    from fastpath.cpu import threads  # which imports this file

    n = threads.num_threads()
    return f"{KERNELS} on {n} thread{'s' * (n != 1)}"


@cache
def vnni_takes_bytes():
    """LLVM 22 declares the VNNI intrinsic on bytes, older ones on 32-bit words: ask the one that is here."""
    name, args = "@llvm.x86.avx512.vpdpbusd.512", "<16 x i32> %a, <64 x i8> %u, <64 x i8> %s"
    declared = "<16 x i32>, <64 x i8>, <64 x i8>"
    module = f"""
        declare <16 x i32> {name}({declared})
        define <16 x i32> @f({args}) {{
          %r = call <16 x i32> {name}({args})
          ret <16 x i32> %r
        }}"""
    try:
        llvm.parse_assembly(module).verify()
        return True
    except RuntimeError:
        return False
