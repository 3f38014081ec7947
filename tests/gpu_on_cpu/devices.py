"""The executors in the place of a GPU: `with fastpath.cuda.device.use(...)` runs the op table on them."""

import numpy as np

from tests.gpu_on_cpu import ir_executor, launching, ptx_executor


class Executor:
    """
    image_of   Kernel -> launching.Image
    schedules  thread orders under which every launch is repeated, and must give the same bytes
    """

    name = "an executor on the CPU"

    def __init__(self, image_of, schedules=launching.SCHEDULES):
        self.image_of, self.schedules = image_of, schedules
        self.launched = {}  # kernel name: number of launches

    def empty(self, shape, dtype):
        """NaN, or -1, until it is written."""
        n_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return np.full(n_bytes, 0xFF, np.uint8).view(dtype).reshape(shape)

    def put(self, array, dtype):
        return np.asarray(array, dtype)

    def launch(self, kernel, grid, threads, *arguments):
        self.launched[kernel.name] = self.launched.get(kernel.name, 0) + 1
        launching.run(self.image_of(kernel), grid, threads, arguments, schedules=self.schedules)


def executor_one(schedules=launching.SCHEDULES):
    return Executor(lambda kernel: ir_executor.image(kernel.function, kernel.signature), schedules)


def executor_two(architecture, schedules=launching.SCHEDULES):
    return Executor(
        lambda kernel: ptx_executor.image(kernel.function, kernel.signature, architecture), schedules
    )
