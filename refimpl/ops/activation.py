"""The two nonlinear functions of Gemma 4: GELU with a gate, and the soft cap on logits."""

import math

import numpy as np


def geglu(gate, up):
    """GELU of the gate times the other half of an FFN's hidden layer.

        out = gelu(gate) * up
        gelu(z) = z/2 * (1 + tanh(sqrt(2/pi) * (z + 0.044715 z^3)))

    Shapes:
        gate, up  f[..., F]
    Returns:
        f[..., F]

    Notes:
        The tanh form, not the one with erf: they differ in the fourth digit.  Dense FFN, experts and
        per-layer embeddings all use it.
    """
    # Not gate**3: NumPy takes powers through pow(), which is slower and rounds differently.
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * (gate * gate * gate))
    return 0.5 * gate * (1 + np.tanh(inner)) * up


def softcap(x, cap):
    """Squash smoothly into (-cap, cap).

        out = cap * tanh(x / cap)

    Shapes:
        x    f[...]
        cap  float  30 in all published models

    Notes:
        The cap is on the final logits only; Gemma 2 had one on attention scores too.  It keeps their order,
        so greedy decoding does not show its absence; probabilities do.
    """
    return cap * np.tanh(x / cap)


def silu(x):
    """x times its own sigmoid, the activation of the audio encoder.

        out = x / (1 + exp(-x))

    Shapes:
        x  f[...]
    """
    with np.errstate(over="ignore"):  # exp of a large -x is infinite, and the quotient 0, as it should be
        return x / (1 + np.exp(-x))


def glu(x):
    """The first half of each row, let through by the sigmoid of the second half.

        out[c] = x[c] / (1 + exp(-x[C + c]))

    Shapes:
        x  f[T, 2*C]
    Returns:
        f[T, C]
    """
    first, gate = np.split(x, 2, axis=-1)
    with np.errstate(over="ignore"):
        return first / (1 + np.exp(-gate))


def clip(x, low, high):
    """Values below `low` become `low`, those above `high` become `high`.

    Shapes:
        x          f[...]
        low, high  float  may be infinite

    Notes:
        The encoders of E2B and E4B clip the input and the output of most of their matrix products, to bounds
        that the file has for each of them.  With the bounds 0 and infinity this is the ReLU.
        NaN stays NaN.
    """
    with np.errstate(over="ignore"):  # a bound beyond the precision of x is no bound
        return np.clip(x, x.dtype.type(low), x.dtype.type(high))
