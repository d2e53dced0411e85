"""What pdtrace made of a dump, and whether that is what happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from truth_vllm import Request

from pdtrace.api import Trace
from pdtrace.diagnosis import Diagnosis


class Seen:
    """What pdtrace made of a dump."""

    def __init__(self, *paths: Path) -> None:
        self.trace = Trace.read(paths)
        self.requests = self.trace.requests()
        self.diagnosis: Diagnosis = self.trace.diagnose()

    def sql(self, query: str) -> pl.DataFrame:
        return self.trace.store.sql(query)

    @property
    def only(self) -> Any:
        assert len(self.diagnosis.deployments) == 1, [d.name for d in self.diagnosis.deployments]
        return self.diagnosis.deployments[0]

    def latency(self, metric: str = "ttft_ms", observer: str | None = None) -> Any:
        rows = [r for r in self.only.latency if r["metric"] == metric]
        if observer is None:
            return next((r for r in rows if r["headline"]), None)
        return next((r for r in rows if r["observer"] == observer), None)

    def phase(self, detail: str) -> dict[str, float]:
        """ms per request in this detail."""
        rows = self.sql(
            f"""SELECT request, sum(end_ns - start_ns)::DOUBLE / 1e6 AS ms FROM phases
                WHERE detail = '{detail}' GROUP BY request"""
        )
        return dict(rows.iter_rows())

    def finding(self, name: str) -> Any:
        return next((f for f in self.only.findings if f.id == name), None)

    def warnings(self) -> set[str]:
        return {
            f.id for d in self.diagnosis.deployments for f in d.findings if f.severity != "info"
        }


def exact(seen: Seen) -> None:
    """Phases partition every window in integer nanoseconds; every record is accounted for."""
    wrong = seen.sql(
        """SELECT * FROM (SELECT r.request, r.end_ns - r.start_ns AS w, sum(p.end_ns - p.start_ns) AS s
           FROM requests r LEFT JOIN phases p USING (request) WHERE r.end_ns > r.start_ns GROUP BY ALL)
           WHERE s IS DISTINCT FROM w"""
    )
    assert not wrong.height, wrong
    unbalanced = seen.sql("FROM sources WHERE used AND rows_read <> rows_kept + rows_skipped")
    assert not unbalanced.height, unbalanced


def external(request_id: str) -> str:
    base = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
    return base.removesuffix("-0") if request_id.startswith("cmpl-") else base


def agrees(
    seen: Seen,
    truth: Sequence[Request],
    found: dict[str, float],
    value: Callable[[Request], float],
    tolerance_ms: float,
) -> None:
    """Each request of the truth has this value in ms, within the tolerance; none is missing."""
    names = dict(seen.requests.select("external_id", "request").iter_rows())
    off = {}
    for r in truth:
        got = found.get(names[external(r.id)], 0.0)
        if got is None or abs(got - value(r)) > tolerance_ms:
            off[r.id] = (got, value(r))
    assert not off, (len(off), len(truth), dict(list(off.items())[:5]))


def column(seen: Seen, name: str) -> dict[str, float]:
    return dict(seen.requests.select("request", name).iter_rows())


def joined_pairs(seen: Seen, n: int) -> None:
    assert seen.only.mode == "disaggregated"
    assert seen.only.requests["count"] == n
    roles = {w["role"] for w in seen.only.workers}
    assert roles == {"prefill", "decode"}
    halves = seen.requests.select("prefill_worker", "decode_worker").unique()
    assert halves.height == 1
    assert halves.row(0)[0] != halves.row(0)[1]
