"""What is kept of a request and of a batch in vLLM's scheduler, and how vLLM's objects are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdtrace.instrumentation.engine_steps import Step
from pdtrace.instrumentation.requests import Request


class Life:
    """A request from `add_request` to its end, as the scheduler sees it."""

    __slots__ = (
        "chunks",
        "engine_id",
        "first_chunk",
        "last_chunk",
        "loaded",
        "loading",
        "pulled",
        "request",
        "since",
        "stream",
        "target",
        "theirs",
        "wait",
    )  # fmt: skip

    def __init__(self, theirs: Any, request: Request, now: int) -> None:
        self.theirs = theirs  # vLLM's own object
        self.request = request
        self.engine_id: str = theirs.request_id
        self.stream = request.stream
        self.since = now  # start of the wait that is on, 0 while none is
        self.wait = "prefill_queue"
        self.loading = self.loaded = 0  # KV from elsewhere: asked for, there
        self.pulled = False
        self.target = 0  # tokens to compute before the next one comes out
        self.first_chunk = self.last_chunk = 0
        self.chunks = 0

    @property
    def output_tokens(self) -> int:
        """Tokens that came out so far."""
        counts = self.stream.counts
        return len(self.stream.times) if counts is None else sum(counts)

    def waits(self, wait: str, now: int) -> None:
        """A wait begins."""
        self.wait, self.since = wait, now

    def goes_on(self, now: int) -> None:
        """The wait that is on is over."""
        if self.since:
            self.request.mark(self.wait, self.since, max(now, self.since))
            self.since = 0


@dataclass(slots=True)
class Batch:
    """A batch between `schedule()` and its result."""

    output: Any
    began: int
    step: Step
    prefills: list[tuple[Life, int, str]] = field(default_factory=list)  # tokens, detail
    pulled: list[Life] = field(default_factory=list)


@dataclass(frozen=True)
class Deployment:
    """What vLLM's configuration says of this engine."""

    model: str | None = None
    role: str = "aggregated"
    connector: str | None = None
    consumer: bool = False
    rank: str | None = None
    randomised_ids: bool = True


class Contexts:
    """How much of each scheduled request was computed before the step, from the scheduler's output."""

    __slots__ = ("fresh", "known", "resumed")

    def __init__(self, output: Any) -> None:
        self.fresh = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        self.known: tuple[Sequence[str], Sequence[int]]  # those that were there before
        if isinstance(cached, list):  # up to 0.9.1: one object a request
            self.known = [c.req_id for c in cached], [c.num_computed_tokens for c in cached]
        else:
            self.known = cached.req_ids, cached.num_computed_tokens
        # The newer model runner gets resumed requests as new ones.
        self.resumed = [*getattr(cached, "resumed_req_ids", ()), *self.fresh]

    @property
    def contexts(self) -> Sequence[int]:
        """Of those that were there before."""
        return self.known[1]

    def of(self, engine_id: str) -> int:
        """Of one; 0 where vLLM does not say."""
        found = self.fresh.get(engine_id)
        if found is not None:
            return int(found)
        ids, contexts = self.known
        return int(contexts[ids.index(engine_id)]) if engine_id in ids else 0


def has_status(theirs: Any, status: str) -> bool:
    """Whether a request has this status, by the name that vLLM gives it."""
    return getattr(theirs.status, "name", None) == status


def is_finished(theirs: Any) -> bool:
    """Whether vLLM says that a request is over."""
    return bool(theirs.is_finished())


def reason_of(status: Any) -> str:
    """A finished status in the words of finish reasons: FINISHED_ABORTED is abort."""
    name = str(getattr(status, "name", status)).removeprefix("FINISHED_").lower()
    return {"aborted": "abort", "stopped": "stop", "length_capped": "length"}.get(name, name)


def mapping(value: Any) -> Mapping[str, Any]:
    """A mapping as it is; anything else is an empty one."""
    return value if isinstance(value, Mapping) else {}


def text(value: Any) -> str | None:
    """A value as a short text; None stays None."""
    return None if value is None else str(value)[:256]
