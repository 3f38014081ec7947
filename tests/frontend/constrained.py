"""What tests of constrained answers share: grammars over the small vocabulary, a model that says anything."""

import numpy as np

from refimpl.frontend.grammar import Grammar, Grammars
from refimpl.frontend.sampling import SamplingParams, sample
from tests.frontend.conversations import TYPES, WEATHER, tool
from tests.frontend.vocab import small

GRAMMARS = Grammars(small())
OPEN, CLOSE, CALL, CALL_END, QUOTE = map(
    small().id_of, ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
)
ENDS = set(small().eog_ids)
# What a random model likes more than other tokens, so that its answers come to an end.
CLOSERS = [i for text in '"}]' for i in small().encode(text)] + [QUOTE, CALL_END, CLOSE, *ENDS]


def ids_of(text: str) -> list[int]:
    return small().encode(text, parse_special=True)


def answer(constraint, seed: int, *, n: int = 300, likes: int | None = None) -> list[int] | None:
    """What a random model says under a constraint, without the end; None: it found no end.

    likes  a token that it always prefers
    """
    rng = np.random.default_rng(seed)
    made: list[int] = []
    for k in range(n):
        row = rng.standard_normal(small().n_vocab).astype(np.float32)
        row[CLOSERS] += 4
        if likes is not None:
            row[likes] = 30
        token = sample(row, SamplingParams(temperature=1.0, seed=seed), made, k, constraint=constraint)
        constraint.accept(token)
        if token in ENDS:
            return made
        made.append(token)
    return None


def allowed(constraint) -> set[int]:
    row = np.zeros(small().n_vocab, np.float32)
    constraint.mask(row, [])
    return set(np.flatnonzero(row > -np.inf).tolist())


def follow(grammar: Grammar, text: str, **switches):
    """A constraint that a text was accepted by, token by token; None where it is not let through."""
    constraint = GRAMMARS.constraint(grammar, **switches)
    for token in ids_of(text):
        if token not in allowed(constraint):
            return None
        constraint.accept(token)
    return constraint


def takes(grammar: Grammar, text: str) -> bool:
    """The text is let through, and the answer may end there."""
    constraint = follow(grammar, text)
    return constraint is not None and ENDS <= allowed(constraint)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
NESTED = tool(
    "plan",
    "d",
    steps={"type": "array", "minItems": 1, "maxItems": 2, "items": {"$ref": "#/$defs/Step"}},
    mode={"enum": ["fast", "", 3, None, {"a": [True]}]},
    pair={"prefixItems": [{"type": "integer"}, {"type": "boolean"}], "minItems": 2, "items": False},
    code={"type": "string", "pattern": "^[a-c]{2}/$", "maxLength": 5},
    optional={"allOf": [{"type": "object", "properties": {"q": {"type": "null"}}}, {"required": ["q"]}]},
    free={},
    map={"type": "object", "additionalProperties": {"type": "integer", "minimum": 3, "maximum": 99}},
)
NESTED["function"]["parameters"]["$defs"] = {
    "Step": {
        "type": "object",
        "properties": {"do": {"type": "string"}, "then": {"$ref": "#/$defs/Step"}},
        "required": ["do"],
    }
}
ODD = tool(
    "my-srv:list.v2",
    "d",
    **{"a b": {"type": ["number", "null"]}, "Z": {"type": "boolean"}, "a": {"const": 1}},
)
TOOLS = [WEATHER, TYPES, NESTED, ODD, tool("none")]
