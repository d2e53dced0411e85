"""Plays recorded arrivals and lengths through workers that batch continuously: first tokens and ends of every request.

Knows only what was fitted from the data (`Cost`) and what is asked (`Plan`); it shares no code with the
simulator of pdtrace/simulator, so that a replay checked against that one is not checked against itself.

After DistServe's and Splitwise's simulators (Zhong et al. 2024, Patel et al. 2024), with what those leave out:
the KV memory of D, the wait for it, and a transfer that is neither free nor ten times as fast.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pdtrace.methods._replay_terms import Cost, Load, Noise, Plan, Played

__all__ = ["Cost", "Load", "Noise", "Plan", "Played", "replay"]

DRAWN = 4096  # ratios drawn at once
ENDLESS = 20.0  # a replay that lasts as many times as the arrivals is given up: the load is more than it carries


@dataclass(slots=True)
class _Worker:
    """What one engine holds while it plays."""

    role: str
    waiting: deque[int] = field(default_factory=deque)
    prefilling: list[int] = field(default_factory=list)
    resident: dict[int, int] = field(default_factory=dict)  # request -> decode steps when it ends
    ends: list[tuple[int, int]] = field(default_factory=list)  # heap of (decode steps, request)
    fresh: list[int] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)  # KV is here
    steps: int = 0  # decode steps so far
    context: int = 0  # tokens of the residents
    reserved: int = 0  # tokens of KV on its way
    begun: int = 0  # tokens of prompts begun and of KV that arrived
    parts: list[tuple[int, int]] = field(default_factory=list)  # of the running step
    decoding: bool = False
    running: bool = False
    busy: float = 0.0
    link_free: float = 0.0


class _Play:
    """One replay while it goes on."""

    def __init__(self, load: Load, cost: Cost, plan: Plan, noise: Noise | None) -> None:
        self.load, self.cost, self.plan = load, cost, plan
        self.noise = noise
        self.random = np.random.default_rng(noise.seed if noise else 0)
        self.ratios: dict[bool, list[float]] = {True: [], False: []}
        n = len(load.arrival_s)
        self.n = n
        self.prompt, self.output = load.prompt.tolist(), load.output.tolist()
        self.target = load.prompt.tolist()  # tokens that the current prefill has to cover
        self.done = load.cached.tolist()
        self.made = [0] * n
        self.first = [float("nan")] * n
        self.end = [float("nan")] * n
        self.ready = [float("nan")] * n  # prompt computed
        self.prefill_start = [float("nan")] * n
        self.moved = [0.0] * n
        self.waited = [0.0] * n
        split = plan.prefill_workers > 0
        self.split = split
        self.entry = [
            _Worker("prefill" if split else "aggregated")
            for _ in range(plan.prefill_workers or plan.workers)
        ]
        self.decoders = [_Worker("decode") for _ in range(plan.workers)] if split else self.entry
        self.bridge: list[deque[tuple[int, _Worker]]] = [deque() for _ in self.decoders]
        self.events: list[tuple[float, int, int, int, int]] = []  # time, order, kind, a, b
        self.order = 0
        self.last = float(load.arrival_s[-1]) if n else 0.0

    # ---- events: 0 arrival, 1 end of a step, 2 KV arrived
    def at(self, time: float, kind: int, a: int, b: int = 0) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, kind, a, b))

    def run(self) -> Played:
        everyone = self.entry if not self.split else self.entry + self.decoders
        for request, (time, worker) in enumerate(
            zip(self.load.arrival_s.tolist(), self.load.worker.tolist(), strict=True)
        ):
            place = worker if self.plan.as_recorded and worker >= 0 else request
            self.at(time, 0, request, place % len(self.entry))
        start = float(self.load.arrival_s[0]) if self.n else 0.0
        limit = start + max(60.0, ENDLESS * (self.last - start))
        finished = True
        while self.events:
            now, _, kind, a, b = heapq.heappop(self.events)
            if now > limit:
                finished = False
                break
            if kind == 0:
                self.entry[b].waiting.append(a)
                self.wake(now, b, everyone)
            elif kind == 1:
                self.finish(now, a, everyone)
            else:
                self.settle(a, b)
                self.decoders[b].arrived.append(a)
                self.wake(now, b + (len(self.entry) if self.split else 0), everyone)
        span = max(self.last - start, 1e-9)
        ended = np.array(self.end)
        return Played(
            np.array(self.first), ended, np.array(self.moved), np.array(self.waited),
            max((w.busy for w in everyone if w.role == "prefill"), default=0.0) / span,
            finished and bool(np.isfinite(ended).all()),
        )  # fmt: skip

    def wake(self, now: float, place: int, everyone: Sequence[_Worker]) -> None:
        worker = everyone[place]
        if worker.running:
            return
        elapsed = self.begin(now, worker)
        if elapsed is None:
            return
        worker.running = True
        worker.busy += elapsed if now <= self.last else 0.0
        self.at(now + elapsed, 1, place)

    # ---- a step
    def begin(self, now: float, worker: _Worker) -> float | None:
        for request in worker.arrived:
            left = self.output[request] - self.made[request]
            worker.resident[request] = worker.steps + left
            heapq.heappush(worker.ends, (worker.steps + left, request))
            tokens = self.prompt[request] + self.made[request]
            worker.context += tokens
            worker.begun -= self.rounded(tokens)
            worker.fresh.append(request)
        worker.arrived = []
        self.fit_memory(worker)
        parts, new, squares = (
            self.take(now, worker) if worker.role != "decode" or worker.waiting else ([], 0, 0.0)
        )
        worker.decoding = bool(worker.resident) and (
            self.plan.chunk_tokens is not None or not parts
        )
        if not parts and not worker.decoding:
            return None
        worker.parts = parts
        batch = len(worker.resident) if worker.decoding else 0
        elapsed = self.cost.step(batch, worker.context if batch else 0.0, new, squares)
        return elapsed * self.ratio(decodes=batch > 0)

    def ratio(self, *, decodes: bool) -> float:
        """How much longer than usual this step takes."""
        if self.noise is None:
            return 1.0
        ratios = self.ratios[decodes]
        if not ratios:
            among = self.noise.decode if decodes else self.noise.prefill
            ratios.extend(self.random.choice(among, DRAWN).tolist())
        return ratios.pop()

    def finish(self, now: float, place: int, everyone: Sequence[_Worker]) -> None:
        worker = everyone[place]
        worker.running = False
        if worker.decoding:
            self.decoded(now, worker)
        for request, new in worker.parts:
            self.done[request] += new
            if self.done[request] >= self.target[request]:
                self.computed(now, worker, request)
        if self.split and place >= len(self.entry):
            self.admit(now, place - len(self.entry))
        self.wake(now, place, everyone)

    def decoder(self, request: int) -> int:
        recorded = int(self.load.decoder[request])
        return (recorded if self.plan.as_recorded and recorded >= 0 else request) % len(
            self.decoders
        )

    def decoded(self, now: float, worker: _Worker) -> None:
        worker.steps += 1
        worker.context += len(worker.resident)
        for request in worker.fresh:
            if self.first[request] != self.first[request]:
                self.first[request] = now
        worker.fresh = []
        while worker.ends and worker.ends[0][0] <= worker.steps:
            ended, request = heapq.heappop(worker.ends)
            if worker.resident.get(request) == ended:
                del worker.resident[request]
                worker.context -= self.prompt[request] + self.output[request]
                self.end[request] = now

    def computed(self, now: float, worker: _Worker, request: int) -> None:
        """The prompt is complete: its first token, or the way to the decode worker."""
        worker.prefilling.remove(request)
        if self.ready[request] != self.ready[request]:
            self.ready[request] = now
        if worker.role == "prefill":
            worker.begun -= self.rounded(self.target[request])
            if self.plan.origin == "prefill":
                self.first[request], self.made[request] = now, 1
                if self.output[request] <= 1:
                    self.end[request] = now
                    return
            place = self.decoder(request)
            self.bridge[place].append((request, worker))
            self.admit(now, place)
            return
        self.made[request] += 1
        if self.first[request] != self.first[request]:
            self.first[request] = now
        if self.made[request] >= self.output[request]:
            self.end[request] = now
            worker.begun -= self.rounded(self.target[request])
        else:
            worker.begun += self.rounded(self.target[request] + 1) - self.rounded(
                self.target[request]
            )
            worker.arrived.append(request)

    def take(self, now: float, worker: _Worker) -> tuple[list[tuple[int, int]], int, float]:
        """Prompt tokens of the coming step: those begun first, then those that wait, in order."""
        plan = self.plan
        whole = plan.chunk_tokens is None
        budget = (
            plan.prefill_batch_tokens
            if plan.chunk_tokens is None
            else plan.chunk_tokens - len(worker.resident)
        )
        parts: list[tuple[int, int]] = []
        total, squares = 0, 0.0
        for request in worker.prefilling:
            if budget <= 0:
                break
            new = min(budget, self.target[request] - self.done[request])
            budget, total, squares = (
                budget - new,
                total + new,
                squares + new * (new + 2.0 * self.done[request]),
            )
            parts.append((request, new))
        while worker.waiting and (budget > 0 or (whole and not parts)):
            request = worker.waiting[0]
            self.target[request] = self.prompt[request] + self.made[request]
            need = self.rounded(self.target[request] + 1)
            busy = len(worker.resident) + len(worker.prefilling)
            if (busy and self.used(worker) + need > plan.kv_tokens) or busy >= plan.max_running:
                break
            left = self.target[request] - self.done[request]
            if whole and parts and left > budget:
                break
            worker.waiting.popleft()
            worker.prefilling.append(request)
            worker.begun += self.rounded(self.target[request])
            if self.prefill_start[request] != self.prefill_start[request]:
                self.prefill_start[request] = now
            new = left if whole else min(budget, left)
            budget, total, squares = (
                budget - new,
                total + new,
                squares + new * (new + 2.0 * self.done[request]),
            )
            parts.append((request, new))
        return parts, total, squares

    # ---- memory
    def rounded(self, tokens: int) -> int:
        size = self.plan.block_tokens
        return -(-tokens // size) * size

    def used(self, worker: _Worker) -> float:
        # A resident's last block is half full on average.
        return (
            worker.context
            + len(worker.resident) * (self.plan.block_tokens / 2)
            + worker.begun
            + worker.reserved
        )

    def fit_memory(self, worker: _Worker) -> None:
        """The newest give way while the next tokens have no room; they are computed again later."""
        while len(worker.resident) > 1 and self.used(worker) > self.plan.kv_tokens:
            request, ends = worker.resident.popitem()
            self.made[request] = self.output[request] - (ends - worker.steps)
            worker.context -= self.prompt[request] + self.made[request]
            if request in worker.fresh:
                worker.fresh.remove(request)
            self.done[request] = 0
            worker.waiting.appendleft(request)

    # ---- prefill to decode
    def admit(self, now: float, place: int) -> None:
        """Room on D is reserved before the transfer begins; transfers leave a P worker one after the other."""
        decoder, queue, plan = self.decoders[place], self.bridge[place], self.plan
        while queue:
            request, source = queue[0]
            need = self.rounded(self.prompt[request] + 1)
            empty = not decoder.resident and not decoder.reserved and not decoder.arrived
            if not empty and self.used(decoder) + need > plan.kv_tokens:
                return
            queue.popleft()
            self.waited[request] = now - self.ready[request]
            size_s = self.prompt[request] * plan.kv_bytes_per_token / plan.bytes_per_s
            if (
                plan.transfer == "layerwise"
            ):  # hidden behind the prefill, but for what that was too short for
                size_s = max(0.0, size_s - (self.ready[request] - self.prefill_start[request]))
            begin = max(now, source.link_free)
            source.link_free = begin + plan.latency_s + size_s
            self.moved[request] = source.link_free - now
            decoder.reserved += need
            self.at(source.link_free, 2, request, place)

    def settle(self, request: int, place: int) -> None:
        """KV has arrived: what was reserved is held."""
        decoder = self.decoders[place]
        decoder.reserved -= self.rounded(self.prompt[request] + 1)
        decoder.begun += self.rounded(self.prompt[request] + self.made[request])


def replay(load: Load, cost: Cost, plan: Plan, noise: Noise | None = None) -> Played:
    """Play the load; the same input gives the same answer. Without noise every step takes its cost."""
    return _Play(load, cost, plan, noise).run()
