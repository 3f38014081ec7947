"""Where things are kept: the first place that can be used, and that nobody else can write to."""

import os

import pytest

from fastpath import user_cache


@pytest.fixture
def place(tmp_path, monkeypatch):
    """() -> the folder, as a new process would choose it."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(user_cache.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    yield user_cache.folder.__wrapped__
    user_cache.folder.cache_clear()


@pytest.mark.skipif(os.name != "posix", reason="names of POSIX")
def test_first_usable_place(place, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert place() == tmp_path / "user" / "twinpath"
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert place().parent == tmp_path / "temporary"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # its specification: to be ignored
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # not there, and not ours to make
    monkeypatch.chdir(tmp_path)
    assert place().parent == tmp_path / "temporary"
    assert not (tmp_path / "relative").exists() and not (tmp_path / "home").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(blocked))
    assert place().parent == tmp_path / "temporary"
    monkeypatch.setattr(user_cache.tempfile, "tempdir", str(blocked))
    assert place() is None
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "chosen"))
    assert place() == tmp_path / "chosen"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="permissions as on POSIX")
@pytest.mark.parametrize("mode", [0o777, 0o702, 0o770])
def test_a_folder_that_others_may_write_to_is_not_trusted(place, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open"))
    (tmp_path / "open" / "twinpath").mkdir(parents=True)
    (tmp_path / "open" / "twinpath").chmod(mode)
    assert place().parent == tmp_path / "temporary"


def test_what_is_old_or_too_much_is_removed(tmp_path):
    now = 4e9
    for n in range(6):
        (tmp_path / str(n)).write_bytes(b"")
        os.utime(tmp_path / str(n), (now - n, now - n))
    os.utime(tmp_path / "1", (1e9, 1e9))
    gone = [tmp_path / "gone"]  # another process was quicker
    user_cache.remove_old([*tmp_path.iterdir(), *gone], 3, lambda path: path.unlink())
    assert {path.name for path in tmp_path.iterdir()} == {"0", "2", "3"}
