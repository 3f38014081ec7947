"""The server's log: one JSON object a line, which names the request it is about."""

from __future__ import annotations

import json
import logging
import traceback
from contextvars import ContextVar
from typing import Any

REQUEST: ContextVar[str] = ContextVar("request", default="")  # id of the one that is being answered
log = logging.getLogger("twinpath.server")


def note(**entry: Any) -> None:
    """A line.  Nothing of a prompt or an answer may be in it, unless Settings.log_prompts says so."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", json.dumps({"id": REQUEST.get(), **entry}, ensure_ascii=False))


def fault(error: BaseException) -> None:
    """A line about an error of ours: its kind and where it came from; its message may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in frames]
    causes = error.__cause__ or error.__context__
    entry = {"id": REQUEST.get(), "fault": type(error).__name__, "at": where}
    log.error("%s", json.dumps(entry if causes is None else {**entry, "of": type(causes).__name__}))
