"""Every barrier is needed: without any one of them, executor one sees it."""

import sys

import numpy as np
import pytest

from fastpath.cuda import (
    attention,
    attention_relative,
    device,
    grouping,
    layout,
    linear,
    linear_float,
    linear_many,
    norm,
    quantize,
    sampling,
    warp,
)
from quant import FORMATS
from tests import strategies
from tests.cuda.executors import EXECUTORS
from tests.gpu_on_cpu import mutants
from tests.gpu_on_cpu.launching import KernelError

RNG = np.random.default_rng(4)


def _products(module):
    """A format of 32 and one of 256 values, more steps than warps twice over."""
    for name in ("Q4_0", "Q4_K"):
        weight = layout.device_matrix(strategies.weights(RNG, FORMATS[name], 4, 17 * 256))
        module.linear(strategies.normal(RNG, 2, 17 * 256), weight, "int8")


def _norms(module):
    x = strategies.normal(RNG, 2, 1024)
    module.layer_norm(x, x[0], None, 1e-6)


def _attention(module):
    pages = strategies.kv_caches(*(strategies.normal(RNG, 1, 320, 1, 160) for _ in range(2)))
    one = np.zeros(1, np.int32)
    q = strategies.normal(RNG, 1, 3, 160, scale=0.1)
    module.attention(q, *pages, one, one + 300, None)


def _argmax(module):
    module.argmax(np.eye(3, 9000, 8999, np.float32))


def _many(module):
    """Three steps, and formats with and without scales of their own for minima."""
    rng, out = np.random.default_rng(4), np.zeros((2, 20, 36), np.float32)
    for name, result in zip(("Q4_0", "Q4_K"), out, strict=True):
        weight = layout.device_matrix(strategies.weights(rng, FORMATS[name], 36, 768))
        x = strategies.normal(rng, 20, 768)
        rounded = quantize.round_activations(x, 256 if weight.coding.is_256 else 32)
        module.multiply(weight, rounded, result)
    return out


def _floats(module):
    weight = layout.device_matrix(strategies.weights(RNG, FORMATS["BF16"], 5, 700))
    x = strategies.normal(RNG, 3, 700)
    module.multiply(x, weight, grouping.no_slots(), 0, np.zeros((3, 5), np.float32))


def _groups(module):
    module.slots_of(RNG.integers(0, 9, (13, 3)).astype(np.int32), 9)


def _neighbours(module):
    q, k, v, relative = strategies.normal(RNG, 4, 6, 2, 40)
    module.attend_to_neighbours(q, k, v, relative[:5], q[0, 0], 1.9, 50.0, np.zeros_like(q))


CALLS = {
    linear: _products, linear_many: _many, linear_float: _floats, grouping: _groups, norm: _norms,
    attention: _attention, attention_relative: _neighbours, sampling: _argmax,
}  # fmt: skip
USED_BY = {warp: norm}  # whose kernels a module of device functions is tried in
SITES = [(module, line) for module in (*CALLS, *USED_BY) for line, _ in mutants.statements(module)]


def test_there_are_barriers():
    assert len(SITES) >= 15


@pytest.mark.parametrize("module, line", SITES, ids=lambda v: getattr(v, "__name__", str(v)).split(".")[-1])
def test_each_is_needed(module, line, monkeypatch):
    mutant = mutants.without(module, line)
    if module in USED_BY:
        user = USED_BY[module]
        monkeypatch.setitem(sys.modules, module.__name__, mutant)
        module, mutant = user, mutants.without(user, None)
    with device.use(EXECUTORS["ir"]):
        whole = CALLS[module](module)
        try:
            without = CALLS[module](mutant)
        except KernelError:
            return
    # integers that are not there yet are -1, whoever comes first
    assert whole is not None and not np.array_equal(whole, without, equal_nan=True), "nobody noticed"
