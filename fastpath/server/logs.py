"""The server's log: one JSON object a line, which names the request it is about."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from typing import Any

REQUEST: ContextVar[str] = ContextVar("request", default="")  # id of the one that is being answered
log = logging.getLogger("twinpath.server")


def note(**entry: Any) -> None:
    """A line.  Nothing of a prompt or an answer may be in it, unless Settings.log_prompts says so."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", json.dumps({"id": REQUEST.get(), **entry}, ensure_ascii=False))
