"""What goes wrong: requests refused or failed, clients that go away, a worker that dies, further attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdtrace.simulator.engine import Worker
from pdtrace.simulator.load import Request, Try
from pdtrace.simulator.scenario import EPOCH_NS, Scenario, uniform

if TYPE_CHECKING:
    from pdtrace.simulator.fleet import Fleet

REFUSED, BROKEN, DEAD = "service_unavailable", "engine_error", "engine_dead"
BACKOFF_NS = (20e6, 80e6)  # until the router tries again


def draw_fate(request: Request, scenario: Scenario, random: np.random.Generator) -> None:
    """How a request that arrives will end, if nothing else happens to it."""
    chance, part = random.random(2)
    refused = scenario.refused_ratio
    failed = refused + scenario.failed_ratio
    if chance < refused:
        _ends_after(request, 0, "failed", REFUSED)
    elif chance < failed and part < 0.5:
        _ends_after(request, 0, "failed", BROKEN)
    elif chance < failed + scenario.left_ratio and request.asked > 1:
        aborted = chance >= failed
        made = 1 + int((part if aborted else 2 * part - 1) * (request.asked - 1))
        _ends_after(request, made, *(("aborted", None) if aborted else ("failed", BROKEN)))


def _ends_after(request: Request, made: int, fate: str, error: str | None) -> None:
    request.output, request.fate, request.error = made, fate, error


def plan(fleet: Fleet) -> None:
    """Set the instant at which the first worker dies."""
    if fleet.scenario.dies_s:
        first = fleet.entry[0].server
        at = EPOCH_NS + int(fleet.scenario.dies_s * 1e9)
        for worker in fleet.entry:
            if worker.server == first:
                fleet.at(at, lambda now, worker: _die(fleet, now, worker), worker)


def _die(fleet: Fleet, now: int, worker: Worker) -> None:
    """All that it held fails; the step that ran is never logged."""
    worker.died = now
    for request in worker.fall():
        fail(fleet, now, worker, request, DEAD)


def fail(fleet: Fleet, now: int, worker: Worker, request: Request, error: str) -> None:
    """An attempt failed at a worker: the router tries again where no token was made yet, or it is over."""
    if request.gone is not None:
        return
    worker.promised -= 1
    again = request.first_token is None and len(request.tries) < fleet.scenario.retries
    if again and fleet.alive(fleet.entry):
        sent, queued = request.sent or now, request.queue_start or now
        request.tries.append(
            Try(len(request.tries), worker.name, sent, queued, request.prefill_start, now, error)
        )
        request.queue_start = request.prefill_start = request.prefill_end = request.end = None
        request.done = request.made = request.cached = 0
        _ends_after(request, request.asked, "completed", None)
        wait = uniform(fleet.streams.of(f"backoff {request.index}"), BACKOFF_NS)
        fleet.at(now + int(wait), fleet.send_again, request)
        return
    _ends_after(request, request.made, "failed", error)
    request.end = now


def give_up(fleet: Fleet, now: int, request: Request) -> None:
    """The client goes away when no token came: whoever has the request drops it before its next step."""
    if request.first_token is not None or request.end is not None:
        return
    request.gone = request.end = now
    _ends_after(request, 0, "aborted", None)
    for worker in fleet.workers:
        if worker.name in (request.prefill_worker, request.decode_worker):
            if worker.role != "prefill" or request.prefill_end is None:
                worker.promised -= 1
            worker.leaving.append(request)
            fleet.wake(now, worker)
    for queue in fleet.bridge.values():
        for entry in [entry for entry in queue if entry[0] is request]:
            queue.remove(entry)
            request.left = now
