"""A forward call gone through on arrays without memory: what it would launch, and what memory it would take.

    noted = of(model, n_tokens=1, context=1024)
    noted.launches, noted.peak_bytes

Nothing is computed and nothing is uploaded, so that a model of any size takes a fraction of a second, on any
machine on which numba-cuda imports.
"""

import math
import weakref
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from fastpath.cuda import device, layout, ops, read_ahead
from fastpath.cuda.footprint import plane_sizes
from fastpath.cuda.planned import Planned, Planner
from fastpath.cuda.program import Launch
from fastpath.kv.cache import KVCache
from fastpath.model.text import forward
from quant import QTensor
from refimpl.batch import make_batch


class Rehearsal:
    """A device that computes nothing.

    launches     what it was asked to launch, in order
    results      arrays whose numbers were asked for
    made_bytes   of all arrays that ops asked for
    peak_bytes   of those that were held at the same time, where launches are not kept
    planes       buffer of a weight's plane -> the weight
    pages        buffers of the cache
    n_active     experts of a token; 0: there are none
    """

    name = "no device"

    def __init__(self, keeps_launches=True):
        self.planes: dict[Any, layout.DeviceMatrix] = {}
        self.pages: set[Any] = set()
        self._keeps_launches = keeps_launches
        self.n_active = 0
        self.launches: list[Launch] = []
        self.results: list[Planned] = []
        self.made_bytes = self.peak_bytes = self._held = 0
        self._planner = Planner()
        self._constants = device.Constants(lambda array: self.outline(array.shape, array.dtype))

    def outline(self, shape, dtype) -> Planned:
        """An array that is no part of the workspace."""
        return self._planner.array(shape, dtype, self._read)

    def empty(self, shape, dtype):
        made = self.outline(shape, dtype)
        n = made.nbytes
        self.made_bytes += n
        self._held += n
        self.peak_bytes = max(self.peak_bytes, self._held)
        weakref.finalize(made.buffer, self._dropped, n)
        return made

    def _dropped(self, n):
        self._held -= n

    def put(self, array, dtype):
        return self.empty(array.shape, dtype) if isinstance(array, np.ndarray) else array

    def computed(self, compute, dtype):
        return self.put(compute(), dtype)

    def constant(self, array, dtype):
        return self._constants.get(array, dtype) if isinstance(array, np.ndarray) else array

    def memory(self, n_bytes):
        made = self.outline((n_bytes,), np.uint8)
        self.pages.add(made.buffer)
        return made

    def launch(self, kernel, grid, threads, *arguments):
        if self._keeps_launches:
            self.launches.append(Launch(kernel, grid, threads, arguments))

    def _read(self, planned):
        self.results.append(planned)
        return np.zeros(planned.shape, planned.dtype)

    def matrix(self, weight: QTensor) -> layout.DeviceMatrix:
        """A weight as it will lie on the device."""
        name = weight.format.name if weight.format.name in layout.CODINGS else "F32"
        sizes = plane_sizes(layout.CODINGS[name], weight.shape)
        dtypes = (np.int32, np.int32, np.uint16, np.uint16)
        planes = (self.outline((n,), dtype) for n, dtype in zip(sizes, dtypes, strict=True))
        made = layout.DeviceMatrix(name, weight.shape, *planes, weight.name)
        self.planes |= {plane.buffer: made for plane in made.planes}
        return made

    @property
    def constants(self) -> set[Any]:
        """Buffers of what is never written and is no matrix."""
        return {made.buffer for made in self._constants.arrays()}

    def to_ask_for(self) -> read_ahead.Weights:
        matrices = {id(made): made for made in self.planes.values()}
        return read_ahead.Weights(matrices.values(), self._constants.arrays())

    def weights(self, record: Any) -> Any:
        """A record of weights, with these in the place of its matrices."""
        known: dict[int, Any] = {}

        def of(value: Any) -> Any:
            if isinstance(value, QTensor):
                if id(value) not in known:
                    known[id(value)] = self.matrix(value)
                return known[id(value)]
            if isinstance(value, tuple):
                return tuple(map(of, value))
            if not is_dataclass(value) or isinstance(value, type):
                return value
            return replace(value, **{each.name: of(getattr(value, each.name)) for each in fields(value)})

        return of(record)


@dataclass(frozen=True)
class Call:
    """n_seqs sequences at position `depth`, each with n_tokens more."""

    n_tokens: int = 1
    n_seqs: int = 1
    depth: int = 0

    @property
    def n_rows(self) -> int:
        return self.n_tokens * self.n_seqs


def of(
    model: Any, call: Call, *, kv_type: Any = "f16", activations: str = "int8", keeps_launches: bool = True
) -> Rehearsal:
    """The forward call of a model, with logits of the last token of each sequence."""
    noted = Rehearsal(keeps_launches)
    noted.n_active = max((layer.moe.n_active for layer in model.config.layers if layer.moe), default=0)
    end = call.depth + call.n_tokens
    with device.use(noted):
        weights = noted.weights(model.weights)
        cache = KVCache(model.config, call.n_seqs, end, call.n_tokens, kv_type=kv_type, arrays=ops.arrays)
        if call.depth:  # pages of what came before, in calls that the cache takes
            for first in range(0, call.depth, call.n_tokens):
                stop = min(first + call.n_tokens, call.depth)
                cache.reserve_spans([(lane, first, stop) for lane in range(call.n_seqs)])
        batch = make_batch([(lane, call.depth, [0] * call.n_tokens, "last") for lane in range(call.n_seqs)])
        held = noted._held  # the pages
        noted.peak_bytes = noted.made_bytes = 0
        forward(ops, model.config, weights, cache, batch, activations=activations)
        noted.peak_bytes = max(0, noted.peak_bytes - held)
    return noted


def n_blocks(launch: Launch) -> int:
    grid = launch.grid
    return int(grid) if np.isscalar(grid) else math.prod(int(n) for n in grid)
