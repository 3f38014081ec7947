"""Several: the answers to several prompts, told as if they were one's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from fastpath.talk.events import Said
from fastpath.talk.exchange import Exchange, Prompt, Talk

_End = Exception | None


class Several:
    """Like a Talk: `async for said in several`, and `leave` in any case.

    Answer k of prompt p has the number p * n + k, where all prompts ask for n answers.  What one of them ends
    with, if that is an error, ends all.

    Raises:
        ValueError, QueueFull, Closing: as Exchange.begin; none of them has begun then
    """

    def __init__(self, exchange: Exchange, prompts: Sequence[Prompt]):
        self._talks: list[Talk] = []
        self._n = prompts[0].options.n
        try:
            for prompt in prompts:
                self._talks.append(exchange.begin(prompt))
        except BaseException:
            self.leave()
            raise

    async def __aiter__(self) -> AsyncIterator[Said]:
        heard: asyncio.Queue[Said | _End] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._listen(p, heard)) for p in range(len(self._talks))]
        n_left = len(tasks)
        try:
            while n_left:
                said = await heard.get()
                if isinstance(said, Exception):
                    raise said
                if said is None:
                    n_left -= 1
                else:
                    yield said
        finally:
            self.leave()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, p: int, heard: asyncio.Queue[Said | _End]) -> None:
        try:
            async for said in self._talks[p]:
                heard.put_nowait(replace(said, choice=p * self._n + said.choice))
        except Exception as error:
            heard.put_nowait(error)
        else:
            heard.put_nowait(None)

    def leave(self) -> None:
        for talk in self._talks:
            talk.leave()
