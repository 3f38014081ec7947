"""Post: what the engine's thread says to an event loop, all of a step in one go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastpath.engine import Event

Hear = Callable[[int, Event], None]


class Post:
    """Waking a loop takes a system call, in which its thread may take the interpreter from the engine's: with
    eight answers, one for each token were eight times that in every step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._letters: list[tuple[Hear, int, Event]] = []

    # In the engine's thread.

    def put(self, hear: Hear, k: int, event: Event) -> None:
        """hear(k, event) is called in the loop, after `send`."""
        self._letters.append((hear, k, event))

    def send(self) -> None:
        letters, self._letters = self._letters, []
        try:
            self.loop.call_soon_threadsafe(_deliver, letters)
        except RuntimeError:
            pass  # the loop is closed: nobody listens


def _deliver(letters: list[tuple[Hear, int, Event]]) -> None:
    for hear, k, event in letters:
        hear(k, event)
