"""Which op table runs: Numba kernels on CPU or GPU, or the reference's definitions under the composition."""

import importlib
from types import ModuleType

from fastpath.cuda.device import missing

BACKENDS = {"cpu": "fastpath.cpu", "cuda": "fastpath.cuda.ops", "ref": "refimpl.ops"}


def ops_for(name: str) -> ModuleType:
    """The op table called `name`; ValueError where it does not exist, or has no device.

    `ref` is the one place where fastpath reaches for a reference op: a number that is wrong with `cpu` and
    right with `ref` comes from a kernel; wrong with both, from the composition in fastpath/model.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} does not exist. Choose one of: {', '.join(BACKENDS)}.")
    if name == "cuda" and (reason := missing()):
        raise ValueError(f"backend cuda: {reason}. Choose --backend cpu")
    return importlib.import_module(BACKENDS[name])
