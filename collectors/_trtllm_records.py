"""One record of TensorRT-LLM's request metrics: its stamps in nanoseconds, its ids, which half of a request it tells.

Source: NVIDIA/TensorRT-LLM tensorrt_llm/serve/{perf_metrics,openai_server,openai_disagg_server}.py, 1.0 to
1.3 (G1: endpoint; G2: with time_breakdown_metrics; G3: files). Times are seconds of a steady clock. A worker adds
the offset to its router's clock, which the router measured when it started: stamps of one record are on the
router's clock, unless that measurement failed. What was never reached is None, 0 or missing, or the bare offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from pdtrace.records import dataclass

from ._common import integer, number, seconds_to_ns

STAMPS = (
    "server_arrival_time", "arrival_time", "first_scheduled_time", "first_token_time", "last_token_time",
    "server_first_token_time", "kv_cache_transfer_start", "kv_cache_transfer_end",
)  # fmt: skip
TOLERANCE_NS = 50_000_000  # routers that measure offsets discard those that may be further off
_NEVER_NS = 1_000_000_000  # a stamp so long before the arrival was never set: it is the bare offset
_LATE_NS = 60_000_000_000
_SAME_STEP_NS = 1_000_000


@dataclass(frozen=True)
class Side:
    """What one worker says of one request."""

    number: str | None  # its own count of requests
    ctx_request: str | None
    disagg_request: str | None
    status: str | None
    stamps: Mapping[str, int]  # those that were set
    bytes: int | None
    reported: Mapping[str, float]
    token_ns: tuple[int, ...]  # instants of decode steps' tokens, on a clock of their own
    drafts: bool  # speculative decoding: a step may make several tokens
    chunks: int | None

    @property
    def start(self) -> int | None:
        """When the request reached the server, or its executor where only that is known."""
        return self.stamps.get("server_arrival_time", self.stamps.get("arrival_time"))

    def at(self, name: str) -> int | None:
        """A stamp; None where it was not set."""
        return self.stamps.get(name)

    def half(self) -> str | None:
        """prefill or decode, of a request that two workers share; None where nothing tells.

        A generation server pulls the KV before it schedules; a context server sends it when its only token is made.
        """
        pulled, scheduled = self.at("kv_cache_transfer_end"), self.at("first_scheduled_time")
        if pulled is not None and scheduled is not None:
            return "decode" if pulled <= scheduled + _SAME_STEP_NS else "prefill"
        if self.token_ns or self.chunks:
            return "decode" if self.token_ns else "prefill"
        first, last = self.at("first_token_time"), self.at("last_token_time")
        if first is None or last is None:
            return None
        return "prefill" if first == last else "decode"


@dataclass(frozen=True)
class Pair:
    """What the router says of one request, with both workers' records."""

    ctx_server: str | None
    gen_server: str | None
    arrival: int | None
    dispatched: int | None
    first_token: int | None
    disagg_request: str | None
    status: str | None
    ctx: Side | None
    gen: Side | None

    def apart(self) -> Iterator[str]:
        """Which sides' stamps cannot be on the router's clock: effects before causes, by more than an offset's error."""
        ctx, gen, slack = self.ctx, self.gen, TOLERANCE_NS
        bad = False
        if ctx and self.arrival is not None and ctx.start is not None:
            made = ctx.at("first_token_time")
            bad = ctx.start < self.arrival - slack or (
                made is not None and self.first_token is not None and made > self.first_token + slack
            )  # fmt: skip
            if bad:
                yield "ctx"
        if gen and self.arrival is not None and gen.start is not None:
            before = None if ctx is None or bad else ctx.at("last_token_time")
            early = max(self.arrival, before or self.arrival)
            late = None if self.first_token is None else self.first_token + _LATE_NS
            if gen.start < early - slack or (late is not None and gen.start > late):
                yield "gen"


def pair_of(record: Mapping[str, Any]) -> Pair | None:
    """A router's record; None for anything else."""
    if not any(key in record for key in ("ctx_perf_metrics", "gen_perf_metrics", "gen_server")):
        return None
    ctx, gen = (_side(record.get(f"{name}_perf_metrics")) for name in ("ctx", "gen"))
    return Pair(
        ctx_server=address(record.get("ctx_server")),
        gen_server=address(record.get("gen_server")),
        arrival=_stamp(record.get("disagg_server_arrival_time")),
        dispatched=_stamp(record.get("disagg_ctx_dispatch_time")),
        first_token=_stamp(record.get("disagg_server_first_token_time")),
        disagg_request=_name(record.get("disagg_request_id")),
        status=_name(record.get("status")),
        ctx=ctx,
        gen=gen,
    )


def side_of(record: Mapping[str, Any]) -> Side | None:
    """A worker's record; None for anything else."""
    return _side(record)


def address(value: object) -> str | None:
    """host:port of a server as routers name it, with or without a scheme."""
    text = _name(value)
    return None if text is None else text.partition("://")[2] or text


def _side(record: object) -> Side | None:
    if not isinstance(record, dict):
        return None
    metrics = record.get("perf_metrics")
    if not isinstance(metrics, dict):
        return None
    timing = _object(metrics, "timing_metrics")
    breakdown = (
        _object(record, "time_breakdown_metrics")
        or _object(metrics, "time_breakdown_metrics")
        or metrics
    )
    drafts = _object(metrics, "speculative_decoding")
    steps = breakdown.get("step_metrics")
    chunks = breakdown.get("ctx_chunk_metrics")
    return Side(
        number=_name(record.get("request_id")),
        ctx_request=_name(record.get("ctx_request_id")),
        disagg_request=_name(record.get("disagg_request_id")),
        status=_name(record.get("status")),
        stamps=_stamps(timing),
        bytes=integer(timing.get("kv_cache_size")) or None,
        reported=_reported(metrics, breakdown, record),
        token_ns=_tokens(steps),
        drafts=bool(number(drafts.get("total_draft_tokens"))),
        chunks=len(chunks) if isinstance(chunks, list) else None,
    )


def _stamps(timing: Mapping[str, Any]) -> dict[str, int]:
    found = {name: ns for name in STAMPS if (ns := _stamp(timing.get(name))) is not None}
    least = found.get("arrival_time", found.get("server_arrival_time"))
    if least is None:
        return found
    return {name: ns for name, ns in found.items() if ns >= least - _NEVER_NS}


def _stamp(value: object) -> int | None:
    """A stamp that was set: 0, negative and missing ones were not."""
    ns = seconds_to_ns(value)
    return ns if ns is not None and ns > 0 else None


def _tokens(steps: object) -> tuple[int, ...]:
    """Instants of the tokens of the decode steps, where each step tells its own and none runs back."""
    if not isinstance(steps, list):
        return ()
    times = [_stamp(step.get("token_time")) if isinstance(step, dict) else None for step in steps]
    known = tuple(t for t in times if t is not None)
    whole = len(known) == len(times) and all(a <= b for a, b in pairwise(known))
    return known if whole else ()


def _reported(
    metrics: Mapping[str, Any], breakdown: Mapping[str, Any], record: Mapping[str, Any]
) -> dict[str, float]:
    blocks = _object(metrics, "kv_cache_metrics")
    drafts = _object(metrics, "speculative_decoding")
    places = {
        **dict.fromkeys(_BLOCKS, blocks),
        "acceptance_rate": drafts,
        "first_iter": metrics,
        "last_iter": metrics,
    }
    found = {name: number(place.get(name)) for name, place in places.items()}
    for name in ("ctx_gpu_forward_time", "ctx_gpu_sample_time"):
        found[name] = number(breakdown.get(name, record.get(name)))
    return {name: value for name, value in found.items() if value is not None}


_BLOCKS = (
    "num_total_allocated_blocks", "num_new_allocated_blocks", "num_reused_blocks", "num_missed_blocks",
)  # fmt: skip

# quantity -> (unit, what the code computes)
DEFINITIONS: dict[str, tuple[str, str]] = {
    "num_total_allocated_blocks": ("1", "KV blocks allocated for the request"),
    "num_new_allocated_blocks": ("1", "of them, blocks that were not in the cache"),
    "num_reused_blocks": ("1", "KV blocks of the prompt that were found in the cache"),
    "num_missed_blocks": ("1", "KV blocks of the prompt that were not found in the cache"),
    "acceptance_rate": ("1", "draft tokens accepted / drafted"),
    "first_iter": ("1", "iteration in which the request was first scheduled"),
    "last_iter": ("1", "iteration that made its last token"),
    "ctx_gpu_forward_time": ("ms", "CUDA events around the forward passes of its prompt"),
    "ctx_gpu_sample_time": ("ms", "CUDA events around sampling after its prompt"),
}


def _object(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _name(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    return str(value).strip() or None
