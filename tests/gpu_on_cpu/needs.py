"""What the executors need, and the sentence that a skipped test says when it is not there."""

import functools
import shutil

VERSION = "0.30"  # of numba-cuda: the executors read the IR it makes, which is no public interface


@functools.cache
def missing():
    """Why kernels cannot be run on this machine; None when they can."""
    if compiler() is None:
        return "no C compiler (cc or gcc) on the path"
    try:
        import numba_cuda
        from numba import cuda  # noqa: F401  raises where no libcudart is found
    except Exception as error:
        return f"numba-cuda does not import ({type(error).__name__}); install the extra `cuda`"
    if not numba_cuda.__version__.startswith(VERSION):
        return f"numba-cuda {numba_cuda.__version__}, but the executors read the IR of {VERSION}"
    try:
        from numba.cuda.cudadrv import nvvm

        nvvm.NVVM()
    except Exception as error:
        return f"NVVM does not load ({type(error).__name__}); install the extra `cuda`"
    return None


def compiler():
    return shutil.which("cc") or shutil.which("gcc")


@functools.cache
def missing_assembler():
    """Why PTX cannot be assembled and read back here; None when it can."""
    from tests.gpu_on_cpu import sass

    absent = [name for name in ("ptxas", "cuobjdump", "nvdisasm") if sass.tool(name) is None]
    if absent:
        return (
            f"no {', '.join(absent)}; install nvidia-cuda-nvcc, nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm"
        )
    return None
