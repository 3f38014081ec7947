"""The GPU of this machine as device.py describes devices."""

import itertools
import math

import numpy as np

from fastpath.cuda import layout, read_ahead
from fastpath.cuda.device import Constants
from fastpath.cuda.driver import Driver
from fastpath.cuda.pool import Block, Pool


class Gpu:
    """Kernels are compiled when they are launched first; results of ops come from a pool (pool.py)."""

    def __init__(self, driver=None):
        self._driver = driver or Driver()
        self.name = self._driver.name
        self.pool = Pool(self._driver.allocate)
        self._compiled = {}
        self._constants = Constants(self._upload)
        self._nothing = None  # a list of what to ask for, with nothing in it

    def empty(self, shape, dtype):
        size = math.prod(shape) if isinstance(shape, tuple) else int(shape)
        block = self.pool.take(size * np.dtype(dtype).itemsize)
        return self._driver.array(block, block.address, shape, dtype)

    def put(self, array, dtype):
        if not isinstance(array, np.ndarray):
            return array
        return self._copied(array, self.empty(array.shape, dtype))

    def computed(self, compute, dtype):
        return self.put(compute(), dtype)

    def constant(self, array, dtype):
        return self._constants.get(array, dtype) if isinstance(array, np.ndarray) else array

    def launch(self, kernel, grid, threads, *arguments):
        more = ()
        if self._driver.can_start_early:
            if self._nothing is None:
                self._nothing = self._upload(read_ahead.table([]))
            more = read_ahead.more_of(self._nothing, 0, read_ahead.NOTHING, grid)
        self._driver.launch(self._function(kernel), grid, threads, arguments + more)

    def memory(self, n_bytes):
        try:
            memory, address = self._driver.allocate(max(1, n_bytes))
        except MemoryError:
            self.pool.clear()
            memory, address = self._driver.allocate(max(1, n_bytes))
        return self._driver.array(Block(memory, address, n_bytes), address, n_bytes, np.uint8)

    def free_bytes(self):
        """What the device still has, and what is kept here unused."""
        return self._driver.free_bytes() + self.pool.n_free

    def staging(self, n_bytes):
        return self._driver.staging(n_bytes)

    def fetch(self, array, host):
        array.copy_to_host(host)

    def capture(self, launches, is_early=True):
        """One CUDA graph.  All kernels have been launched before: while one is captured, nothing may be
        compiled or loaded.  is_early: each but the first may start before the one ahead has ended, and all
        ask for weights of later ones (early.py).
        """
        calls, table = self._calls(launches, is_early)
        builder = self._driver.graph_builder()
        builder.begin_building()
        try:
            for i, (launch, grid, arguments) in enumerate(calls):
                function = self._compiled[launch.kernel]
                early = is_early and i > 0
                self._driver.launch(function, grid, launch.threads, arguments, builder, is_early=early)
        finally:
            builder.end_building()
        graph = builder.complete()
        stream = self._driver.stream
        graph.upload(stream)

        def run(_held=table):
            graph.launch(stream)

        return run

    def _calls(self, launches, is_early):
        """(launch, grid, arguments) of each, and an array that has to live as long as their graph."""
        if not self._driver.can_start_early:
            return [(launch, launch.grid, launch.arguments) for launch in launches], None
        asked = [read_ahead.NOTHING for _ in launches]
        if is_early:
            weights = read_ahead.Weights(layout.matrices_on(self), self._constants.arrays())
            asked = read_ahead.plan(launches, weights)
        table = self._upload(read_ahead.table(asked))
        return list(read_ahead.calls(launches, asked, table)), table

    def time(self, launches):
        """Before the first and behind each."""
        events = [self._driver.event()]
        for launch in launches:
            self.launch(launch.kernel, launch.grid, launch.threads, *launch.arguments)
            events.append(self._driver.event())
        return [self._driver.seconds(a, b) for a, b in itertools.pairwise(events)]

    def _function(self, kernel):
        if kernel not in self._compiled:
            self._compiled[kernel] = self._driver.compile(kernel)
        return self._compiled[kernel]

    def _upload(self, array):
        """Memory of its own, as it stays."""
        there = self.memory(array.nbytes).view(array.dtype).reshape(*array.shape)
        return self._copied(array, there)

    def _copied(self, array, there):
        there.copy_to_device(np.ascontiguousarray(array, there.dtype))
        return there
