"""Compiled kernels on disk: never stale, never in the way."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastpath.cpu import kernel_cache, threads
from fastpath.cpu.kernel import Kernel, kernel
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


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x05cposix\nnothing\n."])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_damaged_entries_are_compiled_again(folder, kind, content):
    _run(Kernel(_double.function))
    (entry,) = folder.glob(f"*/*.{kind}")
    entry.write_bytes(content)
    assert _run(Kernel(_double.function)) == [0, 2, 4, 6, 8]
    again = Kernel(_double.function)
    assert _run(again) == [0, 2, 4, 6, 8] and again.was_cached


def test_no_place_to_keep_them(monkeypatch):
    monkeypatch.setattr(kernel_cache, "FOLDER", None)
    assert _run(Kernel(_double.function)) == [0, 2, 4, 6, 8]
    assert kernel_cache.stored() == frozenset()


def test_folder_that_went_away(folder):
    folder.rmdir()
    folder.write_bytes(b"")  # a file in its place
    assert _run(Kernel(_double.function)) == [0, 2, 4, 6, 8]


def test_first_usable_place(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setattr(kernel_cache.config, "CACHE_DIR", "")
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert kernel_cache.find().parent == tmp_path / "user" / "twinpath"
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert kernel_cache.find().parent.parent == tmp_path / "temporary"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # its specification: to be ignored
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # not there, and not ours to make
    monkeypatch.chdir(tmp_path)
    assert kernel_cache.find().parent.parent == tmp_path / "temporary"
    assert not (tmp_path / "relative").exists() and not (tmp_path / "home").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(blocked))
    assert kernel_cache.find().parent.parent == tmp_path / "temporary"
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(blocked))
    assert kernel_cache.find() is None
    monkeypatch.setattr(kernel_cache.config, "CACHE_DIR", str(tmp_path / "chosen"))
    assert kernel_cache.find().parent == tmp_path / "chosen"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="permissions as on POSIX")
def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache.config, "CACHE_DIR", "")
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open"))
    (tmp_path / "open" / "twinpath").mkdir(parents=True)
    (tmp_path / "open" / "twinpath").chmod(0o777)
    assert kernel_cache.find().parent.parent == tmp_path / "temporary"


def test_old_folders_go_used_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache.config, "CACHE_DIR", str(tmp_path))
    long_ago = 1e9
    for name in ("kernels-old", "kernels-recent", "of-somebody-else"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / "kernels-old", (long_ago, long_ago))
    os.utime(tmp_path / "of-somebody-else", (long_ago, long_ago))
    kernel_cache.find()
    left = {path.name for path in tmp_path.iterdir()}
    assert "kernels-old" not in left and {"kernels-recent", "of-somebody-else"} <= left


def test_an_edit_of_an_included_file_is_seen(tmp_path):
    """vector_math.py is compiled into the kernel of activation.py; Numba alone would run the old code."""
    for package in ("quant", "fastpath/cpu"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignore)
    shutil.copy(ROOT / "fastpath/__init__.py", tmp_path / "fastpath")
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
