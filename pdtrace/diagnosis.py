"""What a diagnosis holds: its records, the documented JSON, and checks against it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pdtrace.model import DATED_FROM_NS, Finding
from pdtrace.options import Check
from pdtrace.records import dataclass

SCHEMA = "pdtrace.diagnosis/1"

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
    notes: tuple[str, ...] = ()
    dependence: tuple[Row, ...] = ()
    figures: tuple[Row, ...] = ()
    judged: tuple[str, ...] = ()  # what was looked for and is not shown
    calls: Row | None = None  # what access lines count, where the requests known are not all of it
    unmatched: int = 0
    surface: tuple[Row, ...] = ()
    fluidity: tuple[Row, ...] = ()


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
        "calls": None if deployment.calls is None else dict(deployment.calls),
        "latency": [dict(row) for row in deployment.latency],
        "phases": [dict(row) for row in deployment.phases],
        "findings": [_finding_dict(f) for f in deployment.findings],
        "slo": [dict(row) for row in deployment.slo],
        "slo_unmatched": deployment.unmatched,
        "goodput_surface": [dict(row) for row in deployment.surface],
        "fluidity": [dict(row) for row in deployment.fluidity],
        "conditions": dict(deployment.conditions),
        "marks": [dict(row) for row in deployment.marks],
        "dependence": [dict(row) for row in deployment.dependence],
        "notes": list(deployment.notes),
        "figures": [dict(row) for row in deployment.figures],
        "judged": list(deployment.judged),
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
        "when": _when(finding),
    }


def _when(finding: Finding) -> dict[str, Any] | None:
    if finding.when is None:
        return None
    start, end, part = finding.when
    return {"start": iso(start), "end": iso(end), "share": part}


def iso(instant_ns: int | None) -> str | None:
    """An instant as ISO-8601 in UTC with milliseconds; None where it is unknown or has no date."""
    if instant_ns is None or instant_ns < DATED_FROM_NS:
        return None
    seconds, rest = divmod(instant_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest // 1_000_000:03d}Z"


def evaluate(diagnosis: Diagnosis, check: Check) -> list[tuple[str, float | None, bool]]:
    """A check against every deployment that has requests: (deployment name, value, holds).

    Attainment is checked class by class.
    """
    return [
        (name, value, check.holds(value))
        for deployment in diagnosis.deployments
        if deployment.requests["count"]
        for name, value in _checked(deployment, check)
    ]


def _checked(deployment: Deployment, check: Check) -> list[tuple[str, float | None]]:
    if check.metric == "attainment":
        rows = [row for row in deployment.slo if row["metric"] == "all"]
        several = len(rows) > 1
        return [
            (
                f"{deployment.name}, {row['class']}" if several else deployment.name,
                row["attainment"],
            )
            for row in rows
        ] or [(deployment.name, None)]
    return [(deployment.name, _checked_value(deployment, check))]


def _checked_value(deployment: Deployment, check: Check) -> float | None:
    if check.metric == "failed":
        return deployment.requests["failed"] / deployment.requests["count"]
    rows = [row for row in deployment.latency if row["metric"] == check.metric]
    best = next((row for row in rows if row["headline"]), rows[0] if len(rows) == 1 else None)
    return None if best is None else best[check.statistic]
