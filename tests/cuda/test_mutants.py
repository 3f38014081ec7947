"""Every barrier is needed: without any one of them, executor one sees it."""

import sys

import numpy as np
import pytest

from fastpath.cuda import attention, device, layout, linear, norm, sampling, warp
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


CALLS = {linear: _products, norm: _norms, attention: _attention, sampling: _argmax}
USED_BY = {warp: norm}  # whose kernels a module of device functions is tried in
SITES = [(module, line) for module in (*CALLS, *USED_BY) for line, _ in mutants.statements(module)]


def test_there_are_barriers():
    assert len(SITES) >= 8


@pytest.mark.parametrize("module, line", SITES, ids=lambda v: getattr(v, "__name__", str(v)).split(".")[-1])
def test_each_is_needed(module, line, monkeypatch):
    mutant = mutants.without(module, line)
    if module in USED_BY:
        user = USED_BY[module]
        monkeypatch.setitem(sys.modules, module.__name__, mutant)
        module, mutant = user, mutants.without(user, None)
    with device.use(EXECUTORS["ir"]):
        CALLS[module](module)
        with pytest.raises(KernelError, match=r"a barrier or a wait is missing|deadlock"):
            CALLS[module](mutant)
