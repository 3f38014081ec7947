"""What the encoders of images and sounds share, over an op table.

The names handed to `trace` are those of the reference, and so is the order of the ops: on the reference's
table both compositions give the same bytes.
"""

from dataclasses import dataclass
from typing import Any

from fastpath.model.block import Trace


@dataclass(frozen=True)
class EncoderPass:
    """One run of an encoder."""

    ops: Any  # the op table
    eps: float
    activations: str  # "int8" | "float": how linear layers with quantised weights see their input
    trace: Trace

    def norm(self, x, weight):
        return self.ops.rms_norm(x, weight, self.eps)

    def linear(self, x, weight):
        return self.ops.linear(x, weight, self.activations)

    def clip_input(self, x, *matrices):
        """What each of these matrices reads: x, clipped to its bounds; once for those with equal ones."""
        clipped: dict[Any, Any] = {}
        for matrix in matrices:
            bounds = matrix.bounds and matrix.bounds[:2]
            if bounds not in clipped:
                clipped[bounds] = x if bounds is None else self.ops.clip(x, *bounds)
            yield clipped[bounds]

    def clipped(self, matrix, x):
        """The product with an input that is clipped already, and its own bounds."""
        y = self.linear(x, matrix.weight)
        return y if matrix.bounds is None else self.ops.clip(y, *matrix.bounds[2:])

    def between_clips(self, matrix, x):
        """Clip, multiply, clip."""
        return self.clipped(matrix, *self.clip_input(x, matrix))

    def project(self, x, weight):
        """Encoder width to text width: a norm without weight, and the matrix."""
        return self.linear(self.norm(x, None), weight)
