"""Requests as they come to a busy engine: chats that go on, prompts that begin alike, pictures, strangers."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from fastpath.engine import Request
from refimpl.batch import PAD, SoftTokens
from refimpl.frontend.sampling import SamplingParams
from tests import tiny

KEPT_CHATS = 40
SYSTEM = 50  # tokens of a beginning that many have in common


@dataclass
class Talk:
    """A conversation so far: ids, and the pictures among them."""

    ids: list[int]
    soft: list[SoftTokens] = field(default_factory=list)


class Traffic:
    """Draws the next request.  The same seed, and the same answers, give the same requests.

    room       most tokens of prompt and answer together
    model_dim  width of a picture's rows
    """

    def __init__(self, family: str, room: int, model_dim: int, seed: int):
        self.random = np.random.default_rng(seed)
        self.family, self.room, self.model_dim = family, room, model_dim
        self.words = np.array([t for s in range(9) for t in tiny.prompt(family, seed=s)[1:]])
        self.systems = [self._say(SYSTEM) for _ in range(3)]
        self.pictures = [self.random.normal(size=(n, model_dim)).astype(np.float32) for n in (3, 9, 14, 17)]
        self.chats: deque[Talk] = deque(maxlen=KEPT_CHATS)

    def _say(self, n: int) -> list[int]:
        return self.random.choice(self.words, n).tolist()

    def request(self) -> tuple[Request, Talk]:
        """A prompt with its options; the talk is what `answered` goes on with."""
        kind = self.random.random()
        if kind < 0.45 and self.chats:  # the next turn; now and then another end of the same talk
            old = self.chats[self.random.integers(len(self.chats))]
            talk = Talk(old.ids.copy(), old.soft.copy())
        elif kind < 0.75:
            talk = Talk([2, *self.systems[self.random.integers(len(self.systems))]])
        else:
            talk = Talk([2])
        if self.random.random() < 0.25:
            rows = self.pictures[self.random.integers(len(self.pictures))]
            talk.soft.append(SoftTokens(len(talk.ids), rows, bool(self.random.random() < 0.7)))
            talk.ids += [PAD] * len(rows)
        talk.ids += self._say(int(self.random.geometric(1 / 25)))
        most = int(self.random.integers(0, 60))
        if len(talk.ids) + most > self.room:  # it became too long: somebody else speaks
            talk = Talk([2, *self._say(20)])
        params = SamplingParams(temperature=float(self.random.choice([0.0, 0.9])), seed=int(kind * 1e6))
        stop_ids = frozenset(self._say(int(self.random.integers(0, 4))))
        return Request(tuple(talk.ids), tuple(talk.soft), params, most, stop_ids), talk

    def answered(self, talk: Talk, answer: tuple[int, ...]) -> None:
        """The ids that were generated are part of what is said next."""
        self.chats.append(Talk(talk.ids + list(answer), talk.soft))
