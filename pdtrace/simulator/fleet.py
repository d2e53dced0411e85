"""Workers, router and links in one timeline: requests in, workers with their logged steps out."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdtrace.simulator import trouble
from pdtrace.simulator.cost import Cost
from pdtrace.simulator.engine import Step, Worker
from pdtrace.simulator.load import Request, requests
from pdtrace.simulator.scenario import (
    BLOCK_TOKENS,
    EPOCH_NS,
    KV_BYTES_PER_TOKEN,
    LOAD_WEIGHT,
    Scenario,
    Streams,
    uniform,
)

LONG_PREFILL_TOKENS = 1500  # a prefill of as many tokens that locked pauses follow
HANDOVER_NS = 500_000  # from the end of a prefill until its decode worker knows of it
DRAIN = 20  # what has not ended after as many durations never will


@dataclass(slots=True)
class Link:
    """The way out of a prefill worker: one transfer after the other."""

    bytes_per_ns: float
    latency: int
    free: int = 0


class Fleet:
    """Everything of one run while it goes on."""

    def __init__(self, scenario: Scenario, seed: int, duration_s: float) -> None:
        self.scenario = scenario
        self.streams = Streams(scenario.name, seed)
        self.stop = EPOCH_NS + int(duration_s * 1e9)
        self.requests: list[Request] = []
        self.by_index: dict[int, Request] = {}
        self.entry, self.decoders = self._workers()
        self.links = self._links()
        # requests whose KV waits for room on a decode worker, in order
        self.bridge: dict[str, deque[tuple[Request, Worker]]] = {
            worker.name: deque() for worker in self.decoders
        }
        self._events: list[tuple[int, int, Callable[[int, Any], None], Any]] = []
        self._count = 0
        self._rounds = {"entry": 0, "decode": 0}
        self._sessions = 0
        self._front = _delays(self.streams.of("front end"))
        self._fates = self.streams.of("fates")
        self._add_pauses(duration_s)
        trouble.plan(self)
        for request in requests(scenario, self.streams, duration_s):
            self.at(request.arrival, self._arrive, request)

    @property
    def workers(self) -> list[Worker]:
        """All workers, those that requests go to first at the front."""
        return self.entry if self.entry is self.decoders else self.entry + self.decoders

    def run(self) -> Fleet:
        """Let the load pass until the last request has ended."""
        last = EPOCH_NS + (self.stop - EPOCH_NS) * DRAIN
        while self._events:
            now, _, happen, what = heapq.heappop(self._events)
            if now > last:
                break
            happen(now, what)
        return self

    # ---- set-up
    def _workers(self) -> tuple[list[Worker], list[Worker]]:
        scenario, cost = self.scenario, Cost(self.scenario, self.streams.of("cost"))

        def made(role: str, count: int) -> list[Worker]:
            names = [f"{role}{n}" for n in range(count)]
            if scenario.ranks > 1:
                names = [f"{name}.{rank}" for name in names for rank in range(scenario.ranks)]
            return [
                Worker(name, role, scenario, cost, self.streams, self.by_index) for name in names
            ]

        if scenario.mode != "pd":
            engines = made("aggregated", scenario.workers)
            return engines, engines
        return made("prefill", scenario.prefill_workers), made("decode", scenario.workers)

    def _links(self) -> dict[str, Link]:
        random = self.streams.of("links")
        bandwidth = uniform(random, self.scenario.link_gbytes_per_s)  # GB/s are bytes/ns
        latency = int(self.scenario.link_latency_ms * 1e6)
        return {worker.name: Link(bandwidth, latency) for worker in self.entry}

    def _add_pauses(self, duration_s: float) -> None:
        if self.scenario.pauses != "independent":
            return
        for worker in self.workers:
            random = self.streams.of(f"pause times {worker.name}")
            count = random.poisson(self.scenario.pauses_per_min * duration_s / 60)
            for at in sorted(random.uniform(0, duration_s, count)):
                lasts = int(uniform(random, self.scenario.pause_ms) * 1e6)
                heapq.heappush(worker.pauses, (EPOCH_NS + int(at * 1e9), lasts))

    # ---- events
    def at(self, time: int, happen: Callable[[int, Any], None], what: Any) -> None:
        """Let something happen at an instant."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, happen, what))

    def _arrive(self, now: int, request: Request) -> None:
        request.index = len(self.requests)
        self.requests.append(request)
        self.by_index[request.index] = request
        if request.turn == 0 and request.session == 0:
            self._sessions += 1
            request.session = self._sessions
        hop, choice, sent = next(self._front)
        request.route_start = now + hop
        request.route_end = request.sent = request.route_start + choice
        request.router_worker, request.asked = "router", request.output
        if self.scenario.troubled:
            trouble.draw_fate(request, self.scenario, self._fates)
        if request.error == trouble.REFUSED or not self.alive(self.entry):
            request.output, request.fate, request.error = 0, "failed", trouble.REFUSED
            request.end = request.route_end
            return
        if self.scenario.patience_s:
            until = now + int(self.scenario.patience_s * 1e9)
            self.at(until, lambda now, request: trouble.give_up(self, now, request), request)
        worker = self._choose(request, self.alive(self.entry), "entry")
        if self.scenario.mode == "pd":
            request.prefill_worker = worker.name
            decoder = self._choose(request, self.decoders, "decode")
            request.decode_worker = decoder.name
            decoder.promised += 1
        else:
            request.decode_worker = worker.name
        request.believed = worker.cache.find(request, touch=False)
        request.candidates, request.load = len(self.entry), worker.promised
        worker.promised += 1
        self.at(request.route_end + sent, self._queue, (worker, request))

    @staticmethod
    def alive(workers: list[Worker]) -> list[Worker]:
        """Those that have not died."""
        return [worker for worker in workers if worker.died is None]

    def send_again(self, now: int, request: Request) -> None:
        """Another attempt, at a worker that lives."""
        if request.gone is not None:
            return
        living = self.alive(self.entry)
        if not living:
            request.end, request.output = now, 0
            request.fate, request.error = "failed", trouble.REFUSED
            return
        worker = self._choose(request, living, "entry")
        request.decode_worker, request.sent = worker.name, now
        worker.promised += 1
        self.at(now + next(self._front)[2], self._queue, (worker, request))

    def _choose(self, request: Request, workers: list[Worker], step: str) -> Worker:
        policy = self.scenario.router
        if policy == "round_robin":
            self._rounds[step] += 1
            return workers[(self._rounds[step] - 1) % len(workers)]
        if policy == "least_loaded":
            return min(workers, key=lambda worker: worker.promised)
        if policy == "long_apart":
            rest = workers[1:] or workers
            long = request.prompt >= LONG_PREFILL_TOKENS
            return workers[0] if long else min(rest, key=lambda worker: worker.promised)

        def price(worker: Worker) -> int:
            cached = worker.cache.find(request, touch=False)
            return request.prompt - cached + LOAD_WEIGHT * worker.promised

        return min(workers, key=price)

    def _queue(self, now: int, where: tuple[Worker, Request]) -> None:
        worker, request = where
        if request.gone is not None:
            return
        request.queue_start = now
        if worker.died is not None:
            trouble.fail(self, now, worker, request, trouble.DEAD)
            return
        worker.waiting.append(request)
        self.wake(now, worker)

    def wake(self, now: int, worker: Worker) -> None:
        """Let a worker that stands still look for work."""
        if worker.step is not None or worker.died is not None:
            return
        step = worker.begin(now)
        if step is not None:
            self.at(step.end, self._step_ends, worker)
            if self.scenario.pauses == "locked":
                self._lock_pause(worker, step)

    def _step_ends(self, now: int, worker: Worker) -> None:
        if worker.died is not None:
            return
        complete, ended = worker.finish()
        if worker.role == "prefill":
            for request in [r for r in complete if r.gone is None]:
                if not request.output:
                    self._named(str(request.decode_worker)).promised -= 1
                    trouble.fail(self, now, worker, request, trouble.BROKEN)
                    continue
                worker.promised -= 1
                self.at(now + HANDOVER_NS, self._hand_over, (request, worker))
        for request in ended:
            if not request.output:
                trouble.fail(self, now, worker, request, str(request.error))
            elif request.fate == "completed":
                self._follow(now, request)
        if ended and worker.role == "decode":
            self._admit(now, worker)
        self.wake(now, worker)

    def _follow(self, now: int, request: Request) -> None:
        """The next turn of the conversation, after a pause to think; none after the load ended."""
        if not request.followers:
            return
        later, *rest = request.followers
        later.arrival += now  # it held the pause
        later.followers, later.session = rest, request.session
        if later.arrival < self.stop:
            self.at(later.arrival, self._arrive, later)

    # ---- prefill to decode
    def _named(self, name: str) -> Worker:
        return next(worker for worker in self.decoders if worker.name == name)

    def _hand_over(self, now: int, what: tuple[Request, Worker]) -> None:
        request, _ = what
        if request.gone is not None:
            request.left = now
            return
        self.bridge[str(request.decode_worker)].append(what)
        self._admit(now, self._named(str(request.decode_worker)))

    def _admit(self, now: int, decoder: Worker) -> None:
        """Reserve room on the decode worker and send the KV, in order; requests swapped out go first."""
        queue = self.bridge[decoder.name]
        while queue and not decoder.swapped:
            request, source = queue[0]
            need = -(-(request.prompt + 1) // BLOCK_TOKENS)
            if decoder.used_blocks() + need > self.scenario.kv_blocks:
                return
            queue.popleft()
            decoder.reserved += need
            link = self.links[source.name]
            began = request.prefill_start if self.scenario.transfer == "layerwise" else None
            request.transfer_start = max(now if began is None else began, link.free)
            size = request.prompt * KV_BYTES_PER_TOKEN
            there = request.transfer_start + link.latency + int(size / link.bytes_per_ns)
            # the last layer leaves when it is computed, and who has no room yet is waited for
            link.free = there if began is None else max(there, now + link.latency)
            request.transfer_end = link.free
            self.at(link.free, self._arrived, (decoder, request, need))

    def _arrived(self, now: int, what: tuple[Worker, Request, int]) -> None:
        decoder, request, blocks = what
        decoder.reserved -= blocks
        if request.gone is None:
            decoder.ready.append(request)
        else:
            request.left = now
        self.wake(now, decoder)

    # ---- the adversary
    def _lock_pause(self, worker: Worker, step: Step) -> None:
        """Pauses that begin where a long prefill ends, on the worker that decodes beside it."""
        ends = [index for index, new, _ in step.parts if new >= LONG_PREFILL_TOKENS]
        if not ends:
            return
        random = self.streams.of(f"locked pause {ends[0]}")
        at = step.end - int(random.uniform(0, 20e6))
        lasts = int(uniform(random, self.scenario.pause_ms) * 1e6)
        victim = worker if worker.role != "prefill" else self._named(self._decoder_of(ends[0]))
        heapq.heappush(victim.pauses, (at, lasts))

    def _decoder_of(self, index: int) -> str:
        return str(self.by_index[index].decode_worker)


def _delays(random: np.random.Generator) -> Iterator[list[int]]:
    """For each request ns until the router begins, has chosen, and the worker has it."""
    while True:
        yield from (random.lognormal(0, 0.4, (1024, 3)) * 150_000).astype(np.int64).tolist()
