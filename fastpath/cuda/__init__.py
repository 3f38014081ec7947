"""The op table on an NVIDIA GPU: the reference's functions as numba-cuda kernels.

Same names and parameters as refimpl.ops, and a keyword `out=`.  What is computed is defined there; the files
here say how.  This package imports nothing of CUDA by itself: without numba-cuda, or without a GPU, `why_not`
says so, and everything else works.

    ops.py         the op table
    device.py      which device runs the kernels, and why there is none; gpu.py: a GPU, driver.py: numba-cuda,
                   pool.py: its memory
    arrays.py      inputs, results and pages of a cache cross over
    program.py     a call of few tokens as one CUDA graph; planned.py: its memory
    kernel.py      a kernel: a plain Python function, its signature, what its machine code must have
    table.py       all kernels by name
    intrinsics.py  PTX instructions that Numba has no name for
    layout.py      weights as they lie in device memory; unit.py: what a lane takes of them
    early.py       kernels that start before the one ahead has ended; read_ahead.py: weights for later ones
    fuse.py        fewer launches for the same bytes: fuse_flow.py, fused_kernels.py, fused_steps.py, and
                   products with what comes of them: linear_single.py, linear_summed.py, linear_gated.py

No development machine has a GPU: tests/gpu_on_cpu/ runs the same kernels on the CPU, from their IR and from
their PTX.
"""

from fastpath.cuda.device import why_not

__all__ = ["why_not"]
