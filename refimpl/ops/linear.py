"""Products with weight matrices, for one matrix and for a stack of experts."""

import numpy as np

from refimpl.ops.integer import integer_linear

# Weights dequantised at a time; the output matrix of a real model would need 3 GB at once.
SLAB_VALUES = 1 << 22


def linear(x, weight, activations):
    """Multiply by a matrix; Gemma 4 has no biases.

        out[t, m] = sum_c x[t, c] * weight[m, c]

    Shapes:
        x            f[T, C]
        weight       QTensor[M, C]
        activations  "float"  the weights as dequantised, x as it is
                     "int8"   x rounded to int8 per block, integer dot products (integer.py), where the
                              format has integer parts; as in "float" where not
    Returns:
        f[T, M], in the precision of x

    Notes:
        The float form sums in float64 and rounds once, whatever the precision of x: then a row does not feel
        (but for one rounding in 1e8) how many rows it was multiplied with.
        The int8 form is float32 by definition.  It is the arithmetic of the fast engines; the distance
        between the two forms is the price of their speed.
    """
    _check_activations(activations)
    if activations == "int8" and weight.format.integer_parts is not None:
        return integer_linear(x.astype(np.float32), weight).astype(x.dtype)
    M, C = weight.shape
    exact_x = x.astype(np.float64)
    out = np.empty((len(x), M), x.dtype)
    step = max(1, SLAB_VALUES // C)
    for start in range(0, M, step):
        rows = weight.take_rows(start, min(start + step, M))
        out[:, start : start + step] = exact_x @ rows.dequantize(np.float64).T
    return out


def expert_linear(x, weight, expert_ids, activations):
    """Multiply each token by the matrices of the experts that it was routed to.

        out[t, a] = linear(x[t] or x[t, a], weight[expert_ids[t, a]])

    Shapes:
        x            f[T, C] (all experts of a token see one input) or f[T, A, C]
        weight       QTensor[E, M, C]
        expert_ids   i[T, A]
        activations  as in `linear`
    Returns:
        f[T, A, M]
    """
    out = np.empty((*expert_ids.shape, weight.shape[1]), x.dtype)
    for e in np.unique(expert_ids):
        t, a = np.nonzero(expert_ids == e)
        rows = x[t] if x.ndim == 2 else x[t, a]
        out[t, a] = linear(rows, weight.expert(int(e)), activations)
    return out


def _check_activations(activations):
    if activations not in ("int8", "float"):
        raise ValueError(f"activations: got {activations!r}, expected 'int8' or 'float'. Choose one of them")
