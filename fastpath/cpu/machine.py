"""What the CPU that Numba compiles for can do: this one, or that of NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""

import platform

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
HAS_SSSE3 = IS_X86 and "ssse3" in FEATURES
DOT = "generic"
if IS_X86 and {"avx512vnni", "avx512f", "avx512bw", "avx512vl"} <= FEATURES:
    DOT = "avx512vnni"
elif IS_X86 and "avxvnni" in FEATURES:
    DOT = "avxvnni"
