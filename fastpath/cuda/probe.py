"""Kernels that ask a card what it can do, for the device check.

fill        any bits, within masks: weights and keys for measuring
copy        16 bytes read and written per thread and step
dp4a, mma   chains of eight, or four, independent products
nothing     an empty kernel
"""

from numba import cuda, float32, int32, int64

from fastpath.cuda.intrinsics import (
    and32,
    dp4a_s8,
    load_v4,
    mma_bf16,
    mma_s8,
    mul32,
    or32,
    shr32,
    store_v4,
    xor32,
)
from fastpath.cuda.kernel import Kernel

THREADS = 256


def _fill_kernel(mask, ones, out):
    start = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(start, out.size, int64(cuda.gridDim.x) * cuda.blockDim.x):
        x = mul32(int32(i & 0x7FFFFFFF), int32(-1640531535))
        x = mul32(xor32(x, shr32(x, 15)), int32(-2048144789))
        out[i] = or32(and32(xor32(x, shr32(x, 13)), mask), ones)


def _copy_kernel(x, out):
    start = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(start, out.size // 4, int64(cuda.gridDim.x) * cuda.blockDim.x):
        store_v4(out, 4 * i, load_v4(x, 4 * i))


def _dp4a_kernel(n, out):
    i = cuda.threadIdx.x
    a = b = c = d = e = f = g = h = int32(i)
    for _ in range(n):
        a, b, c, d = dp4a_s8(a, b, a), dp4a_s8(b, c, b), dp4a_s8(c, d, c), dp4a_s8(d, a, d)
        e, f, g, h = dp4a_s8(e, f, e), dp4a_s8(f, g, f), dp4a_s8(g, h, g), dp4a_s8(h, e, h)
    total = xor32(xor32(xor32(a, b), xor32(c, d)), xor32(xor32(e, f), xor32(g, h)))
    out[cuda.blockIdx.x * cuda.blockDim.x + i] = total


def _mma_s8_kernel(n, out):
    i, zero = int32(cuda.threadIdx.x), int32(0)
    left, right, start = (i, i, i, i), (i, i), (zero, zero, zero, zero)
    p, q, r, s = start, start, start, start
    for _ in range(n):
        p, q = mma_s8(left, right, p), mma_s8(left, right, q)
        r, s = mma_s8(left, right, r), mma_s8(left, right, s)
    out[cuda.blockIdx.x * cuda.blockDim.x + i] = xor32(xor32(p[0], q[1]), xor32(r[2], s[3]))


def _mma_bf16_kernel(n, out):
    i, zero = int32(cuda.threadIdx.x), float32(0)
    left, right, start = (i, i, i, i), (i, i), (zero, zero, zero, zero)
    p, q, r, s = start, start, start, start
    for _ in range(n):
        p, q = mma_bf16(left, right, p), mma_bf16(left, right, q)
        r, s = mma_bf16(left, right, r), mma_bf16(left, right, s)
    out[cuda.blockIdx.x * cuda.blockDim.x + i] = int32(p[0] + q[1] + r[2] + s[3])


def _nothing_kernel(out):
    pass


_I = int32[::1]
FILL = Kernel(_fill_kernel, (int32, int32, _I), name="probe_fill")
COPY = Kernel(_copy_kernel, (_I, _I), ("LDG.E.128", "STG.E.128"), name="probe_copy")
DP4A = Kernel(_dp4a_kernel, (int32, _I), ("IDP.4A",), name="probe_dp4a")
MMA_S8 = Kernel(_mma_s8_kernel, (int32, _I), ("IMMA.16832",), name="probe_mma_s8")
MMA_BF16 = Kernel(_mma_bf16_kernel, (int32, _I), ("HMMA.16816",), name="probe_mma_bf16")
NOTHING = Kernel(_nothing_kernel, (_I,), name="probe_nothing", writes=())
KERNELS = (FILL, COPY, DP4A, MMA_S8, MMA_BF16, NOTHING)
# multiplications and additions of a thread (dp4a) or a warp (mma) in one turn
OPS_OF_TURN = {DP4A: 8 * 8, MMA_S8: 4 * 2 * 16 * 8 * 32, MMA_BF16: 4 * 2 * 16 * 8 * 16}
