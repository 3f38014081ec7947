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
