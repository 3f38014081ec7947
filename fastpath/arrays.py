"""Where the arrays of an op table lie: in memory of the host, unless the table says otherwise.

    arrays = of(ops)
    x = arrays.put(numbers)            an input of a call, where ops read it
    numbers = arrays.get(x)            a result, on the host
    k = arrays.pages(shape, dtype)     memory of a cache, for as long as the cache lives
    arrays.copy_page(k, 3, 5)          k[5] = k[3]

This module is what the host's memory does.  A table whose arrays lie elsewhere has an attribute `arrays` with
the same functions (fastpath/cuda/arrays.py).  Weights are no concern of it: tables take them as they are.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from fastpath.kv.arrays import zeros

Trace = Callable[[str, np.ndarray], None]


def of(ops: Any) -> Any:
    """The functions above, for an op table."""
    return getattr(ops, "arrays", sys.modules[__name__])


def put(array: np.ndarray) -> Any:
    return array


def get(array: Any) -> np.ndarray:
    return array


pages = zeros


def copy_page(array: Any, source: int, target: int) -> None:
    array[target] = array[source]


def is_elsewhere(ops: Any) -> bool:
    """Do results have to be brought to the host?"""
    return hasattr(ops, "arrays")


def on_host(ops: Any, trace: Trace | None) -> Trace | None:
    """A trace that is shown the arrays of an op table, for one that wants NumPy's."""
    if trace is None or not is_elsewhere(ops):
        return trace
    arrays = of(ops)
    return lambda name, array: trace(name, arrays.get(array))
