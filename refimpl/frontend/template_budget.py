"""What rendering a template may cost: its budget, and the size of results before they are made."""

import re
import time
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from jinja2.runtime import Context
from jinja2.utils import Namespace

MAX_WEIGHT = 1 << 24
MAX_TOTAL = 1 << 26
ELEMENT_WEIGHT = 32
MAX_INT_BITS = 1 << 14
STEPS_PER_LOOK = 16
BUDGET = "%budget"  # the name of the budget among a template's variables; no template can spell it

WIDE_FORMAT = re.compile(r"\d{4}|\*|\{[^}]*\{")  # a width of four digits, or one taken from an argument


class Budget:
    """What one rendering may still spend."""

    def __init__(self, input_weight: int, seconds: float):
        self._deadline = time.thread_time() + seconds
        self._steps = 0
        self._seconds = seconds
        self._max_weight = MAX_WEIGHT + 2 * input_weight
        self._left = MAX_TOTAL + 16 * input_weight

    def step(self) -> None:
        self._steps += 1
        if self._steps % STEPS_PER_LOOK == 0 and time.thread_time() > self._deadline:
            raise TemplateError(
                f"it ran for more than {self._seconds:g} s of processor time; use a simpler template"
            )

    def check(self, weight: int) -> None:
        """Refuse something before it is made."""
        if weight > self._max_weight:
            raise TemplateError(
                f"it makes a value of size {weight}, allowed are {self._max_weight}; use a simpler template"
            )

    def charge(self, value: Any) -> Any:
        """Count a value that the template made; returns it."""
        self.step()
        weight = len(value) if isinstance(value, str) else self.weigh(value)
        self.check(weight)
        self._left -= weight
        if self._left < 0:
            raise TemplateError("all it makes together is too large; use a simpler template")
        return value

    def weigh(self, value: Any) -> int:
        """Size of a value with all it holds; stops with an error once that is too large (also for one that
        holds itself).
        """
        weight, waiting = 0, [value]
        while waiting:
            self.step()
            item = waiting.pop()
            if isinstance(item, str | bytes):
                weight += len(item)
            elif isinstance(item, int):
                weight += item.bit_length() // 3
            elif isinstance(item, Mapping | Namespace):
                pairs = item if isinstance(item, Mapping) else item._Namespace__attrs
                weight += ELEMENT_WEIGHT * len(pairs)
                waiting += pairs.keys()
                waiting += pairs.values()
            elif isinstance(item, list | tuple | set | frozenset | type({}.values()) | type({}.items())):
                weight += ELEMENT_WEIGHT * len(item)
                waiting += item
            self.check(weight)
        return weight


def budget_of(context: Context) -> Budget:
    return context.parent[BUDGET]


# -- how large a result will be --------------------------------------------------------------------


def input_weight(value: Any) -> int:
    """Size of what the caller passed in: that much more may be made of it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return ELEMENT_WEIGHT + sum(input_weight(k) + input_weight(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return ELEMENT_WEIGHT + sum(map(input_weight, value))
    return ELEMENT_WEIGHT


def length_of(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return ELEMENT_WEIGHT * len(value) if hasattr(value, "__len__") else 0


def repetitions(value: Any) -> int:
    return max(0, value) if isinstance(value, int) else 0


def check_integers(operator: str, left: int, right: int) -> None:
    bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(0, right)}.get(
        operator, 0
    )
    if bits > MAX_INT_BITS:
        raise TemplateError(f"an integer of {bits} bits, allowed are {MAX_INT_BITS}; use a simpler template")


def check_format(budget: Budget, form: str, arguments: Any) -> None:
    if WIDE_FORMAT.search(form):
        raise TemplateError(f"format {form[:40]!r}: widths have at most three digits and stand in the format")
    budget.check(len(form) + budget.weigh(arguments) * max(1, form.count("%") + form.count("{")))


def check_method(budget: Budget, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call of a string's method whose result would be too large."""
    if name == "replace" and len(args) > 1:
        old, new = args[:2]
        budget.check(len(text) + text.count(old) * len(new))
    elif name == "join" and args and hasattr(args[0], "__len__"):
        budget.check(budget.weigh(args[0]) + len(text) * len(args[0]))
    elif name in ("split", "rsplit", "splitlines"):
        separators = [args[0]] if args and args[0] else list(" \t\r\n\v\f")
        budget.check(len(text) + ELEMENT_WEIGHT * sum(map(text.count, separators)))
    elif name == "format":
        check_format(budget, text, (args, kwargs))
