"""What the encoders of images and sounds share."""

from dataclasses import dataclass
from typing import Any

from refimpl import ops


@dataclass(frozen=True)
class EncoderCall:
    """One run of an encoder.

    eps          of its norms
    activations  how `linear` reads its input: "float" or "int8"
    trace        function of (name, array)
    """

    eps: float
    activations: str
    trace: Any

    def norm(self, x, weight):
        return ops.rms_norm(x, weight, self.eps)

    def linear(self, x, weight):
        return ops.linear(x, weight, self.activations)

    def clipped(self, x, matrix):
        """Clip, multiply, clip: clip(W clip(x)).

        Notes:
            Only E2B and E4B have bounds.  They come from training; what they cut off, later layers never saw.
        """
        if matrix.bounds is None:
            return self.linear(x, matrix.weight)
        low, high, out_low, out_high = matrix.bounds
        return ops.clip(self.linear(ops.clip(x, low, high), matrix.weight), out_low, out_high)

    def project(self, x, weight):
        """Encoder width to text width: f[n, D] -> f[n, D of the text model].

        Notes:
            First the norm, which has no weight, then the matrix.  The result enters the text model as it is:
            it is not multiplied by sqrt(D) as token embeddings are.
        """
        return self.linear(self.norm(x, None), weight)


def start(eps, activations, trace):
    return EncoderCall(eps, activations, trace or (lambda name, array: None))
