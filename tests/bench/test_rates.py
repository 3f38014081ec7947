"""Rates: that the loops compute what they are timed for. No speed is looked at."""

import os
import subprocess
import sys

import numpy as np
import pytest

from fastpath.bench import rates
from fastpath.cpu import threads
from fastpath.cpu.buffers import address


def results(kernel, words, dtype, rounds=rates.ROUNDS):
    out = np.zeros(threads.num_threads() * (rates.TILE + rates.STATE), np.uint8)
    threads.run(kernel, (address(words), address(out), rounds), 1)
    return out[:64].view(dtype)


def test_plain_read_reads_every_byte(monkeypatch):
    """A sum of all words, per lane; a rest of less than 512 bytes is left out."""
    data = np.random.default_rng(0).integers(-1000, 1000, (2 * rates.PIECE + 1500) // 4, dtype=np.int32)
    plain = rates.PlainRead([data, data[:200]])
    assert plain.nbytes == (data.nbytes // 512 + 800 // 512) * 512
    assert plain.bytes_per_s() > 0
    passes = iter([3.0, 9.0, 5.0, 7.0])
    monkeypatch.setattr(plain, "bytes_per_s", lambda: next(passes))
    assert plain.best() == 9.0 and list(passes) == [7.0]  # of three
    begin, size = plain.pieces[0]
    assert (begin, size) == (address(data), rates.PIECE) and plain.pieces[:, 1].sum() == plain.nbytes
    threads.run(rates.read_plain, (address(plain.pieces), address(plain._out)), 1)
    expected = data[: rates.PIECE // 4].reshape(-1, 16).sum(axis=0, dtype=np.int32)
    assert np.array_equal(plain._out[0], expected)


def test_dot_loop_computes_dot_products():
    words = np.arange(64, dtype=np.int8)
    got = results(rates.dot_peak, words, np.int32)
    u = np.arange(rates.ROUNDS, dtype=np.int32).view(np.uint8).reshape(-1, 4)
    expected = (u.astype(np.int64) @ words[:48].reshape(12, 4).T.astype(np.int64)).sum()
    assert (got == np.int64(expected).astype(np.int32)).all()


def test_fma_loop_stays_finite():
    got = results(rates.fma_peak, np.full(32, 0.5, np.float32), np.float32)
    assert np.allclose(got, 12 * 0.5 / (1 - 0.5))


PROGRAM = """
import numpy as np
from fastpath.bench import rates
from tests.bench.test_rates import results
got = results(rates.tile_peak, np.arange(1024).astype(np.int8), np.int32, rounds=3)
m = np.arange(1024).astype(np.int8).astype(np.int32).reshape(16, 64)
b = m.reshape(16, 16, 4).transpose(0, 2, 1).reshape(64, 16)  # four neighbouring rows side by side
assert np.array_equal(got, 3 * (m @ b)[0]), got
"""


def test_tile_loop_computes_matrix_products():
    env = os.environ | {"TWINPATH_KERNELS": "amx-emulated", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("rate", [rates.int8_ops_per_s, rates.fma_ops_per_s])
def test_rates_are_positive(rate):
    assert rate(0.001) > 0
