"""Captures read once in a process (cut ones everywhere, the full ones where they lie beside the checkout), and what must hold for each.

Figures in the tests are those that other tools or the client itself measured; tolerances stand beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from pdtrace.diagnose import diagnose
from pdtrace.diagnosis import Diagnosis
from pdtrace.ingest import ingest
from pdtrace.store import Store

CUTS = Path(__file__).parent / "fixtures" / "captures"
DEMO = Path(str(files("pdtrace") / "demo"))
FULL = Path(__file__).resolve().parents[2] / "shared" / "data"
full = [
    pytest.mark.shared,
    pytest.mark.skipif(not FULL.is_dir(), reason="the full captures are not beside this checkout"),
]
VLLM, DYNAMO = FULL / "vllm", FULL / "dynamo"


class Run:
    """One reading: the store and what is said of it."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.store = Store()
        ingest([str(path) for path in paths], self.store)
        self._said: Diagnosis | None = None

    @property
    def said(self) -> Diagnosis:
        if self._said is None:
            self._said = diagnose(self.store)
        return self._said

    def one(self, name: str | None = None) -> Any:
        """The deployment of that name, or the only one."""
        found = [d for d in self.said.deployments if name is None or d.name == name]
        assert len(found) == 1, [d.name for d in self.said.deployments]
        return found[0]

    def latency(self, metric: str, observer: str, name: str | None = None) -> Mapping[str, Any]:
        rows = [
            r for r in self.one(name).latency if (r["metric"], r["observer"]) == (metric, observer)
        ]
        assert len(rows) == 1
        return rows[0]

    def phase(self, detail: str, name: str | None = None) -> Mapping[str, Any]:
        return next(p for p in self.one(name).phases if p["detail"] == detail)

    def finding(self, name_of: str, name: str | None = None) -> Any:
        return next((f for f in self.one(name).findings if f.id == name_of), None)

    def value(self, query: str) -> Any:
        return self.store.sql(query).item()

    def skipped(self, path: str) -> dict[str, int]:
        return next(s["skipped_reasons"] for s in self.said.sources if s["path"].endswith(path))


@cache
def read(*paths: Path) -> Run:
    """A capture, read once a session."""
    return Run(paths)


def server_side(folder: Path) -> tuple[Path, ...]:
    """The files of a capture without what clients and the proxy's own book-keeping say."""
    own = re.compile(r"client\.jsonl|bench_|proxy_requests|cmd|ORIGIN|profile_export|aiperf")
    return tuple(sorted(p for p in folder.iterdir() if p.is_file() and not own.match(p.name)))


def exact_partition(run: Run) -> None:
    """Phases cover each request's window exactly: nothing twice, nothing left out."""
    wrong = run.value(
        """SELECT count(*) FROM (
             SELECT r.request, r.end_ns - r.start_ns AS whole, sum(p.end_ns - p.start_ns) AS parts,
                    min(p.start_ns) AS low, max(p.end_ns) AS high, r.start_ns, r.end_ns
             FROM requests r LEFT JOIN phases p USING (request)
             WHERE r.start_ns IS NOT NULL AND r.end_ns IS NOT NULL GROUP BY ALL)
           WHERE whole <> parts OR low <> start_ns OR high <> end_ns"""
    )
    assert wrong == 0
    twice = run.value(
        """SELECT count(*) FROM (SELECT start_ns, lag(end_ns) OVER (PARTITION BY request ORDER BY start_ns, end_ns) AS before
                                 FROM phases) WHERE start_ns < before"""
    )
    assert twice == 0


def balanced(run: Run) -> None:
    """Every source is accounted for: read = kept + skipped, skipped = the sum of its reasons."""
    for source in run.said.sources:
        assert source["rows_read"] == source["rows_kept"] + source["rows_skipped"], source
        assert source["rows_skipped"] == sum(source["skipped_reasons"].values()), source
        assert source["why"], source
        assert "gave no row" not in source["skipped_reasons"], source
