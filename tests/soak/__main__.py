"""python -m tests.soak [REQUESTS [SEED [FAMILY]]]: the long soak, 2,000 requests each time (make soak)."""

import sys
import tempfile
from pathlib import Path

from fastpath.backend import ops_for
from fastpath.load import load_model
from tests import tiny
from tests.engine.conftest import FORMATS
from tests.soak.soak import MEMORY, Soak


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    family = sys.argv[3] if len(sys.argv) > 3 else "26b"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        keys = {"gemma4.attention.sliding_window": 45}
        tiny.make(path, family, size="block32", formats=FORMATS["block32"], keys=keys)
        model = load_model(path).packed()
        for memory in MEMORY:
            soak = Soak(model, ops_for("cpu"), family, n, memory=memory, seed=seed)
            report = soak.run(lambda done, r: print(f"  {done} of {n}, {r.n_steps} steps", flush=True))
            print(f"{memory} memory, {family}, seed {seed}", *report.lines(), sep="\n", flush=True)


if __name__ == "__main__":
    main()
