"""Jinja for templates that come out of files: no way out of the sandbox, and a bound on work and memory.

A chat template is a program written by a stranger.  Jinja's immutable sandbox keeps it away from the
interpreter; this module and the two it names keep it from running for ever and from filling the memory.  The
rules, all of which ordinary templates stay far below:

time     turns of loops, calls, filters and operators are steps, and every few steps look at this thread's
         processor time
size     every string or container the template makes is weighed when it is made (a character 1, an element
         32, nested ones with all they hold); one may weigh `MAX_WEIGHT`, all of them together `MAX_TOTAL`,
         and so may the text that comes out (template_budget.py)
surface  filters, methods of strings and global functions are the harmless ones, listed here and in
         template_functions.py

Jinja asks the environment about calls, attributes and arithmetic.  What it does not ask about (loops, `~`,
literals, plain text) is rewritten in the syntax tree to pass through a filter of ours.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from refimpl.frontend.template_budget import (
    BUDGET,
    Budget,
    budget_of,
    check_format,
    check_integers,
    check_method,
    input_weight,
    length_of,
    repetitions,
)
from refimpl.frontend.template_functions import FILTERS, GLOBALS, finalize

MAX_SOURCE = 1 << 16  # characters; the longest published Gemma 4 template has 19,000

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


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox that chat templates run in.  `render` is the way to use it."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], cache_size=0
        )
        self.filters = dict(FILTERS)
        self.globals = dict(GLOBALS)
        self.finalize = finalize
        self._last = ("", self.from_string(""))

    def render(self, source: str, variables: Mapping[str, Any], *, seconds: float) -> str:
        """The text that a template makes of variables.  Every failure is a `ValueError` of one line."""
        if len(source) > MAX_SOURCE:
            raise ValueError(
                f"chat template: {len(source)} characters, at most {MAX_SOURCE}; this is no chat template"
            )
        try:
            template = self._compiled(source)
            budget = Budget(input_weight(variables), seconds)
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
        budget = budget_of(context)
        budget.step()
        receiver, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(receiver, str):
            check_method(budget, receiver, name, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        return result if isinstance(receiver, Mapping) else budget.charge(result)  # get() makes nothing new

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = budget_of(context)
        budget.step()
        if isinstance(left, int) and isinstance(right, int):
            check_integers(operator, left, right)
        elif operator == "*":
            budget.check(max(length_of(left) * repetitions(right), length_of(right) * repetitions(left)))
        elif operator == "+":
            budget.check(length_of(left) + length_of(right))
        elif operator == "%" and isinstance(left, str):
            check_format(budget, left, right)
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
