"""What rounding activations to int8 costs, per block size: `python -m tests.engine.measure_rounding`.

Normal numbers, of which 1 % of the channels are 20 times larger: the figures of docs/adr/0006.
"""

import numpy as np

D, OUTLIERS, TIMES = 4096, 41, 20.0


def rounding_error(x: np.ndarray, block: int) -> float:
    """RMS over rows of |rounded row - row| / |row|; the scale of a block is amax/127."""
    blocks = x.reshape(len(x), -1, block)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    delta = np.rint(blocks / scale) * scale - blocks
    return float(np.sqrt(np.mean((delta**2).sum((1, 2)) / (blocks**2).sum((1, 2)))))


def main() -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((512, D))
    x[:, rng.permutation(D)[:OUTLIERS]] *= TIMES
    for block in (32, 256):
        print(f"per {block:3d} values: {100 * rounding_error(x, block):.1f} %")


if __name__ == "__main__":
    main()
