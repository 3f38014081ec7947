"""Compile ahead: which kernels a model needs, and their compilation with progress.

    plan = compile_plan(weights)
    warm(plan, report=lambda i, n, name: print(f"compiling kernels {i}/{n}: {name}"))

Without this the same happens at first use, one kernel at a time and silently.
"""

from dataclasses import fields, is_dataclass

from fastpath.cpu import kernel_cache, threads
from fastpath.cpu.activation import _geglu_kernel, _softcap_kernel
from fastpath.cpu.attention import attention_kernels
from fastpath.cpu.elementwise import _add_kernel, _scale_kernel
from fastpath.cpu.grouping import _group_kernel
from fastpath.cpu.linear import kernels_for
from fastpath.cpu.moe import _expert_sum_kernel, _route_kernel
from fastpath.cpu.norm import _rms_norm_kernel
from fastpath.cpu.rotary import _rope_kernel
from fastpath.cpu.write_kv import _write_kv_kernel
from quant import QTensor

_COMMON = (
    _rms_norm_kernel,
    _rope_kernel,
    _write_kv_kernel,
    _geglu_kernel,
    _softcap_kernel,
    _add_kernel,
    _scale_kernel,
)


def compile_plan(weights, activations="int8", kv_type="f16"):
    """The kernels that a forward pass with these weights uses, each once.

    `weights` is a model's `Weights` (or anything that holds QTensors in dataclass fields and tuples).
    """
    tensors = list(_tensors(weights))
    plan = [*_COMMON, *attention_kernels(kv_type)]
    if any(tensor.ndim == 3 for tensor in tensors):
        plan += (_route_kernel, _group_kernel, _expert_sum_kernel)
    for name in sorted({tensor.format.name for tensor in tensors}):
        plan += kernels_for(name, activations)
    return list(dict.fromkeys(plan))


def warm(plan, report=None):
    """Load these kernels, compiling those that the cache does not hold.

    report(i, n, name) is called before each compilation, i of n; never when all come from the cache.
    """
    stored = kernel_cache.stored()
    missing = [kernel for kernel in plan if kernel.name not in stored and not kernel.is_loaded]
    for i, kernel in enumerate(missing):
        if report:
            report(i + 1, len(missing), kernel.function.__name__.strip("_"))
        kernel.load()
    for kernel in plan:
        kernel.load()
    threads.load()


def _tensors(node):
    if isinstance(node, QTensor):
        yield node
    elif is_dataclass(node):
        for field in fields(node):
            yield from _tensors(getattr(node, field.name))
    elif isinstance(node, (tuple, list)):
        for part in node:
            yield from _tensors(part)
