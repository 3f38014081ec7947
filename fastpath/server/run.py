"""run: serve until somebody ends it."""

import socket

import uvicorn

from fastpath.server.app import DRAIN_S, create_app
from fastpath.server.service import Service


def run(service: Service, listener: socket.socket) -> None:
    """Ends at SIGINT or SIGTERM, when the answers that have begun are done, or DRAIN_S later."""
    config = uvicorn.Config(
        create_app(service), log_level="warning", access_log=False, timeout_graceful_shutdown=int(DRAIN_S) + 2
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        service.close(0)
