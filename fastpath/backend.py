"""Which op table runs: Numba kernels on CPU or GPU, or the reference's definitions under the composition."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from fastpath.cuda.device import describe, missing

BACKENDS = {"cpu": "fastpath.cpu", "cuda": "fastpath.cuda.ops", "ref": "refimpl.ops"}
AUTO = "auto"


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


class Choice(NamedTuple):
    """name: one of BACKENDS; reason: why, in half a line."""

    name: str
    reason: str


def choose(name: str, misfit: Callable[[], str | None]) -> Choice:
    """The backend for `--backend NAME`.

    misfit  () -> why the model does not fit the device, None where it does; asked where there is a device

    Raises:
        ValueError: cuda was asked for by name, and there is no device, or the model does not fit
    """
    if name == "cuda":
        ops_for(name)
        if reason := misfit():
            raise ValueError(f"backend cuda: {reason}. Ask for less, or choose --backend cpu")
        return Choice(name, "asked for")
    if name != AUTO:
        return Choice(name, "asked for")
    reason = missing() or misfit()
    return Choice("cpu", reason) if reason else Choice("cuda", describe())
