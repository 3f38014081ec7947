"""run: serve until somebody ends it."""

import gc
import socket
import sys

import uvicorn

from fastpath.server.app import DRAIN_S, create_app
from fastpath.server.service import Service

# Seconds for which a thread may keep Python to itself while others want it (else 5 ms).  The engine wants
# it several times in a step: a prompt that is being rendered would hold up all answers as often.
TURN_S = 0.0005


def run(service: Service, listener: socket.socket) -> None:
    """Ends at SIGINT or SIGTERM, when the answers that have begun are done, or DRAIN_S later."""
    sys.setswitchinterval(TURN_S)
    gc.collect()
    gc.freeze()  # what is there stays: looking through a large vocabulary takes 30 ms, and all answers wait
    config = uvicorn.Config(
        create_app(service), log_level="warning", access_log=False, timeout_graceful_shutdown=int(DRAIN_S) + 2
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        service.close(0)
