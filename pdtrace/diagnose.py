"""Runs the findings, ranks them and puts the whole diagnosis together; wording.py says it in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pdtrace import coverage, library, wording
from pdtrace.methods import statistics
from pdtrace.model import OBSERVERS, PHASE_DETAILS, PHASES, Finding, Slo
from pdtrace.options import Check
from pdtrace.store import Store

SCHEMA = "pdtrace.diagnosis/1"
_SEVERITIES = ("critical", "warning", "info")
_METRICS = ("ttft_ms", "e2e_ms", "tpot_ms", "itl_ms")
_DETAILS = tuple(PHASE_DETAILS)
_READ_BY_MANY = ("counted_requests", "deployment_sources", "phase_by_request", "gap_summary", "token_dependence")

# `told`: something beside samples says what it is or that it worked.
_WORKERS = """
SELECT w.*, role IS NOT NULL
    OR worker IN (SELECT worker FROM legs WHERE worker IS NOT NULL)
    OR worker IN (SELECT worker FROM steps WHERE worker IS NOT NULL) AS told
FROM workers w
ORDER BY deployment, role, name, worker
"""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Deployment:
    """The diagnosis of one set of workers that exchange requests."""

    id: str
    name: str
    mode: str
    window: tuple[str | None, str | None]
    workers: tuple[Row, ...]
    verdict: str
    requests: Mapping[str, int]
    latency: tuple[Row, ...]
    phases: tuple[Row, ...]
    findings: tuple[Finding, ...]
    slo: tuple[Row, ...] = ()
    conditions: tuple[tuple[str, str], ...] = ()
    marks: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `pdtrace diagnose` says."""

    overview: str
    sources: tuple[Row, ...]
    deployments: tuple[Deployment, ...]
    not_supported: tuple[str, ...]
    unknown: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON (schemas/diagnosis.schema.json)."""
        return {
            "schema": SCHEMA,
            "overview": self.overview,
            "sources": [dict(row) for row in self.sources],
            "deployments": [_deployment_dict(d) for d in self.deployments],
            "not_supported": list(self.not_supported),
            "unknown": list(self.unknown),
        }


def _deployment_dict(deployment: Deployment) -> dict[str, Any]:
    return {
        "id": deployment.id,
        "name": deployment.name,
        "mode": deployment.mode,
        "window": {"start": deployment.window[0], "end": deployment.window[1]},
        "workers": [dict(row) for row in deployment.workers],
        "verdict": deployment.verdict,
        "requests": dict(deployment.requests),
        "latency": [dict(row) for row in deployment.latency],
        "phases": [dict(row) for row in deployment.phases],
        "findings": [_finding_dict(f) for f in deployment.findings],
        "slo": [dict(row) for row in deployment.slo],
        "conditions": dict(deployment.conditions),
    }


def _finding_dict(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "severity": finding.severity,
        "cost_s": finding.cost_s,
        "title": finding.title,
        "detail": finding.detail,
        "level": finding.level,
        "value": finding.value,
        "unit": finding.unit,
        "interval": None if finding.interval is None else list(finding.interval),
        "share": finding.share,
        "requests": finding.requests,
        "workers": list(finding.workers),
        "culprits": [{"request": request, "value": value} for request, value in finding.culprits],
        "sources": list(finding.sources),
        "assumptions": list(finding.assumptions),
        "suggestions": list(finding.suggestions),
    }


def diagnose(store: Store, slo: Slo | None = None) -> Diagnosis:
    """Diagnose what the store holds. Every deployment is judged apart; nothing is pooled."""
    slo = slo or Slo()
    with store.computed_once(*_READ_BY_MANY):
        return _diagnose(store, slo)


def _diagnose(store: Store, slo: Slo) -> Diagnosis:
    findings = _findings(store, slo)
    latency = sorted(
        store.query("latency_by_observer").to_dicts(),
        key=lambda r: (_METRICS.index(r["metric"]), OBSERVERS.index(r["observer"])),
    )
    phases = sorted(
        store.query("phase_summary").to_dicts(),
        key=lambda r: (PHASES.index(r["phase"]), _DETAILS.index(r["detail"])),
    )
    workers = store.sql(_WORKERS).to_dicts()
    facts = store.sql(
        "SELECT f.*, w.deployment FROM facts f LEFT JOIN workers w USING (worker)"
    ).to_dicts()
    deployments = []
    for row in _deployments(store):
        deployment = Deployment(
            id=row["deployment"],
            name=row["name"],
            mode=row["mode"],
            window=(iso(row["start_ns"]), iso(row["end_ns"])),
            workers=_workers(workers, row["deployment"]),
            verdict="",
            requests=_counts(store, row["deployment"]),
            latency=tuple(
                _without(r, "deployment") for r in latency if r["deployment"] == row["deployment"]
            ),
            phases=tuple(
                _without(r, "deployment") for r in phases if r["deployment"] == row["deployment"]
            ),
            findings=tuple(_ranked(f for f in findings if f.deployment == row["deployment"])),
            slo=tuple(_attainment(store, row["deployment"], slo)),
            conditions=tuple(
                coverage.conditions(f for f in facts if f["deployment"] == row["deployment"])
            ),
        )
        deployments.append(replace(deployment, verdict=wording.verdict(deployment)))
    sources = tuple(coverage.sources(store))
    return Diagnosis(
        overview=wording.overview(deployments, sources),
        sources=sources,
        deployments=tuple(deployments),
        not_supported=tuple(coverage.not_supported(store, deployments)),
        unknown=tuple(coverage.unknown(store, deployments)),
    )


def _deployments(store: Store) -> list[dict[str, Any]]:
    return store.sql(
        """SELECT d.* FROM deployments d
           LEFT JOIN (SELECT deployment, count(*) AS n FROM requests GROUP BY deployment) r USING (deployment)
           ORDER BY coalesce(n, 0) DESC, d.name, d.deployment"""
    ).to_dicts()


def _findings(store: Store, slo: Slo) -> list[Finding]:
    """The rows of every finding query, in words."""
    found = []
    for query in library.queries().values():
        if query.kind != "findings":
            continue
        limits = {f"slo_{key}": value for key, value in vars(slo).items() if value is not None}
        wanted = {p.name for p in query.params}
        rows = store.query(query.name, **{k: v for k, v in limits.items() if k in wanted})
        found += [wording.finding(query.name, row) for row in rows.iter_rows(named=True)]
    return found


def _ranked(findings: Any) -> list[Finding]:
    """Critical first, then by seconds lost; unknown cost last inside a severity."""
    return sorted(
        findings,
        key=lambda f: (
            f.severity != "critical",
            -(f.cost_s or 0.0),
            _SEVERITIES.index(f.severity),
            f.id,
        ),
    )


def _workers(rows: list[dict[str, Any]], deployment: str) -> tuple[Row, ...]:
    """The workers of a deployment; files of metrics that name no process only where nothing else is there."""
    mine = [row for row in rows if row["deployment"] == deployment]
    told = [row for row in mine if row["told"]]
    return tuple(_worker(row) for row in told or mine)


def _worker(row: Row) -> dict[str, Any]:
    return {
        "id": row["worker"],
        "name": row["name"],
        "role": row["role"],
        "role_basis": row["role_basis"],
        "engine": row["engine"],
        "version": row["version"],
        "host": row["host"],
    }


def _counts(store: Store, deployment: str) -> dict[str, int]:
    rows = dict(
        store.rows(
            "SELECT outcome, count(*) FROM requests WHERE deployment = ? GROUP BY outcome",
            [deployment],
        )
    )
    counts = {
        name: int(rows.get(name, 0)) for name in ("completed", "failed", "aborted", "unknown")
    }
    return {"count": sum(int(n) for n in rows.values()), **counts}


def _attainment(store: Store, deployment: str, slo: Slo) -> list[dict[str, Any]]:
    """Share of requests that met each limit and all of them, over all arrivals and over completed ones.

    A request with one output token has no TPOT: it passes any TPOT limit, as in vLLM's bench (method: G2).
    """
    limits = {
        key: value for key, value in vars(slo).items() if value is not None and key != "itl_ms"
    }
    if not limits:
        return []
    rows = []
    tests = {
        key: f"(coalesce({key} <= {value}, {key} IS NULL AND output_tokens = 1))"
        for key, value in limits.items()
    }
    tests["all"] = "(" + " AND ".join(tests.values()) + ")"
    for key, test in tests.items():
        known = test if key == "all" else f"{key} IS NOT NULL OR output_tokens = 1"
        ((n, completed, unknown, good),) = store.rows(
            f"""SELECT count(*), count(*) FILTER (outcome = 'completed'),
                       count(*) FILTER (outcome = 'completed' AND NOT coalesce({known}, false)
                                        AND {"true" if key != "all" else "ttft_ms IS NULL"}),
                       count(*) FILTER (outcome = 'completed' AND {test})
                FROM requests WHERE deployment = ?""",
            [deployment],
        )
        low, high = statistics.wilson_interval(good, n) if n else (None, None)
        rows.append(
            {
                "metric": key, "limit_ms": limits.get(key), "good": good, "arrivals": n, "completed": completed,
                "unknown": unknown, "attainment": good / n if n else None, "interval": [low, high],
                "attainment_of_completed": good / completed if completed else None,
            }
        )  # fmt: skip
    return rows


def _without(row: Row, *names: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in names}


def iso(instant_ns: int | None) -> str | None:
    """An instant as ISO-8601 in UTC with milliseconds; None stays None."""
    if instant_ns is None:
        return None
    seconds, rest = divmod(instant_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03d}Z"


def evaluate(diagnosis: Diagnosis, check: Check) -> list[tuple[str, float | None, bool]]:
    """A check against every deployment that has requests: (deployment name, value, holds)."""
    results = []
    for deployment in diagnosis.deployments:
        if not deployment.requests["count"]:
            continue
        value = _checked_value(deployment, check)
        results.append((deployment.name, value, check.holds(value)))
    return results


def _checked_value(deployment: Deployment, check: Check) -> float | None:
    if check.metric == "failed":
        return deployment.requests["failed"] / deployment.requests["count"]
    if check.metric == "attainment":
        return next((row["attainment"] for row in deployment.slo if row["metric"] == "all"), None)
    rows = [row for row in deployment.latency if row["metric"] == check.metric]
    best = next((row for row in rows if row["headline"]), rows[0] if len(rows) == 1 else None)
    return None if best is None else best[check.statistic]
