"""What keys and values are stored as: names, dtypes, and the shape of a block."""

import numpy as np

STEP = 32  # positions of a block; every cache length is a multiple of it
COLUMNS = 32  # components of a value that lie side by side; what the last ones lack is 0
KV_TYPES = {  # names of what keys and values are stored as
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),  # NumPy has no bfloat16; its bits are the upper half of a float32's
}


def shapes_of(n_pages, page, n_kv_heads, head_dim):
    """Shapes of the arrays of keys and of values: pages of at least so many positions."""
    n_blocks, n_columns = -(-page // STEP), -(-head_dim // COLUMNS)
    return (
        (n_pages, n_kv_heads, n_blocks, head_dim, STEP),
        (n_pages, n_kv_heads, n_blocks, n_columns, STEP, COLUMNS),
    )


def own_pages(n_seqs):
    """The table of a cache without paging: a lane has one page, of its own number."""
    return np.arange(n_seqs, dtype=np.int32)[:, None]


def dtypes_of(kv_type):
    """dtypes of keys and of values, from one name for both or a pair of names."""
    names = (kv_type, kv_type) if isinstance(kv_type, str) else tuple(kv_type)
    if len(names) != 2 or not set(names) <= KV_TYPES.keys():
        raise ValueError(
            f"kv_type: got {kv_type!r}, expected one or two of {', '.join(KV_TYPES)}. Choose f16 if in doubt"
        )
    return KV_TYPES[names[0]], KV_TYPES[names[1]]
