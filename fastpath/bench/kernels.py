"""Rates of products with few rows, format by format: `python -m fastpath.bench.kernels --help`.

Memory larger than any cache is full of matrices, which are multiplied with one or a few rows of activations,
one after the other in one compiled call, as a decode step does it.  All that time goes into reading weights
if the kernel is good: the limit is a plain read of the same memory, measured in turn.
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fastpath.backend import ops_for
from fastpath.bench import parity
from fastpath.bench.rates import PlainRead
from fastpath.cpu import linear, threads
from fastpath.cpu.arena import Arena
from fastpath.cpu.packing import SEGMENTS, PackedTensor, packed
from fastpath.cpu.program import record
from quant import FORMATS, QTensor

MEMORY = 1 << 29  # bytes: more than the caches of a processor hold
MATRIX = 1 << 22  # bytes: of this size are many matrices of a small model
COLUMNS = (1536, 2560, 6144, 12288)  # of the matrices of E2B to 31B
PATTERN_ROWS = 64  # random ones, repeated through the memory
REPETITIONS = 5
FORMAT_NAMES = (*SEGMENTS, "F16", "BF16", "F32")


@dataclass(frozen=True)
class KernelRate:
    """Bytes of weights per second, and of a plain read of the same memory."""

    format: str
    n_cols: int
    n_rows: int
    bytes_per_s: float
    read_bytes_per_s: float

    @property
    def limit(self) -> float:
        return self.bytes_per_s / self.read_bytes_per_s

    def __str__(self) -> str:
        return (
            f"linear {self.format:7} C {self.n_cols:6}  T {self.n_rows:2}{self.bytes_per_s / 1e9:8.1f} GB/s"
            f"{self.limit:8.0%} of reading"
        )


def kernel_rates(
    formats: Iterable[str] = FORMAT_NAMES,
    columns: Iterable[int] = (2560,),
    rows: Iterable[int] = (1, 2, 4),
    *,
    matrix_bytes: int = MATRIX,
    memory: int = MEMORY,
) -> Iterator[KernelRate]:
    """One rate for each format, number of columns and number of rows of activations, in this order."""
    arena = Arena(memory).take(memory)
    arena[:] = 0
    read, rows = PlainRead([arena]), tuple(rows)
    for name in formats:
        for n_cols in columns:
            weights = _weights(arena, name, n_cols, matrix_bytes)
            for n_rows in rows:
                yield KernelRate(name, n_cols, n_rows, *_measured(weights, n_rows, read))


def check(formats: Iterable[str] = FORMAT_NAMES, columns: Iterable[int] = (2560,)) -> None:
    """ParityError if a product of one of them is not what it is defined to be."""
    parity.check_products(ops_for("cpu"), tuple(formats), tuple(columns))


def _weights(arena: np.ndarray, name: str, n_cols: int, matrix_bytes: int) -> list[PackedTensor]:
    """Matrices that fill the memory, of random rows."""
    rng = np.random.default_rng(n_cols)
    numbers = (0.02 * rng.standard_normal((PATTERN_ROWS, n_cols))).astype(np.float32)
    pattern = packed(_quantized(numbers, name, rng)).memory
    n = max(1, min(matrix_bytes, arena.nbytes) // pattern.nbytes)
    size = n * pattern.nbytes
    every = arena[: arena.nbytes // size * size].reshape(-1, size)
    every.reshape(-1, pattern.nbytes)[:] = pattern
    return [PackedTensor(FORMATS[name], (n * PATTERN_ROWS, n_cols), one, name) for one in every]


def _quantized(numbers: np.ndarray, name: str, rng: np.random.Generator) -> QTensor:
    form = FORMATS[name]
    if form.quantize_blocks is not None:
        return QTensor.from_array(numbers, name)
    # no quantiser: any bytes, with a moderate scale in front (formats with kernels have theirs there)
    data = rng.integers(0, 256, (len(numbers), form.row_bytes(numbers.shape[1])), np.uint8)
    data.reshape(-1, form.block_bytes)[:, :2] = (0x00, 0x20)
    return QTensor(form, numbers.shape, data)


def _measured(weights: list[PackedTensor], n_rows: int, read: PlainRead) -> tuple[float, float]:
    x = np.random.default_rng(n_rows).standard_normal((n_rows, weights[0].row_len)).astype(np.float32)
    with record() as program:
        for weight in weights:
            linear(x, weight, "int8")
    n_bytes, seconds, plain = sum(weight.nbytes for weight in weights), [], []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        program.replay()
        seconds.append(time.perf_counter() - begin)
        plain.append(read.bytes_per_s())
    return n_bytes / min(seconds), max(plain)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fastpath.bench.kernels", description=__doc__)
    parser.add_argument("--formats", default=",".join(FORMAT_NAMES), metavar="NAME,...")
    parser.add_argument("--columns", default="2560", metavar="N,...", help=f"such as {COLUMNS}")
    parser.add_argument("--rows", default="1,2,4", metavar="N,...")
    parser.add_argument("--matrix-kb", type=int, default=MATRIX >> 10, metavar="N")
    parser.add_argument("--threads", type=int, default=threads.available())
    args = parser.parse_args()
    threads.set_num_threads(args.threads)
    columns, rows = ([int(n) for n in text.split(",")] for text in (args.columns, args.rows))
    formats = args.formats.split(",")
    try:
        check(formats, columns)
    except parity.ParityError as error:
        parser.exit(2, f"{error}\n")
    for rate in kernel_rates(formats, columns, rows, matrix_bytes=args.matrix_kb << 10):
        print(rate, flush=True)


if __name__ == "__main__":
    main()
