"""Instructions of fastpath.cuda.intrinsics on the executors against NumPy."""

import numpy as np
import pytest
from numba import cuda, float32, int8, int32

from fastpath.cuda import intrinsics as ptx
from fastpath.cuda import shared_memory as at_shared
from fastpath.cuda.kernel import Kernel
from tests.cuda.executors import EXECUTORS

F, I = float32[::1], int32[::1]


def _run(executor, function, signature, threads, *arrays):
    EXECUTORS[executor].launch(Kernel(function, signature), 1, threads, *arrays)


def of_integers(x, y, out):
    i = cuda.threadIdx.x
    n = x.size
    out[i] = ptx.dp4a_s8(x[i], y[i], i)
    out[n + i] = ptx.permute_bytes(x[i], y[i], 0x7216)
    out[2 * n + i] = ptx.add32(ptx.mul32(x[i], y[i]), ptx.sub32(x[i], y[i]))
    out[3 * n + i] = ptx.xor32(
        ptx.or32(ptx.shl32(x[i], 5), ptx.shr32(y[i], 3)), ptx.and32(ptx.sar32(x[i], 7), y[i])
    )


@pytest.mark.parametrize("executor", EXECUTORS)
def test_integers(executor):
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-(2**31), 2**31, 32, dtype=np.int32) for _ in range(2))
    out = np.zeros(128, np.int32)
    _run(executor, of_integers, (I, I, I), 32, x, y, out)
    bytes_x, bytes_y = x.view(np.uint8).reshape(-1, 4), y.view(np.uint8).reshape(-1, 4)
    dots = (bytes_x.view(np.int8).astype(np.int32) * bytes_y.view(np.int8)).sum(-1) + np.arange(32)
    np.testing.assert_array_equal(out[:32], dots)
    chosen = np.hstack([bytes_x, bytes_y])[:, [6, 1, 2, 7]]
    np.testing.assert_array_equal(out[32:64], np.ascontiguousarray(chosen).view(np.int32)[:, 0])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out[64:96], x * y + (x - y))
    upper = (y.view(np.uint32) >> 3).view(np.int32)
    np.testing.assert_array_equal(out[96:], (x << 5 | upper) ^ (x >> 7 & y))


two_words, two_apart = ptx.loads_at("ld.global.u32", 1, 2, 8), ptx.loads_at("ld.global.u32", 1, 2)
word, nothing = ptx.piece_of(4), ptx.zeros_of(2)


def of_lanes(x, y, out):
    i = cuda.threadIdx.x
    n = out.size // 6
    out[i], out[n + i] = two_words(word(x, i))
    out[2 * n + i] = two_apart(word(x, i), 12)[1]
    out[3 * n + i] = ptx.and_or(x[i], 0x0F0F0F0F, y[i]) + nothing()[1]
    out[4 * n + i] = ptx.and_xor(x[i], y[i], 0x11111111)
    out[5 * n + i] = ptx.of_lane_in_8(x[i], 3)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_lanes_and_addresses(executor):
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-(2**31), 2**31, n, dtype=np.int32) for n in (35, 32))
    out = np.zeros(6 * 32, np.int32)
    _run(executor, of_lanes, (I, I, I), 32, x, y, out)
    here = x[:32]
    wanted = here, x[2:34], x[3:], here & 0x0F0F0F0F | y, here & y ^ 0x11111111, x[np.arange(32) // 8 * 8 + 3]
    for got, want in zip(out.reshape(6, 32), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def of_floats(x, y, out, bits):
    i, n = cuda.threadIdx.x, x.size
    out[i] = ptx.fma_rn(x[i], y[i], float32(-1))
    out[n + i] = ptx.add_rn(ptx.mul_rn(x[i], y[i]), float32(-1))
    out[2 * n + i] = ptx.exp2_approx(x[i])
    out[3 * n + i] = ptx.tanh_approx(x[i])
    out[4 * n + i] = ptx.f16_to_f32(ptx.pack_f16(y[i], x[i]))
    out[5 * n + i] = ptx.as_f32(ptx.shl32(ptx.pack_bf16(y[i], x[i]), 16))
    bits[i] = ptx.round_to_int(ptx.as_f32(ptx.as_i32(x[i])))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_floats(executor):
    """Among them a product whose sum with -1 is 0 when it is rounded before; ties; infinities."""
    x = np.linspace(-70, 70, 32, dtype=np.float32)
    x[:6] = 1 + np.float32(2**-13), 2.5, 3.5, -0.5, 1e30, -np.inf
    y = np.full(32, 1 - np.float32(2**-13))
    out, bits = np.zeros(6 * 32, np.float32), np.zeros(32, np.int32)
    _run(executor, of_floats, (F, F, F, I), 32, x, y, out, bits)
    fma, apart, power, tanh, half, bfloat = out.reshape(6, 32)
    exact = x.astype(np.float64) * y - 1
    np.testing.assert_array_equal(fma, exact.astype(np.float32))
    assert fma[0] == np.float32(-(2.0**-26)) and apart[0] == 0
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(power, np.exp2(x), rtol=2**-21)
        np.testing.assert_array_equal(half, x.astype(np.float16).astype(np.float32))
    np.testing.assert_allclose(tanh, np.tanh(x), rtol=2**-10)
    np.testing.assert_allclose(bfloat, x, rtol=2**-8)
    assert bits[:6].tolist() == [1, 2, 4, 0, 2**31 - 1, -(2**31)]


def of_tensor_cores(a, b, out):
    """16x32 int8 times 32x8, by way of cp.async and ldmatrix."""
    shared_a, shared_b = (
        cuda.shared.array(512, int8, alignment=16),
        cuda.shared.array(256, int8, alignment=16),
    )
    lane = cuda.threadIdx.x
    ptx.copy_async_16(shared_a, lane * 16, a, lane * 16)
    ptx.commit_copies()
    if lane < 16:
        ptx.copy_async_16(shared_b, lane * 16, b, lane * 16)
    ptx.commit_copies()
    ptx.wait_copies_but_one()
    ptx.wait_copies()
    cuda.syncthreads()
    left = ptx.load_matrix_x4(shared_a, (lane & 15) * 32 + (lane >> 4) * 16)
    right = ptx.load_matrix_x2(shared_b, (lane & 7) * 32 + ((lane >> 3) & 1) * 16)
    zero = int32(0)
    c = ptx.mma_s8(left, right, (zero, zero, zero, zero))
    row, column = lane >> 2, 2 * (lane & 3)
    out[row, column], out[row, column + 1] = c[0], c[1]
    out[row + 8, column], out[row + 8, column + 1] = c[2], c[3]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_tensor_cores(executor):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((16, 32), (8, 32)))
    out = np.zeros((16, 8), np.int32)
    signature = int8[::1], int8[::1], int32[:, ::1]
    _run(executor, of_tensor_cores, signature, 32, a.reshape(-1), b.reshape(-1), out)
    np.testing.assert_array_equal(out, a.astype(np.int32) @ b.T.astype(np.int32))


def of_float_cores(a, b, out, is_bf16):
    lane = cuda.threadIdx.x
    row, k = lane >> 2, 2 * (lane & 3)
    zero = float32(0)
    c = (zero, zero, zero, zero)
    if is_bf16:
        left = (
            ptx.pack_bf16(a[row, k + 1], a[row, k]), ptx.pack_bf16(a[row + 8, k + 1], a[row + 8, k]),
            ptx.pack_bf16(a[row, k + 9], a[row, k + 8]), ptx.pack_bf16(a[row + 8, k + 9], a[row + 8, k + 8]),
        )  # fmt: skip
        right = ptx.pack_bf16(b[k + 1, row], b[k, row]), ptx.pack_bf16(b[k + 9, row], b[k + 8, row])
        c = ptx.mma_bf16(left, right, c)
    else:
        left = (
            ptx.pack_f16(a[row, k + 1], a[row, k]), ptx.pack_f16(a[row + 8, k + 1], a[row + 8, k]),
            ptx.pack_f16(a[row, k + 9], a[row, k + 8]), ptx.pack_f16(a[row + 8, k + 9], a[row + 8, k + 8]),
        )  # fmt: skip
        right = ptx.pack_f16(b[k + 1, row], b[k, row]), ptx.pack_f16(b[k + 9, row], b[k + 8, row])
        c = ptx.mma_f16(left, right, c)
    out[row, k], out[row, k + 1], out[row + 8, k], out[row + 8, k + 1] = c[0], c[1], c[2], c[3]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("is_bf16", [0, 1])
def test_float_tensor_cores(is_bf16, executor):
    """Small integers: exact in both types."""
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-100, 100, shape).astype(np.float32) for shape in ((16, 16), (16, 8)))
    out = np.zeros((16, 8), np.float32)
    signature = float32[:, ::1], float32[:, ::1], float32[:, ::1], int32
    _run(executor, of_float_cores, signature, 32, a, b, out, is_bf16)
    np.testing.assert_array_equal(out, a @ b)


def of_stores(x, out):
    i = 4 * cuda.threadIdx.x
    ptx.store_v4(out, i, ptx.load_v4(x, i))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_stores(executor):
    x, out = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    _run(executor, of_stores, (I, I), 32, x, out)
    np.testing.assert_array_equal(out, x)


LOAD_4, LOAD_2 = ptx.load_rows_v4(2, 64), ptx.load_rows_v2(2, 32, 32)
KEEP, AGAIN_4, AGAIN_2 = (
    ptx.store_shared_rows_v4(2, 512),
    ptx.load_shared_rows_v4(2, 512),
    ptx.load_shared_rows_v2(2, 8),
)
STORE_4 = ptx.store_rows_v4(2, 16)


def of_rows(x, out):
    """Words from several places at once, by way of shared memory."""
    shared = cuda.shared.array(256, int32, alignment=16)
    i = cuda.threadIdx.x
    KEEP(shared, 4 * i, LOAD_4(x, 4 * i))
    cuda.syncthreads()
    STORE_4(out, 8 * i, AGAIN_4(shared, 4 * (i ^ 1)))
    four = AGAIN_2(shared, 4 * i)
    two = LOAD_2(x, 2 * i)
    ptx.store_v2(out, 256 + 2 * i, (ptx.add32(four[0], two[1]), four[3]))
    ptx.store_v1(out, 320 + i, (ptx.div32(ptx.or32(two[0], 1 << 31), ptx.add32(two[2], 3)),))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rows(executor):
    x, out = np.arange(256, dtype=np.int32) ** 2, np.zeros(352, np.int32)
    _run(executor, of_rows, (I, I), 32, x, out)
    fours, i = x.reshape(-1, 4), np.arange(32)
    both = np.hstack([fours[i], fours[i + 4]])  # 64 bytes are 16 words
    np.testing.assert_array_equal(out[:256].reshape(32, 8), both[i ^ 1])
    twos = x.reshape(-1, 2)
    np.testing.assert_array_equal(out[256:320:2], both[:, 0] + twos[i + 4, 1])
    np.testing.assert_array_equal(out[257:320:2], both[:, 3])
    quotients = (twos[i + 4, 0].astype(np.uint32) | np.uint32(1 << 31)) // (twos[i + 8, 0] + 3).astype(
        np.uint32
    )
    np.testing.assert_array_equal(out[320:].view(np.uint32), quotients)


def of_shared_memory(a, b, out):
    """16x16 int8 times 16x8 by way of addresses, words and halves of shared memory; the rest as it comes."""
    memory = cuda.shared.array(256, int32, alignment=16)
    lane = int32(cuda.threadIdx.x)
    at = at_shared.shared_address(memory)
    own = at + 4 * lane
    COPY(at + 16 * (lane & 15), ptx.address_of(a, 4 * (lane & 15)))
    ptx.commit_copies()
    PUT_2(at + 8 * (lane & 15), (b[2 * (lane & 15)], b[2 * (lane & 15) + 1]))
    PUT_1(own, lane)
    PUT_LONG(at + 16 * lane, (ptx.address_of(a, lane), ptx.address_of(b, 0)))
    ptx.wait_copies()
    cuda.syncthreads()
    left = LEFT(at + 16 * (lane & 15))
    zero = int32(0)
    c = ptx.mma_s8_short(left, (RIGHT(own),), (zero, zero, zero, zero))
    row, column = lane >> 2, 2 * (lane & 3)
    out[row, column], out[row, column + 1] = c[0], c[1]
    out[row + 8, column], out[row + 8, column + 1] = c[2], c[3]
    first, second = GET_LONG(at + 16 * lane)
    x, y = GET_2(at + 8 * (lane & 15))
    words = LOAD_1(first)[0], LOAD_1(second)[0], GET_1(own), x, y, at_shared.afresh(lane)
    for i in range(6):
        out[16 + i, lane] = words[i]


# a at 0, b at 256 and at 384, lanes at 512; two addresses of a lane overwrite the rest
COPY, LEFT = at_shared.copy_16(0), at_shared.load_matrices(2, 0)
PUT_2, RIGHT, GET_2 = (
    at_shared.store_words(2, 256),
    at_shared.load_words(1, 256),
    at_shared.load_words(2, 256),
)
PUT_1, GET_1 = at_shared.store_words(1, 384), at_shared.load_words(1, 384)
PUT_LONG, GET_LONG = at_shared.store_addresses(512), at_shared.load_addresses(512)
LOAD_1 = ptx.loads_at("ld.global.u32", 1, 1, 4)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_shared_memory(executor):
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((16, 16), (8, 16)))
    out = np.zeros((22, 32), np.int32)
    words = a.reshape(-1).view(np.int32), b.reshape(-1).view(np.int32)
    _run(executor, of_shared_memory, (I, I, int32[:, ::1]), 8 * 4, *words, out)
    np.testing.assert_array_equal(out[:16, :8], a.astype(np.int32) @ b.T.astype(np.int32))
    lanes = np.arange(32)
    np.testing.assert_array_equal(out[16], words[0][lanes])
    np.testing.assert_array_equal(out[17], np.full(32, words[1][0]))
    np.testing.assert_array_equal(out[18], lanes)
    np.testing.assert_array_equal(out[19:21], words[1].reshape(16, 2).T[:, lanes & 15])
    np.testing.assert_array_equal(out[21], lanes)
