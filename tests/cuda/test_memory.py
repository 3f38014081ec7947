"""Every kernel loads whole sectors and has no bank conflicts, or it is said here why not."""

import re

import numpy as np
import pytest

from fastpath.cuda import device, layout, linear, probe, table
from quant import FORMATS
from tests import strategies
from tests.cuda import cases, families, test_fused
from tests.gpu_on_cpu import devices, launching
from tests.gpu_on_cpu.traffic import Profiler

ONCE = devices.executor_one((launching.LOCKSTEP,))
# Beginning of a kernel's name: (efficiency of its worst load, why that is no loss)
EXPLAINED = {
    "attention_part_f16": (0.5, "a lane's 8 queries are two loads; pages: test_attention.py"),
    "attention_part_f32": (0.5, "a lane's 8 floats are two loads; the second finds its sectors in L1"),
    "attention_part_q": (0.93, "scales of a position, two bytes of a tile: at times in two sectors"),
    "write_kv_q4_0": (0.06, "the other half of a byte that is written; a read per key that is stored"),
    "conv2d": (0.15, "neighbours and weights come from L1: each is read 9 times"),
    "causal_conv": (0.33, "weights of a channel lie side by side: most of them come from L1"),
    "embed": (0.42, "scales of one row of a tile's four: 16 bytes of a row, once a token"),
    "linear": (0.5, "a lane's sums are two loads, a step's d 32 bytes: the rest of their sectors is in L1"),
    "float_q": (0.12, "scales and high bits of a sub-block of 4: the others' come next, from L1 or L2"),
    "float_iq4": (0.25, "the same"),
    "float_mxfp4": (0.25, "the same"),
    "many": (0.2, "a scale per token and step: the next steps' lie in the same sector, in L1"),
    "some": (0.12, "a scale per token and block: the next ones, too, find it in L1; codes: test_products.py"),
    "route": (0.14, "scales of the chosen experts, wherever they lie: 8 of them a token"),
}  # fmt: skip


@pytest.mark.parametrize("name", families.kernels())
def test_memory(name):
    with device.use(Profiler()) as profiler:
        cases.call_of(name)()
    _check(name, profiler.sites[name])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_memory_of_one_token(name):
    """Products have a loop of their own for it."""
    rng = np.random.default_rng(0)
    weight = layout.device_matrix(strategies.weights(rng, FORMATS[name], 8, 17 * 256))
    with device.use(Profiler()) as profiler:
        linear.linear(strategies.normal(rng, 1, 17 * 256), weight, "int8")
    kernel = linear.PRODUCTS[name].name
    _check(kernel, profiler.sites[kernel])


FUSED = ("norm, sum, scale, norm, rounding", "three products", "gate and rounding")


@pytest.mark.parametrize("pattern", FUSED)
def test_memory_of_fused_kernels(pattern):
    """Those of dense layers, in Q8_0; they go by the explanations of their first step."""
    numbers = test_fused.Numbers(0, 3, 256, "Q8_0")
    _, launches = test_fused.replayed(lambda: test_fused.PATTERNS[pattern][0](numbers), ONCE)
    profiler = Profiler()
    for launch in launches:
        profiler.launch(launch.kernel, launch.grid, launch.threads, *map(_memory, launch.arguments))
    fused = [name for name in profiler.sites if name.startswith("fused_")]
    assert fused
    for name in fused:
        _check(re.sub(r"^fused_(?:\d+_)?", "", name), profiler.sites[name])


def _memory(argument):
    """What is written is written where the next launch reads it."""
    return argument._memory if isinstance(argument, devices.DeviceArray) else argument


def _check(name, sites):
    least = _least(name, EXPLAINED)
    for site in sites:
        if site.space == "shared":
            assert site.efficiency == 1, f"bank conflicts: {site}"
        elif site.instruction.startswith("ld."):
            assert site.efficiency >= least, f"sectors of which parts are used: {site}"


def test_memory_of_probes():
    """What measures a card must not be slow for reasons of its own."""
    words = np.zeros(4 * 512, np.int32)
    profiler = Profiler()
    profiler.launch(probe.FILL, 2, probe.THREADS, -1, 0, words)
    profiler.launch(probe.COPY, 2, probe.THREADS, words, words.copy())
    for kernel in (probe.FILL, probe.COPY):
        assert profiler.sites[kernel.name]
        assert all(site.efficiency == 1 for site in profiler.sites[kernel.name]), profiler.sites


def _least(name, explained):
    return min([bound for start, (bound, _) in explained.items() if name.startswith(start)], default=1)


def test_explanations_are_used():
    for start in EXPLAINED:
        assert any(name.startswith(start) for name in table.KERNELS), f"no kernel is called {start}..."
