"""What keys and values are stored as: names, dtypes, and the shape of a block.

Both lie in blocks of 32 positions of one head:

    numbers   keys    [H][32 positions]                     values  [H/32][32 positions][32 components]
    tiles     keys    [H/32] tiles                          values  [H/32] tiles

A tile is 32 positions by 32 components in bytes: 32 scales (float16, one per position), then codes, for keys
[component][position], for values [position][component].  kv_tiles.py has what is in it.
"""

import numpy as np

STEP = 32  # positions of a block; the positions of every page are a multiple of it
COLUMNS = 32  # components of a value that lie side by side; what the last ones lack is 0
KV_TYPES = {  # names of what keys and values are stored as
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),  # NumPy has no bfloat16; its bits are the upper half of a float32's
    "q8_0": np.dtype(np.uint8),
    "q4_0": np.dtype(np.uint8),
}
SCALES = 2 * STEP  # bytes in front of a tile's codes
TILE_BYTES = {"q8_0": SCALES + STEP * COLUMNS, "q4_0": SCALES + STEP * COLUMNS // 2}
NOTHING = np.float32(2.0**-100)  # 32 components that are all smaller are stored as 0 in a tile
TILE_TYPES = {n_bytes: name for name, n_bytes in TILE_BYTES.items()}


def shapes_of(n_pages, page, n_kv_heads, head_dim, kv_type="f32"):
    """Shapes of the arrays of keys and of values: pages of at least so many positions.

    kv_type: a name, or one for keys and one for values
    """
    n_blocks, n_columns = -(-page // STEP), -(-head_dim // COLUMNS)
    front, (k_type, v_type) = (n_pages, n_kv_heads, n_blocks), names_of(kv_type)
    k_block, v_block = (head_dim, STEP), (n_columns, STEP, COLUMNS)
    if k_type in TILE_BYTES:
        k_block = n_columns, TILE_BYTES[k_type]
    if v_type in TILE_BYTES:
        v_block = n_columns, TILE_BYTES[v_type]
    return front + k_block, front + v_block


def own_pages(n_seqs):
    """The table of a cache without paging: a lane has one page, of its own number."""
    return np.arange(n_seqs, dtype=np.int32)[:, None]


def dtypes_of(kv_type):
    """dtypes of keys and of values, from one name for both or a pair of names."""
    k_type, v_type = names_of(kv_type)
    return KV_TYPES[k_type], KV_TYPES[v_type]


def exact_type(dtype):
    """The name of the type that rounds nothing of a call in float32 or float64."""
    return {np.dtype(np.float32): "f32", np.dtype(np.float64): "f64"}[np.dtype(dtype)]


def names_of(kv_type):
    """The pair of names, from one name for both or a pair."""
    names = (kv_type, kv_type) if isinstance(kv_type, str) else tuple(kv_type)
    if len(names) != 2 or not set(names) <= KV_TYPES.keys():
        raise ValueError(
            f"kv_type: got {kv_type!r}, expected one or two of {', '.join(KV_TYPES)}. Choose f16 if in doubt"
        )
    return names
