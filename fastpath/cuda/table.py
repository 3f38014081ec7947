"""All kernels by name: what tests, the device check and the launcher's warm-up go through."""

from fastpath.cuda import (
    activation,
    attention,
    attention_relative,
    convolution,
    elementwise,
    embedding,
    grouping,
    linear,
    linear_float,
    linear_many,
    linear_some,
    moe,
    norm,
    quantize,
    rotary,
    rows,
    sampling,
    tiles,
)

MODULES = (
    activation, attention, attention_relative, convolution, elementwise, embedding, grouping, linear,
    linear_float, linear_many, linear_some, moe, norm, quantize, rotary, rows, sampling, tiles,
)  # fmt: skip
KERNELS = {kernel.name: kernel for module in MODULES for kernel in module.KERNELS}

assert len(KERNELS) == sum(len(module.KERNELS) for module in MODULES), "two kernels have one name"
