"""Compiling CUDA kernels on a machine without a driver.  Import before the first kernel is compiled.

numba-cuda asks the current device for its compute capability when a kernel calls a device function, and asks
NVRTC (a wheel of 215 MB) which architectures exist.  Both are given a fixed answer here.
"""

import functools
import types

import numba.cuda.cuda_paths as cuda_paths
import numba.cuda.cudadrv.nvrtc as numba_nvrtc
import numba.cuda.dispatcher as dispatcher
from numba import cuda

ARCHITECTURES = ((8, 0), (9, 0))
_KNOWN = [(7, 5), (8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]


def _has_nvrtc():
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcGetSupportedArchs()
    except Exception:  # which one depends on what is missing
        return False
    return True


if not cuda.is_available():
    dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=ARCHITECTURES[-1])
if not _has_nvrtc():
    numba_nvrtc.get_supported_ccs = lambda: _KNOWN
    cuda_paths._get_nvrtc_path = lambda: cuda_paths._env_path_tuple("not installed", None)


@functools.cache
def _typed(function, signature, bounds=None):
    """A kernel as numba-cuda typed it: from here on executors and architectures differ."""
    from numba.cuda.compiler import _compile_pyfunc_with_fixup

    options = {"launch_bounds": bounds} if bounds else {}
    return _compile_pyfunc_with_fixup(
        function, signature, device=False, abi="numba", cc=ARCHITECTURES[-1], **options
    )[0]


@functools.cache
def to_ptx(function, signature, architecture=ARCHITECTURES[-1], bounds=None):
    """PTX text of a kernel; bounds: kernel.Kernel."""
    return _typed(function, signature, bounds).get_asm_str(cc=architecture)


def to_nvvm_ir(function, signature, bounds=None):
    """(name of the entry, list of LLVM modules as text) of a kernel."""
    from numba.cuda.cudadrv import nvvm

    library = _typed(function, signature, bounds)
    return library._entry_name, [nvvm.llvm_replace(text) for text in library.llvm_strs]
