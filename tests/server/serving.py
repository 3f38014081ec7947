"""A server of a test: the application under uvicorn, in a thread, on a free port of this machine."""

import asyncio
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from fastpath.backend import ops_for
from fastpath.engine import Engine
from fastpath.media import Encoders
from fastpath.server.app import create_app
from fastpath.server.service import Service, Settings
from fastpath.talk.exchange import Exchange
from fastpath.talk.worker import Worker


@dataclass
class Served:
    url: str
    service: Service
    server: uvicorn.Server

    @property
    def engine(self) -> Engine:
        return self.service.exchange.worker.engine

    def settled(self, seconds: float = 5.0) -> bool:
        """Nothing is computed any more, within so many seconds."""
        deadline = time.monotonic() + seconds
        while not self.engine.is_idle and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.engine.is_idle


@contextmanager
def serving(model, *, n_seqs=4, max_waiting=64, media=None, engine=None, image_budget=280, **settings):
    ops = ops_for("cpu")
    engine = Engine(model, ops, n_seqs=n_seqs, **(engine or {}))
    encoders = Encoders(media, ops) if media else None
    exchange = Exchange(Worker(engine, max_waiting=max_waiting), encoders=encoders, image_budget=image_budget)
    service = Service(exchange, Settings(**{"name": "demo", **settings}), [model.path])
    server = uvicorn.Server(
        uvicorn.Config(create_app(service), port=0, log_level="error", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=asyncio.run, args=(server.serve(),), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    [listener] = server.servers[0].sockets
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", service, server)
    finally:
        server.should_exit = True
        thread.join(20)
        service.close(0)
        assert not thread.is_alive(), "the server did not end"
