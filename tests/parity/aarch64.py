"""Every kernel as an AArch64 object, made on any machine.

    python -m tests.parity.aarch64 CPU [PART OF A NAME ...]       prints {kernel: what its code has} as JSON

Numba makes LLVM IR here as it would there: machine.py is told that the CPU is an AArch64 one, and nothing is
compiled for this one.  The IR then goes through LLVM's AArch64 code generator.
"""

import contextlib
import importlib.util
import json
import platform
import re
import sys
from pathlib import Path
from unittest import mock

import llvmlite.binding as llvm
import numba
from numba.core import codegen

TRIPLE = "aarch64-unknown-linux-gnu"
CPUS = {"generic": (), "neoverse-n1": ("dotprod",)}  # LLVM's name: features beyond NEON
# What code may call besides its own functions: memory, the system, and Numba's way of reporting errors.
OUTSIDE = re.compile(r"(mem(cpy|set|move)|sched_yield|Py\w+|_Py\w+|NRT_\w+|numba_\w+)$")


def pretend(cpu):
    """Import fastpath.cpu as on an AArch64 machine."""
    features = mock.Mock(flatten=lambda: ",".join("+" + name for name in ("neon", *CPUS[cpu])))
    path = Path(__file__).parents[2] / "fastpath/cpu/machine.py"
    spec = importlib.util.spec_from_file_location("fastpath.cpu.machine", path)
    module = importlib.util.module_from_spec(spec)
    with (
        mock.patch.object(platform, "machine", lambda: "aarch64"),
        mock.patch.object(llvm, "get_host_cpu_features", lambda: features),
    ):
        spec.loader.exec_module(module)
    sys.modules[spec.name] = module
    assert module.KERNELS == module.DOT == "neon" and module.IS_AARCH64 and not module.IS_X86
    import fastpath.cpu

    fastpath.cpu.machine = module


@contextlib.contextmanager
def only_ir():
    """Numba stops before it makes machine code."""
    numba.njit("i8(i8)")(lambda x: x)  # what Numba needs of its own is compiled before
    library, engine = codegen.JITCodeLibrary, codegen.JITCPUCodegen
    with (
        mock.patch.object(engine, "_add_module", lambda self, module: None),
        mock.patch.object(engine, "set_env", lambda self, name, env: None),
        mock.patch.object(library, "_finalize_specific", lambda self: None),
        mock.patch.object(
            library, "get_pointer_to_function", lambda self, name: self._ensure_finalized() or 0
        ),
    ):
        yield


def functions():
    """(name, a call that makes its IR) of every kernel and of the functions that run them."""
    from fastpath.cpu import kernel, threads

    for name, k in kernel.KERNELS.items():
        yield (
            name,
            lambda k=k: numba.cfunc(kernel.SIGNATURE, error_model="numpy")(k.function).inspect_llvm(),
        )
    for name, lazy in vars(threads).items():
        if isinstance(lazy, threads._Lazy):
            yield f"threads.{name}", lambda f=lazy: _of_njit(f)


def _of_njit(lazy):
    dispatcher = numba.njit(lazy.signature, nogil=True, error_model="numpy")(lazy.function)
    return "\n".join(dispatcher.inspect_llvm().values())


def compile_for(machine, ir):
    """(assembly, bytes of the object) of a module's IR."""
    ir = re.sub(r"target triple = .*", f'target triple = "{TRIPLE}"', ir)
    ir = re.sub(r"target datalayout = .*", f'target datalayout = "{machine.target_data}"', ir)
    module = llvm.parse_assembly(ir)
    module.verify()
    assembly = machine.emit_assembly(module)
    return assembly, machine.emit_object(module)


def what_it_has(ir, assembly, code):
    defined = set(re.findall(r"^(\S+):", assembly, re.M))
    called = set(re.findall(r"\bbl?\s+([A-Za-z_.][\w.$]*)", assembly)) - defined
    return {
        "x86": sorted(set(re.findall(r"llvm\.x86\.[\w.]+|asm [^\n]*", ir))),
        "outside": sorted(name for name in called if not OUTSIDE.match(name)),
        "elf": code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == 183,  # EM_AARCH64
        "fma": len(re.findall(r"\bfmla\b|\bfmadd\b", assembly)),
        "dot": len(re.findall(r"\b[su]dot\b", assembly)),
        "multiply": len(re.findall(r"\b[su]mlal2?\b|\b[su]mull2?\b|\bmla\b", assembly)),
    }


def main(cpu, *parts):
    pretend(cpu)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(TRIPLE)
    machine = target.create_target_machine(cpu=cpu, opt=2, reloc="pic", codemodel="default")
    result = {}
    with only_ir():
        for name, make in functions():
            if not parts or any(part in name for part in parts):
                ir = make()
                result[name] = what_it_has(ir, *compile_for(machine, ir))
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
