"""Rates of attention alone, on caches as they lie in memory: `python -m fastpath.bench.attention`.

decode    one token at a depth, from caches that together are larger than any processor's: bytes of keys and
          values per second, against a plain read in the same run
prefill   a prompt in one call: multiplications and additions that a query needs (half of the square, or the
          window), against float32 multiply-adds from registers
"""

import argparse
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fastpath.backend import ops_for
from fastpath.bench import parity, rates
from fastpath.cache import KVCache, KVType
from refimpl.kv_types import dtypes_of

FAR = 1 << 29  # bytes: more than the caches of a processor hold

SHAPES = {  # layers of published models: query heads, key/value heads, head size, window
    "E2B global": (8, 1, 512, None),
    "E2B sliding": (8, 1, 256, 512),
    "E4B global": (8, 2, 512, None),
    "26B global": (16, 2, 512, None),
    "26B sliding": (16, 8, 256, 1024),
    "12B global": (16, 1, 512, None),
    "31B sliding": (32, 16, 256, 1024),
}


@dataclass(frozen=True)
class AttentionRate:
    """One figure.  limit: the share of the binding limit, memory or multiply-adds."""

    what: str
    seconds: float
    gb_s: float
    gflop_s: float
    read_share: float
    fma_share: float

    @property
    def limit(self) -> float:
        return max(self.read_share, self.fma_share)

    def __str__(self) -> str:
        return (
            f"{self.what:42}{1e6 * self.seconds:10.1f} us{self.gb_s:8.1f} GB/s{self.gflop_s:8.1f} GFLOP/s"
            f"{self.read_share:8.0%} of reading{self.fma_share:8.0%} of multiply-adds"
        )


def attention_rates(
    kv_type: KVType = "f16",
    shapes: Iterable[str] = tuple(SHAPES),
    *,
    depth: int = 4096,
    prompt: int = 2048,
    batches: Iterable[int] = (1,),
    seconds: float = 0.3,
) -> list[AttentionRate]:
    """Decode of `batches` sequences in one call, and a prefill, for each shape: the best of `seconds`."""
    read = rates.PlainRead([np.ones(FAR // 8)])
    read_peak = read.best()
    fma_peak = rates.fma_ops_per_s()
    results = []
    for name in shapes:
        layer = _Layer(*SHAPES[name], kv_type)
        for batch in batches:
            what = f"{name}, {batch} at depth {depth}"
            results.append(_rate(what, layer.decode(depth, batch, seconds), read_peak, fma_peak))
        if prompt:
            results.append(
                _rate(f"{name}, prompt {prompt}", layer.prefill(prompt, seconds), read_peak, fma_peak)
            )
    return results


def check(kv_type: KVType = "f16", shapes: Iterable[str] = tuple(SHAPES)) -> None:
    """ParityError if attention of one of them is not what it is defined to be."""
    layers = sorted({(SHAPES[name][2], SHAPES[name][3] is not None) for name in shapes})
    parity.check_attention(ops_for("cpu"), layers, dtypes_of(kv_type))


def _rate(what, figures, read_peak, fma_peak) -> AttentionRate:
    elapsed, n_bytes, n_ops = figures
    speed, ops = n_bytes / elapsed, n_ops / elapsed
    return AttentionRate(what, elapsed, speed / 1e9, ops / 1e9, speed / read_peak, ops / fma_peak)


class _Layer:
    """Stands for a model of one layer."""

    def __init__(self, n_heads, n_kv_heads, head_dim, window, kv_type):
        self.index, self.kv_from, self.owns_kv = 0, 0, True
        self.n_heads, self.n_kv_heads, self.head_dim, self.window = n_heads, n_kv_heads, head_dim, window
        self.layers, self.kv_type = (self,), kv_type

    def _cache(self, n_seqs, n_positions, chunk):
        """(keys, values) with something in them: memory that was never written is not read from memory."""
        cache = KVCache(self, n_seqs, n_positions, chunk, kv_type=self.kv_type)
        cache.reserve(n_positions)
        for array in cache.layer(0):
            some = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
            some = some.view(np.uint32) >> 16 if array.dtype == np.uint16 else some.astype(array.dtype)
            flat = array.reshape(-1)
            for i in range(0, len(flat), len(some)):
                flat[i : i + len(some)] = some[: len(flat) - i]
        return cache.layer(0)

    def _seen(self, position):
        return position + 1 if self.window is None else min(self.window, position + 1)

    def decode(self, depth, batch, seconds):
        """(s, bytes, operations) of one call of `batch` sequences."""
        from fastpath.cpu import attention
        from fastpath.cpu.program import record

        k, v = self._cache(1, depth, 1)
        n_seqs = batch * max(2, -(-FAR // (batch * (k.nbytes + v.nbytes))))
        k, v = self._cache(n_seqs, depth, 1)
        q = np.ones((batch, self.n_heads, self.head_dim), np.float32) / self.head_dim
        lanes, positions = np.zeros(batch, np.int32), np.full(batch, depth - 1, np.int32)
        with record() as program:
            attention(q, k, v, lanes, positions, self.window)
        best, end = np.inf, time.perf_counter() + seconds
        for first in itertools.cycle(range(0, n_seqs, batch)):
            lanes[:] = np.arange(first, first + batch)
            begin = time.perf_counter()
            program.replay()
            best = min(best, time.perf_counter() - begin)
            if begin > end:
                break
        seen = batch * self._seen(depth - 1)
        n_bytes = seen * self.n_kv_heads * self.head_dim * (k.itemsize + v.itemsize)
        return best, n_bytes, 4 * seen * self.n_heads * self.head_dim

    def prefill(self, prompt, seconds):
        """(s, bytes, operations) of one call of `prompt` tokens."""
        from fastpath.cpu import attention

        k, v = self._cache(1, prompt, prompt)
        q = np.ones((prompt, self.n_heads, self.head_dim), np.float32) / self.head_dim
        lanes, positions = np.zeros(prompt, np.int32), np.arange(prompt, dtype=np.int32)
        out, best, end = np.empty_like(q), np.inf, time.perf_counter() + seconds
        while time.perf_counter() < end or best == np.inf:
            begin = time.perf_counter()
            attention(q, k, v, lanes, positions, self.window, out=out)
            best = min(best, time.perf_counter() - begin)
        seen = sum(self._seen(position) for position in range(prompt))
        return best, k.nbytes + v.nbytes, 4 * seen * self.n_heads * self.head_dim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kv-type", default="f16", help="f32, f16, bf16, or one for keys and one for values")
    parser.add_argument("-d", "--depth", type=int, default=4096)
    parser.add_argument("-p", "--prompt", type=int, default=2048)
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    from fastpath.cpu import machine, threads

    if args.threads:
        threads.set_num_threads(args.threads)
    types = args.kv_type.split(",")
    kv_type = types[0] if len(types) == 1 else (types[0], types[1])
    try:
        check(kv_type, args.shapes)
    except parity.ParityError as error:
        parser.exit(2, f"{error}\n")
    print(f"{machine.describe()}, {args.kv_type}")
    options = {"depth": args.depth, "prompt": args.prompt, "batches": args.batch}
    for rate in attention_rates(kv_type, args.shapes, **options):
        print(rate)


if __name__ == "__main__":
    main()
