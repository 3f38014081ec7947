"""What the CPU that Numba compiles for can do: this one, or that of NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""

import platform
from functools import cache

import llvmlite.binding as llvm
from numba.core import config


def _features():
    if config.CPU_FEATURES is not None:
        names = config.CPU_FEATURES.split(",")
    elif config.CPU_NAME is not None and config.CPU_NAME != "host":
        return frozenset()  # another CPU was asked for without its features: assume the least
    else:
        names = llvm.get_host_cpu_features().flatten().split(",")
    return frozenset(name[1:] for name in names if name.startswith("+"))


FEATURES = _features()
IS_AARCH64 = platform.machine().lower() in ("aarch64", "arm64")
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
DOT = "generic"
if IS_X86 and {"avx512vnni", "avx512f", "avx512bw", "avx512vl"} <= FEATURES:
    DOT = "avx512vnni"
elif IS_X86 and "avxvnni" in FEATURES:
    DOT = "avxvnni"


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
