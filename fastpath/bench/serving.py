"""What serving costs: the server beside the bare engine, in turn (A B A B), on the same weights and threads.

    python -m fastpath.bench.serving --model MODEL.gguf -n 64 -r 5        # other options are those of `serve`

The server is the one of `serve`, in a process of its own; the client is this process, which does nothing but
read. `bare` is the same engine in the same thread, stepped without anything around it: no HTTP, no protocol,
no other thread that wakes up. Both are given the same prompt, of which the prefix cache has the same.

    first token   from the request to the first piece of its answer
    tokens/s      of --parallel answers of -n tokens. The engine is held until all of them have arrived, so
                  that both begin alike: from then to the end of the last one. What comes before is in the
                  first row.
"""

import argparse
import json
import multiprocessing
import re
import selectors
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from fastpath.bench.table import markdown
from fastpath.cli.arguments import Parser, one_line, whole
from fastpath.cli.serve import add_serve, make_service

QUESTION = "What is Twinpath?"
HOST = "127.0.0.1"
ARRIVAL_S = 60.0  # for all requests to arrive
FIRST = re.compile(rb'"content":"[^"]|"finish_reason":"')  # of an answer's text, or its end where it has none


@dataclass(frozen=True)
class Pair:
    """Samples in the order in which they were taken: sample k of both stands side by side."""

    bare: list[float]
    served: list[float]

    def medians(self) -> tuple[float, float]:
        return statistics.median(self.bare), statistics.median(self.served)

    def of_pairs(self, compare: Callable[[float, float], float]) -> tuple[float, float, float]:
        """Median, least and most of what a pair differs by: a machine that slows down does so for both."""
        found = [compare(*pair) for pair in zip(self.bare, self.served)]
        return statistics.median(found), min(found), max(found)


def main(words: Sequence[str] | None = None) -> int:
    args = _arguments(words)
    try:
        first, all_s = _measured(args)
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f"bench-serving: {one_line(str(error))}") from None
    print(table(first, all_s, args.parallel, args.tokens))
    return 0


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m fastpath.bench.serving", description=__doc__)
    add_serve(parser)
    parser.add_argument("-n", "--tokens", type=whole(1), default=64, metavar="N", help="of each answer (64)")
    parser.add_argument(
        "-r", "--rounds", type=whole(1, 1000), default=5, metavar="N", help="after one to warm up (5)"
    )
    parser.add_argument(
        "--firsts", type=whole(1, 100), default=10, metavar="N", help="first tokens of each round (10)"
    )
    parser.set_defaults(host=HOST, port=0, quiet=True)
    return parser.parse(list(sys.argv[1:] if words is None else words))


def _measured(args: argparse.Namespace) -> tuple[Pair, Pair]:
    """Seconds to the first token, and to the end of all answers."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(args, theirs))
    process.start()
    theirs.close()
    try:
        server = _Server(ours)
        first, all_s = Pair([], []), Pair([], [])
        for k in range(args.rounds + 1):
            for _ in range(args.firsts):
                first.bare.append(server.ask("first"))
                first.served.append(server.first())
            all_s.bare.append(server.ask("many", args.parallel, args.tokens))
            all_s.served.append(server.many(args.parallel, args.tokens))
            if k == 0:  # to warm up
                first, all_s = Pair([], []), Pair([], [])
        return first, all_s
    finally:
        process.terminate()
        process.join()


def table(first: Pair, all_s: Pair, n_streams: int, n_tokens: int) -> str:
    """first, all_s: seconds."""
    n = n_streams * n_tokens
    rates = Pair([n / s for s in all_s.bare], [n / s for s in all_s.served])
    more = first.of_pairs(lambda bare, served: 1e3 * (served - bare))
    less = rates.of_pairs(lambda bare, served: 100 * (served / bare - 1))
    cells = [
        ["", "bare", "served", "difference", "least", "most"],
        ["first token, ms", *(f"{1e3 * s:.2f}" for s in first.medians()), *(f"{ms:+.2f} ms" for ms in more)],
        [
            f"{n_streams} answers of {n_tokens}, tokens/s",
            *(f"{rate:.1f}" for rate in rates.medians()),
            *(f"{percent:+.1f} %" for percent in less),
        ],
    ]
    return markdown(cells)


# -- the client ------------------------------------------------------------------------------------


class _Server:
    """The other process, asked over HTTP, or through the pipe for what needs no server.

    Times are of the clock that all processes of a machine share.
    """

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        ready = pipe.recv()
        if isinstance(ready, Exception):
            raise ready
        self._port, self._ends = ready

    def ask(self, *what: Any) -> float:
        self._pipe.send(what)
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def first(self) -> float:
        began = time.perf_counter()
        with self._request(1, 0) as connection:
            got = b""
            while not FIRST.search(got):
                got += _read(connection)
            took = time.perf_counter() - began
            while chunk := connection.recv(1 << 16):
                got += chunk
        _check(got, 1)
        return took

    def many(self, n_streams: int, n_tokens: int) -> float:
        """The engine waits for the last request; it says when it began."""
        self._pipe.send(("hold", n_streams))
        self._pipe.recv()
        with selectors.DefaultSelector() as waiting:
            got: dict[int, list[bytes]] = {}
            for k in range(n_streams):
                connection = self._request(n_tokens, k)
                connection.setblocking(False)
                waiting.register(connection, selectors.EVENT_READ, k)
                got[k] = []
            while waiting.get_map():
                for key, _ in waiting.select():
                    if chunk := key.fileobj.recv(1 << 16):  # type: ignore[union-attr]
                        got[key.data].append(chunk)
                    else:
                        waiting.unregister(key.fileobj).fileobj.close()  # type: ignore[union-attr]
        end = time.perf_counter()
        began = self._pipe.recv()
        if isinstance(began, Exception):
            raise began
        for chunks in got.values():
            _check(b"".join(chunks), n_tokens)
        return end - began

    def _request(self, n_tokens: int, seed: int) -> socket.socket:
        body = {
            "messages": [{"role": "user", "content": QUESTION}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": n_tokens,
            "seed": seed,
            "logit_bias": {str(i): -100 for i in self._ends},
        }
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection = socket.create_connection((HOST, self._port), timeout=600)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head.encode() + data)
        return connection


def _read(connection: socket.socket) -> bytes:
    if chunk := connection.recv(1 << 16):
        return chunk
    raise ValueError("the server ended an answer before its first token")


def _check(got: bytes, n_tokens: int) -> None:
    """It was an answer, and it had all its tokens."""
    if f'"completion_tokens":{n_tokens},'.encode() not in got:
        raise ValueError(f"an answer of {n_tokens} tokens was expected, got {got[-300:]!r}")


# -- the server's process --------------------------------------------------------------------------


def _serve(args: argparse.Namespace, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client ends this process
    try:
        from fastpath.server.run import run

        service = make_service(args)
        listener = socket.create_server((args.host, args.port), backlog=1024)
    except Exception as error:
        pipe.send(ValueError(str(error)))
        return
    pipe.send((listener.getsockname()[1], sorted(service.exchange.tokenizer.eog_ids)))
    threading.Thread(target=_Bare(service, pipe).obey, daemon=True).start()
    run(service, listener)


class _Bare:
    """Does what the client asks of the engine itself, in the engine's thread as the server's requests."""

    def __init__(self, service: Any, pipe: Connection):
        self._worker, self._pipe = service.exchange.worker, pipe
        exchange = service.exchange
        self._ids = exchange.template.render_ids(exchange.tokenizer, [{"role": "user", "content": QUESTION}])
        self._bias = tuple((i, -100.0) for i in exchange.tokenizer.eog_ids)
        self._sampling = service.settings.sampling

    def obey(self) -> None:
        commands = {"first": self._first, "many": self._many, "hold": self._hold}
        while True:
            try:
                what, *given = self._pipe.recv()
            except EOFError:
                return
            try:
                self._pipe.send(self._worker.call(partial(commands[what], *given)).result())
            except Exception as error:
                self._pipe.send(ValueError(str(error)))

    def _first(self) -> float:
        return self._many(1, 1)

    def _many(self, n_streams: int, n_tokens: int) -> float:
        from fastpath.engine import Request

        began, engine = time.perf_counter(), self._worker.engine
        for k in range(n_streams):
            params = replace(self._sampling, seed=k, bias=self._bias)
            engine.add(Request(self._ids, params=params, max_tokens=n_tokens))
        while not engine.is_idle:
            engine.step()
        return time.perf_counter() - began

    def _hold(self, n_streams: int) -> float:
        """Until so many wait; when that was."""
        self._pipe.send("held")
        deadline = time.perf_counter() + ARRIVAL_S
        while self._worker.engine.n_waiting < n_streams:
            if time.perf_counter() > deadline:
                raise ValueError(f"{n_streams} requests did not arrive within {ARRIVAL_S:.0f} s")
            time.sleep(0.0005)
        return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
