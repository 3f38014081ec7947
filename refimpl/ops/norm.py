"""Root-mean-square normalisation."""

import numpy as np


def rms_norm(x, weight, eps):
    """Scale each vector to a root mean square of 1, then each component by its weight.

        out = x / sqrt(mean(x^2) + eps) * weight          mean over the last axis

    Shapes:
        x       f[..., D]
        weight  f[D] | None  None: no weight, as for values and for the router's input
        eps     float
    Returns:
        f[..., D]

    Notes:
        The weight multiplies as it stands.  Earlier Gemmas multiply by 1 + weight; Gemma 4 does not.
        The same op normalises queries and keys per head (the last axis is then H).
    """
    out = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return out if weight is None else out * weight


def layer_norm(x, weight, bias, eps):
    """Shift each vector to a mean of 0, scale it to a deviation of 1, then each component.

        out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias           both over the last axis

    Shapes:
        x       f[..., D]
        weight  f[D]
        bias    f[D] | None
        eps     float
    Returns:
        f[..., D]

    Notes:
        The variance divides by D, not by D - 1.  Only encoders have this norm: the audio one after its
        convolutions (over the channels, no bias), the unified vision one around its projection.
    """
    centred = x - np.mean(x, axis=-1, keepdims=True)
    out = centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps) * weight
    return out if bias is None else out + bias
