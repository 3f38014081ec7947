"""Compiled kernels on disk: never stale, never in the way."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fastpath.cpu import kernel_cache, threads
from fastpath.cpu.kernel import KERNELS, SIGNATURE, Kernel, kernel
from fastpath.cpu.simd import ld_f32, ld_i64, st_f32

ROOT = Path(__file__).parents[2]


@kernel
def _double(args, lo, hi, thread):
    x = ld_i64(args)
    for i in range(lo, hi):
        st_f32(x + 4 * i, ld_f32(x + 4 * i) + ld_f32(x + 4 * i))


def _run(a_kernel):
    x = np.arange(5, dtype=np.float32)
    threads.run(a_kernel, (x.ctypes.data,), 5, 5)
    return x.tolist()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache, "FOLDER", tmp_path)
    return tmp_path


def test_compiled_once(folder):
    first, second = Kernel(_double.function), Kernel(_double.function)
    assert _run(first) == _run(second) == [0, 2, 4, 6, 8]
    assert not first.was_cached and second.was_cached
    assert second.name in kernel_cache.stored()


def test_loaded_without_the_compiler(folder):
    """What a second process does: the code of the first one, from the file alone."""
    _run(Kernel(_double.function))
    code = kernel_cache._load(next(folder.glob("*.o")))
    x = np.arange(5, dtype=np.float32)
    words = np.array([x.ctypes.data])
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_ssize_t] * 4)
    kind(code.address)(words.ctypes.data, 1, 4, 0)
    assert x.tolist() == [0, 2, 4, 6, 4]


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_file_cut_short_is_compiled_again(folder, cut):
    _run(Kernel(_double.function))
    (entry,) = folder.glob("*.o")
    entry.write_bytes(entry.read_bytes()[:cut])
    assert _run(Kernel(_double.function)) == [0, 2, 4, 6, 8]
    again = Kernel(_double.function)
    assert _run(again) == [0, 2, 4, 6, 8] and again.was_cached


@pytest.mark.parametrize(
    "content",
    [
        b"not json\n",
        b"[]\n",
        b"{}\n",
        b'{"entry": 1, "needs": 2, "check": "3"}\n',
        b"\xff\n\n\n",
        b"[" * 100_000,
    ],
    ids=range(6),
)
def test_other_content_is_compiled_again(folder, content):
    _run(Kernel(_double.function))
    (entry,) = folder.glob("*.o")
    entry.write_bytes(content)
    assert _run(Kernel(_double.function)) == [0, 2, 4, 6, 8]


def test_damaged_code_is_never_run(folder):
    _run(Kernel(_double.function))
    (entry,) = folder.glob("*.o")
    whole = entry.read_bytes()
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        entry.write_bytes(damaged)
        loaded = kernel_cache._load(entry)
        assert loaded is None, f"byte {at} of {len(whole)} is not covered"


def test_code_with_a_need_that_this_process_lacks_is_compiled_again(folder):
    """LLVM ends the process when it meets a name that it cannot resolve."""
    _run(Kernel(_double.function))
    (entry,) = folder.glob("*.o")
    head, _, code = entry.read_bytes().partition(b"\n")
    header = json.loads(head) | {"needs": ["no_such_function"]}
    header["check"] = kernel_cache._check(header, code)
    entry.write_bytes(json.dumps(header).encode() + b"\n" + code)
    assert kernel_cache._load(entry) is None
    assert _run(Kernel(_double.function)) == [0, 2, 4, 6, 8]


def test_functions_that_close_over_others_are_not_kept(folder):
    factor = np.float32(3)

    def scaled(args, lo, hi, thread):
        x = ld_i64(args)
        for i in range(lo, hi):
            st_f32(x + 4 * i, ld_f32(x + 4 * i) * factor)

    assert _run(Kernel(scaled)) == [0, 3, 6, 9, 12]
    assert not list(folder.iterdir())


def test_every_kernel_of_the_engine_can_be_kept():
    """One that could not would be compiled in every process."""
    for name, a_kernel in KERNELS.items():
        if a_kernel.function.__module__.startswith("fastpath."):
            assert kernel_cache._path(a_kernel.function, SIGNATURE) is not None, name


def test_no_place_to_keep_them(monkeypatch):
    monkeypatch.setattr(kernel_cache, "FOLDER", None)
    assert _run(Kernel(_double.function)) == [0, 2, 4, 6, 8]
    assert kernel_cache.stored() == frozenset()


def test_folder_that_went_away(folder):
    folder.rmdir()
    folder.write_bytes(b"")  # a file in its place
    assert _run(Kernel(_double.function)) == [0, 2, 4, 6, 8]


def test_old_folders_go_used_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "KEEP_FOLDERS", 3)
    long_ago, now = 1e9, time.time()
    ages = {"kernels-old": long_ago, "of-somebody-else": long_ago}
    ages |= {f"kernels-{n}": now - 100 * n for n in range(5)}
    for name, when in ages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.o").write_bytes(b"")
        os.utime(tmp_path / name, (when, when))
    mine = kernel_cache.find()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {mine.name, "kernels-0", "kernels-1", "kernels-2", "of-somebody-else"}


def test_numbers_from_outside_of_the_folder_are_in_the_key(tmp_path, monkeypatch):
    """Kernels are compiled for blocks of STEP positions and COLUMNS components, and for levels of formats."""
    wanted = {
        "from refimpl.kv_types import", "from refimpl import kv_types", "from quant import fp4, i_quantize",
        "from quant.fp4 import LEVELS", "from quant.i_quantize import LEVELS",
    }  # fmt: skip
    foreign = re.compile(r"^(?:from (?:refimpl|quant)\S* import|import (?:refimpl|quant)).*", re.MULTILINE)
    found = {
        (path.name, line)
        for path in (ROOT / "fastpath/cpu").glob("*.py")
        for line in foreign.findall(path.read_text())
        if not line.startswith(tuple(wanted))
    }
    # types of arguments, of which nothing is compiled, and sizes of blocks, which files have fixed
    plain = {"from quant import QTensor", "from quant import Format, QTensor", "from quant import FORMATS"}
    assert {line for _, line in found} <= plain
    before, files = kernel_cache.source_hash(), list(kernel_cache._CONSTANTS)
    edits = {
        "kv_types.py": ("STEP = 32", "STEP = 64"),
        "fp4.py": ("6, 8, 12, 0", "6, 8, 13, 0"),
        "i_quantize.py": ("-127, ", "-126, "),
    }
    assert [path.name for path in files] == list(edits)
    for i, path in enumerate(files):
        edited = tmp_path / path.name
        edited.write_text(path.read_text().replace(*edits[path.name]))
        assert edited.read_text() != path.read_text()
        monkeypatch.setattr(kernel_cache, "_CONSTANTS", [*files[:i], edited, *files[i + 1 :]])
        assert kernel_cache.source_hash() != before


def test_an_edit_of_an_included_file_is_seen(tmp_path):
    """vector_math.py is compiled into the kernel of activation.py; Numba alone would run the old code."""
    for package in ("quant", "refimpl", "fastpath"):
        ignore = shutil.ignore_patterns("__pycache__", "demo")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignore)
    code = "import numpy, fastpath.cpu; print(fastpath.cpu.softcap(numpy.ones((1, 1), 'f4'), 30.0)[0, 0])"

    def run():
        environment = {
            **os.environ,
            "NUMBA_CACHE_DIR": str(tmp_path / "kernels"),
            "PYTHONPATH": str(tmp_path),
        }
        command = [sys.executable, "-c", code]
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return float(result.stdout)

    before = run()
    source = tmp_path / "fastpath/cpu/vector_math.py"
    text = source.read_text()
    assert text.count("fma_f32(mul_f32(p, z2), z, z)") == 1
    source.write_text(
        text.replace("fma_f32(mul_f32(p, z2), z, z)", "fma_f32(mul_f32(p, z2), z, add_f32(z, z))")
    )
    assert run() > 1.5 * before
