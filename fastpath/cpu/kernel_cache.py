"""Machine code of kernels, kept between runs.

A kernel's file holds the object code that Numba made, and is loaded without Numba: starting its compiler
takes 0.3 s even when there is nothing to compile.  The folder's name is a hash of all kernel sources and of
the files whose numbers they are compiled for, the compiler's version, the kernel set and the CPU:
an edit, an upgrade or another machine gets another folder, and stale code cannot run.  A full disk, a
truncated file or a folder that is gone costs time, never an answer.
"""

import contextlib
import hashlib
import inspect
import json
import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core import config
from numba.core.base import _load_global_helpers
from numba.core.runtime import _nrt_python

from fastpath import user_cache
from fastpath.cpu import machine
from fastpath.interrupts import Noticed
from quant import fp4, i_quantize
from refimpl import kv_types

KEEP_FOLDERS = 12  # of other sources, versions and machines
_SOURCES = Path(__file__).parent
# their numbers are constants of kernels: the layout of keys and values, levels of formats
_CONSTANTS = [Path(module.__file__) for module in (kv_types, fp4, i_quantize)]
_OPTIONS = {"error_model": "numpy"}  # x / 0 is inf, as in NumPy; nothing raises inside a kernel
_NEEDED = re.compile(r'^declare .*?@"?([^"(]+)"?\(|^@"?([^"\s]+)"? = external ', re.MULTILINE)


def source_hash():
    """Hash of everything that decides what a kernel compiles to."""
    state = hashlib.blake2b(digest_size=10)
    for path in (*sorted(_SOURCES.glob("*.py")), *_CONSTANTS):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    versions = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag, config.CPU_NAME)
    state.update(repr((versions, machine.KERNELS, sorted(machine.FEATURES))).encode())
    return state.hexdigest()


def find():
    """The folder for this process's kernels, or None when there is no place to keep them."""
    name = f"kernels-{source_hash()}"
    for parent, is_named in user_cache.places():
        folder = parent / name
        known = folder.exists()
        if user_cache.usable(parent, is_named) and user_cache.usable(folder, is_named):
            if not known:
                others = (other for other in parent.glob("kernels-*") if other != folder)
                user_cache.remove_old(others, KEEP_FOLDERS, lambda other: shutil.rmtree(other, True))
            with contextlib.suppress(OSError):
                os.utime(folder)  # in use: other versions let it live
            return folder
    return None


FOLDER = find()


def name_of(function):
    """'module.function'."""
    return f"{function.__module__.rsplit('.', 1)[-1]}.{function.__qualname__}"


def stored():
    """Names of the kernels that the folder holds: 'module.function'."""
    if FOLDER is None:
        return frozenset()
    return frozenset(path.name.rsplit("-", 1)[0] for path in FOLDER.glob("*.o"))


class MachineCode:
    """A function compiled for C to call. `address` is good as long as this object lives."""

    def __init__(self, address, keep_alive, was_cached):
        self.address, self._keep_alive, self.was_cached = address, keep_alive, was_cached


def machine_code(function, signature):
    """The machine code of a function of Numba's language: kept code, or code compiled now and kept.

    A Ctrl+C meanwhile is KeyboardInterrupt, at the latest when the code is made: compilers run many
    destructors, which swallow it.
    """
    with Noticed() as ctrl_c:
        made = _machine_code(function, signature)
    ctrl_c.check()
    return made


def _machine_code(function, signature):
    path = None if FOLDER is None else _path(function, signature)
    if path is not None and (found := _load(path)) is not None:
        return found
    compiled = numba.cfunc(signature, **_OPTIONS)(function)
    if path is not None:
        _store(path, compiled)
    return MachineCode(compiled.address, compiled, False)


def _path(function, signature):
    """None for functions whose code depends on what no hash here covers."""
    if function.__closure__:
        return None
    state = hashlib.blake2b(str(signature).encode(), digest_size=8)
    source = Path(inspect.getfile(function))
    if source.parent != _SOURCES:  # a test's kernel
        try:
            state.update(source.read_bytes())
        except OSError:
            return None
    return FOLDER / f"{name_of(function)}-{state.hexdigest()}.o"


def _store(path, compiled):
    """Header line, object code. Written whole or not at all, whoever else does the same."""
    library = compiled._library
    code = library.serialize_using_object_code()[2][0]
    needs = {function or variable for function, variable in _NEEDED.findall(library.get_llvm_str())}
    needs = sorted(name for name in needs if not name.startswith("llvm."))
    header = {"entry": compiled.native_name, "needs": needs}
    header["check"] = _check(header, code)
    part = path.with_name(f".{path.name}-{os.getpid()}.part")
    try:
        part.write_bytes(json.dumps(header).encode() + b"\n" + code)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()


def _load(path):
    """None if there is nothing, or nothing that can be used."""
    try:
        head, _, code = path.read_bytes().partition(b"\n")
        header = json.loads(head)
        if header["check"] != _check(header, code):
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # the last: nested very deeply
        return None
    _add_symbols()
    if not all(llvm.address_of_symbol(name) for name in header["needs"]):
        return None  # LLVM would end the process
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return MachineCode(engine.get_function_address(header["entry"]), engine, True)


def _check(header, code):
    names = json.dumps([header["entry"], header["needs"]]).encode()
    return hashlib.blake2b(names + code, digest_size=16).hexdigest()


def _target_machine():
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine()


@cache
def _add_symbols():
    """What the error paths of compiled functions name, which no kernel takes: as Numba does to compile."""
    _load_global_helpers()
    for name, address in _nrt_python.c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)
