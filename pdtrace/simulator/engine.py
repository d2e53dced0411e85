"""One worker: forms steps as a continuous-batching engine does, and logs what each one held."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdtrace.simulator.cost import Cost, Part
from pdtrace.simulator.load import Request
from pdtrace.simulator.scenario import BLOCK_TOKENS, Scenario, Streams, uniform

Ints = NDArray[np.int64]
HICCUP_MS = (4.0, 40.0)
NOISE, HICCUPS = 0.03, 0.002  # of a step's duration; share of steps
MISSPECIFIED_NOISE, MISSPECIFIED_HICCUPS = 0.10, 0.02
DRAWN = 8192  # random numbers drawn at once


@dataclass(slots=True)
class Step:
    """What one iteration held, and what it would have lasted without its prompt tokens."""

    start: int
    end: int
    excess: int  # ns that prompt tokens added for each resident
    parts: list[Part]
    residents: Ints  # requests that decode here, or that wait while only prompts are computed
    decoded: bool
    context: Ints  # tokens of each resident before the step
    tokens: Ints | None  # tokens each resident made; None is one each
    running: int
    waiting: int
    blocks: int
    complete: tuple[int, ...] = ()  # requests that made a token because their prompt was complete


class Worker:
    """An engine; `role` is aggregated, prefill or decode."""

    def __init__(
        self,
        name: str,
        role: str,
        scenario: Scenario,
        cost: Cost,
        streams: Streams,
        by_index: dict[int, Request],
    ) -> None:
        self.name, self.role, self.scenario, self.cost = name, role, scenario, cost
        self.server = server_of(name)[0]
        self.died: int | None = None
        self.leaving: list[Request] = []  # their clients went away
        self.exclusive = scenario.mode != "chunked"
        self.by_index = by_index
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.ready: list[Request] = []  # KV is here, decode from the next step on
        self.fresh: list[Request] = []  # joined, have not decoded here yet
        self.swapped: deque[Request] = deque()
        self.reserved = 0  # blocks kept for KV on its way
        self.promised = 0  # requests sent here that have not ended
        self.ids: Ints = np.empty(0, np.int64)
        self.context: Ints = np.empty(0, np.int64)
        self.left: Ints = np.empty(0, np.int64)
        self.cache = PrefixCache(scenario.cache_tokens)
        self.steps: list[Step] = []
        self.step: Step | None = None  # the one that runs
        self.preemptions: list[tuple[int, int]] = []  # (instant, request)
        self.pauses: list[tuple[int, int]] = []  # heap of (start, duration)
        again = f" {scenario.step_draw}" if scenario.step_draw else ""
        self._random = streams.of(f"steps {name}{again}")
        self._pause_random = streams.of(f"pauses {name}")
        self._draws: list[tuple[float, float]] = []
        self._noise, self._hiccups = (
            (MISSPECIFIED_NOISE, MISSPECIFIED_HICCUPS)
            if scenario.misspecified
            else (NOISE, HICCUPS)
        )

    # ---- a step
    def begin(self, now: int) -> Step | None:
        """Form the next step at this instant; None when there is nothing to do."""
        self._let_go(now)
        self._join()
        self._fit_memory(now)
        parts = self._parts()
        decoded = len(self.ids) > 0 and not (self.exclusive and parts)
        if not parts and not decoded:
            return None
        base, whole = self._durations(parts, decoded=decoded)
        noise, hiccup = self._draw()
        elapsed = int((whole * noise + hiccup) * 1e6)
        # In a step of its own the whole step is lost, but for pauses: they come either way.
        excess = elapsed if not decoded else int((whole - base) * noise * 1e6)
        pause = self._pause(now, now + elapsed)
        for index, _, _ in parts:
            request = self.by_index[index]
            if request.prefill_start is None:
                request.prefill_start = now
        for request in self.fresh if decoded else ():
            if request.decode_start is None:
                request.decode_start = now
        self.step = Step(
            start=now,
            end=now + elapsed + pause,
            excess=excess if parts else 0,
            parts=parts,
            residents=self.ids,
            decoded=decoded,
            context=self.context,
            tokens=self._guessed() if decoded and self.scenario.speculative_tokens else None,
            running=len(self.ids) + len(self.prefilling),
            waiting=len(self.waiting) + len(self.swapped),
            blocks=self.used_blocks(),
        )
        self.steps.append(self.step)
        return self.step

    def finish(self) -> tuple[list[Request], list[Request]]:
        """End the running step: (requests whose prompt is complete, requests that ended)."""
        step = self.step
        assert step is not None
        self.step = None
        complete = self._computed(step)
        ended = self._decoded(step) if step.decoded else []
        for request in complete:
            self.prefilling.remove(request)
        for request in complete if self.role != "prefill" else ():
            if request.gone is not None:
                continue
            if not request.output:  # it fails here
                request.end = step.end
                ended.append(request)
                continue
            step.complete += (request.index,)
            if request.first_token is None:
                request.first_token = step.end
            request.made += 1
            if request.made >= request.output:
                request.end = step.end
                ended.append(request)
            else:
                self.ready.append(request)
        for request in ended:
            self.promised -= request.output > 0
            self.cache.keep(request, request.prompt + request.output)
        return complete, ended

    def _computed(self, step: Step) -> list[Request]:
        complete = []
        for index, new, _ in step.parts:
            request = self.by_index[index]
            request.done += new
            if request.done >= request.target:
                complete.append(request)
                if request.prefill_end is None:
                    request.prefill_end = step.end
                self.cache.keep(request, request.prompt)
        return complete

    def _decoded(self, step: Step) -> list[Request]:
        made = 1 if step.tokens is None else step.tokens
        self.context, self.left = self.context + made, self.left - made
        for request in self.fresh:
            if request.first_token is None and request.gone is None:
                request.first_token = step.end
        self.fresh = []
        if not len(self.left) or self.left.min() > 0:
            return []
        over = self.left <= 0
        ended = [self.by_index[int(index)] for index in self.ids[over]]
        ended = [request for request in ended if request.gone is None]
        for request in ended:
            request.end, request.made = step.end, request.output
        self._keep(~over)
        return ended

    # ---- who goes away
    def _let_go(self, now: int) -> None:
        """Drop whose client went away."""
        for request in self.leaving:
            resident = self.ids == request.index
            for held in (self.waiting, self.prefilling, self.ready, self.swapped):
                if request in held:
                    held.remove(request)
                    request.left = now
            if resident.any():
                self._keep(~resident)
                request.left = now
            if request in self.fresh:
                self.fresh.remove(request)
        self.leaving = []

    def fall(self) -> list[Request]:
        """The worker is dead: what it held, each with the tokens that it made; the running step is lost."""
        if self.step is not None:
            self.steps.pop()
            self.step = None
        residents = [self.by_index[int(index)] for index in self.ids]
        for request, left in zip(residents, self.left, strict=True):
            request.made = request.output - int(left)
        held = [*self.waiting, *self.prefilling, *self.ready, *residents, *self.swapped]
        self._keep(np.zeros(len(self.ids), bool))
        for kept in (self.waiting, self.prefilling, self.ready, self.fresh, self.swapped):
            kept.clear()
        return held

    # ---- who takes part
    def _join(self) -> None:
        if not self.ready:
            return
        new = self.ready
        self.ready = []
        self.fresh += new
        self.ids = np.append(self.ids, [request.index for request in new])
        self.context = np.append(self.context, [r.prompt + r.made for r in new])
        self.left = np.append(self.left, [r.output - r.made for r in new])

    def _keep(self, stays: NDArray[np.bool_]) -> None:
        self.ids, self.context, self.left = self.ids[stays], self.context[stays], self.left[stays]

    def _parts(self) -> list[Part]:
        """Prompt tokens of the coming step: those begun first, then those that wait, in order."""
        if self.exclusive:
            budget = self.scenario.prefill_batch_tokens
        else:
            guessed = 1 + self.scenario.speculative_tokens
            budget = self.scenario.chunk_tokens - len(self.ids) * guessed
        parts: list[Part] = []
        for request in self.prefilling:
            if budget <= 0:
                break
            budget -= self._take(request, budget, parts)
        room = self.scenario.kv_blocks - self.used_blocks() if self.waiting else 0
        while self.waiting and budget > 0:
            request = self.waiting[0]
            running = len(self.ids) + len(self.prefilling)
            request.target = request.prompt + request.made
            need = _blocks(request.target + 1)
            if need > room or running >= self.scenario.max_running:
                break
            cached = self.cache.find(request)
            new = request.target - cached
            if self.exclusive and parts and new > budget:
                break
            self.waiting.popleft()
            room -= need
            if request.prefill_start is None:
                request.cached = cached
            request.done = cached
            self.prefilling.append(request)
            budget -= self._take(request, new if self.exclusive else budget, parts)
        return parts

    @staticmethod
    def _take(request: Request, budget: int, parts: list[Part]) -> int:
        new = min(budget, request.target - request.done)
        parts.append((request.index, new, request.done))
        return new

    def _durations(self, parts: list[Part], *, decoded: bool) -> tuple[float, float]:
        if not decoded:
            return 0.0, self.cost.alone(parts)
        whole, base = self.cost.mixed(len(self.ids), float(self.context.sum()), parts)
        return base, whole

    def _guessed(self) -> Ints:
        """Tokens each resident makes: 1 and a run of guesses that hold, 60 % each."""
        most = self.scenario.speculative_tokens
        right = self._random.random((len(self.ids), most)) < 0.6
        made: Ints = 1 + np.cumprod(right, axis=1).sum(axis=1)
        return np.minimum(made, self.left)

    # ---- memory
    def used_blocks(self) -> int:
        """Blocks in use: residents, prompts begun, KV on its way."""
        resident = int(((self.context + BLOCK_TOKENS) // BLOCK_TOKENS).sum())
        begun = sum(_blocks(request.target + 1) for request in self.prefilling)
        joining = sum(_blocks(request.prompt + request.made + 1) for request in self.ready)
        return resident + begun + joining + self.reserved

    def _fit_memory(self, now: int) -> None:
        """Preempt the newest while the next tokens have no room; take swapped ones back first."""
        while len(self.ids) > 1 and self.used_blocks() > self.scenario.kv_blocks:
            request = self.by_index[int(self.ids[-1])]
            request.made = request.output - int(self.left[-1])
            request.preempted += 1
            self.preemptions.append((now, request.index))
            if request in self.fresh:
                self.fresh.remove(request)
            self._keep(np.arange(len(self.ids)) < len(self.ids) - 1)
            if self.scenario.preemption == "swap":
                self.swapped.appendleft(request)
            else:
                self.waiting.appendleft(request)
        room = self.scenario.kv_blocks - self.used_blocks() if self.swapped else 0
        while self.swapped and (
            (need := _blocks(self.swapped[0].prompt + self.swapped[0].made + 1)) + 4 < room
            or not len(self.ids)
        ):
            room -= need
            self.ready.append(self.swapped.popleft())
            self._join()

    # ---- chance
    def _draw(self) -> tuple[float, float]:
        """(factor, hiccup in ms) of one step."""
        if not self._draws:
            noise = np.exp(self._random.normal(0, self._noise, DRAWN))
            hit = self._random.random(DRAWN) < self._hiccups
            hiccup = np.where(hit, self._random.uniform(*HICCUP_MS, DRAWN), 0.0)
            self._draws = list(zip(noise.tolist(), hiccup.tolist(), strict=True))
        return self._draws.pop()

    def _pause(self, start: int, end: int) -> int:
        total = 0
        if self.scenario.pauses == "load":
            rate = self.scenario.pauses_per_min / 60e9 * len(self.ids) / 10
            if self._pause_random.random() < rate * (end - start):
                total += int(uniform(self._pause_random, self.scenario.pause_ms) * 1e6)
        while self.pauses and self.pauses[0][0] < end:
            at, duration = heapq.heappop(self.pauses)
            total += max(0, at + duration - max(at, start))  # what was spent idle holds nobody up
            end += duration
        return total


def server_of(worker: str) -> tuple[str, str | None]:
    """(server, data-parallel rank) of a worker's name."""
    server, _, rank = worker.partition(".")
    return server, rank or None


class PrefixCache:
    """Prompt tokens that a worker holds, by conversation and by shared prefix; the oldest go."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._held: OrderedDict[tuple[str, int], int] = OrderedDict()

    def find(self, request: Request, *, touch: bool = True) -> int:
        """Leading tokens of the prompt that are here, in whole blocks; the last token never."""
        best = 0
        for key, shared in _keys(request):
            if key in self._held:
                best = max(best, min(self._held[key], shared))
                if touch:
                    self._held.move_to_end(key)
        return min(best, request.prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def keep(self, request: Request, tokens: int) -> None:
        """Hold the first tokens of this request."""
        if not self.capacity:
            return
        for key, shared in _keys(request):
            length = min(tokens, shared)
            self.used += max(length - self._held.get(key, 0), 0)
            self._held[key] = max(length, self._held.get(key, 0))
            self._held.move_to_end(key)
        while self.used > self.capacity and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self.used -= dropped


def _keys(request: Request) -> list[tuple[tuple[str, int], int]]:
    """(what may be shared, how many leading tokens it covers)."""
    keys = []
    if request.prefix >= 0:
        keys.append((("prefix", request.prefix), request.shared))
    if request.session >= 0:
        keys.append((("session", request.session), request.prompt + request.output))
    return keys


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
