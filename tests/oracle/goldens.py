"""Reading oracles/golden/, and comparing a trace with one, op by op."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oracles import protocol

GOLDEN = Path(__file__).parents[2] / "oracles" / "golden"


@dataclass(frozen=True)
class Golden:
    """What an oracle said about one tiny model."""

    name: str
    arrays: dict[str, np.ndarray]
    meta: dict

    @property
    def tokens(self) -> list[int]:
        return self.meta["tokens"]

    @property
    def rows(self) -> slice:
        """The rows that were kept, of one per token."""
        return protocol.row_slice(self.meta["rows"])

    @property
    def in_order(self) -> list[str]:
        """The names in the order of computation, which is that of the file."""
        return list(self.arrays)


def read(name: str) -> Golden:
    return read_file(GOLDEN / f"{name}.npz")


def read_file(path: Path) -> Golden:
    return Golden(path.stem, *protocol.load(path))


def max_abs_in_deviations(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference, in units of the deviation of what is wanted, or absolute where that is below 1."""
    return float(np.abs(got.astype(np.float64) - want).max() / max(1.0, want.std()))


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    """Mean squared error over mean square."""
    want = want.astype(np.float64)
    return float(((got - want) ** 2).sum() / (want**2).sum())


def check(trace: dict[str, np.ndarray], golden: Golden, distance, limit: float) -> None:
    """Fails with the first name, in the order of computation, that is further than `limit` away."""
    agreed = 0
    for name in golden.in_order:
        want = golden.arrays[name]
        assert name in trace, f"{golden.name}: the oracle has {name}, the trace has not"
        got = trace[name][golden.rows]
        assert got.shape == want.shape, (
            f"{golden.name}: {name}: shape {got.shape}, the oracle has {want.shape}"
        )
        error = distance(got, want)
        assert error <= limit, (
            f"{golden.name}: first difference at {name}: {error:.2g} > {limit:g} "
            f"(the {agreed} before it agree: {', '.join(golden.in_order[:agreed][-3:]) or 'none'})"
        )
        agreed += 1
