"""Rotary position embedding on CUDA.        definition: refimpl/ops/rotary.py

grid     one block per token
block    256 threads stride over the pairs of all heads
traffic  heads are read once and written once; cosines and sines of a token stay in the first-level cache
"""

import numpy as np
from numba import cuda, float32

from fastpath.cuda import device
from fastpath.cuda.intrinsics import add_rn, mul_rn
from fastpath.cuda.kernel import Kernel

THREADS = 256


def rope_table(positions, inv_freq, *, out=None):
    """Computed by the host, in float64, which kernels do without: a few numbers per token."""
    positions, inv_freq = device.get(positions), device.get(inv_freq)

    def of(function):
        return function(np.asarray(positions, np.float64)[:, None] * inv_freq)

    if out is None:
        return tuple(device.computed(lambda f=f: of(f), np.float32) for f in (np.cos, np.sin))
    for to, function in zip(out, (np.cos, np.sin), strict=True):
        device.fill(to, of(function).astype(np.float32))
    return out


def rope(x, cos, sin, *, out=None):
    cos, sin = (device.put(array, np.float32) for array in (cos, sin))
    out = device.current().empty(x.shape, np.float32) if out is None else out
    device.current().launch(ROPE, len(x), THREADS, x, cos, sin, out)
    return out


@cuda.jit(device=True)
def rotated(first, second, c, s):
    """A pair, turned; no product is fused with the sum, whatever stands around."""
    return add_rn(mul_rn(first, c), -mul_rn(second, s)), add_rn(mul_rn(second, c), mul_rn(first, s))


def _rope_kernel(x, cos, sin, out):
    t, N, half = cuda.blockIdx.x, x.shape[1], cos.shape[1]
    for pair in range(cuda.threadIdx.x, N * half, THREADS):
        n, i = pair // half, pair % half
        a, b = rotated(x[t, n, i], x[t, n, i + half], cos[t, i], sin[t, i])
        out[t, n, i], out[t, n, i + half] = a, b


ROPE = Kernel(_rope_kernel, (float32[:, :, ::1], float32[:, ::1], float32[:, ::1], float32[:, :, ::1]))
KERNELS = (ROPE,)
