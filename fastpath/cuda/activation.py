"""Nonlinear functions on CUDA.        definition: refimpl/ops/activation.py

grid, block, traffic  as elementwise.py
arithmetic            libdevice's expf and tanhf, to 2 units in the last place; the hardware's quick
                      approximations (2^-11) are not used: the budget of errors has no room for them
"""

import math

import numpy as np
from numba import cuda, float32, int32

from fastpath.cuda import device
from fastpath.cuda.elementwise import launch, like, places
from fastpath.cuda.intrinsics import fma_rn, mul_rn
from fastpath.cuda.kernel import Kernel

ROOT, CUBE = float32(math.sqrt(2 / math.pi)), float32(0.044715)


def geglu(gate, up, *, out=None):
    return launch(GEGLU, like(gate, out), gate.reshape(-1), up.reshape(-1))


def softcap(x, cap, *, out=None):
    return launch(SOFTCAP, like(x, out), x.reshape(-1), np.float32(cap))


def silu(x, *, out=None):
    return launch(SILU, like(x, out), x.reshape(-1))


def glu(x, *, out=None):
    C = x.shape[-1] // 2
    out = device.current().empty((*x.shape[:-1], C), np.float32) if out is None else out
    return launch(GLU, out, x.reshape(-1), np.int32(C))


def clip(x, low, high, *, out=None):
    with np.errstate(over="ignore"):  # a bound beyond float32 is no bound
        return launch(CLIP, like(x, out), x.reshape(-1), np.float32(low), np.float32(high))


@cuda.jit(device=True)
def geglu_of(z, up):
    # gelu(z) = z / (1 + exp(-2y)): where 1 + tanh(y) would cancel, this keeps its digits
    y = mul_rn(ROOT, fma_rn(CUBE, mul_rn(mul_rn(z, z), z), z))
    return mul_rn(z / (float32(1) + math.exp(mul_rn(float32(-2), y))), up)


def _geglu_kernel(gate, up, out):
    for i in places(out.size):
        out[i] = geglu_of(gate[i], up[i])


@cuda.jit(device=True)
def softcap_of(x, cap):
    return mul_rn(cap, math.tanh(x / cap))


def _softcap_kernel(x, cap, out):
    for i in places(out.size):
        out[i] = softcap_of(x[i], cap)


def _silu_kernel(x, out):
    for i in places(out.size):
        out[i] = x[i] / (float32(1) + math.exp(-x[i]))


def _glu_kernel(x, C, out):
    for i in places(out.size):
        first = i // C * 2 * C + i % C
        out[i] = x[first] / (float32(1) + math.exp(-x[first + C]))


def _clip_kernel(x, low, high, out):
    for i in places(out.size):
        value = x[i]  # NaN is neither below nor above
        if value < low:
            value = low
        if value > high:
            value = high
        out[i] = value


_F = float32[::1]
GEGLU = Kernel(_geglu_kernel, (_F, _F, _F), wants=("MUFU.EX2",))
SOFTCAP = Kernel(_softcap_kernel, (_F, float32, _F), wants=("MUFU.EX2",))
SILU = Kernel(_silu_kernel, (_F, _F), wants=("MUFU.EX2",))
GLU = Kernel(_glu_kernel, (_F, int32, _F), wants=("MUFU.EX2",))
CLIP = Kernel(_clip_kernel, (_F, float32, float32, _F))
KERNELS = (GEGLU, SOFTCAP, SILU, GLU, CLIP)
