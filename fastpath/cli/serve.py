"""serve: the model behind HTTP, for a browser and for clients of OpenAI, Anthropic and Ollama."""

import argparse
import logging
import os
import socket
import sys
from concurrent.futures import TimeoutError as Late
from typing import Any

from fastpath.cli import arguments
from fastpath.cli.arguments import real, whole
from fastpath.cli.media import BUDGETS, add_mmproj, add_sampling, sampling_of

KEY = "TWINPATH_API_KEY"
LOCAL = ("127.0.0.1", "localhost", "::1")


def add_serve(parser: argparse.ArgumentParser) -> None:
    arguments.add_model(parser)
    add_mmproj(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="NAME", help="(default: 127.0.0.1)")
    parser.add_argument("--port", type=whole(0, 65535), default=5000, metavar="N", help="(default: 5000)")
    parser.add_argument("--name", metavar="NAME", help="of the model, for clients (default: its file's)")
    parser.add_argument(
        "--parallel", type=whole(1, 256), default=8, metavar="N", help="answers at once (default: 8)"
    )
    parser.add_argument(
        "--max-waiting", type=whole(1), default=64, metavar="N", help="requests that may wait (default: 64)"
    )
    parser.add_argument(
        "--kv-bytes", type=whole(1), metavar="N", help="memory for keys and values (default: what it takes)"
    )
    parser.add_argument("--max-tokens", type=whole(1), metavar="N",
                        help="of answers without a limit (default: what the context holds)")  # fmt: skip
    arguments.add_thinking_budget(parser)
    parser.add_argument("--image-tokens", type=int, choices=BUDGETS, default=280,
                        help="most soft tokens of an image (default: 280)")  # fmt: skip
    parser.add_argument("--max-body-mb", type=real(0, open_below=True), default=64, metavar="X",
                        help="largest request in megabytes (default: 64)")  # fmt: skip
    parser.add_argument("--cors", action="append", default=[], metavar="ORIGIN",
                        help="let pages of another place ask, as in https://example.org")  # fmt: skip
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME",
                        help="another name of a server that only this machine sees")  # fmt: skip
    parser.add_argument(
        "--allow-urls",
        action="store_true",
        help="fetch images that a request names by http or https; never from private addresses",
    )
    log = parser.add_mutually_exclusive_group()
    log.add_argument("--quiet", action="store_true", help="no line for each request")
    log.add_argument(
        "--log-prompts", action="store_true", help="the texts of prompts and answers in the log, too"
    )
    add_sampling(parser.add_argument_group("videos"))
    arguments.add_prefix_cache(parser)
    arguments.add_engine(parser)
    parser.epilog = f"An API key is taken from the environment: {KEY}."


def run_serve(args: argparse.Namespace) -> int:
    try:
        from fastpath.server.run import run
    except ImportError as error:
        raise ValueError(
            f"serve: {error.name} is not installed. Install the server's: pip install 'twinpath[server]'"
        ) from None
    listener = _listener(args.host, args.port)
    try:
        logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
        logging.getLogger("twinpath.server").setLevel(logging.WARNING if args.quiet else logging.INFO)
        service = make_service(args)
        host, port = listener.getsockname()[:2]
        listener.listen(1024)
        place = f"[{host}]" if ":" in host else host
        print(f"listening on http://{place}:{port}", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            print("open it in a browser to chat; Ctrl+C ends", file=sys.stderr, flush=True)
        run(service, listener)
    finally:
        listener.close()
    return 0


def _listener(host: str, port: int) -> socket.socket:
    """Taken before the model is read: nobody waits for a model to be told that the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise ValueError(
            f"{host}:{port}: cannot listen ({reason}). Choose another --host or --port."
        ) from None
    return listener


def make_service(args: argparse.Namespace) -> Any:
    """The model, its engine and encoders, ready: kernels compiled, weights packed, the vocabulary set up."""
    from fastpath.backend import ops_for
    from fastpath.cli.parts import Parts
    from fastpath.cli.setup import open_model, prepare, say
    from fastpath.engine import Engine
    from fastpath.media import Encoders, load_projector
    from fastpath.server.fetch import Fetcher
    from fastpath.server.service import Service, Settings
    from fastpath.talk.exchange import Exchange
    from fastpath.talk.worker import Worker

    model = open_model(args)
    _ = model.template
    media = None
    if args.mmproj is not None:
        media = load_projector(model, args.mmproj)
        for note in media.notes:
            say(f"note: {note}")
    ops = ops_for(args.backend)
    engine = Engine(
        model,
        ops,
        n_seqs=args.parallel,
        kv_bytes=args.kv_bytes,
        context_len=args.context,
        chunk=args.chunk,
        largest_image=args.image_tokens if media else 0,
        kv_type=args.kv_type,
        activations=args.activations,
        replay=not args.no_replay,
        prefix_cache=not args.no_prefix_cache,
    )
    prepare(args, engine.lanes, engine.lanes.chunk, "last", Parts())
    encoders = Encoders(media, ops, activations=args.activations) if media else None
    exchange = Exchange(
        Worker(engine, max_waiting=args.max_waiting),
        encoders=encoders,
        budget=args.thinking_budget,
        image_budget=args.image_tokens,
        sampling=sampling_of(args),
    )
    _set_up_vocabulary(exchange)
    settings = Settings(
        name=args.name or model.path.stem,
        max_tokens=args.max_tokens,
        api_key=os.environ.get(KEY) or None,
        max_body=int(args.max_body_mb * 1e6),
        origins=tuple(args.cors),
        hosts=(*LOCAL, *args.allow_host) if args.host in LOCAL else None,
        fetch=Fetcher() if args.allow_urls else None,
        log_prompts=args.log_prompts,
    )
    return Service(exchange, settings, [model.path, *([media.path] if media else [])])


def _set_up_vocabulary(exchange: Any) -> None:
    """Before anybody asks: it holds Python for seconds, in which no answer would go on."""
    from fastpath.cli.setup import SILENT_S, say

    exchange.tokenizer.set_up()
    done = exchange.grammars.prepare()
    try:
        done.result(SILENT_S)
    except Late:
        say("setting the vocabulary up for answers by a schema or a grammar")
        done.result()
