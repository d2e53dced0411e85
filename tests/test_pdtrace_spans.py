"""pdtrace's own spans: requests, phases, token times, transfers and choices as they were emitted."""

from __future__ import annotations

from typing import Any

import polars as pl

from pdtrace import semconv as s
from pdtrace.collectors import pdtrace_spans
from pdtrace.collectors._otlp_content import redact

MS = 1_000_000
TYPES = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}


class Rows(dict[str, pl.DataFrame]):
    """A sink that keeps the frames."""

    def add(self, table: str, batch: Any, *, record: str | None = "record") -> None:
        self[table] = batch


def frame(claims: Any, spans: list[dict[str, Any]]) -> pl.DataFrame:
    """The frame that interpret() gets, from a few words per span."""
    event = pl.List(pl.Struct({"time_ns": pl.Int64, "name": pl.String, "attributes": pl.String}))
    schema = {
        "source": pl.Int32, "trace_id": pl.String, "span_id": pl.String, "parent_span_id": pl.String,
        "start_ns": pl.Int64, "end_ns": pl.Int64, "name": pl.String, "kind": pl.String, "status_code": pl.String,
        "scope_name": pl.String, "service_name": pl.String, "worker": pl.String, "resolution_ns": pl.Int64,
        "events": event, "mine": pl.Boolean,
        **{key: TYPES[kind] for key, kind in claims.attributes.items()},
    }  # fmt: skip
    rows = [
        {name: span.get(name) for name in schema} | {"trace_id": span.get("trace_id", "t"), "mine": span.get("mine", True),
         "resolution_ns": 1, "source": 0, "kind": span.get("kind", "internal")}
        for span in spans
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=schema)


def interpreted() -> Rows:
    spans = frame(
        pdtrace_spans.CLAIMS,
        [
            {
                "span_id": "r", "name": s.SPAN_REQUEST, "kind": "server", "start_ns": 0, "end_ns": 100 * MS, "worker": "d",
                s.WORKER_ROLE: "decode", s.REQUEST_ID: "abc", s.INPUT_TOKENS: 500, s.OUTPUT_TOKENS: 4, s.CACHED_TOKENS: 16,
                s.FIRST_TOKEN_NS: 40 * MS, s.TOKEN_TIMES_US: "[0, 10000, 30000, 60000]", s.RESPONSE_FINISH_REASONS: '["stop"]',
            },
            {"span_id": "q", "parent_span_id": "r", "name": s.SPAN_QUEUE, "start_ns": 5 * MS, "end_ns": 10 * MS},
            {
                "span_id": "k", "parent_span_id": "r", "name": s.SPAN_KV_TRANSFER, "start_ns": 10 * MS, "end_ns": 30 * MS,
                s.KV_BYTES: 4096, s.KV_BACKEND: "NIXL", s.KV_DIRECTION: "prefill_to_decode",
            },
            {"span_id": "x", "parent_span_id": "r", "name": s.SPAN_DECODE, "start_ns": 40 * MS, "end_ns": 100 * MS, s.PHASE_DETAIL: "decode_exec"},
        ],
    )  # fmt: skip
    out = Rows()
    pdtrace_spans.interpret(spans, pl.DataFrame(), out)  # type: ignore[arg-type]
    return out


def test_a_request_span_is_a_leg() -> None:
    leg = interpreted()["legs"].row(0, named=True)
    assert (leg["leg"], leg["observer"], leg["role"], leg["external_id"]) == (
        "t/r",
        "engine",
        "decode",
        "abc",
    )
    assert (leg["ttft_ms"], leg["e2e_ms"], leg["tpot_ms"]) == (40, 100, 20)
    assert (
        leg["last_token_ns"] == 100 * MS
        and leg["finish_reason"] == "stop"
        and leg["status"] == "completed"
    )


def test_phase_spans_are_measured_intervals_of_their_parent() -> None:
    rows = interpreted()["intervals"].sort("start_ns")
    assert rows["detail"].to_list() == ["decode_queue", "kv_transfer", "decode_exec"]
    assert rows["leg"].unique().to_list() == ["t/r"] and rows["basis"].unique().to_list() == [
        "measured"
    ]


def test_token_times_are_a_stream_and_transfers_carry_bytes() -> None:
    out = interpreted()
    assert out["streams"].row(0, named=True)["gaps_us"] == [10000, 20000, 30000]
    transfer = out["transfers"].row(0, named=True)
    assert (transfer["bytes"], transfer["duration_ms"], transfer["leg"]) == (4096, 20, "t/r")


def test_arrays_that_are_none_leave_what_they_tell_unknown_and_the_rest_whole() -> None:
    bad = '{"length": 9000, "sha256": "0"}'
    step = {"name": s.SPAN_STEPS, "start_ns": 0, "end_ns": MS, "worker": "d", s.STEP_FIRST_SEQ: 0}
    spans = frame(
        pdtrace_spans.CLAIMS,
        [
            {**step, "span_id": "a", s.STEP_ELAPSED_NS: "[5, 6]", s.STEP_MEMBER_IDS: bad,
             s.STEP_MEMBERS["step"]: "[0]", s.STEP_MEMBERS["request"]: "[0]"},
            {**step, "span_id": "b", s.STEP_FIRST_SEQ: 2, s.STEP_ELAPSED_NS: '["7"]'},
            {**step, "span_id": "c", s.STEP_FIRST_SEQ: 3, s.STEP_ELAPSED_NS: "7"},
            {"span_id": "r", "name": s.SPAN_REQUEST, "kind": "server", "start_ns": 0, "end_ns": 9,
             s.FIRST_TOKEN_NS: 1, s.TOKEN_TIMES_US: "[0, 1.5]"},
        ],
    )  # fmt: skip
    out = Rows()
    pdtrace_spans.interpret(spans, pl.DataFrame(), out)  # type: ignore[arg-type]
    known = out["steps"].filter(pl.col("elapsed_ns").is_not_null())
    assert known.select("seq", "elapsed_ns").rows() == [(0, 5), (1, 6)]
    assert out["step_members"]["request_id"].to_list() == [None]
    assert out["legs"].height == 1


def test_many_ids_of_one_run_are_no_content() -> None:
    ids = [f"cmpl-{n:060d}" for n in range(100)]
    assert redact(ids, s.STEP_MEMBER_IDS).value == ids
    assert redact(ids, "unknown.list").withheld == 1
    assert redact(["x" * 5000], s.STEP_MEMBER_IDS).withheld == 1


def test_a_request_says_how_often_it_was_put_off() -> None:
    request = {"name": s.SPAN_REQUEST, "kind": "server", "start_ns": 0, "end_ns": 9, "worker": "d"}
    spans = frame(
        pdtrace_spans.CLAIMS,
        [
            {**request, "span_id": "a", s.REQUEST_ID: "a", s.PREEMPTIONS: 3},
            {**request, "span_id": "b", s.REQUEST_ID: "b", s.PREEMPTIONS: 0},
        ],
    )
    out = Rows()
    pdtrace_spans.interpret(spans, pl.DataFrame(), out)  # type: ignore[arg-type]
    assert out["events"].select("worker", "kind", "request_id", "count").rows() == [
        ("d", "preemption", "a", 3)
    ]
