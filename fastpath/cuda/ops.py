"""The op table on CUDA: what fastpath.cpu is on the CPU.  Importing it takes numba-cuda."""

from fastpath.cuda import arrays as arrays  # no op: where arrays lie
from fastpath.cuda import program as program  # no op: how calls of ops are recorded
from fastpath.cuda.activation import clip, geglu, glu, silu, softcap
from fastpath.cuda.attention import attention, relative_attention, write_kv
from fastpath.cuda.convolution import causal_conv, conv2d, mean_pool
from fastpath.cuda.elementwise import add, add_bias, scale, standardize
from fastpath.cuda.embedding import embed
from fastpath.cuda.linear import expert_linear, linear
from fastpath.cuda.moe import expert_sum, route
from fastpath.cuda.norm import layer_norm, rms_norm
from fastpath.cuda.rotary import rope, rope_table
from fastpath.cuda.rows import get_rows, set_rows, swap_axes
from fastpath.cuda.sampling import top_k

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
