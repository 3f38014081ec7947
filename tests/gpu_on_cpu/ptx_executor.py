"""Executor two: the PTX that NVVM makes for sm_80 or sm_90, translated to C and compiled.

Independent of executor one up to runtime.c.  It also sees NVVM's optimiser, the constraints of inline
assembly and the device's own libdevice.
"""

import ctypes
import functools

from tests.gpu_on_cpu import launching, offline, runtime
from tests.gpu_on_cpu.ptx_to_c import Translation

# Products and sums are fused where PTX says so, and nowhere else.
FLAGS = ("-O1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing")


@functools.cache
def image(function, signature, architecture=offline.ARCHITECTURES[-1], bounds=None, log_accesses=False):
    """The kernel, compiled; cached for each function, signature and architecture."""
    return PtxImage(function, signature, architecture, bounds, log_accesses)


class PtxImage(launching.Image):
    def __init__(self, function, signature, architecture, bounds, log_accesses):
        translation = Translation(offline.to_ptx(function, signature, architecture, bounds), log_accesses)
        self.name = f"{function.__name__} for sm_{architecture[0]}{architecture[1]}"
        self.signature, self.shared, self.sites = signature, translation.shared, translation.sites
        runtime.library()  # whose functions it calls
        self._library = ctypes.CDLL(str(runtime.build(translation.source, *FLAGS)))
        self.address = ctypes.cast(self._library.kernel_entry, ctypes.c_void_p).value
