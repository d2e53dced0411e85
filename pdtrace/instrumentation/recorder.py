"""The way of finished requests out of the serving process: a bounded queue and one thread.

Putting a request costs an append. The thread chooses what is kept, encodes and exports it; when
the exporter is slow or down the queue fills up, and what does not fit is dropped and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdtrace.instrumentation.requests import Hop, Request
from pdtrace.semconv import SPAN_REQUEST

_log = logging.getLogger("pdtrace.instrumentation")
QUEUE_REQUESTS = 8192  # finished requests that wait for the thread; more are dropped
BATCH_REQUESTS = 256
WAITING_BYTES = 32 << 10  # a larger body is not kept to be read where many requests wait
QUEUE_BYTES = 128 << 20  # of engine steps and of requests that wait, about; more are dropped
INTERVAL_S = 0.2  # so long may a finished request stay in memory: what a kill may cost
_REQUEST_BYTES, _PHASE_BYTES = 2000, 400  # about
_SCALE = 1 << 64


class Unwritten(Exception):
    """Some of the requests hold what the exporter cannot write; it has taken the others."""

    def __init__(self, requests: int, first: Exception) -> None:
        super().__init__(str(first))
        self.requests = requests


class Exporter(Protocol):
    """Where finished requests go. Called by one thread at a time, never by the serving code."""

    def export(self, requests: Sequence[Request], dropped: int) -> None:
        """Write these requests; `dropped` is how many were lost in this process so far.

        Raises Unwritten for those that cannot be; any other exception means that none is written.
        """

    def close(self) -> None:
        """Write what is left and let go."""


class Opener(Protocol):
    """Gives requests and hops their ids where somebody else numbers spans (the application's SDK)."""

    def open(self, request: Request) -> None:
        """Set trace_id, span_id, sampled and span."""

    def hop(self, hop: Hop) -> None:
        """Set span_id."""

    def enter(self, request: Request) -> Any:
        """Make the request's span the current one; what `leave` needs."""

    def leave(self, entered: Any) -> None:
        """Make the span before it the current one again."""


class Destination(Protocol):
    """Takes what is finished."""

    @property
    def enabled(self) -> bool:
        """Whether it keeps anything."""

    @property
    def opener(self) -> Opener | None:
        """Who numbers the spans; None: we do."""

    def put(self, request: Request) -> None:
        """Take it, without blocking."""


@dataclass(frozen=True)
class Sampling:
    """Which finished requests are kept: by ratio of trace ids, and all slow and failed ones.

    The choice by ratio is the same in every process for one trace id (W3C: the low 8 bytes).
    """

    ratio: float = 1.0
    slow_ttft_ms: float | None = None
    slow_ms: float | None = None

    def keeps(self, request: Request) -> bool:
        """Whether this request is written; runs of engine steps always are: a part of them says nothing."""
        if request.name != SPAN_REQUEST:
            return True
        if self.ratio >= 1 and (request.parent is None or request.parent.sampled):
            return True
        if request.error is not None or request.attributes.get("aborted"):
            return True
        status = request.attributes.get("http_status")
        if isinstance(status, int) and status >= 500:
            return True
        if self.slow_ms is not None and request.end_ns - request.start_ns >= self.slow_ms * 1e6:
            return True
        times = request.stream.times
        if (
            self.slow_ttft_ms is not None
            and times
            and times[0] - request.start_ns >= self.slow_ttft_ms * 1e6
        ):
            return True
        if request.parent is not None and not request.parent.sampled:
            return False
        return int(request.trace_id[16:], 16) < self.ratio * _SCALE


class Off:
    """The recorder while nothing is instrumented: takes requests and forgets them."""

    enabled = False
    opener = None

    def put(self, request: Request) -> None:
        """Forget it."""


class Recorder:
    """Takes finished requests from any thread, without blocking; exports them on its own."""

    enabled = True

    def __init__(
        self,
        make_exporter: Callable[[], Exporter],
        sampling: Sampling | None = None,
        queue_requests: int = QUEUE_REQUESTS,
        interval_s: float = INTERVAL_S,
        opener: Opener | None = None,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.opener = opener
        self.dropped = 0
        self.failures = 0
        self._make_exporter = make_exporter
        self._sampling = sampling or Sampling()
        self._limit = queue_requests
        self._limit_bytes = queue_bytes
        self._interval_s = interval_s
        self._start_afresh()
        _living.add(self)

    def _start_afresh(self) -> None:
        """Nothing queued, no thread, no exporter: at the start, and in a forked child."""
        self._queue: deque[Request] = deque()
        self._held = self._let_go = 0  # bytes that came in and that went out since it was empty
        self._wake = threading.Event()
        self._draining = threading.Lock()
        self._starting = threading.Lock()
        self._exporter: Exporter | None = None
        self._thread: threading.Thread | None = None
        self._closing = self._stopped = False
        self._pid = os.getpid()

    def put(self, request: Request) -> None:
        """Take a finished request, or count it as dropped."""
        queue = self._queue
        crowded = len(queue) >= BATCH_REQUESTS
        if crowded:
            _slim(request)  # before the thread may see it
        if len(queue) >= self._limit or self._closing or not self._room_for(request.held_bytes):
            self.dropped += 1
            return
        queue.append(request)
        if self._thread is None:
            self._start()
        elif crowded and not self._wake.is_set():
            self._wake.set()

    def _room_for(self, held_bytes: int) -> bool:
        """Whether the queue takes so much more. Two threads that ask at once may be counted as one: no lock here."""
        if not self._queue:
            self._held = self._let_go = 0
        if self._held - self._let_go + held_bytes > self._limit_bytes:
            return False
        self._held += held_bytes
        return True

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._stopped:
                thread = threading.Thread(target=self._run, name="pdtrace-recorder", daemon=True)
                self._thread = thread
                try:
                    thread.start()
                except (
                    RuntimeError
                ):  # no more threads, or (in Python 3.12) the interpreter is going down
                    self._thread = None

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            self._drain()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Have what is queued now exported; False when that takes longer than `timeout_s`."""
        end = time.monotonic() + timeout_s
        if self._queue and self._thread is None:
            self._start()
            if self._thread is None:
                self._drain()
        self._wake.set()
        while self._queue or self._draining.locked():
            if time.monotonic() >= end:
                return False
            time.sleep(0.001)
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Export what is left, for at most so long, and stop; what comes later is dropped and counted."""
        self._closing = True
        self.flush(timeout_s)
        self._stopped = True
        self._wake.set()
        if self._draining.acquire(timeout=0.1):
            with contextlib.suppress(Exception):
                if self._exporter is not None:
                    self._exporter.close()
            self._draining.release()
        _living.discard(self)

    def _drain(self) -> None:
        with self._draining:
            while self._queue:
                batch = [
                    self._queue.popleft() for _ in range(min(BATCH_REQUESTS, len(self._queue)))
                ]
                for request in batch:
                    self._let_go += request.held_bytes
                    _settle(request)
                self._export(batch)

    def _export(self, finished: list[Request]) -> None:
        requests = finished
        try:
            requests = [request for request in finished if self._sampling.keeps(request)]
            if not requests:
                return
            if self._exporter is None:
                self._exporter = self._make_exporter()
            self._exporter.export(requests, self.dropped)
        except Unwritten as error:
            self._failed(error.requests, error)
        except (TypeError, ValueError, OverflowError) as error:
            # What one of them holds cannot be written: the others can.
            if len(finished) == 1:
                self._failed(1, error)
            else:
                for request in finished:
                    self._export([request])
        except Exception as error:
            self._failed(len(requests), error)

    def _failed(self, requests: int, error: Exception) -> None:
        self.dropped += requests
        self.failures += 1
        if self.failures == 1:
            _log.warning("pdtrace: traces are not written: %s", error)


def _slim(request: Request) -> None:
    """A request that has to wait takes little room, and is counted: its instants packed, no large body of a call."""
    held = request.held_bytes + _REQUEST_BYTES + len(request.phases) * _PHASE_BYTES
    if request.later:
        request.later = [work for work in request.later if _kept_bytes(work) <= WAITING_BYTES]
        held += sum(map(_kept_bytes, request.later))
    for stream in request.streams:
        if stream.times:
            with contextlib.suppress(TypeError, OverflowError):  # no instants; told when written
                stream.pack()
            held += 8 * len(stream.times)
    request.held_bytes = held


def _kept_bytes(work: Callable[[], None]) -> int:
    arguments = getattr(work, "args", ())  # of a partial
    return sum(len(argument) for argument in arguments if isinstance(argument, bytes))


def _settle(request: Request) -> None:
    """What was put off on the serving thread; what cannot be read tells nothing."""
    for work in request.later:
        try:
            work()
        except Exception:
            _log.debug("pdtrace: part of a request not understood", exc_info=True)
    request.later = ()


_living: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child has neither the parent's thread nor its right to the parent's queued requests."""
    for recorder in list(_living):
        recorder.dropped = 0
        recorder._start_afresh()


os.register_at_fork(after_in_child=_in_child)
