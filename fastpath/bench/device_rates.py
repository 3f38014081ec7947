"""What a card reaches: memory, products, launches.  The second part of `device-check`.

Everything takes sizes, so that tests run every line of it on an executor.
"""

import statistics
from typing import Any

import numpy as np

from fastpath.cuda import device, probe
from fastpath.cuda.program import Launch

REPETITIONS = 5
BLOCKS = 132 * 8  # of probes: a few for each multiprocessor of any card


def seconds_of(launch: Launch, repetitions: int = REPETITIONS) -> float:
    """The median of some launches, behind one that compiles."""
    here = device.real()
    here.time([launch])
    return statistics.median(here.time([launch] * repetitions))


def ceilings(n_bytes: int = 1 << 30, turns: int = 4096, blocks: int = BLOCKS) -> dict[str, float]:
    """Bytes read and written per second by a copy, operations per second by products."""
    words = device.real().memory(2 * n_bytes).view(np.int32)
    half = len(words) // 2
    x, y = words[:half], words[half:]
    device.real().launch(probe.FILL, blocks, probe.THREADS, np.int32(-1), np.int32(0), x)
    found = {"copy": 2 * n_bytes / seconds_of(Launch(probe.COPY, blocks, probe.THREADS, (x, y)))}
    out = y[: blocks * probe.THREADS]
    for kernel, ops in probe.OPS_OF_TURN.items():
        units = blocks * probe.THREADS // (1 if kernel is probe.DP4A else 32)
        taken = seconds_of(Launch(kernel, blocks, probe.THREADS, (np.int32(turns), out)))
        found[kernel.name.removeprefix("probe_")] = units * turns * ops / taken
    return found


def launch_overhead(clock: Any, n: int = 1000) -> dict[str, float]:
    """Seconds of one of n empty kernels that depend on each other: launched one by one, and in a graph, as
    programs are and each after the one before it has ended."""
    here, host = device.real(), np.empty(1, np.int32)
    out = here.put(np.zeros(1, np.int32), np.int32)
    launch = Launch(probe.NOTHING, 1, 32, (out,))
    here.time([launch])

    def taken(run):
        here.fetch(out, host)  # nothing is on its way
        begin = clock()
        run()
        here.fetch(out, host)
        return (clock() - begin) / n

    def one_by_one():
        for _ in range(n):
            here.launch(launch.kernel, launch.grid, launch.threads, *launch.arguments)

    found = {"launch": taken(one_by_one)}
    try:
        for name, is_early in (("graph", True), ("graph_in_turn", False)):
            run = here.capture([launch] * n, is_early)
            run()
            found[name] = taken(run)
    except Exception as error:  # of the driver or cuda.core: what runs without graphs is still measured
        found["graph_error"] = f"{type(error).__name__}: {error}"[:300]  # type: ignore[assignment]
    return found
