"""Engine steps as pdtrace's own spans: a run of steps a span, their numbers and members in arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from pdtrace import semconv as s
from pdtrace.simulator.engine import server_of
from pdtrace.simulator.otlp import Clock, Ids, Span
from pdtrace.simulator.run import Run

STEPS = 256  # of one span


def step_spans(
    run: Run, worker: str, resource: dict[str, Any], ids: Ids, clock: Clock
) -> Iterator[Span]:
    """Spans of all steps of a worker, in order."""
    steps = run.steps.filter(pl.col("worker") == worker).sort("seq")
    members = run.members.filter(pl.col("worker") == worker).sort("seq", "request")
    for part in steps.iter_slices(STEPS):
        first = part["seq"][0]
        inside = members.filter(pl.col("seq").is_between(first, first + part.height - 1))
        yield _span(worker, resource, ids, clock, part, inside)


def _span(
    worker: str,
    resource: dict[str, Any],
    ids: Ids,
    clock: Clock,
    steps: pl.DataFrame,
    members: pl.DataFrame,
) -> Span:
    first = steps["seq"][0]
    starts = [clock(at) for at in steps["start_ns"]]
    names = members["request"].unique().sort()
    known = members.join(
        pl.DataFrame({"request": names}).with_row_index("number"), on="request", how="left",
        maintain_order="left",
    )  # fmt: skip
    numbers = {
        "step": known["seq"] - first,
        "request": known["number"],
        **{name: known[name] for name in ("prefill_tokens", "decode_tokens", "context_tokens")},
    }
    attributes = {
        s.STEP_FIRST_SEQ: first,
        s.STEP_RANK: server_of(worker)[1],
        s.STEP_OFFSETS_NS: [start - starts[0] for start in starts],
        s.STEP_ELAPSED_NS: steps["elapsed_ns"].to_list(),
        **{key: steps[name].to_list() for name, key in s.STEP_COUNTS.items()},
        s.STEP_KV_USAGE: steps["kv_usage_ratio"].to_list(),
        s.STEP_MEMBER_IDS: names.to_list(),
        **{key: numbers[name].to_list() for name, key in s.STEP_MEMBERS.items()},
    }
    end = starts[-1] + steps["elapsed_ns"][-1]
    return Span(
        resource, s.SCOPE, s.SPAN_STEPS, ids.hex(32, "steps", worker, first), ids.hex(16, worker, first),
        starts[0], end, None, attributes=attributes,
    )  # fmt: skip
