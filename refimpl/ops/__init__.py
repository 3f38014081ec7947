"""The op table: every numerical step of the model as a pure function of arrays.

`__all__` is the contract.  The fast engines have functions of these names with these parameters, and the
tests hold them to the numbers computed here.  The ops are dtype-polymorphic: float64 in gives float64 out,
and that is the truth that all tolerances are measured from.  The precision of a model call enters in one
place, `embed`.

Letters (docs/glossary.md): T tokens, S cache slots, D model width, N query heads, K key/value heads, H head
size, F hidden width of an FFN, V vocabulary, E experts, A experts that a token uses, P width of per-layer
embeddings, R cache lanes; C and M are the input and output width of any matrix.
"""

from refimpl.ops.activation import clip, geglu, glu, silu, softcap
from refimpl.ops.attention import attention, relative_attention, write_kv
from refimpl.ops.convolution import causal_conv, conv2d, mean_pool
from refimpl.ops.elementwise import add, add_bias, scale, standardize
from refimpl.ops.embedding import embed
from refimpl.ops.linear import expert_linear, linear
from refimpl.ops.moe import expert_sum, route
from refimpl.ops.norm import layer_norm, rms_norm
from refimpl.ops.rotary import rope, rope_table
from refimpl.ops.rows import get_rows, set_rows, swap_axes
from refimpl.ops.sampling import top_k

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
