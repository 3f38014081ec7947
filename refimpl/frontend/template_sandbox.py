"""Jinja for templates that come out of files: no way out of the sandbox, and a bound on work and memory.

A chat template is a program written by a stranger.  Jinja's immutable sandbox keeps it away from the
interpreter; this module keeps it from running for ever and from filling the memory.  The rules, all of which
ordinary templates stay far below:

time     turns of loops, calls, filters and operators are steps, and every few steps look at this thread's
         processor time
size     every string or container the template makes is weighed when it is made (a character 1, an element
         32, nested ones with all they hold); one may weigh `MAX_WEIGHT`, all of them together `MAX_TOTAL`,
         and so may the text that comes out
surface  filters, methods of strings and global functions are the harmless ones, listed here

Jinja asks the environment about calls, attributes and arithmetic.  What it does not ask about (loops, `~`,
literals, plain text) is rewritten in the syntax tree to pass through a filter of ours.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.filters import FILTERS as DEFAULT_FILTERS
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 1 << 16  # characters; the longest published Gemma 4 template has 19,000
MAX_WEIGHT = 1 << 24
MAX_TOTAL = 1 << 26
MAX_RANGE = 100_000
ELEMENT_WEIGHT = 32
MAX_INT_BITS = 1 << 14
STEPS_PER_LOOK = 16
BUDGET = "%budget"  # the name of the budget among a template's variables; no template can spell it

_FILTERS = """abs attr capitalize count d default dictsort e escape first float forceescape groupby indent int
    items join last length list lower map max min reject rejectattr replace reverse round safe select
    selectattr sort string sum title tojson trim truncate unique upper wordcount""".split()
_FILTERS_THAT_TAKE_TEXT_APART = frozenset("groupby list map max min reject select sort title unique".split())
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        """capitalize count endswith find format index isalnum isalpha isdigit islower isspace istitle isupper
        join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip
        split splitlines startswith strip title upper
        """.split()
    ),
    bytes: frozenset(),
    int: frozenset(),
    float: frozenset({"is_integer"}),
}
_WIDE_FORMAT = re.compile(r"\d{4}|\*|\{[^}]*\{")  # a width of four digits, or one taken from an argument


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


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox that chat templates run in.  `render` is the way to use it."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], cache_size=0
        )
        known = self.filters
        self.filters = {name: _charged(name, known[name]) for name in _FILTERS}
        self.filters |= {"indent": _indent, "join": _join, "replace": _replace, "round": _round}
        self.filters |= {"string": _string, "sum": _sum, "tojson": _tojson}
        self.filters |= {"%loop": _loop, "%made": _made, "%concat": _concat}
        self.globals = {
            "dict": dict,
            "namespace": Namespace,
            "range": _range,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.finalize = _finalize
        self._last = ("", self.from_string(""))

    def render(self, source: str, variables: Mapping[str, Any], *, seconds: float) -> str:
        """The text that a template makes of variables.  Every failure is a `ValueError` of one line."""
        if len(source) > MAX_SOURCE:
            raise ValueError(
                f"chat template: {len(source)} characters, at most {MAX_SOURCE}; this is no chat template"
            )
        try:
            template = self._compiled(source)
            budget = Budget(_input_weight(variables), seconds)
            context = template.new_context({**variables, BUDGET: budget})
            return "".join(budget.charge(piece) for piece in template.root_render_func(context))
        except RecursionError:
            raise ValueError(
                "chat template: nested or recursive too deeply; use a simpler template"
            ) from None
        except MemoryError:
            raise ValueError("chat template: it needs too much memory; use a simpler template") from None
        except Exception as error:  # the sandbox and the template's own mistakes raise anything
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ValueError(f"chat template: {kind}{' '.join(str(error).split())}") from None

    def _compiled(self, source: str) -> Template:
        """The program of a template; the last one is kept: a chat renders one template again and again."""
        kept, template = self._last
        if source != kept:
            template = self.from_string(source)
            self._last = (source, template)
        return template

    # -- what Jinja asks the environment -----------------------------------------------------------

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.step()
        receiver, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(receiver, str):
            _check_method(budget, receiver, name, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        return result if isinstance(receiver, Mapping) else budget.charge(result)  # get() makes nothing new

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        budget.step()
        if isinstance(left, int) and isinstance(right, int):
            _check_integers(operator, left, right)
        elif operator == "*":
            budget.check(max(_length(left) * _times(right), _length(right) * _times(left)))
        elif operator == "+":
            budget.check(_length(left) + _length(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(budget, left, right)
        return budget.charge(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _FormatMethod(value.__self__, wrapped)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in _METHODS.items():
            if isinstance(obj, kind) and attr not in names:
                return False
        return super().is_safe_attribute(obj, attr, value)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        source = _Metered(self).visit(source)
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)


class _FormatMethod:
    """`"...".format` as Jinja guards it, recognisable in `BoundedEnvironment.call`."""

    __name__ = "format"

    def __init__(self, text: str, wrapped: Callable[..., str]):
        self.__self__ = text
        self._wrapped = wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return self._wrapped(*args, **kwargs)


class _Metered(NodeTransformer):
    """Sends through a filter of ours what Jinja compiles to plain Python: loops, `~`, literals of containers,
    text.
    """

    def __init__(self, environment: BoundedEnvironment):
        self._environment = environment

    def _through(self, name: str, node: Any) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._through("%loop", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._through("%concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._through("%made", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._through("%made", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._through("%made", node) if node.ctx == "load" else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return self._through("%made", nodes.Const(node.data, lineno=node.lineno))


# -- filters ---------------------------------------------------------------------------------------


def _budget(context: Context) -> Budget:
    return context.parent[BUDGET]


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that looks at the clock before and is charged for its result after."""
    wanted = str(getattr(function, "jinja_pass_arg", ""))  # Jinja marks filters that want its context so

    @pass_context
    def charged(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.step()
        if name in _FILTERS_THAT_TAKE_TEXT_APART and isinstance(value, str):
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
    budget = _budget(context)
    for item in items:
        budget.step()
        yield item


@pass_context
def _made(context: Context, value: Any) -> Any:
    return _budget(context).charge(value)


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    budget = _budget(context)
    budget.weigh(values)
    return budget.charge("".join(map(str, values)))


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """What `{{ value }}` prints: weighed first, because printing writes out shared parts again and again."""
    if not isinstance(value, str):
        _budget(context).weigh(value)
        value = str(value)
    return _budget(context).charge(value)


@pass_context
def _string(context: Context, value: Any) -> str:
    return _finalize(context, value)


@pass_context
def _join(context: Context, values: Iterable[Any], separator: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        values = context.environment.call_filter(
            "map", values, kwargs={"attribute": attribute}, context=context
        )
    budget = _budget(context)
    parts = [str(_finalize(context, value)) for value in values]
    separator = str(separator)
    budget.check(sum(map(len, parts)) + len(separator) * len(parts))
    return budget.charge(separator.join(parts))


@pass_context
def _replace(context: Context, text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = (str(_finalize(context, value)) for value in (text, old, new))
    limit = -1 if count is None else count
    _check_method(_budget(context), text, "replace", (old, new, limit), {})
    return _budget(context).charge(text.replace(old, new, limit))


@pass_context
def _indent(
    context: Context, text: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    budget = _budget(context)
    text = str(_finalize(context, text))
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
    return DEFAULT_FILTERS["round"](value, precision, method)


@pass_context
def _sum(context: Context, values: Iterable[Any], attribute: Any = None, start: float = 0) -> Any:
    if attribute is not None:
        values = context.environment.call_filter(
            "map", values, kwargs={"attribute": attribute}, context=context
        )
    for value in values:
        if not isinstance(start + value, int | float):
            raise TemplateError("sum: only numbers can be summed; use join for text")
        start = _budget(context).charge(start + value)
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
    budget = _budget(context)
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
    if len(form) > 100 or _WIDE_FORMAT.search(form):
        raise TemplateError(
            f"strftime_now: format {form[:40]!r}, allowed are 100 characters and no wide fields"
        )
    return datetime.now().strftime(form)


# -- how large a result will be --------------------------------------------------------------------


def _input_weight(value: Any) -> int:
    """Size of what the caller passed in: that much more may be made of it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return ELEMENT_WEIGHT + sum(_input_weight(k) + _input_weight(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return ELEMENT_WEIGHT + sum(map(_input_weight, value))
    return ELEMENT_WEIGHT


def _length(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return ELEMENT_WEIGHT * len(value) if hasattr(value, "__len__") else 0


def _times(value: Any) -> int:
    return max(0, value) if isinstance(value, int) else 0


def _check_integers(operator: str, left: int, right: int) -> None:
    bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(0, right)}.get(
        operator, 0
    )
    if bits > MAX_INT_BITS:
        raise TemplateError(f"an integer of {bits} bits, allowed are {MAX_INT_BITS}; use a simpler template")


def _check_format(budget: Budget, form: str, arguments: Any) -> None:
    if _WIDE_FORMAT.search(form):
        raise TemplateError(f"format {form[:40]!r}: widths have at most three digits and stand in the format")
    budget.check(len(form) + budget.weigh(arguments) * max(1, form.count("%") + form.count("{")))


def _check_method(
    budget: Budget, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
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
        _check_format(budget, text, (args, kwargs))
