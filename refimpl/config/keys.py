"""Typed reading of a model's metadata: a wrong value is one line that names its key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

REQUIRED = object()  # default of a key without which a model cannot be built


class Keys:
    """The hyper-parameters of one file, e.g. `keys.integer("block_count")` for the key gemma4.block_count.

    A name may be a tuple of spellings; the first one that the file has is read.
    """

    def __init__(self, metadata: Any, architecture: str, path: Any) -> None:
        self.metadata = metadata
        self.architecture = architecture
        self.path = path

    def fault(self, name: str | tuple[str, ...], got: str, expected: str, advice: str = "") -> ValueError:
        advice = advice or "Convert the model again, or get it from another place"
        return ValueError(f"{self.path}: key {self._key(name)!r}: got {got}, expected {expected}. {advice}")

    def has(self, name: str | tuple[str, ...]) -> bool:
        return self._key(name) in self.metadata

    def text(self, key: str) -> str:
        """A full key (without the architecture), "" when missing or not text."""
        value = self.metadata.get(key, "")
        return value if isinstance(value, str) else ""

    def integer(
        self, name: str | tuple[str, ...], default: Any = REQUIRED, *, low: int = 1, high: int
    ) -> Any:
        value = self._value(name, default, f"a whole number, {low} .. {high}")
        return value if value is default else self._checked_integer(name, value, low, high)

    def real(self, name: str | tuple[str, ...], default: Any = REQUIRED, *, low: float = 0.0) -> Any:
        """A finite number above `low`, or equal to it if that is 0."""
        value = self._value(name, default, "a number")
        if value is default:
            return value
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or value < 0 or (low > 0 and value < low):
            raise self.fault(name, _short(value), f"a finite number, at least {low:g}")
        return float(value)

    def per_layer(
        self, name: str, n_layers: int, default: Any = REQUIRED, *, low: int = 1, high: int
    ) -> tuple[list[Any], bool]:
        """One integer per layer, and whether the file has them one by one: a single number speaks for all
        layers."""
        value = self._value(name, default, f"a whole number, or {n_layers} of them")
        if value is default or not _is_array(value):
            one = default if value is default else self._checked_integer(name, value, low, high)
            return [one] * n_layers, False
        self._check_length(name, value, n_layers)
        return [self._checked_integer(name, item, low, high) for item in _items(value)], True

    def sliding(self, name: str, n_layers: int) -> list[bool]:
        """Which layers have a window: one truth value per layer, or a period p, where every p-th layer is
        global."""
        value = self._value(name, REQUIRED, f"{n_layers} truth values, or a period")
        if not _is_array(value):
            period = self._checked_integer(name, value, 1, 1 << 16)
            return [(i + 1) % period != 0 for i in range(n_layers)]
        self._check_length(name, value, n_layers)
        items = _items(value)
        for item in items:
            if not isinstance(item, bool | int) or item not in (0, 1):
                raise self.fault(name, f"the item {_short(item)}", "each item true or false (1 or 0)")
        return [bool(item) for item in items]

    def _key(self, name: str | tuple[str, ...]) -> str:
        names = (name,) if isinstance(name, str) else name
        keys = [f"{self.architecture}.{n}" for n in names]
        return next((key for key in keys if key in self.metadata), keys[0])

    def _value(self, name: str | tuple[str, ...], default: Any, expected: str) -> Any:
        value = self.metadata.get(self._key(name), default)
        if value is REQUIRED:
            raise self.fault(name, "nothing: the file does not have it", expected)
        return value

    def _checked_integer(self, name: str | tuple[str, ...], value: Any, low: int, high: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fault(name, _short(value), f"a whole number, {low} .. {high}")
        return int(value)

    def _check_length(self, name: str, value: Any, n_layers: int) -> None:
        if len(value) != n_layers:
            raise self.fault(
                name, f"an array of {len(value)}", f"{n_layers} items, one per layer (block_count)"
            )


def _is_array(value: Any) -> bool:
    return (isinstance(value, np.ndarray) and value.ndim > 0) or (
        isinstance(value, Sequence) and not isinstance(value, str)
    )


def _items(value: Any) -> list[Any]:
    return value.tolist() if isinstance(value, np.ndarray) else list(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
