"""`--batch-file`: one request a line in, one result a line out, in their order; many are computed at once.

A result is printed as soon as it and all before it are done.  A line that cannot be answered gets a result
with an error; the others go on.
"""

import argparse
import json
import os
import queue
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, BinaryIO

from fastpath.backend import ops_for
from fastpath.cli.arguments import one_line
from fastpath.cli.batch_line import Asked, Line, Reader, lines_of
from fastpath.cli.parts import Parts
from fastpath.cli.setup import MANY, open_engine, open_model, prepare, say
from fastpath.engine import Engine, Token, Usage
from fastpath.kv.geometry import cache_bytes
from fastpath.lanes import default_chunk
from fastpath.load import Model
from fastpath.memory import available_bytes
from refimpl.frontend.output_parser import Event, OutputParser
from refimpl.frontend.stop_strings import StopStrings

LINE_FAILED, INTERRUPTED = 1, 130
AHEAD = 1000  # lines that may be done while one before them is not: their results are kept


def answer_lines(args: argparse.Namespace, parts: Parts) -> int:
    """Answers a file of requests; the exit status. Ctrl+C prints what there is of the lines so far."""
    where = "standard input" if args.batch_file == "-" else args.batch_file
    file = _opened(args.batch_file)
    lines = lines_of(file)
    first = next(lines, None)
    if first is None:
        raise ValueError(f'{where}: no requests. Write one a line, like {{"prompt": "Hi"}}.')
    with parts.measured("header"):
        model = open_model(args)
    with parts.measured("tokenizer"):
        _ = model.tokenizer
    with parts.measured("cache"):
        engine = _engine(args, model)
    reader = Reader(args, where, model, _Encoders(args, model))
    if args.mmproj is not None:
        reader.check_projector()
    n_compiled = prepare(args, engine.lanes, MANY, "last", parts)
    is_all_there = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    batch = Batch(engine, reader, Arriving(first, lines, is_all_there=is_all_there))
    batch.run()
    if args.stats:
        batch.print_stats(n_compiled)
    if batch.n_failed:
        say(f"{batch.n_failed} of {batch.n_lines} lines got an error, the first: {batch.first_error}")
    return INTERRUPTED if batch.is_interrupted else LINE_FAILED if batch.n_failed else 0


def _opened(name: str) -> BinaryIO:
    """Open until the program ends. Of standard input a handle of its own: the interpreter would close the
    other one while a thread reads from it.
    """
    if name == "-":
        if sys.stdin is None:
            raise ValueError("standard input is closed. Name a file.")
        return open(sys.stdin.fileno(), "rb", closefd=False)
    if not name:
        raise ValueError("the name of the batch file is empty. Name a file, or - for standard input.")
    return open(name, "rb")


class Arriving:
    """Lines as they come: who writes them may wait for an answer before the next, and nobody else waits.

    A thread reads, some lines ahead. Nobody closes what it reads, so that no end has to wait for it.

    is_all_there  of a file on a disk, whose lines need no waiting for
    """

    def __init__(self, first: Line, rest: Iterator[Line], *, is_all_there: bool):
        self._is_all_there = is_all_there
        self._read: queue.Queue[Line | Exception | None] = queue.Queue(maxsize=64)
        self._read.put(first)
        threading.Thread(target=self._run, args=(rest,), daemon=True).start()

    def _run(self, lines: Iterator[Line]) -> None:
        try:
            for line in lines:
                self._read.put(line)
            self._read.put(None)
        except Exception as error:
            self._read.put(error)

    def next(self, *, wait: bool) -> Line | None:
        """None: that was all.

        Raises:
            queue.Empty: not there yet, and not waited for
            Exception: what reading ended with
        """
        line = self._read.get(block=wait or self._is_all_there)
        if isinstance(line, Exception):
            raise line
        return line


def _engine(args: argparse.Namespace, model: Model) -> Engine:
    """For an image of any line. Where full contexts would take more than half of the memory that is free,
    that half is for keys and values: requests wait for each other, and no answer changes.
    """
    kv_bytes = args.kv_memory
    if kv_bytes is None:
        context = args.context or model.config.context_len
        chunk = min(args.chunk or default_chunk(model.config), context)
        full = cache_bytes(model.config, args.parallel, context, chunk, args.kv_type)
        available = available_bytes()
        if available is not None and full > available // 2:
            kv_bytes = available // 2
    options = {"n_seqs": args.parallel, "kv_bytes": kv_bytes, "largest_image": args.image_tokens}
    return open_engine(args, model, **options)


class _Encoders:
    """Those of the model's projector, opened when the first line asks for them."""

    def __init__(self, args: argparse.Namespace, model: Model):
        self._args, self._model = args, model
        self._made: Any = None

    def __call__(self) -> Any:
        if self._made is None:
            from fastpath.media import Encoders, load_projector

            args = self._args
            media = load_projector(self._model, args.mmproj)
            for note in media.notes:
                say(f"note: {note}")
            self._made = Encoders(media, ops_for(args.backend), activations=args.activations)
        return self._made


class _RawParser:
    """Every token's text, markers included."""

    def __init__(self, tokenizer: Any):
        self._stream = tokenizer.stream()

    def push(self, token_id: int) -> list[Event]:
        return [Event("content", self._stream.push(token_id))]

    def finish(self) -> list[Event]:
        return [Event("content", self._stream.flush())]


class Pending:
    """A line whose result is not printed yet.

    result  None: it is being made
    """

    def __init__(self, id: Any, asked: Asked | None, tokenizer: Any):
        self.id, self.asked = id, asked
        self.result: dict[str, Any] | None = None
        if asked is not None:
            ids = asked.request.prompt_ids
            self._parser = _RawParser(tokenizer) if asked.is_raw else OutputParser(tokenizer, ids)
            self._stops = StopStrings(asked.stops)
            self._content: list[str] = []
            self._thought: list[str] = []
            self._calls: list[dict[str, Any]] = []

    def push(self, token_id: int) -> bool:
        """True: a stop string was met, no more tokens are wanted."""
        self._take(self._parser.push(token_id))
        return self._stops.stopped

    def finish(self, reason: str, usage: Usage) -> None:
        if not self._stops.stopped:
            self._take(self._parser.finish())
        self._content.append(self._stops.flush())
        self.result = {"id": self.id, "text": "".join(self._content)}
        if self.asked is not None and self.asked.shows_thought:
            self.result["thought"] = "".join(self._thought)
        if self._calls:
            self.result["tool_calls"] = self._calls
        self.result["reason"] = reason
        self.result["usage"] = {
            "prompt_tokens": usage.prompt,
            "cached_tokens": usage.cached,
            "completion_tokens": usage.generated,
        }

    def fail(self, message: str) -> None:
        self.result = {"id": self.id, "error": one_line(message)}

    def _take(self, events: list[Event]) -> None:
        """Stop strings are looked for in the content: a thought may speak of anything."""
        for event in events:
            if event.kind == "thought":
                self._thought.append(event.text)
            elif event.kind == "content":
                self._content.append(self._stops.push(event.text))
            else:
                self._calls.append({"name": event.name, "arguments": event.arguments})


class Batch:
    """One run: lines become requests as the engine has room for them."""

    def __init__(self, engine: Engine, reader: Reader, lines: Arriving):
        self.engine, self.reader, self._lines = engine, reader, lines
        self._pending: deque[Pending] = deque()  # in the order of the lines
        self._running: dict[int, Pending] = {}
        self._has_more = True
        self._encodes_ascii = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") != "utf8"
        self._began = time.perf_counter()
        self.n_lines = self.n_failed = 0
        self.first_error = ""
        self.n_tokens = dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens"), 0)
        self.is_interrupted = False

    def run(self) -> None:
        try:
            while self._has_more or self._pending:
                self._take_in()
                self._print_done()
                self._step()
        except KeyboardInterrupt:
            self.is_interrupted = True
            for id, pending in self._running.items():
                pending.finish("interrupted", self.engine.usage(id))
            self._print_done()

    def _take_in(self) -> None:
        """As many wait in the engine as run in it, so that whoever ends has a successor at once. A line is
        waited for only where there is nothing else to do.
        """
        most = 2 * self.engine.lanes.cache.n_seqs
        while self._has_more and len(self._running) < most and len(self._pending) < AHEAD:
            try:
                line = self._lines.next(wait=not self._pending)
            except queue.Empty:
                break
            if line is None:
                self._has_more = False
            else:
                self.n_lines += 1
                self._begin(line)

    def _begin(self, line: Line) -> None:
        number, _ = line
        id: Any = number
        tokenizer = self.engine.lanes.model.tokenizer
        try:
            value = self.reader.parse(line)
            id = value.get("id", number)
            asked = self.reader.asked(number, value)
            with self.reader.named(number):
                request_id = self.engine.add(asked.request)
            pending = self._running[request_id] = Pending(id, asked, tokenizer)
        except ValueError as error:
            pending = Pending(id, None, tokenizer)
            self._fail(pending, str(error))
        self._pending.append(pending)

    def _step(self) -> None:
        for event in self.engine.step():
            pending = self._running.get(event.id)
            if pending is None:
                continue  # a stop string ended it
            if not isinstance(event, Token):
                self._end(event.id, event.reason, event.usage, event.error)
            elif pending.push(event.token):
                self.engine.abort(event.id)
                self._end(event.id, "stop", self.engine.usage(event.id))

    def _end(self, id: int, reason: str, usage: Usage, error: Exception | None = None) -> None:
        pending = self._running.pop(id)
        if error is not None:
            self._fail(pending, str(error))
        else:
            pending.finish(reason, usage)

    def _fail(self, pending: Pending, message: str) -> None:
        pending.fail(message)
        self.n_failed += 1
        self.first_error = self.first_error or one_line(message)

    def _print_done(self) -> None:
        """An interrupt while a line is written does not write it twice."""
        while self._pending and (result := self._pending[0].result) is not None:
            line = json.dumps(result, ensure_ascii=self._encodes_ascii) + "\n"
            self._pending.popleft()
            sys.stdout.write(line)
            sys.stdout.flush()
            for name, n in result.get("usage", {}).items():
                self.n_tokens[name] += n

    def print_stats(self, n_compiled: int) -> None:
        from fastpath.cli.stats import memory_line

        seconds, n = time.perf_counter() - self._began, self.n_tokens
        say(
            f"batch    {self.n_lines} lines in {seconds:.2f} s, {self.engine.lanes.cache.n_seqs} at a time, "
            f"{n_compiled} kernels compiled"
        )
        say(f"prompts  {n['prompt_tokens']} tokens, {n['cached_tokens']} of them from the prefix cache")
        say(f"answers  {n['completion_tokens']} tokens, {n['completion_tokens'] / seconds:.1f} tokens/s")
        say(f"memory   {memory_line()}")
