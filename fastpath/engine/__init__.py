"""Many requests at once: engine.py is the loop, scheduler.py decides, store.py knows what is in the cache."""

from fastpath.engine.engine import Engine
from fastpath.engine.request import Event, Finished, Request, Result, Token, Usage

__all__ = ["Engine", "Event", "Finished", "Request", "Result", "Token", "Usage"]
