"""What the tests of CUDA kernels run on."""

from tests.gpu_on_cpu import devices, launching, offline

# executor one under every schedule; executor two, which is there for what NVVM does, under two of them
FEW = (launching.SCHEDULES[0], launching.SCHEDULES[3])
# kernels one by one: NumPy's arrays are the device's.  Whole models have strict ones (devices.Executor)
KIND = devices.OnHostArrays
EXECUTORS = {"ir": devices.executor_one(kind=KIND)}
EXECUTORS |= {f"sm_{a}{b}": devices.executor_two((a, b), FEW, KIND) for a, b in offline.ARCHITECTURES}
ONCE = devices.executor_one((launching.LOCKSTEP,), KIND)  # where schedules are tried elsewhere
EXAMPLES = {"ir": 25, "sm_80": 4, "sm_90": 8}
