"""What the serving code holds while it works on a request: marks of time, nothing else.

This is the hot path. A mark costs one clock reading and one append; encoding, ids of phases,
attribute names and files are the recorder's business, on its own thread. No method raises.
Instants are readings of the monotonic clock beside one reading of the wall clock at the start of
the request, so that a clock step cannot make a phase negative.
"""

from __future__ import annotations

import contextlib
import logging
import os
from array import array
from collections.abc import Callable, MutableMapping, Sequence
from contextvars import ContextVar, Token
from time import perf_counter_ns, time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pdtrace.instrumentation._context import TRACEPARENT, Parent, new_span_id, new_trace_id, parse
from pdtrace.semconv import SPAN_REQUEST

if TYPE_CHECKING:
    from pdtrace.instrumentation.recorder import Destination

Attributes = dict[str, Any]

_log = logging.getLogger("pdtrace.instrumentation")
_forks = [0]  # how often this process is a child: what it inherited open is its parent's
os.register_at_fork(after_in_child=lambda: _forks.__setitem__(0, _forks[0] + 1))
_current: ContextVar[Request | None] = ContextVar("pdtrace_request", default=None)


class Stream:
    """One token stream of a request: the instant of each emission, and how many tokens it held."""

    __slots__ = ("_append", "counts", "times")

    def __init__(self) -> None:
        # A list, since its append costs half of an array's; 8 bytes a token where requests have to wait.
        self.times: list[int] | array[int] = []
        self.counts: array[int] | None = None
        self._append = self.times.append  # looked up once, not for each token

    def token(self, count: int = 1) -> None:
        """A token, or `count` tokens at once, went out now."""
        if count != 1 or self.counts is not None:
            self._counted(count)
        self._append(perf_counter_ns())

    def at(self, time_ns: int, count: int = 1) -> None:
        """A token, or `count` tokens at once, went out at that instant of `time.perf_counter_ns`."""
        if count != 1 or self.counts is not None:
            self._counted(count)
        self._append(time_ns)

    def pack(self) -> None:
        """No more tokens come, and the request has to wait: its instants take a fifth of the room."""
        self.times = array("q", self.times)

    def _counted(self, count: int) -> None:
        if self.counts is None:
            self.counts = array("q", [1]) * len(self.times)
        try:
            self.counts.append(count)
        except (TypeError, OverflowError):  # no number of tokens
            self.counts.append(1)


class Block:
    """A context manager for `with` and `async with` alike; nothing in it waits."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Leave the block."""

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)


class Phase(Block):
    """Time that a request spends in one kind of work or wait: a context manager, sync or async."""

    __slots__ = ("attributes", "name", "request", "start")

    def __init__(self, request: Request, name: str, attributes: Attributes) -> None:
        self.request = request
        self.name = name
        self.attributes = attributes
        self.start = 0

    def set(self, **attributes: Any) -> None:
        """Say more of it: tokens, bytes, worker, ..."""
        self.attributes.update(attributes)

    def __enter__(self) -> Self:
        self.start = perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        end = perf_counter_ns()
        error_name = None if kind is None else kind.__name__
        self.request.phases.append((self.name, self.start, end, self.attributes, error_name))


class Hop(Phase):
    """A call to another component; its `inject` makes that component's spans children of the call."""

    __slots__ = ("span_id",)

    def __init__(self, request: Request, attributes: Attributes) -> None:
        super().__init__(request, "dispatch", attributes)
        self.span_id = new_span_id()
        opener = request.recorder.opener
        if opener is not None:
            quietly(opener.hop, self)
        attributes["span_id"] = self.span_id

    def inject(self, headers: MutableMapping[str, str]) -> MutableMapping[str, str]:
        """Add the traceparent header of this call; the same headers, for chaining."""
        return self.request._inject(headers, self.span_id)


class Request(Stream, Block):
    """One request at one component, from arrival to the last byte: a context manager, sync or async.

    Attributes are plain words (model, prompt_tokens, ...; see encode.py for their names in
    OpenTelemetry); unknown ones are written as `pdtrace.<word>`. Text of prompts has no word.
    A request is its own first stream: `token(count=1)` says that a token, or `count` tokens at once,
    went out now. It is one object with few others, since all that wait for the recorder's thread are
    looked through by the garbage collector of the serving process.
    """

    __slots__ = (
        "_attached",
        "_born",
        "_further",
        "_token",
        "attributes",
        "end_ns",
        "ended",
        "error",
        "held_bytes",
        "later",
        "links",
        "name",
        "parent",
        "phases",
        "recorder",
        "sampled",
        "span",
        "span_id",
        "start_ns",
        "trace_id",
        "wall_ns",
    )

    def __init__(
        self,
        recorder: Destination,
        parent: Parent | None,
        attributes: Attributes,
        name: str = SPAN_REQUEST,
    ) -> None:
        self.ended = True  # until it is whole: what breaks below leaves nothing to end
        self.wall_ns, self.start_ns = time_ns(), perf_counter_ns()
        self.name = name
        self.recorder = recorder
        self.parent = parent
        self.span: Any = None  # the SDK's, where the application has a TracerProvider
        self.sampled = True
        if recorder.opener is None:
            self.trace_id = parent.trace_id if parent is not None else new_trace_id()
            self.span_id = new_span_id()
        else:
            recorder.opener.open(self)
        self.attributes = attributes
        self.phases: list[tuple[str, int, int, Attributes, str | None]] = []
        self.times = []
        self.counts = None
        self._append = self.times.append
        self._further: Sequence[Stream] = ()
        self.links: Sequence[Parent] = ()
        self.later: Sequence[Callable[[], None]] = ()  # what the recorder's thread has to do
        self.error: str | None = None
        self.held_bytes = 0  # about so much memory, where it is counted
        self.end_ns = 0
        self._born = _forks[0]
        self._token: Token[Request | None] | None = None
        self._attached: Any = None
        self.ended = False

    def set(self, **attributes: Any) -> None:
        """Say more of the request: model, prompt_tokens, cached_tokens, output_tokens, request_id, ..."""
        self.attributes.update(attributes)

    def phase(self, name: str, **attributes: Any) -> Phase:
        """A phase: queue, prefill, kv_transfer, decode, router, or a detail of them such as kv_space_wait."""
        return Phase(self, name, attributes)

    def mark(self, name: str, start_ns: int, end_ns: int, **attributes: Any) -> None:
        """A phase that is over, by instants of `time.perf_counter_ns`."""
        self.phases.append((name, start_ns, end_ns, attributes, None))

    def decision(self, **attributes: Any) -> Phase:
        """A router's choice: worker, policy, cost, overlap_tokens, candidates."""
        return Phase(self, "router", attributes)

    def transfer(self, **attributes: Any) -> Phase:
        """A KV movement: bytes, backend, direction, source, destination."""
        return Phase(self, "kv_transfer", attributes)

    def dispatch(self, **attributes: Any) -> Hop:
        """A call to another component (attempt, worker); send its headers through `inject`."""
        return Hop(self, attributes)

    def choice(self, index: int) -> Stream:
        """The stream of one choice, where a request has several (n > 1)."""
        if index < 1:
            return self
        missing = min(index, 1023) - len(self._further)
        if missing > 0:
            self._further = (*self._further, *(Stream() for _ in range(missing)))
        return self._further[min(index, len(self._further)) - 1]

    @property
    def stream(self) -> Stream:
        """The stream of the first choice."""
        return self

    @property
    def streams(self) -> Sequence[Stream]:
        """The streams of all choices that said something."""
        return (self, *self._further)

    def put_off(self, work: Callable[[], None]) -> None:
        """Have the recorder's thread do this before it writes the request."""
        self.later = (*self.later, work)

    def link(self, traceparent: str | None) -> None:
        """The span that made the KV which this request uses (decode to prefill)."""
        parent = parse(traceparent)
        if parent is not None:
            self.links = (*self.links, parent)

    @property
    def traceparent(self) -> str:
        """This request as a W3C traceparent."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"

    def inject(self, headers: MutableMapping[str, str]) -> MutableMapping[str, str]:
        """Add the traceparent header of this request; the same headers, for chaining."""
        return self._inject(headers, self.span_id)

    def _inject(self, headers: MutableMapping[str, str], span_id: str) -> MutableMapping[str, str]:
        if not self.recorder.enabled:
            return headers
        with contextlib.suppress(Exception):  # headers that cannot be written are the caller's
            headers[TRACEPARENT] = f"00-{self.trace_id}-{span_id}-{self.sampled:02x}"
        return headers

    def end(self, error: str | BaseException | None = None, *, aborted: bool = False) -> None:
        """The request is over; the first call counts."""
        if self.ended:
            return
        self.ended = True
        self.end_ns = perf_counter_ns()
        if error is not None:
            self.error = error if isinstance(error, str) else type(error).__name__
        if aborted:
            self.attributes["aborted"] = True
        self.recorder.put(self)

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        if self.span is not None and self.recorder.opener is not None:
            self._attached = self.recorder.opener.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._token is not None:
            # A generator may be closed in another context than it was started in.
            with contextlib.suppress(ValueError):
                _current.reset(self._token)
            self._token = None
            if self._attached is not None and self.recorder.opener is not None:
                self.recorder.opener.leave(self._attached)
                self._attached = None
        if kind is not None and _left(kind):
            self.end(aborted=True)
        else:
            self.end(None if kind is None else kind.__name__)

    def __del__(self) -> None:
        # Dropped without an end: a stream that nobody read to its end. Not in a forked child, where
        # the requests that were open go with the rest of the memory.
        if not self.ended and self._born == _forks[0]:
            with contextlib.suppress(Exception):  # the interpreter may be going down
                self.end(aborted=True)


def _left(kind: type[BaseException]) -> bool:
    """Whether an exception means that the caller left: cancellation, a closed generator, a lost connection."""
    names = {base.__name__ for base in kind.__mro__}
    return bool(names & {"CancelledError", "GeneratorExit", "ClientDisconnect", "Cancelled"})


def quietly(work: Callable[..., None], *arguments: Any) -> None:
    """Do what only recording needs: whatever goes wrong in it, the call that is recorded goes on."""
    try:
        work(*arguments)
    except Exception:
        _log.debug("pdtrace: part of a call not recorded", exc_info=True)


def current() -> Request | None:
    """The request that this task or thread works on, if one was entered."""
    return _current.get()
