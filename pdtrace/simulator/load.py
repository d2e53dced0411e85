"""Requests to come: when, how long, in which conversation."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pdtrace.simulator.scenario import EPOCH_NS, Scenario, Streams, uniform

THINK_S = 6.0  # mean time between an answer and the next turn
TURNS = 4.0  # mean turns of a conversation
QUESTION_TOKENS = 60.0  # median length of what a turn adds


@dataclass(frozen=True, slots=True)
class Try:
    """An attempt that failed and was followed by another; instants in ns."""

    number: int
    worker: str
    sent: int
    queue_start: int
    prefill_start: int | None
    end: int
    error: str


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way: lengths are given, instants (ns) are filled in as they happen."""

    index: int
    arrival: int
    prompt: int
    output: int
    session: int
    turn: int
    prefix: int  # which shared prefix it begins with; -1 none
    shared: int  # tokens of that prefix
    followers: list[Request] = field(default_factory=list)  # later turns, in order
    router_worker: str | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    cached: int = 0
    believed: int = 0  # prompt tokens that the router believed cached where it sent the request
    candidates: int = 1
    load: int = 0  # requests of the chosen worker as the router counted them
    made: int = 0  # output tokens so far
    done: int = 0  # prompt tokens computed in the current prefill
    target: int = 0  # tokens that the current prefill has to cover
    preempted: int = 0
    asked: int = 0  # tokens that the client asked for; `output` are those that will be made
    fate: str = "completed"  # how the attempt ends once `output` tokens are made
    error: str | None = None
    tries: list[Try] = field(default_factory=list)  # failed attempts that another one followed
    gone: int | None = None  # when its client went away before the first token
    left: int | None = None  # when the engine dropped it for that
    route_start: int | None = None
    route_end: int | None = None
    sent: int | None = None  # by the router, to the worker of the last attempt
    queue_start: int | None = None
    prefill_start: int | None = None
    prefill_end: int | None = None
    transfer_start: int | None = None
    transfer_end: int | None = None
    decode_start: int | None = None
    first_token: int | None = None
    end: int | None = None


def requests(scenario: Scenario, streams: Streams, duration_s: float) -> list[Request]:
    """First requests by arrival; later turns of a conversation hang on the turn before."""
    random = streams.of("load")
    short = _arrivals(scenario, random, uniform(random, scenario.short_per_s), duration_s)
    long = _arrivals(scenario, random, uniform(random, scenario.long_per_s), duration_s)
    chats = random.random(len(short)) < scenario.session_ratio / TURNS
    single = random.random(len(short)) >= scenario.session_ratio
    made: list[Request] = []
    for at, chat, alone in zip(short, chats, single, strict=True):
        if chat:
            made.append(_conversation(scenario, random, int(at)))
        elif alone:
            prompt = _length(random, scenario.short_tokens, 0.7, 8, 1500)
            made.append(_request(scenario, random, int(at), prompt))
    made += [
        _request(scenario, random, int(at), int(uniform(random, scenario.long_tokens)))
        for at in long
    ]
    return sorted(made, key=lambda request: request.arrival)


def _arrivals(
    scenario: Scenario, random: np.random.Generator, rate: float, duration_s: float
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Instants of a Poisson process; with bursts, thinned from the highest rate."""
    highest = rate * (1 + scenario.burst)
    count = random.poisson(highest * duration_s)
    at = np.sort(random.uniform(0, duration_s, count))
    if scenario.burst:
        period = float(random.uniform(12, 30))
        phase = 2 * np.pi * (at / period + random.random())
        now = rate * (1 + scenario.burst * np.sign(np.sin(phase)))
        at = at[random.random(count) < now / highest]
    return EPOCH_NS + (at * 1e9).astype(np.int64)


def _length(random: np.random.Generator, median: float, sigma: float, low: int, high: int) -> int:
    return int(min(max(random.lognormal(np.log(median), sigma), low), high))


def _request(
    scenario: Scenario, random: np.random.Generator, at: int, prompt: int, turn: int = 0
) -> Request:
    output = _length(random, scenario.output_tokens, 0.7, 1, scenario.output_max)
    prefix = int(random.integers(scenario.system_prefixes)) if scenario.system_tokens else -1
    shared = scenario.system_tokens
    return Request(-1, at, prompt + shared, output, -1, turn, prefix, shared)


def _conversation(scenario: Scenario, random: np.random.Generator, at: int) -> Request:
    """The first turn; `arrival` of each later one is the pause after the answer before it."""
    first = _request(scenario, random, at, _length(random, scenario.short_tokens, 0.7, 8, 1500))
    before = first
    for turn in range(1, int(random.geometric(1 / TURNS))):
        think = int(random.exponential(THINK_S) * 1e9)
        added = _length(random, QUESTION_TOKENS, 0.6, 4, 600)
        prompt = before.prompt + before.output + added
        later = _request(scenario, random, think, prompt - scenario.system_tokens, turn)
        later.prefix = first.prefix
        first.followers.append(later)
        before = later
    first.session = 0  # numbered when it arrives
    return first
