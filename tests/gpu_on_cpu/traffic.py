"""How warps reach memory: sectors of global memory and wavefronts of shared memory, for every site.

Executor two logs thread, site and address of every access.  The n-th execution of a site by the lanes of a
warp is one request, as it is on the device while they do not diverge.
"""

from typing import NamedTuple

import numpy as np

from tests.gpu_on_cpu import launching, offline, ptx_executor, runtime

SECTOR, BANKS = 32, 32
ACCESS = np.dtype([("site", "u4"), ("block", "u4"), ("thread", "u4"), ("pad", "u4"), ("address", "u8")])


class Site(NamedTuple):
    """
    cost   sectors (global) or wavefronts (shared) per request
    ideal  the same if the bytes lay side by side, each counted once: cost / ideal is 1 at best
    """

    instruction: str
    space: str
    n_bytes: int
    requests: int
    cost: float
    ideal: float

    @property
    def efficiency(self):
        return self.ideal / self.cost


class Profiler:
    """A device (fastpath.cuda.device.use) that runs kernels on executor two and keeps their sites.

    sites   {kernel name: [Site]} of the last launch of each kernel
    kernels {kernel name: Kernel}
    issued  {kernel name: PTX instructions of all its warps} of the same, but for moves (ptx_to_c.FREE)
    """

    def __init__(self, architecture=offline.ARCHITECTURES[-1], capacity=2_000_000, log=True):
        self.architecture, self.capacity = architecture, capacity
        self.sites, self.issued, self.kernels = {}, {}, {}
        self.log = log  # without: instructions are counted, and no accesses kept

    def empty(self, shape, dtype):
        return np.zeros(shape, dtype)

    def put(self, array, dtype):
        return np.asarray(array, dtype)

    constant = put

    def launch(self, kernel, grid, threads, *arguments):
        image = ptx_executor.image(
            kernel.function, kernel.signature, self.architecture, kernel.bounds, log_accesses=True
        )
        log, library = np.zeros(self.capacity, ACCESS), runtime.library()
        library.run_log(log.ctypes.data, self.capacity if self.log else 0)
        before = library.run_issued_so_far()
        self.kernels[kernel.name] = kernel
        try:
            launching.run(image, grid, threads, arguments, schedules=(launching.LOCKSTEP,))
            n = library.run_log_length()
        finally:
            library.run_log(None, 0)
        if self.log and n > self.capacity:
            raise ValueError(
                f"{kernel.name}: {n} accesses, the log holds {self.capacity}. Profile a smaller case"
            )
        if self.log:
            self.sites[kernel.name] = list(_sites(image.sites, log[:n]))
        self.issued[kernel.name] = library.run_issued_so_far() - before


def _sites(sites, log):
    for number, (instruction, space, n_bytes) in enumerate(sites):
        accesses = log[log["site"] == number]
        if len(accesses):
            count = _global if space == "global" else _shared
            yield Site(instruction, space, n_bytes, *count(accesses, n_bytes))


def _requests(accesses):
    """Accesses in the order of their requests, and the request number of each."""
    thread = accesses["block"].astype(np.uint64) << np.uint64(10) | accesses["thread"]
    order = np.argsort(thread, kind="stable")
    accesses, thread = accesses[order], thread[order]
    is_first = np.r_[True, thread[1:] != thread[:-1]]
    start = np.maximum.accumulate(np.where(is_first, np.arange(len(thread)), 0))
    execution = np.arange(len(thread)) - start
    key = (execution.astype(np.uint64) << np.uint64(40)) | (thread >> np.uint64(5))
    return accesses, np.unique(key, return_inverse=True)[1]


def _global(accesses, n_bytes):
    accesses, request = _requests(accesses)
    n = request.max() + 1
    ends = np.stack([accesses["address"], accesses["address"] + np.uint64(n_bytes - 1)]) // np.uint64(SECTOR)
    pairs = np.unique(np.stack([np.tile(request, 2), ends.reshape(-1).astype(np.int64)]), axis=1)
    distinct = np.unique(np.stack([request, accesses["address"].astype(np.int64)]), axis=1)
    per_request = np.bincount(distinct[0]) * n_bytes / SECTOR
    return int(n), pairs.shape[1] / n, np.maximum(1, np.ceil(per_request)).sum() / n


def _shared(accesses, n_bytes):
    """A request of 4-byte accesses is served at once, one of 8 or 16 bytes in 2 or 4 parts of the warp."""
    accesses, request = _requests(accesses)
    lanes = {8: 16, 16: 8}.get(n_bytes, 32)
    part = request * 4 + accesses["thread"] % 32 // lanes
    words = accesses["address"].astype(np.int64) // 4
    words = np.concatenate([words + i for i in range(max(1, n_bytes // 4))])
    pairs = np.unique(np.stack([np.tile(part, max(1, n_bytes // 4)), words]), axis=1)
    banks, counts = np.unique(np.stack([pairs[0], pairs[1] % BANKS]), axis=1, return_counts=True)
    parts, place = np.unique(banks[0], return_inverse=True)
    waves = np.zeros(len(parts), int)
    np.maximum.at(waves, place, counts)
    n = request.max() + 1
    return int(n), waves.sum() / n, len(parts) / n
