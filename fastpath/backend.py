"""Which op table runs: the Numba kernels, or the reference's definitions under the fast composition."""

import importlib
from types import ModuleType

BACKENDS = {"cpu": "fastpath.cpu", "ref": "refimpl.ops"}


def ops_for(name: str) -> ModuleType:
    """The op table called `name`.

    `ref` is the one place where fastpath reaches for a reference op: a number that is wrong with `cpu` and
    right with `ref` comes from a kernel; wrong with both, from the composition in fastpath/model.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} does not exist. Choose one of: {', '.join(BACKENDS)}.")
    return importlib.import_module(BACKENDS[name])
