"""Answers that keep a form: JSON, a JSON schema, a regular expression, a grammar, calls of declared tools.

The work is done by llguidance (extra `grammar`): it follows the answer's bytes through a grammar and says
which tokens may come.  Marker tokens never stand for characters there; a grammar that wants one says so.

A grammar sleeps while the model thinks and is armed where the thought ends.  With thinking off it holds from
the first token on, with thinking on the first token may be the one that opens a thought and nothing else that
the grammar does not allow.  The grammar of calls that a model makes by itself is armed by `<|tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from threading import Lock, Semaphore, Thread
from typing import Any, Literal, NamedTuple

import numpy as np

from refimpl.frontend.constraint import ends_in_thought, only
from refimpl.frontend.dialects import ToolChoice
from refimpl.frontend.tokenizer import Tokenizer
from refimpl.frontend.tool_grammar import body_grammar, calls_grammar

MAX_SPACE = 16  # white space between two tokens of JSON: an answer of spaces without end is none
MAX_SOURCE = 1 << 20
KEPT_GRAMMARS = 64
COMPILE_S = 10.0  # the library takes 1 s for a schema of 2000 patterns, and no end for some of forty
COMPILERS, PATIENCE_S = 2, 2.0  # grammars that are compiled at the same time, and how long others wait
MAX_MULTIPLE = 100_000  # of multipleOf: a state for each remainder, 0.2 s for so many, all memory for 2**31
MAX_ROLLBACK = 64  # tokens; drafts are shorter
# What each byte of a bit mask leaves of eight logits: 0.13 ms a vocabulary, masks of booleans 1.3 ms.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_LIMITS = np.where(_BITS, np.inf, -np.inf).astype(np.float32)


@dataclass(frozen=True)
class Grammar:
    """What an answer, or a call in it, must look like.

    source  in llguidance's form
    field   what to name in an error
    holds   for the whole answer, or in each call that the model makes
    """

    source: str
    field: str
    holds: Literal["answer", "call"] = "answer"


# -- what clients ask for --------------------------------------------------------------------------


def json_schema(schema: Mapping[str, Any] | bool, field: str = "response_format") -> Grammar:
    """JSON that a schema accepts; `json_schema({"type": "object"})` is any JSON object."""
    return _grammar({"json_schema": _bounded(schema, field)}, field)


def regex(pattern: str, field: str = "regex") -> Grammar:
    """A text that a regular expression matches from end to end."""
    return _grammar({"lark_grammar": f"start: TEXT\nTEXT: {_between_slashes(pattern, field)}\n"}, field)


def lark(text: str, field: str = "grammar") -> Grammar:
    """A text of a grammar in Lark's syntax, as llguidance reads it; it may name tokens (`<|tool_call>`)."""
    return _grammar({"lark_grammar": _checked(text, field)}, field)


def gbnf(text: str, field: str = "grammar") -> Grammar:
    """A text of a grammar in llama.cpp's syntax."""
    _library()
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return lark(gbnf_to_lark(_checked(text, field)), field)
    except Exception as error:  # the converter raises anything
        raise ValueError(f"{field}: no GBNF that can be read ({_line(str(error))})") from None


def tool_calls(
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    schema: Mapping[str, Any] | None = None,
    field: str = "response_format",
) -> Grammar | None:
    """The grammar that a choice of tools asks for, or None where it asks for nothing.

    schema  of an answer in JSON, which is to come where no tool is called; field: where it came from
    """
    if choice.mode == "none" or (choice.mode == "auto" and not tools):
        return None if schema is None else json_schema(schema, field)
    if choice.mode == "required":
        if not tools:
            raise ValueError("tool_choice: required, but there are no tools; expected at least one in tools")
        source = calls_grammar(tools, name=choice.name, parallel=choice.parallel)
        return _grammar({"lark_grammar": source}, "tools")
    if schema is not None:
        bounded = _bounded(schema, field)
        source = calls_grammar(tools, parallel=choice.parallel, schema=bounded)
        return _grammar({"lark_grammar": source}, field)
    return _grammar({"lark_grammar": body_grammar(tools)}, "tools", "call")


def _grammar(grammar: Mapping[str, Any], field: str, holds: Literal["answer", "call"] = "answer") -> Grammar:
    try:
        source = json.dumps({"grammars": [grammar]})
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{field}: {_line(str(error))}; expected JSON of a few hundred levels") from None
    _check_multiples(_checked(source, field), field)
    return Grammar(source, field, holds)


MAX_DIVISORS = 32  # different ones of multipleOf: their common multiple takes long to find
_MULTIPLE = re.compile(r'"multipleOf\\*"\s*:\s*(\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3})?)')


def _check_multiples(source: str, field: str) -> None:
    """Refuse divisors that may meet in one number with too large a common multiple (trailing zeros aside).

    source  has schemas as JSON, or inside a text of a grammar, which escapes their quotes
    """
    spelled = set(_MULTIPLE.findall(source))
    shown = f"{field}: multipleOf {', '.join(sorted(each[:20] for each in spelled))[:80]}"
    if len(spelled) > MAX_DIVISORS or any(len(each) > 20 for each in spelled):
        raise ValueError(f"{shown}, expected at most {MAX_DIVISORS} numbers of at most 20 digits")
    divisors = set(map(Fraction, spelled))
    scale = lcm(*(each.denominator for each in divisors))  # a power of ten, or a part of one
    common = lcm(*(int(each * scale) for each in divisors))
    while common and common % 10 == 0:
        common //= 10
    if common > MAX_MULTIPLE:
        raise ValueError(f"{shown}, expected a common multiple of at most {MAX_MULTIPLE}")


def _bounded(schema: Any, field: str) -> Any:
    """A schema with the bound of white space."""
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"{field}: {type(schema).__name__}, expected a JSON schema (an object)")
    options = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{MAX_SPACE}}}", "whitespace_flexible": True}
    return {**schema, "x-guidance": options} if isinstance(schema, Mapping) else schema


def _checked(text: Any, field: str) -> str:
    if not isinstance(text, str) or len(text) > MAX_SOURCE:
        raise ValueError(f"{field}: {type(text).__name__}, expected at most {MAX_SOURCE} characters of text")
    return text


def _between_slashes(pattern: Any, field: str) -> str:
    return f"/{_library().regex_to_lark(_checked(pattern, field), use_ascii='')}/"


def _line(text: str) -> str:
    """The first lines of a message, as one."""
    text = " ".join(text.split("<state>")[0].split())
    return text if len(text) <= 200 else text[:197] + "..."


# -- over one vocabulary ---------------------------------------------------------------------------


class Grammars:
    """Grammars over the vocabulary of one model; any thread may ask for one.

    Setting the vocabulary up takes 1.1 s, and the library has no form of it to keep on disk.  `prepare` does
    it in the background, or the first grammar does; for most of that second no other Python code runs, so a
    server prepares before it listens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._vocabulary: Future[Any] | None = None
        self._lock = Lock()  # of what is kept; not held while anything is compiled
        self._compilers = Semaphore(COMPILERS)
        self._kept: OrderedDict[str, Any] = OrderedDict()  # matchers at their start, by source

    def prepare(self) -> Future[Any]:
        """Begin, if that has not been done."""
        with self._lock:
            if self._vocabulary is None:
                pool = ThreadPoolExecutor(1, "grammar")
                self._vocabulary = pool.submit(_vocabulary_of, self._tokenizer)
                pool.shutdown(wait=False)
            return self._vocabulary

    def constraint(
        self, grammar: Grammar, prompt_ids: Sequence[int] = (), *, thinking: bool = False
    ) -> GrammarConstraint:
        """A constraint that keeps an answer to a grammar; one that is none is a `ValueError` of one line."""
        return GrammarConstraint(self._tokenizer, self._matcher(grammar), grammar, prompt_ids, thinking)

    def _matcher(self, grammar: Grammar) -> Any:
        with self._lock:
            matcher = self._kept.get(grammar.source)
        if matcher is None:
            matcher = self._compiled(grammar)
            if matcher.is_error():
                problem = _line(matcher.get_error())
                raise ValueError(f"{grammar.field}: {problem}; expected what llguidance can follow")
        with self._lock:
            self._kept[grammar.source] = matcher
            self._kept.move_to_end(grammar.source)
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return matcher

    def _compiled(self, grammar: Grammar) -> Any:
        """In a thread of its own, since nothing can end the library: the time of some grammars doubles with
        each pattern that must hold at once.  Who asked is not kept waiting, and neither is anybody else.
        """
        vocabulary, library, made = self.prepare().result(), _library(), Future[Any]()

        def compile() -> None:
            try:
                made.set_result(library.LLMatcher(vocabulary, grammar.source, log_level=0))
            except BaseException as error:
                made.set_exception(error)
            finally:
                self._compilers.release()

        if not self._compilers.acquire(timeout=PATIENCE_S):
            raise ValueError(f"{grammar.field}: {COMPILERS} grammars are being compiled. Try again later")
        Thread(target=compile, name="grammar", daemon=True).start()
        try:
            return made.result(COMPILE_S)
        except TookTooLong:
            raise ValueError(
                f"{grammar.field}: not compiled after {COMPILE_S:g} s, expected fewer patterns or choices"
            ) from None


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError(
            "grammar: llguidance is not installed, which keeps answers to a form; "
            "pip install 'twinpath[grammar]'"
        ) from None
    return llguidance


def _vocabulary_of(tokenizer: Tokenizer) -> Any:
    ends = sorted(tokenizer.eog_ids)
    wrapped = _library().TokenizerWrapper(_Vocabulary(tokenizer, ends[0]))
    return _library().LLTokenizer(wrapped, eos_token=ends)


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, end: int):
        self._tokenizer = tokenizer
        self.eos_token_id = end
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
        self.special_token_ids = tokenizer.special_ids

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text)


# -- one answer ------------------------------------------------------------------------------------

_State = Literal["name", "thought", "begin", "armed", "free", "end"]


class _Step(NamedTuple):
    """What a token found: the state before it, and the matcher that took it, if one did."""

    state: _State
    matcher: Any
    took: bool
    n_named: int


class GrammarConstraint:
    """A constraint (constraint.py) made by `Grammars.constraint`.

    name     a channel was opened: it must be that of thoughts, or what it says would be part of the answer
    thought  the grammar sleeps; a thought cannot end the answer, or the answer would have no form
    begin    as armed, but a thought may open
    armed    the grammar says what may come
    free     outside of calls, where only calls have a form
    end      the answer is over
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        matcher: Any,
        grammar: Grammar,
        prompt_ids: Sequence[int],
        thinking: bool,
    ):
        self._tokenizer, self._start, self._holds = tokenizer, matcher, grammar.holds
        self._field = grammar.field
        names = ("<|channel>", "<channel|>", "<|tool_call>", "<|turn>")
        self._open, self._close, self._call, turn = map(tokenizer.id_of, names)
        self._name, self._n_named = tokenizer.encode("thought\n"), 0  # what follows `<|channel>`
        self._matcher = matcher.deep_copy()
        self._state: _State = "free" if self._holds == "call" else "begin" if thinking else "armed"
        if self._holds == "answer" and ends_in_thought(prompt_ids, self._open, self._close, turn):
            self._state = "thought"
        self._specials = np.array(tokenizer.special_ids, np.int64)
        self._steps: list[_Step] = []
        self._bits = np.zeros((tokenizer.n_vocab + 31) // 32, np.int32)

    def mask(self, row: np.ndarray, history: Sequence[int] | np.ndarray) -> None:
        if self._state == "end":
            only(row, self._tokenizer.eog_ids)
        elif self._state == "name":
            only(row, [i for i in (self._name[self._n_named], self._close) if i is not None])
        elif self._state == "thought":
            close = row[self._close]
            row[self._specials[self._specials < len(row)]] = -np.inf
            row[[i for i in self._tokenizer.eog_ids if i < len(row)]] = -np.inf
            row[self._close] = close
        elif self._state != "free":
            opener = row[self._open] if self._state == "begin" and self._open is not None else None
            self._apply(row)
            if opener is not None:
                row[self._open] = opener

    def _apply(self, row: np.ndarray) -> None:
        """What the grammar forbids, out of the row."""
        if self._matcher.is_stopped():
            only(row, self._tokenizer.eog_ids)
            return
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise ValueError(f"{self._field}: {_line(self._matcher.get_error())}; use a simpler grammar")
        n = min(len(row), self._tokenizer.n_vocab)
        limits = _LIMITS.take(self._bits.view(np.uint8), axis=0).ravel()
        np.minimum(row[:n], limits[:n], out=row[:n])
        row[n:] = -np.inf

    def accept(self, token: int) -> None:
        before, matcher, took, n_named = self._state, self._matcher, False, self._n_named
        if token in self._tokenizer.eog_ids:
            self._state = "end"
        elif before == "thought":
            self._state = "armed" if token == self._close else "thought"
        elif before == "begin" and token == self._open:
            self._state, self._n_named = "name", 0
        elif before == "name":
            self._n_named += 1
            is_named = self._n_named == len(self._name)
            self._state = "armed" if token == self._close else "thought" if is_named else "name"
        elif before == "free":
            if token == self._call:
                self._state, self._matcher = "armed", self._start.deep_copy()
        elif before != "end":
            took = True
            if not matcher.consume_token(int(token)):
                raise ValueError(
                    f"{self._field}: token {token} came, which it forbids: {_line(matcher.get_error())}"
                )
            self._state = "free" if self._holds == "call" and matcher.is_accepting() else "armed"
        self._steps.append(_Step(before, matcher, took, n_named))
        del self._steps[:-MAX_ROLLBACK]

    def rollback(self, n: int) -> None:
        if n > len(self._steps):
            raise ValueError(f"rollback: {n} tokens, at most {len(self._steps)} are remembered")
        for _ in range(n):
            self._state, self._matcher, took, self._n_named = self._steps.pop()
            if took and not self._matcher.rollback(1):
                raise ValueError(f"{self._field}: {_line(self._matcher.get_error())}")

    def fork(self) -> GrammarConstraint:
        other = object.__new__(GrammarConstraint)
        other.__dict__ = {**self.__dict__, "_matcher": self._matcher.deep_copy(), "_steps": []}
        other._bits = self._bits.copy()
        return other
