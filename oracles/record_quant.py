"""Record what ggml's own C code makes of the tensor formats: quantisation error and dequantised values.

    python -m oracles.record_quant PATH/libggml-base.so

writes oracles/golden/quant_error.json with
    inputs       sha256 of each test distribution, so that a test knows that it quantises the same numbers
    rmse         format -> distribution -> root mean square error of ggml_quantize_chunk without importance
                 weights, divided by that of the zero answer; dequantised by ggml, too
    dequantized  format -> sha256 of the values of the random blocks whose values are all finite
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import platform
import sys
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden" / "quant_error.json"

SEED = 20260
ROWS, ROW_LEN = 32, 1024
N_BLOCKS = 512

# name: (ggml id, values per block, bytes per block)
FORMATS = {
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18),
    "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136),
    "IQ1_M": (29, 256, 56),
    "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17),
    "NVFP4": (40, 64, 36),
    "Q1_0": (41, 128, 18),
}

# Quantised without importance weights; the lowest-bit IQ formats need them.
QUANTIZED = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
)


def distributions() -> dict[str, np.ndarray]:
    """Name -> f32[ROWS, ROW_LEN]: shapes of values that weights have, or might have."""
    rng = np.random.Generator(np.random.Philox(SEED))
    size = (ROWS, ROW_LEN)
    normal = rng.standard_normal(size)
    inputs = {
        "normal": normal,
        "laplace": rng.laplace(size=size),
        "heavy_tails": rng.standard_t(4, size),
        "uniform": rng.uniform(-1, 1, size),
        "all_positive": 0.5 + np.abs(normal),
        "few_outliers": normal * np.where(rng.random(size) < 0.01, 20, 1),
        "rows_differ": normal * np.exp(rng.standard_normal((ROWS, 1))),
        "columns_differ": normal * np.exp(rng.standard_normal((1, ROW_LEN))),
    }
    return {name: (0.02 * x).astype(np.float32) for name, x in inputs.items()}


def random_blocks(name: str) -> np.ndarray:
    """u8[N_BLOCKS, block_bytes], every bit random."""
    ggml_id, _, block_bytes = FORMATS[name]
    rng = np.random.Generator(np.random.Philox([SEED, ggml_id]))
    return rng.integers(0, 256, (N_BLOCKS, block_bytes), dtype=np.uint8)


def digest(values: np.ndarray) -> str:
    """sha256 of the float32 rows that are finite throughout, -0 counted as 0."""
    finite = values[np.isfinite(values).all(axis=1)] + np.float32(0)
    return hashlib.sha256(finite.astype("<f4").tobytes()).hexdigest()


class Ggml:
    """The three functions of libggml-base that are asked."""

    def __init__(self, library: Path):
        to_float = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)

        class Traits(ctypes.Structure):
            _fields_ = (
                ("type_name", ctypes.c_char_p),
                ("block_size", ctypes.c_int64),
                ("interleave", ctypes.c_int64),
                ("type_size", ctypes.c_size_t),
                ("is_quantized", ctypes.c_bool),
                ("to_float", to_float),
                ("from_float_ref", ctypes.c_void_p),
            )

        self._lib = ctypes.CDLL(str(library))
        self._lib.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
        self._lib.ggml_version.restype = ctypes.c_char_p
        self._lib.ggml_commit.restype = ctypes.c_char_p
        self._lib.ggml_quantize_chunk.restype = ctypes.c_size_t
        pointer, i64 = ctypes.c_void_p, ctypes.c_int64
        self._lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, i64, i64, i64, pointer]

    @property
    def version(self) -> str:
        return f"ggml {self._lib.ggml_version().decode()} ({self._lib.ggml_commit().decode()})"

    def dequantize(self, name: str, blocks: np.ndarray) -> np.ndarray:
        ggml_id, block_size, block_bytes = FORMATS[name]
        traits = self._lib.ggml_get_type_traits(ggml_id).contents
        assert (traits.block_size, traits.type_size) == (block_size, block_bytes), (name, traits.type_size)
        blocks = np.ascontiguousarray(blocks).reshape(-1, block_bytes)
        out = np.empty((len(blocks), block_size), np.float32)
        traits.to_float(blocks.ctypes.data, out.ctypes.data, out.size)
        return out

    def quantize(self, name: str, x: np.ndarray) -> np.ndarray:
        ggml_id, block_size, block_bytes = FORMATS[name]
        out = np.empty((x.shape[0], x.shape[1] // block_size * block_bytes), np.uint8)
        written = self._lib.ggml_quantize_chunk(ggml_id, x.ctypes.data, out.ctypes.data, 0, *x.shape, None)
        assert written == out.nbytes, (name, written)
        return out


def relative_rmse(x: np.ndarray, back: np.ndarray) -> float:
    """sqrt(sum (back - x)^2 / sum x^2), in float64."""
    x = x.astype(np.float64)
    return float(np.sqrt(((back.reshape(x.shape) - x) ** 2).sum() / (x**2).sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description="record quantisation goldens from libggml-base")
    parser.add_argument("library", type=Path)
    ggml = Ggml(parser.parse_args().library)
    inputs = distributions()
    record = {
        "provenance": {
            "oracle": ggml.version,
            "command": "python -m oracles.record_quant libggml-base.so",
            "seed": SEED,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "inputs": {d: hashlib.sha256(x.astype("<f4").tobytes()).hexdigest() for d, x in inputs.items()},
        "rmse": {
            name: {
                d: relative_rmse(x, ggml.dequantize(name, ggml.quantize(name, x))) for d, x in inputs.items()
            }
            for name in QUANTIZED
        },
        "dequantized": {name: digest(ggml.dequantize(name, random_blocks(name))) for name in FORMATS},
    }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{GOLDEN.name}: {GOLDEN.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
