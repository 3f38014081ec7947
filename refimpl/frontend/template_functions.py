"""The filters and global functions that a template may use, each held to the budget of its rendering.

Most filters are Jinja's own, charged for what they return; those whose result can be much larger than what
they are given are written here, and so are those that `template_sandbox.py` puts into a template (`%loop`,
`%made`, `%concat`).
"""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, pass_context
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.runtime import Context, Undefined
from jinja2.utils import Namespace

from refimpl.frontend.template_budget import ELEMENT_WEIGHT, WIDE_FORMAT, budget_of, check_method

MAX_RANGE = 100_000

_ALLOWED = """abs attr capitalize count d default dictsort e escape first float forceescape groupby indent int
    items join last length list lower map max min reject rejectattr replace reverse round safe select
    selectattr sort string sum title tojson trim truncate unique upper wordcount""".split()
_TAKE_TEXT_APART = frozenset("groupby list map max min reject select sort title unique".split())


class Null:
    """What a JSON null inside tool arguments becomes: it prints `null`, where some templates print Python's
    `None`.
    """

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return "null"

    __repr__ = __str__


NULL = Null()


# -- filters ---------------------------------------------------------------------------------------


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that looks at the clock before and is charged for its result after."""
    wanted = str(getattr(function, "jinja_pass_arg", ""))  # Jinja marks filters that want its context so

    @pass_context
    def charged(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.step()
        if name in _TAKE_TEXT_APART and isinstance(value, str):
            budget.check(ELEMENT_WEIGHT * len(value))
        if "eval_context" in wanted:
            args = (value, *args)
            value = context.eval_ctx
        elif "environment" in wanted:
            args = (value, *args)
            value = context.environment
        elif "context" in wanted:
            args = (value, *args)
            value = context
        return budget.charge(function(value, *args, **kwargs))

    return charged


@pass_context
def _loop(context: Context, items: Any) -> Iterator[Any]:
    budget = budget_of(context)
    for item in items:
        budget.step()
        yield item


@pass_context
def _made(context: Context, value: Any) -> Any:
    return budget_of(context).charge(value)


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    budget = budget_of(context)
    budget.weigh(values)
    return budget.charge("".join(map(str, values)))


@pass_context
def finalize(context: Context, value: Any) -> Any:
    """What `{{ value }}` prints: weighed first, because printing writes out shared parts again and again."""
    if not isinstance(value, str):
        budget_of(context).weigh(value)
        value = str(value)
    return budget_of(context).charge(value)


@pass_context
def _string(context: Context, value: Any) -> str:
    return finalize(context, value)


@pass_context
def _join(context: Context, values: Iterable[Any], separator: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        values = context.environment.call_filter(
            "map", values, kwargs={"attribute": attribute}, context=context
        )
    budget = budget_of(context)
    parts = [str(finalize(context, value)) for value in values]
    separator = str(separator)
    budget.check(sum(map(len, parts)) + len(separator) * len(parts))
    return budget.charge(separator.join(parts))


@pass_context
def _replace(context: Context, text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = (str(finalize(context, value)) for value in (text, old, new))
    limit = -1 if count is None else count
    check_method(budget_of(context), text, "replace", (old, new, limit), {})
    return budget_of(context).charge(text.replace(old, new, limit))


@pass_context
def _indent(
    context: Context, text: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    budget = budget_of(context)
    text = str(finalize(context, text))
    if isinstance(width, int):
        budget.check(width)
    pad = width if isinstance(width, str) else " " * width
    lines = text.splitlines(keepends=True)
    budget.check(len(text) + len(pad) * len(lines))
    padded = (
        pad + line if (k or first) and (blank or line.strip()) else line for k, line in enumerate(lines)
    )
    return budget.charge("".join(padded))


@pass_context
def _round(context: Context, value: Any, precision: int = 0, method: str = "common") -> Any:
    if not isinstance(precision, int) or abs(precision) > 100:
        raise TemplateError(f"round: precision {precision!r}, allowed are whole numbers from -100 to 100")
    return JINJA_FILTERS["round"](value, precision, method)


@pass_context
def _sum(context: Context, values: Iterable[Any], attribute: Any = None, start: float = 0) -> Any:
    if attribute is not None:
        values = context.environment.call_filter(
            "map", values, kwargs={"attribute": attribute}, context=context
        )
    for value in values:
        if not isinstance(start + value, int | float):
            raise TemplateError("sum: only numbers can be summed; use join for text")
        start = budget_of(context).charge(start + value)
    return start


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it in templates: no HTML escapes, letters as they are."""
    budget = budget_of(context)
    budget.weigh(value)
    if indent is not None and not 0 <= indent <= 16:
        raise TemplateError(f"tojson: indent {indent}, allowed are 0 to 16")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_json_value,
    )
    pieces, length = [], 0
    for piece in encoder.iterencode(value):
        budget.step()
        length += len(piece)
        budget.check(length)
        pieces.append(piece)
    return budget.charge("".join(pieces))


def _json_value(value: Any) -> Any:
    if value is NULL or isinstance(value, Undefined):
        return None
    raise TemplateError(f"tojson: {type(value).__name__} has no JSON form")


FILTERS: dict[str, Callable[..., Any]] = {name: _charged(name, JINJA_FILTERS[name]) for name in _ALLOWED}
FILTERS |= {"indent": _indent, "join": _join, "replace": _replace, "round": _round}
FILTERS |= {"string": _string, "sum": _sum, "tojson": _tojson}
FILTERS |= {"%loop": _loop, "%made": _made, "%concat": _concat}


# -- global functions ------------------------------------------------------------------------------


def _range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise TemplateError(
            f"range of {len(numbers)} numbers, allowed are {MAX_RANGE}; use a simpler template"
        )
    return numbers


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 100 or WIDE_FORMAT.search(form):
        raise TemplateError(
            f"strftime_now: format {form[:40]!r}, allowed are 100 characters and no wide fields"
        )
    return datetime.now().strftime(form)


GLOBALS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "namespace": Namespace,
    "range": _range,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
