"""smg's gateway spans: the call that it served, the workers that it chose, and how long the choice took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pdtrace.collectors import smg
from pdtrace.ingest import ingest
from pdtrace.store import Store

FIXTURES = Path(__file__).parent / "fixtures" / "smg"
MS = 1_000_000
TYPES = {str: pl.String, int: pl.Int64}


class Rows(dict[str, pl.DataFrame]):
    """A sink that keeps the frames."""

    def add(self, table: str, batch: Any, *, record: str | None = "record") -> None:
        self[table] = batch


def interpreted(*spans: dict[str, Any]) -> Rows:
    event = pl.List(pl.Struct({"time_ns": pl.Int64, "name": pl.String, "attributes": pl.String}))
    schema = {
        "source": pl.Int32, "trace_id": pl.String, "span_id": pl.String, "parent_span_id": pl.String,
        "start_ns": pl.Int64, "end_ns": pl.Int64, "name": pl.String, "worker": pl.String, "resolution_ns": pl.Int64,
        "events": event, "mine": pl.Boolean, "method": pl.String, "path": pl.String, "uri": pl.String,
        "request_id": pl.String, "attribute.status_code": pl.Int64, "latency": pl.Int64,
    }  # fmt: skip
    common = {"source": 0, "trace_id": "t", "name": "http_request", "worker": "service:smg", "resolution_ns": 1, "mine": True, "method": "POST", "path": "/v1/chat/completions", "start_ns": 0, "end_ns": 500 * MS}  # fmt: skip
    rows = [{name: {**common, **span}.get(name) for name in schema} for span in spans]
    out = Rows()
    smg.interpret(pl.DataFrame(rows, schema=schema), pl.DataFrame(), out)  # type: ignore[arg-type]
    return out


def sending(at_ms: float, **urls: str) -> dict[str, Any]:
    said = ",".join(f'"{name}":"http://{address}"' for name, address in urls.items())
    kind = "concurrent requests" if "prefill_url" in urls else "request"
    return {"time_ns": round(at_ms * MS), "name": f"Sending {kind}", "attributes": f"{{{said}}}"}


@pytest.fixture(scope="module")
def real() -> Store:
    store = Store()
    ingest([str(FIXTURES / "disaggregated.otlp.jsonl")], store)
    return store


def test_gateway_and_both_workers_are_one_request(real: Store) -> None:
    legs = real.sql("SELECT request, role, count(*) AS n FROM legs GROUP BY ALL ORDER BY ALL").rows()  # fmt: skip
    assert legs == [
        (f"load-{n}", role, 1) for n in (5, 6) for role in ("decode", "prefill", "router")
    ]
    assert real.sql("SELECT DISTINCT deployment, mode FROM deployments").height == 1
    roles = real.sql("SELECT role, engine FROM workers WHERE role = 'router'").rows()
    assert roles == [("router", "smg")]


def test_the_choice_is_measured_and_names_who_was_chosen_for_what(real: Store) -> None:
    rows = real.sql(
        "SELECT d.request_id, d.phase, d.worker, d.duration_ms, d.time_ns - l.start_ns AS after_ns"
        " FROM decisions d JOIN legs l USING (leg) ORDER BY 1, 2 DESC"
    ).rows(named=True)
    assert [(r["request_id"], r["phase"]) for r in rows] == [
        ("load-5", "prefill"), ("load-5", "decode"), ("load-6", "prefill"), ("load-6", "decode"),
    ]  # fmt: skip
    assert len({r["worker"] for r in rows}) == 4  # round robin over two and two
    assert all(r["worker"].startswith("address:127.0.0.1:") for r in rows)
    # One choice of two workers: its time is not counted twice.
    assert [r["duration_ms"] is None for r in rows] == [False, True, False, True]
    assert rows[0]["duration_ms"] == pytest.approx(rows[0]["after_ns"] / MS)


def test_a_call_without_pd_names_one_worker() -> None:
    store = Store()
    ingest([str(FIXTURES / "aggregated.otlp.jsonl")], store)
    assert store.sql("SELECT phase, duration_ms IS NOT NULL FROM decisions").rows() == [("aggregated", True)]  # fmt: skip
    assert store.sql("SELECT role FROM legs ORDER BY 1").rows() == [("aggregated",), ("router",)]
    assert store.sql("SELECT mode FROM requests").rows() == [("aggregated",)]


def test_only_calls_that_make_tokens_are_requests() -> None:
    out = interpreted(
        {"span_id": "a", "method": "GET", "path": "/v1/models"},
        {"span_id": "b", "path": "/workers"},
        {"span_id": "c", "path": None, "uri": "/generate?x=1"},
        {"span_id": "d", "path": "http://gw:30000/v1/completions"},
    )
    assert out["legs"].select("span_id", "route").rows() == [("c", "/generate"), ("d", "/v1/completions")]  # fmt: skip


def test_latency_is_microseconds_to_the_head_and_no_duration() -> None:
    out = interpreted({"span_id": "a", "latency": 232_553, "attribute.status_code": 200})
    assert out["legs"]["e2e_ms"].to_list() == [500.0]
    assert "first_token_ns" not in out["legs"].columns
    ((value, unit, definition),) = out["reported"].select("value", "unit", "definition").rows()
    assert (value, unit) == (232.553, "ms")
    assert "head" in definition


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [(200, "completed", None), (503, "failed", "HTTP 503"), (499, "aborted", "HTTP 499"), (None, "unknown", None)],
)  # fmt: skip
def test_outcomes(code: int | None, status: str, error: str | None) -> None:
    legs = interpreted({"span_id": "a", "attribute.status_code": code})["legs"]
    assert legs.select("status", "error").rows() == [(status, error)]


def test_a_retry_is_another_choice_but_the_first_call_ends_the_deciding() -> None:
    events = [sending(7, prefill_url="p1:1", decode_url="d1:1"), sending(90, prefill_url="p2:1", decode_url="d1:1")]  # fmt: skip
    out = interpreted({"span_id": "a", "events": events})
    assert out["intervals"].select("detail", "start_ns", "end_ns").rows() == [("router_decide", 0, 7 * MS)]  # fmt: skip
    chosen = out["decisions"].select("phase", "worker", "duration_ms").rows()
    assert chosen == [
        ("prefill", "address:p1:1", 7.0), ("decode", "address:d1:1", None),
        ("prefill", "address:p2:1", None), ("decode", "address:d1:1", None),
    ]  # fmt: skip


def test_a_call_that_reached_no_worker_has_no_choice_and_no_interval() -> None:
    out = interpreted({"span_id": "a", "attribute.status_code": 503})
    assert out["decisions"].is_empty()
    assert out["intervals"].is_empty()
