"""The largest logits of a row.        definition: refimpl/ops/sampling.py

NumPy does it: on the CPU logits lie where the sampler is, which needs nobody to look for it.  These are here
so that an engine may ask any op table.
"""

import numpy as np

from fastpath.cpu.activation import softcap
from refimpl.ops import sampling as definition


def argmax(logits, *, out=None):
    return _to(out, definition.argmax(logits))


def top_k(logits, k, cap=None, *, out=None):
    logits = logits if cap is None else softcap(logits, cap)
    best = definition.top_k(logits, k, None)
    return best if out is None else tuple(_to(o, b) for o, b in zip(out, best, strict=True))


def _to(out, result):
    if out is None:
        return result
    np.copyto(out, result)
    return out
