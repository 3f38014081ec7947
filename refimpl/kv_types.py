"""What keys and values are stored as: names, dtypes, and the size of a block of keys."""

import numpy as np

STEP = 32  # positions of a block of keys; every cache length is a multiple of it
KV_TYPES = {  # names of what keys and values are stored as
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),  # NumPy has no bfloat16; its bits are the upper half of a float32's
}


def dtypes_of(kv_type):
    """dtypes of keys and of values, from one name for both or a pair of names."""
    names = (kv_type, kv_type) if isinstance(kv_type, str) else tuple(kv_type)
    if len(names) != 2 or not set(names) <= KV_TYPES.keys():
        raise ValueError(
            f"kv_type: got {kv_type!r}, expected one or two of {', '.join(KV_TYPES)}. Choose f16 if in doubt"
        )
    return KV_TYPES[names[0]], KV_TYPES[names[1]]
