"""Tiles in memory compute what the instructions do, and the kernels for real tiles compile to them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from fastpath.cpu import machine, tile

ROOT = Path(__file__).parents[2]
SAPPHIRE_RAPIDS = (
    "+ssse3,+sse4.1,+sse4.2,+avx,+avx2,+f16c,+fma,+bmi,+bmi2,+avx512f,+avx512bw,+avx512dq,+avx512vl,"
    "+avx512vnni,+amx-tile,+amx-int8"
)
COMPILE = """
from fastpath.cpu import machine, matmul_tiles, panels
from fastpath.cpu.kernel import SIGNATURE
import numba
machine.TILES = "registers"
for kernel in {matmul_tiles.product_kernel(name) for name in ("Q4_0", "Q4_K", "Q6_K")}:
    print("kernel", kernel.name)
    print(numba.cfunc(SIGNATURE, error_model="numpy")(kernel.function)._library.get_asm_str())
"""


def test_the_configuration_is_as_the_manual_says():
    config = tile.Tiles({0: (16, 64), 6: (8, 32)}).configuration()
    assert config[0] == 1 and config[1] == 0  # palette, first row
    assert config[16:18] == bytes([64, 0]) and config[28:30] == bytes([32, 0])  # bytes of a row
    assert config[48] == 16 and config[54] == 8  # rows
    assert sum(config) == 1 + 64 + 32 + 16 + 8


@pytest.mark.skipif(machine.TILES == "registers", reason="tiles are registers here")
def test_tiles_in_memory_multiply_int8_matrices():
    unit = tile.Tiles({0: (16, 64), 1: (16, 32), 2: (8, 64)})
    zero, load_a, load_b = unit.zero(0), unit.load(1), unit.load(2)
    dot, store = unit.dot(0, 1, 2), unit.store(0)

    @numba.njit
    def twice(state, a, a_stride, b, b_stride, c):
        zero(state)
        load_a(state, a, a_stride)
        load_b(state, b, b_stride)
        dot(state)
        dot(state)
        store(state, c)

    rng = np.random.default_rng(0)
    a, b = rng.integers(-128, 128, (16, 40)).astype(np.int8), rng.integers(-128, 128, (8, 80)).astype(np.int8)
    c, state = np.zeros((16, 16), np.int32), np.zeros(tile.STATE, np.uint8)
    twice(state.ctypes.data, a.ctypes.data, 40, b.ctypes.data, 80, c.ctypes.data)
    columns = b[:, :64].reshape(8, 16, 4).transpose(0, 2, 1).reshape(32, 16)  # row 4k + j is byte j of row k
    np.testing.assert_array_equal(c, 2 * a[:, :32].astype(np.int32) @ columns.astype(np.int32))


@pytest.mark.skipif(not machine.IS_X86, reason="instructions of x86")
def test_kernels_for_registers_compile_to_the_instructions():
    environment = {
        **{k: v for k, v in os.environ.items() if k != machine.SETTING},
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": SAPPHIRE_RAPIDS,
    }
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = re.split(r"^kernel (\S+)\n", run.stdout, flags=re.M)[1:]
    assembly = dict(zip(kernels[::2], kernels[1::2], strict=True))
    counts = {
        name: [
            len(re.findall(rf"\t{op}\t", text)) for op in ("tdpbssd", "tileloadd", "tilestored", "tilezero")
        ]
        for name, text in assembly.items()
    }
    # per block of 32 a product of two tiles (an even, an odd and a first one are in the code)
    assert counts["matmul_tiles.tiles_32"] == [3, 6, 3, 3]
    # per block of 256 two groups by two planes by four tiles of 64 columns; the minima of two groups, twice
    assert counts["matmul_tiles.tiles_16"] == [16, 20, 4, 4]
    assert counts["matmul_tiles.tiles_8_with_minima"] == [20, 25, 8, 8]
    for text in assembly.values():
        assert text.count("\tldtilecfg\t") == 1 and text.count("\ttilerelease") == 1
