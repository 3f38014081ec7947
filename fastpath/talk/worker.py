"""Worker: the engine in a thread of its own; requests in, events out.

    worker = Worker(engine)
    ticket = worker.submit([request], heard)     # heard(k, event) is called in the worker's thread
    ticket.cancel()                              # within one step; heard(k, Finished("abort")) still comes
    worker.close(timeout=10)

A listener must be quick: all answers wait for it.  What is to be done once for all that a step has said, such
as waking another thread, belongs into `submit(..., told=...)`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastpath.engine import Engine, Event, Finished, Request, Usage

T = TypeVar("T")
Heard = Callable[[int, Event], None]
IDLE_S = 1.0  # how long an idle worker sleeps at a time
SMOOTHING = 0.2  # weight of the latest request in the mean time of one


class QueueFull(Exception):
    """There are as many requests waiting as may wait.

    retry_after  seconds until one of them may be done
    """

    def __init__(self, n_waiting: int, retry_after: int):
        super().__init__(f"{n_waiting} requests are waiting, and no more may. Try again in {retry_after} s")
        self.retry_after = retry_after


class Closing(Exception):
    """The worker takes no more requests."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down. Try again later")


class InternalError(Exception):
    """A step failed, and with it all requests that were in the engine; the cause is chained."""


@dataclass(eq=False)
class Ticket:
    """Answers that were asked for together.

    ids  the engine's; of those that have not been added yet, None
    """

    worker: Worker
    requests: Sequence[Request]
    heard: Heard
    told: Callable[[], None] | None
    ids: list[int | None]
    began: float
    is_cancelled: bool = False

    def cancel(self, k: int | None = None) -> None:
        """Gives one answer up, or all."""
        self.worker._cancel(self, k)


class Worker:
    """
    max_waiting  requests that may wait for their turn; more are refused
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 64):
        self.engine, self.max_waiting = engine, max_waiting
        self._changed = threading.Condition()  # and its lock, for all that follows
        self._listeners: dict[int, tuple[Ticket, int]] = {}
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._is_closing = False
        self._mean_s = 1.0
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        return self.engine.n_waiting

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def check_room(self) -> None:
        """Asked before the work of preparing a request.

        Raises:
            QueueFull, Closing
        """
        if self._is_closing:
            raise Closing
        n = self.engine.n_waiting
        if n >= self.max_waiting:
            turns = 1 + n // max(1, self.engine.n_running)
            raise QueueFull(n, max(1, min(60, round(self._mean_s * turns))))

    def submit(
        self, requests: Sequence[Request], heard: Heard, told: Callable[[], None] | None = None
    ) -> Ticket:
        """Answers to requests with one prompt: the others begin when the first has computed it.

        told  called at the end of each step that said something of them; tickets with equal ones share a call

        Raises:
            ValueError: one can never be computed; says why
            QueueFull, Closing
        """
        ticket = Ticket(self, tuple(requests), heard, told, [None] * len(requests), time.perf_counter())
        with self._changed:
            self.check_room()
            self._add(ticket, 0)
            self._changed.notify_all()
        return ticket

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Has something computed between two steps (images, sounds): the processor has one user at a time."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_closing:
                raise Closing
            self._calls.append((function, future))
            self._changed.notify_all()
        return future

    def running(self) -> list[tuple[int, int, Usage]]:
        """(id, prompt tokens, usage) of the requests that are in the engine."""
        with self._changed:
            ids = list(self._listeners)
        found = []
        for id in ids:
            try:
                result = self.engine.result(id)
            except KeyError:
                continue
            if result.reason is None:
                found.append((id, result.usage.prompt, replace(result.usage)))
        return found

    def close(self, timeout: float = 30.0) -> None:
        """Takes no more requests, waits for those that are there, and ends those that are not done then."""
        deadline = time.perf_counter() + timeout
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            while self._listeners and (left := deadline - time.perf_counter()) > 0:
                self._changed.wait(min(left, IDLE_S))
            rest = {id(ticket): ticket for ticket, _ in self._listeners.values()}
        for ticket in rest.values():
            ticket.cancel()
        self._thread.join(timeout=IDLE_S + 10)

    # In the worker's thread.

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Nobody waits for a thread that is gone, also where a fault in here has ended it."""
        with self._changed:
            self._is_closing = True
            calls, self._calls = self._calls, []
            left, self._listeners = self._listeners, {}
            self._changed.notify_all()
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(Closing())
        error = InternalError("the model's thread has ended")
        for id, (ticket, k) in left.items():
            ticket.heard(k, Finished(id, "error", Usage(0), error))
            if ticket.told is not None:
                ticket.told()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._listeners or self._calls or self._is_closing):
                    self._changed.wait(IDLE_S)
                if self._is_closing and not (self._listeners or self._calls):
                    return
                calls, self._calls = self._calls, []
            for function, future in calls:
                _settle(future, function)
            if self._listeners:
                self._step()

    def _step(self) -> None:
        try:
            events = self.engine.step()
        except Exception as error:
            events = self._failed(error)
        tickets = [self._tell(event) for event in events]
        for told in dict.fromkeys(ticket.told for ticket in tickets if ticket is not None):
            if told is not None:
                told()

    def _failed(self, cause: Exception) -> list[Event]:
        """A step that failed takes all its requests along: none of them is waited for in vain."""
        error = InternalError("a step of the model failed")
        error.__cause__ = cause
        with self._changed:
            ids = list(self._listeners)
        ends: list[Event] = [Finished(id, "error", self.engine.usage(id), error) for id in ids]
        for id in ids:
            self.engine.abort(id)  # the last: of many results the engine forgets the first
        return ends

    def _tell(self, event: Event) -> Ticket | None:
        last = event if isinstance(event, Finished) else None
        if last is not None:
            self.engine.forget(event.id)  # the event says all; an error holds on to whoever was told of it
        with self._changed:
            ticket, k = self._listeners.get(event.id, (None, 0))
            if ticket is None:
                return None  # it was told already that its step had failed
            waiting = [j for j, id in enumerate(ticket.ids) if id is None] if k == 0 else []
            if last is not None:
                del self._listeners[event.id]
                self._mean_s += SMOOTHING * (time.perf_counter() - ticket.began - self._mean_s)
                self._changed.notify_all()
            if not ticket.is_cancelled and not (last is not None and last.reason == "error"):
                for j in waiting:
                    self._add(ticket, j)
                waiting = []
        ticket.heard(k, event)
        if last is not None:
            for j in waiting:
                ticket.heard(j, replace(last, usage=Usage(last.usage.prompt)))
        return ticket

    def _add(self, ticket: Ticket, k: int) -> None:
        id = ticket.ids[k] = self.engine.add(ticket.requests[k])
        self._listeners[id] = ticket, k

    def _cancel(self, ticket: Ticket, k: int | None) -> None:
        with self._changed:
            if k is None:
                ticket.is_cancelled = True
            ids = [id for j, id in enumerate(ticket.ids) if k in (None, j)]
        for id in ids:
            if id is not None:
                self.engine.abort(id)
        with self._changed:
            self._changed.notify_all()


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
