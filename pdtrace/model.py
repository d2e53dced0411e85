"""The vocabulary that rooms share: phases, evidence, sources and sinks, claims, findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from pdtrace.records import dataclass

if TYPE_CHECKING:  # the types only: this module must stay importable without them
    import polars as pl
    import pyarrow as pa

    Batch: TypeAlias = pl.DataFrame | pa.Table | pa.RecordBatch | Sequence[Mapping[str, Any]]

Basis = Literal["measured", "reported", "placed", "inferred", "upper_bound"]
Level = Literal["A", "B", "C", "D"]
Severity = Literal["critical", "warning", "info"]
Mode = Literal["aggregated", "disaggregated", "mixed", "unknown"]

# From the outermost to the innermost: who saw a request. Headlines come from the outermost that saw enough.
OBSERVERS: tuple[str, ...] = ("client", "gateway", "router", "frontend", "engine")
ROLES: tuple[str, ...] = (
    "client", "gateway", "router", "frontend", "prefill", "decode", "aggregated",
)  # fmt: skip

# detail -> phase, in the order of precedence: where intervals overlap, the earlier detail owns the time.
PHASE_DETAILS: dict[str, str] = {
    "failed_attempt": "retry",
    "retry_backoff": "retry",
    "migration": "retry",
    "stream_out_first": "stream_out",  # stream_out before the headline first token: outranks decode there
    "decode_exec": "decode",
    "prefill_recompute": "decode",
    "preempted": "decode",
    "prefill_exec": "prefill",
    "prefill_gap": "prefill",
    "kv_load_at_most": "kv_load",  # inside a prefill known as wall time only: may be hidden behind it
    "kv_load": "kv_load",
    "kv_transfer_at_most": "kv_transfer",
    "kv_transfer": "kv_transfer",
    "bridge_wait_at_most": "kv_wait",
    "bridge_wait": "kv_wait",
    "kv_space_wait_at_most": "kv_wait",
    "kv_space_wait": "kv_wait",
    "decode_queue": "decode_queue",
    "decode_stall": "decode",
    "prefill_queue": "queue",
    "router_queue": "router",
    "router_decide": "router",
    "dispatch": "router",
    "frontend": "frontend",
    "stream_out": "stream_out",
    "network_in": "network",
    "prefill_wall": "prefill",
    "decode_wall": "decode",
    "kv_wait_upper_bound": "kv_wait",
    "before_queue": "queue",
    "unattributed": "unattributed",
}

# The phases in the order in which a request meets them.
PHASES: tuple[str, ...] = (
    "network", "frontend", "router", "queue", "kv_load", "prefill", "kv_wait", "kv_transfer",
    "decode_queue", "decode", "stream_out", "retry", "unattributed",
)  # fmt: skip

# Column `extra` of a span rebuilt from a log line that did not tell its ids: trace, name and parent are true.
MADE_SPAN_ID = '{"span_id":"made up"}'

# Clock of everything that is stamped with the time of day.
WALL = "wall"

# Prefix of clocks of hosts that count from their start: instants are in order among themselves and have no date.
UNDATED = "steady:"
DATED_FROM_NS = (
    10**17
)  # no host runs so long (three years): what is below was stamped by such a clock


@dataclass(frozen=True)
class Head:
    """What a collector may look at to recognise a source: its name and its first bytes."""

    path: str  # as given; archive!member for members
    name: str  # file name without compression suffixes (.gz, .zst)
    data: bytes  # the first 64 KiB after decompression
    complete: bool = False  # the whole content is in `data`

    def text(self) -> str:
        """The head as text, undecodable bytes replaced."""
        return self.data.decode("utf-8", "replace")


STRENGTH = {"exact": 3, "dialect": 2, "generic": 1}


@dataclass(frozen=True)
class Match:
    """A collector's claim on a source. `ignore` set: recognised and useless, with the reason why."""

    strength: Literal["exact", "dialect", "generic"]
    what: str = ""  # for people: what the source is
    ignore: str = ""  # recognised, not used: why


class Source(Protocol):
    """One file, archive member or stream."""

    path: str
    name: str
    number: int  # sources.source
    mtime_ns: int | None  # last change of the file; the year of year-less log lines
    keep_content: bool  # prompt and answer text may be stored (asked for by --keep-content)

    def open(self) -> IO[bytes]:
        """The decompressed bytes, from the start, as a stream."""


class Sink(Protocol):
    """Where a collector puts what it read."""

    def unit(self, name: str) -> None:
        """Name the record unit of this source (span, line, request, ...)."""

    def read(self, n: int) -> None:
        """Count n more records as seen."""

    def add(self, table: str, batch: Batch, *, record: str | None = "record") -> None:
        """Append rows; column `record` (if present) holds the ordinal of the record that made the row.

        Columns that the table has and the batch lacks become NULL; unknown columns raise SchemaMismatch.
        """

    def skip(self, record: int | Sequence[int], reason: str, excerpt: str | None = None) -> None:
        """Count records as not kept. The excerpt is masked before it is stored."""

    def skip_many(self, n: int, reason: str, first: int | None = None) -> None:
        """Count n records as not kept without naming each."""

    def worker(
        self,
        aliases: Mapping[str, str | None],
        *,
        role: str | None = None,
        role_basis: str | None = None,
        engine: str | None = None,
        version: str | None = None,
        host: str | None = None,
        rank: str | None = None,
        name: str | None = None,
        start_ns: int | None = None,
        end_ns: int | None = None,
    ) -> str:
        """Declare a worker instance by its aliases (see ALIAS_KINDS) and return its id."""

    def fact(self, worker: str | None, key: str, value: object) -> None:
        """Record what the source says of a worker (flags, connector, budget, model, ...)."""

    def clock(self, domain: str) -> None:
        """Name the clock of this source's instants when it is not the wall clock."""


# Alias kinds, strongest first. Workers that share an alias of a global kind are one; the scoped kinds
# (pid, address) identify only inside one host or folder and time; service and file are the last resort.
# A process (instants of its start and of its first metric, to the microsecond) unites, but is no name for people.
ALIAS_KINDS: tuple[str, ...] = (
    "instance", "engine_id", "worker_id", "pod", "pid", "address", "file", "service", "process",
)  # fmt: skip
GLOBAL_ALIAS_KINDS: tuple[str, ...] = ("instance", "engine_id", "worker_id", "pod")


def worker_id(aliases: Mapping[str, str | None], scope: str = "") -> str:
    """The id of a worker with these aliases: kind:value of the strongest; a pid is qualified by `scope`."""
    for kind in ALIAS_KINDS:
        value = aliases.get(kind)
        if value:
            return f"{kind}:{value}@{scope}" if kind == "pid" and scope else f"{kind}:{value}"
    return "unknown:"


@dataclass(frozen=True)
class Claims:
    """Which spans a collector interprets. Every span has one owner: scope before name before prefix."""

    scopes: tuple[str, ...] = ()  # scope names; a trailing * matches any ending
    names: tuple[str, ...] = ()  # span names; a trailing * matches any ending
    # Names that other systems use too: only with one of these attribute keys, in scopes not claimed.
    shared_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()  # attribute key prefixes
    # Attributes that interpret() wants as columns, by key, typed str | int | float | bool. Values of any
    # type that can be cast are cast (Dynamo writes numbers as strings); the others are NULL. A key that every
    # span has as a column itself (status_code) comes as `attribute.<key>`.
    attributes: Mapping[str, type] = field(default_factory=dict)
    resource_attributes: tuple[str, ...] = ()  # wanted as columns `resource.<key>`, text
    resource_aliases: Mapping[str, str] = field(
        default_factory=dict
    )  # resource attribute -> alias kind
    log_scopes: tuple[
        str, ...
    ] = ()  # scopes of OTLP log records for interpret_logs(); trailing * allowed
    fallback: bool = False  # takes spans that nobody else claims


class Collector(Protocol):
    """A module in collectors/. `interpret`, `CLAIMS`, `interpret_logs` are optional."""

    TITLE: str

    def sniff(self, head: Head) -> Match | None:
        """Recognise a source by its head, or None."""

    def read(self, source: Source, out: Sink) -> None:
        """Read one source into the tables."""


@dataclass(frozen=True)
class Slo:
    """Limits that a request must meet; None means no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None  # of a quantile of the request's own gaps between tokens
    e2e_ms: float | None = None
    itl_quantile: float = 0.99  # which quantile; 1 is the longest gap

    def limits(self) -> dict[str, float]:
        """The limits that are set, by metric."""
        names = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class SloClass:
    """Limits for the requests that meet all of its conditions; what is left out asks nothing.

    Texts are patterns: `*` stands for anything. Prompt lengths: at least the first, below the second.
    """

    name: str
    limits: Slo
    model: tuple[str, ...] = ()
    tenant: tuple[str, ...] = ()
    session: tuple[str, ...] = ()
    route: tuple[str, ...] = ()
    request: tuple[str, ...] = ()
    streaming: bool | None = None
    prompt_tokens: tuple[int | None, int | None] = (None, None)

    def takes_all(self) -> bool:
        """Whether it has no condition."""
        texts = (self.model, self.tenant, self.session, self.route, self.request)
        return not any(texts) and self.streaming is None and self.prompt_tokens == (None, None)


@dataclass(frozen=True)
class SloPolicy:
    """Classes of requests with their limits; the first class whose conditions a request meets takes it."""

    classes: tuple[SloClass, ...]

    def single(self) -> Slo:
        """The limits, where one class takes every request; else none."""
        (first, *others) = self.classes
        return first.limits if not others and first.takes_all() else Slo()


@dataclass(frozen=True)
class Finding:
    """One answer: a number with its interval, what it rests on, what was assumed and what to try."""

    id: str
    deployment: str
    severity: Severity
    title: str
    detail: str
    level: Level
    value: float | None = None
    unit: str = ""
    interval: tuple[float, float] | None = None
    share: float | None = None
    requests: int | None = None
    cost_s: float | None = None
    workers: tuple[str, ...] = ()
    culprits: tuple[tuple[str, float], ...] = ()
    sources: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    when: tuple[int, int, float] | None = None  # start, end, share of it: where it is concentrated
