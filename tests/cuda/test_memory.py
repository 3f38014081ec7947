"""Weights and caches are read in whole sectors, and what shared memory makes wait is known."""

import functools

import pytest

from fastpath.cuda import device
from tests.cuda import cases
from tests.gpu_on_cpu.traffic import Profiler

CALLS = cases.calls()
STREAMS = [name for name in CALLS if name.startswith(("linear", "attention"))]
# A lane reads 8 floats in two loads; each takes half of the sectors that the first brings to the cache.
EXPLAINED = {"attention_f32": 0.5}
WITH_SHARED_MEMORY = [*STREAMS, "rms_norm", "layer_norm", "argmax"]


@pytest.mark.parametrize("name", STREAMS)
def test_weights_and_caches_are_read_in_whole_sectors(name):
    sites = _sites(name)
    streams = [site for site in sites if site.space == "global" and site.instruction.startswith("ld.")]
    assert streams
    for site in streams:
        assert site.efficiency >= EXPLAINED.get(name, 1), f"{name}: {site}"


@pytest.mark.parametrize("name", WITH_SHARED_MEMORY)
def test_no_bank_conflicts(name):
    for site in _sites(name):
        if site.space == "shared":
            assert site.efficiency == 1, f"{name}: {site}"


@functools.cache
def _sites(name):
    with device.use(Profiler()) as profiler:
        CALLS[name]()
    return [site for sites in profiler.sites.values() for site in sites]
