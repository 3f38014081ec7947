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
from fastpath.kv.arrays import zeros
from fastpath.kv.geometry import PAGE, KVType, pages_of
from refimpl.kv_types import dtypes_of, shapes_of

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
    page: int = PAGE,
    seconds: float = 0.3,
) -> list[AttentionRate]:
    """Decode of `batches` sequences in one call, and a prefill, for each shape: the best of `seconds`."""
    read = rates.PlainRead([np.ones(FAR // 8)])
    read_peak = read.best()
    fma_peak = rates.fma_ops_per_s()
    results = []
    for name in shapes:
        layer = _Layer(*SHAPES[name], kv_type, page)
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
    parity.check_attention(ops_for("cpu"), layers, kv_type)


def _rate(what, figures, read_peak, fma_peak) -> AttentionRate:
    elapsed, n_bytes, n_ops = figures
    speed, ops = n_bytes / elapsed, n_ops / elapsed
    return AttentionRate(what, elapsed, speed / 1e9, ops / 1e9, speed / read_peak, ops / fma_peak)


class _Layer:
    """One layer's keys and values."""

    def __init__(self, n_heads, n_kv_heads, head_dim, window, kv_type, page):
        self.n_heads, self.n_kv_heads, self.head_dim, self.window = n_heads, n_kv_heads, head_dim, window
        self.kv_type, self.page = kv_type, page

    def _pages(self, n_seqs, n_positions):
        """(keys, values, table): what lanes of n_positions keep, all written, on pages in any order.

        Memory that was never written is not read from memory.
        """
        from fastpath.cpu import write_kv

        K, H, P = self.n_kv_heads, self.head_dim, self.page
        E = -(-n_positions // P)
        if self.window is not None:
            E = min(E, pages_of(self.window, P))
        shapes = shapes_of(n_seqs * E, P, K, H, self.kv_type)
        k, v = map(zeros, shapes, dtypes_of(self.kv_type))
        rng = np.random.default_rng(0)
        some = rng.standard_normal((2, P, K, H), np.float32)
        one, order = np.zeros((1, 1), np.int32), np.arange(P, dtype=np.int32)
        write_kv(*some, k[:1], v[:1], one, np.zeros(P, np.int32), order)
        k[1:], v[1:] = k[:1], v[:1]
        return k, v, rng.permutation(n_seqs * E).astype(np.int32).reshape(n_seqs, E)

    def _seen(self, position):
        return position + 1 if self.window is None else min(self.window, position + 1)

    def decode(self, depth: int, batch: int, seconds: float) -> tuple[float, int, int]:
        """(s, bytes, operations) of one call of `batch` sequences."""
        from fastpath.cpu import attention
        from fastpath.cpu.program import record

        k, v, _ = self._pages(1, depth)
        n_seqs = batch * max(2, -(-FAR // (batch * (k.nbytes + v.nbytes))))
        k, v, table = self._pages(n_seqs, depth)
        q = np.ones((batch, self.n_heads, self.head_dim), np.float32) / self.head_dim
        lanes, positions = np.zeros(batch, np.int32), np.full(batch, depth - 1, np.int32)
        with record() as program:
            attention(q, k, v, table, lanes, positions, self.window)
        best, end = np.inf, time.perf_counter() + seconds
        for first in itertools.cycle(range(0, n_seqs, batch)):
            lanes[:] = np.arange(first, first + batch)
            begin = time.perf_counter()
            program.replay()
            best = min(best, time.perf_counter() - begin)
            if begin > end:
                break
        seen = batch * self._seen(depth - 1)
        n_bytes = seen * (k[0].nbytes + v[0].nbytes) // self.page
        return best, n_bytes, 4 * seen * self.n_heads * self.head_dim

    def prefill(self, prompt: int, seconds: float) -> tuple[float, int, int]:
        """(s, bytes, operations) of one call of `prompt` tokens."""
        from fastpath.cpu import attention

        wide = _Layer(self.n_heads, self.n_kv_heads, self.head_dim, None, self.kv_type, self.page)
        k, v, table = wide._pages(1, prompt)
        q = np.ones((prompt, self.n_heads, self.head_dim), np.float32) / self.head_dim
        lanes, positions = np.zeros(prompt, np.int32), np.arange(prompt, dtype=np.int32)
        out, best, end = np.empty_like(q), np.inf, time.perf_counter() + seconds
        while time.perf_counter() < end or best == np.inf:
            begin = time.perf_counter()
            attention(q, k, v, table, lanes, positions, self.window, out=out)
            best = min(best, time.perf_counter() - begin)
        seen = sum(self._seen(position) for position in range(prompt))
        return best, k.nbytes + v.nbytes, 4 * seen * self.n_heads * self.head_dim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kv-type", default="f16", help="a type, or one for keys and one for values")
    parser.add_argument("-d", "--depth", type=int, default=4096)
    parser.add_argument("-p", "--prompt", type=int, default=2048)
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--page", type=int, default=PAGE, help="positions of a page, a multiple of 32")
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
    print(f"{machine.describe()}, {args.kv_type}, pages of {args.page}")
    options = {"depth": args.depth, "prompt": args.prompt, "batches": args.batch, "page": args.page}
    for rate in attention_rates(kv_type, args.shapes, **options):
        print(rate)


if __name__ == "__main__":
    main()
