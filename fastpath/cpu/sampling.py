"""The largest logits of a row.        definition: refimpl/ops/sampling.py

NumPy does it: on the CPU logits lie where the sampler is, which finds them itself.  This is here so that
callers may ask any op table.
"""

import numpy as np

from fastpath.cpu.activation import softcap
from fastpath.cpu.buffers import output


def top_k(logits, k, cap=None, *, out=None):
    logits = logits if cap is None else softcap(logits, cap)
    shape = len(logits), k
    values, ids = (None, None) if out is None else out
    values, ids = output(values, shape, "top_k: values"), output(ids, shape, "top_k: ids", np.int32)
    values[...], ids[...] = -np.inf, -1
    for t, row in enumerate(logits):
        row = np.where(np.isfinite(row), row, np.nan)
        keys = np.where(np.isnan(row), np.float32(np.inf), row)
        n = min(k, len(row))
        candidates = np.flatnonzero(keys >= np.partition(keys, -n)[-n])
        best = candidates[np.argsort(-keys[candidates], kind="stable")][:n]
        values[t, :n], ids[t, :n] = row[best], best
    return values, ids
