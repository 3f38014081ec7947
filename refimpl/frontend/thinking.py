"""How long a model may think, and one close that must not come.

The numbers were measured on E4B by the authors of the system description (section "thinking"):

    thinking off   a thought that the model opens all the same ends at the first line break past
                   min(64, max_tokens // 4) tokens, at twice that at the latest.  Cut in the middle of a
                   sentence instead, the model went on thinking in its answer.
    thinking on    it ends after exactly `budget` tokens, if there is a budget
    after a tool's result, thinking off: a `<channel|>` that closes nothing does not come.  The model wrote
                   its answer, closed a thought it had not opened, and wrote its answer again.

Tokens of a thought are counted from `<|channel>`, itself the first, or from the first token of the answer
where the prompt ends inside an open thought.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from refimpl.frontend.constraint import ends_in_thought, only
from refimpl.frontend.tokenizer import Tokenizer

FREE_THOUGHT = 64  # tokens of a thought that nobody asked for


class _State(NamedTuple):
    is_open: bool
    n: int = 0  # tokens of the open thought
    is_due: bool = False  # the next token must close it


class ThoughtLimits:
    """A constraint (constraint.py) that keeps these rules.

    prompt_ids  the prompt
    thinking    the client asked for thoughts
    max_tokens  of the answer; None: no limit
    budget      tokens of a thought; None: no limit with thinking on; 0: no rule ends any thought
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        thinking: bool,
        max_tokens: int | None = None,
        budget: int | None = None,
    ):
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise ValueError(f"thinking budget: {budget!r}, expected a number of tokens (0: no limit)")
        self._tokenizer = tokenizer
        names = ("<|channel>", "<channel|>", "<|tool_call>", "<|turn>", "<tool_response|>")
        self._open, self._close, self._call, turn, self._result = map(tokenizer.id_of, names)
        self._soft: int | None = None
        self._hard: int | None = budget
        if not thinking:
            self._soft = min(FREE_THOUGHT, max_tokens // 4) if max_tokens is not None else FREE_THOUGHT
            self._hard = 2 * self._soft
        if budget == 0:
            self._soft = self._hard = None
        after_result = len(prompt_ids) > 0 and prompt_ids[-1] == self._result
        self._no_stray_close = after_result and not thinking
        self._states = [_State(ends_in_thought(prompt_ids, self._open, self._close, turn))]

    @property
    def in_thought(self) -> bool:
        return self._states[-1].is_open

    def mask(self, row: np.ndarray, history: Sequence[int] | np.ndarray) -> None:
        state = self._states[-1]
        if self._close is None:
            return
        if state.is_due:
            only(row, [self._close])
        elif self._no_stray_close and not state.is_open and self._close < len(row):
            row[self._close] = -np.inf

    def accept(self, token: int) -> None:
        state = self._states[-1]
        if state.is_open and token not in (self._close, self._call):
            self._states.append(self._counted(state.n + 1, token))
        elif not state.is_open and token == self._open:
            self._states.append(self._counted(1, token))
        else:
            self._states.append(_State(False))

    def _counted(self, n: int, token: int) -> _State:
        breaks = self._soft is not None and n > self._soft and b"\n" in self._tokenizer.token_bytes(token)
        return _State(True, n, breaks or (self._hard is not None and n >= self._hard))

    def rollback(self, n: int) -> None:
        del self._states[len(self._states) - n :]

    def fork(self) -> "ThoughtLimits":
        other = object.__new__(ThoughtLimits)
        other.__dict__ = {**self.__dict__, "_states": self._states[-1:]}
        return other
