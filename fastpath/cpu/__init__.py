"""The op table on the CPU: the reference's functions, compiled by Numba.

Same names and parameters as refimpl.ops, and a keyword `out=` for the result.  Arrays are float32; weights
are packed for the kernels (packing.py), or as they lie in the file.  What is computed is defined there; the
files here say how.  Laws that the tests hold:

    the bytes of a row depend on that row alone: not on the batch, the chunk, the cache's shape or the threads
    integer dot products equal their definition in every bit

How a kernel is made: simd.py and simd_dot.py (vector values), kernel.py (range functions), threads.py (who
computes what), program.py (a whole forward call as one compiled call).
`warm.compile_plan` lists the kernels that a model needs; they are compiled once and kept (kernel_cache.py).
"""

from fastpath.cpu import program as program  # no op: how calls of ops are recorded
from fastpath.cpu.activation import clip, geglu, glu, silu, softcap
from fastpath.cpu.attention import attention, relative_attention, write_kv
from fastpath.cpu.convolution import causal_conv, conv2d, mean_pool
from fastpath.cpu.elementwise import add, add_bias, scale, standardize
from fastpath.cpu.embedding import embed
from fastpath.cpu.linear import expert_linear, linear
from fastpath.cpu.moe import expert_sum, route
from fastpath.cpu.norm import layer_norm, rms_norm
from fastpath.cpu.rotary import rope, rope_table
from fastpath.cpu.rows import get_rows, set_rows, swap_axes
from fastpath.cpu.sampling import top_k

__all__ = [
    "add",
    "add_bias",
    "attention",
    "causal_conv",
    "clip",
    "conv2d",
    "embed",
    "expert_linear",
    "expert_sum",
    "geglu",
    "get_rows",
    "glu",
    "layer_norm",
    "linear",
    "mean_pool",
    "relative_attention",
    "rms_norm",
    "rope",
    "rope_table",
    "route",
    "scale",
    "set_rows",
    "silu",
    "softcap",
    "standardize",
    "swap_axes",
    "top_k",
    "write_kv",
]
