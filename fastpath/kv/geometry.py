"""How many pages a cache has, of which size: from a model's config alone, before anything is allocated.

Two kinds of layers, each with pages of its own, because they keep different positions:

    global   every position: the pages of a lane are a line
    sliding  the window - 1 positions before a call and the call itself: a ring, however long the sequence

A page is P positions in every layer of its kind that owns keys; shared-KV layers own none.  `plan` is the one
formula for estimates, for what `inspect` prints, and for what KVCache allocates.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from refimpl.kv_types import STEP, dtypes_of, exact_type, shapes_of

GLOBAL, SLIDING = "global", "sliding"
PAGE = 64  # positions

KVType = str | tuple[str, str]  # a name of refimpl.kv_types.KV_TYPES, or one for keys and one for values


@dataclass(frozen=True)
class Kind:
    """The layers of one kind, and the pages that they share out.

    layers      the config's layers that own keys
    window      positions that a query sees, its own included; None: all
    n_entries   E, pages that a lane may hold: position p is in entry p // P % E
    n_pages     N, of all lanes together
    page_bytes  of one page in all layers
    """

    name: str
    layers: tuple
    window: int | None
    n_entries: int
    n_pages: int
    page_bytes: int

    @property
    def nbytes(self) -> int:
        return self.n_pages * self.page_bytes


@dataclass(frozen=True)
class Geometry:
    """kinds: those that the model has, by name; page: P."""

    page: int
    kinds: Mapping[str, Kind]

    @property
    def nbytes(self) -> int:
        return sum(kind.nbytes for kind in self.kinds.values())

    @property
    def page_bytes(self) -> dict[str, int]:
        return {name: kind.page_bytes for name, kind in self.kinds.items()}


PageCounts = Mapping[str, int] | Callable[[Geometry], Mapping[str, int]]  # kind -> N


def plan(
    config,
    n_seqs: int,
    capacity: int,
    chunk: int,
    kv_type: KVType | np.dtype,
    page: int = PAGE,
    n_pages: PageCounts | None = None,
) -> Geometry:
    """The pages of a cache.

    Args:
        capacity: positions of a sequence
        chunk: most tokens of one sequence in a call
        kv_type: its name or names, or the dtype of numbers that are stored as they are
        n_pages: kind -> N, or a function that says so of the geometry of `n_seqs` full sequences; None: what
            these take
    """
    if page < STEP or page % STEP:
        raise ValueError(f"pages of {page} positions, expected a multiple of {STEP}. Take {PAGE} if in doubt")
    if callable(n_pages):
        n_pages = n_pages(plan(config, n_seqs, capacity, chunk, kv_type, page))
    kinds = {}
    for name in (GLOBAL, SLIDING):
        layers = tuple(x for x in config.layers if x.owns_kv and (x.window is None) == (name == GLOBAL))
        if not layers:
            continue
        windows = {layer.window for layer in layers}
        assert len(windows) == 1, f"windows {windows}: one table serves all sliding layers"
        (window,) = windows
        n_entries = entries(window, capacity, chunk, page)
        page_bytes = sum(layer_bytes(layer, 1, page, kv_type) for layer in layers)
        n = (n_pages or {}).get(name, n_seqs * n_entries)
        kinds[name] = Kind(name, layers, window, n_entries, n, page_bytes)
    return Geometry(page, kinds)


def entries(window: int | None, capacity: int, chunk: int, page: int) -> int:
    """Pages of one full lane.

    Keys are written before they are read, so a ring holds what the first token of a call sees beside what the
    last one does: window - 1 + chunk positions, wherever in a page the first of them is.
    """
    line = -(-capacity // page)
    return line if window is None else min(line, pages_of(window - 1 + chunk, page))


def pages_of(n: int, page: int) -> int:
    """Pages that n >= 1 neighbouring positions touch at most."""
    return (n + page - 2) // page + 1


def arrays_of(layer, n_pages: int, page: int, kv_type: KVType | np.dtype):
    """((shape, dtype) of the keys, the same of the values) of one layer."""
    names = exact_type(kv_type) if isinstance(kv_type, np.dtype) else kv_type
    shapes = shapes_of(n_pages, page, layer.n_kv_heads, layer.head_dim, names)
    return tuple(zip(shapes, dtypes_of(names), strict=True))


def layer_bytes(layer, n_pages: int, page: int, kv_type: KVType | np.dtype) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays_of(layer, n_pages, page, kv_type))


def cache_bytes(
    config, n_seqs: int, capacity: int, chunk: int, kv_type: KVType = "f16", page: int = PAGE
) -> int:
    """Bytes of a cache in which `n_seqs` sequences fill the context."""
    return plan(config, n_seqs, capacity, chunk, kv_type, page).nbytes
