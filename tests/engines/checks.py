"""What must hold of a run of a real engine, however slow the machine was: structure and joins, never speed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pdtrace.diagnose import diagnose
from pdtrace.diagnosis import Diagnosis
from pdtrace.ingest import ingest
from pdtrace.store import Store


class Run:
    """A capture as pdtrace reads it, beside what the client saw."""

    def __init__(self, captures: Iterable[Path], truth: Iterable[Path]) -> None:
        self.store = Store()
        ingest([str(path) for path in captures], self.store)
        self.sent = [json.loads(line) for path in truth for line in path.read_text().splitlines()]
        assert self.sent
        assert not [row["error"] for row in self.sent if row["error"]], "the load itself failed"

    def said(self) -> Diagnosis:
        return diagnose(self.store)

    def rows(self, query: str) -> list[dict[str, Any]]:
        return list(self.store.sql(query).iter_rows(named=True))


def read(*folders: Path) -> Run:
    """Whole runs, each a folder with capture/ and truth.jsonl."""
    return Run([one / "capture" for one in folders], [one / "truth.jsonl" for one in folders])


def made(folder: Path) -> bool:
    """Whether the run that belongs there is there already."""
    return (folder / "truth.jsonl").exists()


def each_request_once(run: Run) -> None:
    """Each request that was sent is one request here, under its own id and trace, with the client's token counts."""
    found = {r["external_id"]: r for r in run.rows("FROM requests")}
    assert len(run.rows("FROM requests")) == len(run.sent)
    assert set(found) == {row["request_id"] for row in run.sent}
    for row in run.sent:
        request = found[row["request_id"]]
        assert request["outcome"] == "completed", request
        if row["traceparent"]:
            assert request["trace_id"] == row["traceparent"].split("-")[1]
        if row["usage"]:
            assert request["prompt_tokens"] == row["usage"]["prompt_tokens"], request
            assert request["output_tokens"] == row["usage"]["completion_tokens"], request


def legs_of(run: Run, expected: dict[str, int]) -> None:
    """Every request was seen by so many workers of each role, whatever told of them; no record is left over."""
    legs = run.rows(
        "SELECT DISTINCT request, role, worker FROM legs WHERE container IS NOT TRUE AND worker IS NOT NULL"
    )
    assert run.rows("SELECT leg FROM legs WHERE request IS NULL") == []
    for request in {leg["request"] for leg in legs}:
        assert Counter(leg["role"] for leg in legs if leg["request"] == request) == expected, (
            request
        )


def workers_are(run: Run, expected: dict[str | None, int]) -> None:
    """So many workers of each role; None (unknown) is a role that nobody has unless it stands there."""
    assert Counter(worker["role"] for worker in run.rows("FROM workers")) == expected


def served_where(run: Run, mode: str) -> None:
    """Each request has a worker that computed its prompt and one that decoded, of the right role, in one deployment."""
    role = {
        worker["worker"]: (worker["role"], worker["deployment"])
        for worker in run.rows("FROM workers")
    }
    for request in run.rows("FROM requests"):
        assert request["mode"] == mode, request
        for column, wanted in (("prefill_worker", "prefill"), ("decode_worker", "decode")):
            wanted = wanted if mode == "disaggregated" else "aggregated"
            assert role[request[column]] == (wanted, request["deployment"]), request


def exact_partition(run: Run) -> None:
    """Phases cover each request's window exactly: nothing twice, nothing left out."""
    wrong = run.rows(
        """SELECT r.request FROM requests r LEFT JOIN phases p USING (request)
           WHERE r.start_ns IS NOT NULL AND r.end_ns IS NOT NULL GROUP BY r.request, r.start_ns, r.end_ns
           HAVING coalesce(sum(p.end_ns - p.start_ns), 0) <> r.end_ns - r.start_ns
               OR min(p.start_ns) <> r.start_ns OR max(p.end_ns) <> r.end_ns"""
    )
    assert not wrong
    twice = run.rows(
        """SELECT request FROM (SELECT *, lag(end_ns) OVER (PARTITION BY request ORDER BY start_ns, end_ns) AS before
                                FROM phases) WHERE start_ns < before"""
    )
    assert not twice


def balanced(run: Run) -> None:
    """Every record is accounted for, and no source is unknown."""
    for source in run.said().sources:
        assert source["rows_read"] == source["rows_kept"] + source["rows_skipped"], source
        assert source["rows_skipped"] == sum(source["skipped_reasons"].values()), source
        assert source["collector"] or source["rows_read"] == 0, source


def joined_by(run: Run, observer: str) -> None:
    """Each request has exactly one leg of that observer, joined to it by the spans' parentage."""
    legs = run.rows(
        f"SELECT request, count(*) AS legs FROM legs WHERE observer = '{observer}' GROUP BY ALL"
    )
    assert len(legs) == len(run.sent)
    assert {leg["legs"] for leg in legs} == {1}


def or_skip(make: Any) -> Any:
    """Its value, or the test is skipped with the reason why the engine cannot be had."""
    from venvs import Unavailable

    try:
        return make()
    except Unavailable as reason:
        pytest.skip(str(reason))
