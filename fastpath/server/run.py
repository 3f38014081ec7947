"""run: serve until somebody ends it."""

import logging
import socket
from types import FrameType

import uvicorn

from fastpath.server.app import DRAIN_S, create_app
from fastpath.server.service import Service


def run(service: Service, listener: socket.socket) -> None:
    """Ends at SIGINT or SIGTERM, when the answers that have begun are done, or DRAIN_S later; at a second
    SIGINT at once.
    """
    config = uvicorn.Config(
        create_app(service), log_level="warning", access_log=False, timeout_graceful_shutdown=int(DRAIN_S) + 2
    )
    try:
        _Server(config, service).run(sockets=[listener])
    finally:
        service.close(0)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._engine = service.exchange.worker.engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        is_first = not self.should_exit
        super().handle_exit(sig, frame)
        if self.force_exit:  # what is cut off by it is no fault, which uvicorn would tell of at length
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        elif is_first and not self._engine.is_idle:
            logging.getLogger("twinpath.server").warning(
                f"ending when the answers that have begun are done, in {DRAIN_S:.0f} s at most; "
                "Ctrl+C ends at once"
            )
