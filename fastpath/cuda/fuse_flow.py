"""Who reads and who writes what in a list of launches.

Arrays are known by their bytes: a Span.  Spans that overlap are of one region; two launches may change places
unless one writes a region that the other reads or writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fastpath.cuda.program import Launch


class Span(NamedTuple):
    """Addresses of an array's bytes."""

    start: int
    stop: int

    def overlaps(self, other: "Span") -> bool:
        return self.start < other.stop and other.start < self.stop


def span(array: Any) -> Span:
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    steps = zip(array.shape, array.strides, strict=True)
    length = sum((n - 1) * step for n, step in steps) + array.dtype.itemsize
    start = interface["data"][0]
    return Span(start, start + (length if array.size else 0))


def is_array(argument: Any) -> bool:
    return getattr(argument, "ndim", 0) > 0


def names_of(kernel) -> tuple[str, ...]:
    """Of its arguments."""
    code = kernel.function.__code__
    return code.co_varnames[: code.co_argcount]


@dataclass(frozen=True, eq=False)
class Call:
    """A launch, with the spans of its arguments by name."""

    launch: Launch
    reads: dict[str, Span]
    writes: dict[str, Span]

    @property
    def kernel(self):
        return self.launch.kernel

    def argument(self, name: str) -> Any:
        return self.launch.arguments[names_of(self.kernel).index(name)]

    @property
    def spans(self) -> dict[str, Span]:
        return self.reads | self.writes


def call_of(launch: Launch) -> Call:
    named = dict(zip(names_of(launch.kernel), launch.arguments, strict=True))
    spans = {name: span(value) for name, value in named.items() if is_array(value)}
    unused = {name for name, flag in UNUSED.items() if flag in named and not named[flag]}
    writes = {name: s for name, s in spans.items() if name in launch.kernel.writes}
    reads = {name: s for name, s in spans.items() if name not in writes and name not in unused}
    return Call(launch, reads, writes)


# an argument that a kernel does not look at where a flag is 0
UNUSED = {"weight": "is_weighted", "slots": "share", "scale": "is_scaled"}


class Regions:
    """Numbers for the bytes of some calls: spans have one number if they overlap, or others join them."""

    def __init__(self, calls: Sequence[Call]):
        spans = sorted({s for call in calls for s in call.spans.values() if s.stop > s.start})
        self._number: dict[Span, int] = {}
        end, number = -1, -1
        for s in spans:
            if s.start >= end:
                number += 1
            end = max(end, s.stop)
            self._number[s] = number

    def of(self, spans) -> frozenset[int]:
        return frozenset(self._number[s] for s in spans if s.stop > s.start)


def renamed(call: Call, arrays: dict[Span, Any]) -> Call:
    """The call with other arrays in the place of some that it reads."""
    if not any(s in arrays for s in call.reads.values()):
        return call
    arguments = [
        _alike(arrays[call.reads[name]], value) if call.reads.get(name) in arrays else value
        for name, value in zip(names_of(call.kernel), call.launch.arguments, strict=True)
    ]
    return call_of(replace(call.launch, arguments=tuple(arguments)))


def _alike(array: Any, pattern: Any) -> Any:
    """The bytes of `array`, seen as `pattern` is."""
    if array.dtype != pattern.dtype:
        array = array.view(pattern.dtype)
    return array if array.shape == pattern.shape else array.reshape(*pattern.shape)


def same(one: Any, other: Any) -> bool:
    """Are two arguments of a launch the same?"""
    if not is_array(one) or not is_array(other):
        return not is_array(one) and not is_array(other) and type(one) is type(other) and one == other
    return (span(one), one.shape, one.dtype) == (span(other), other.shape, other.dtype)


def blocks_of(launch: Launch) -> int:
    return int(np.prod(launch.grid))
