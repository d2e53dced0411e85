"""Runs the findings, ranks them and puts the whole diagnosis together; wording.py says it in words."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdtrace import _unsupported, coverage, goodput, library, marks, wording
from pdtrace._conditions import Conditions
from pdtrace.diagnosis import Deployment, Diagnosis, Row, iso
from pdtrace.errors import PROBLEM, REPORT, in_one_line, reraise_stop
from pdtrace.model import OBSERVERS, PHASE_DETAILS, PHASES, Finding, Slo, SloPolicy
from pdtrace.store import Asked, Questions, Store

_log = logging.getLogger(__name__)
_WORD = re.compile(r"\w+")
_SEVERITIES = ("critical", "warning", "info")
_METRICS = ("ttft_ms", "e2e_ms", "tpot_ms", "itl_ms")
_DETAILS = tuple(PHASE_DETAILS)
_READ_BY_MANY = (
    "request_values",
    "value_quartiles",
    "phase_totals",
    "deployment_sources",
    "transfer_times",
    "prompt_reuse",
    "prefix_reuse",
    "side_sums",
    "side_workers",
    "load_spread",
    "decision_outcomes",
    "gap_lengths",
    "gap_summary",
    "token_dependence",
    "interference_by_worker",
)
_ASKED = (
    "latency_by_observer",
    "phase_summary",
    "coverage_items",
    "token_dependence",
    "interference_by_worker",
    "finding_windows",
)

# `told`: something beside samples says what it is or that it worked. `alone`: only its log or scrape is there
# while others have the requests: it may be one of them under another name.
_WORKERS = """
SELECT w.*, role IS NOT NULL
    OR worker IN (SELECT worker FROM legs WHERE worker IS NOT NULL)
    OR worker IN (SELECT worker FROM steps WHERE worker IS NOT NULL) AS told,
    role IN ('prefill', 'decode', 'aggregated') AND worker NOT IN (SELECT worker FROM side_workers)
    AND deployment IN (SELECT deployment FROM side_workers) AS alone
FROM workers w
ORDER BY deployment, role, name, worker
"""

_DEPLOYMENTS = """
SELECT d.* FROM deployments d
LEFT JOIN (SELECT deployment, count(*) AS n FROM requests GROUP BY deployment) r USING (deployment)
ORDER BY coalesce(n, 0) DESC, d.name, d.deployment
"""

_OUTCOMES = """
SELECT deployment, outcome, count(*) AS requests, count(*) FILTER (waiting) AS waiting,
       quantile_cont(e2e_ms, 0.5) FILTER (waiting) AS waited_ms
FROM (SELECT *, first_token_ns IS NULL AND ttft_ms IS NULL AS waiting FROM request_values)
GROUP BY deployment, outcome ORDER BY deployment, outcome
"""

_STATEMENTS = (_WORKERS, _DEPLOYMENTS, _OUTCOMES, *coverage.STATEMENTS, *_unsupported.STATEMENTS)


def diagnose(
    store: Store, slo: Slo | SloPolicy | None = None, heard: Callable[[str], bool] = bool
) -> Diagnosis:
    """Diagnose what the store holds. Every deployment is judged apart; nothing is pooled.

    Limits by class judge requests one by one; findings go by limits that hold for every request only.
    `heard`: which findings, by id, the verdict may rest on; all of them unless told otherwise.
    """
    policy = goodput.as_policy(slo)
    conditions = store.conditions()
    names, ask, *_ = _questions(store, policy, conditions, conditions.hold)
    asked = {name: given for name, given in ask if name not in _ASKED}
    with store.computed_once(*names, ask=ask, conditions=conditions, statements=_STATEMENTS):
        if policy:
            goodput.judge_streams(store)
        return _diagnose(store, policy, asked, heard)


def ahead(
    store: Store, slo: Slo | SloPolicy | None = None, also: Sequence[Asked] = ()
) -> Questions:
    """What diagnose() of the same limits will hold and ask, and what is asked `also`. Conditions are not asked here."""
    conditions = store.conditions()
    policy = goodput.as_policy(slo)
    return _questions(store, policy, conditions, lambda _: True, also)


def _questions(
    store: Store,
    policy: SloPolicy | None,
    conditions: Conditions,
    hold: Callable[[str], bool],
    also: Sequence[Asked] = (),
) -> Questions:
    goodput.give(store, policy)
    ask = [*_finding_queries(policy, hold).items(), *((name, {}) for name in _ASKED), *also]
    held = [*_held(ask), *(goodput.READ_BY_MANY if policy else ())]
    return Questions(held, ask, conditions, _STATEMENTS)


def _held(ask: Iterable[Asked]) -> list[str]:
    """Of what these questions read, that which many read."""
    names = [name for name, _ in ask]
    read = set(names).union(*map(library.below, names))
    return [name for name in _READ_BY_MANY if name in read]


def _diagnose(
    store: Store,
    policy: SloPolicy | None,
    asked: Mapping[str, Mapping[str, object]],
    heard: Callable[[str], bool],
) -> Diagnosis:
    slo = policy.single() if policy else Slo()
    problems = _problems(store)
    findings = _findings(store, asked, problems)
    latency = sorted(
        store.query("latency_by_observer").to_dicts(),
        key=lambda r: (_METRICS.index(r["metric"]), OBSERVERS.index(r["observer"])),
    )
    phases = sorted(
        store.query("phase_summary").to_dicts(),
        key=lambda r: (PHASES.index(r["phase"]), _DETAILS.index(r["detail"])),
    )
    workers = store.short(_WORKERS).to_dicts()
    facts = coverage.deployment_facts(store)
    dependence = sorted(
        store.query("token_dependence").to_dicts(),
        key=lambda r: (_METRICS.index(f"{r['measure']}_ms"), r["tokens"]),
    )
    interference = store.query("interference_by_worker").to_dicts()
    outcomes = _outcomes(store)
    deployments = []
    for row in _deployments(store):
        deployment = Deployment(
            id=row["deployment"],
            name=row["name"],
            mode=row["mode"],
            window=(iso(row["start_ns"]), iso(row["end_ns"])),
            workers=_workers(workers, row["deployment"]),
            verdict="",
            requests=_counts(outcomes.get(row["deployment"], [])),
            latency=_latency(
                [r for r in latency if r["deployment"] == row["deployment"]],
                outcomes.get(row["deployment"], []),
            ),
            phases=tuple(
                _without(r, "deployment") for r in phases if r["deployment"] == row["deployment"]
            ),
            findings=tuple(_ranked(f for f, _ in findings if f.deployment == row["deployment"])),
            conditions=tuple(
                coverage.conditions(f for f in facts if f["deployment"] == row["deployment"])
            ),
            judged=tuple(
                wording.interference(
                    [r for r in interference if r["deployment"] == row["deployment"]]
                )
            ),
        )
        if policy:
            deployment = _limited(store, deployment)
        spoken = [(f, row) for f, row in findings if heard(f.id)]
        deployments.append(_judged(store, deployment, spoken, facts, dependence, slo))
    sources = tuple(coverage.sources(store))
    return Diagnosis(
        overview=wording.overview(deployments, sources),
        sources=sources,
        deployments=tuple(deployments),
        not_supported=tuple(_unsupported.not_supported(store, deployments)),
        unknown=(*problems, *coverage.unknown(store, deployments)),
    )


def _deployments(store: Store) -> list[dict[str, Any]]:
    return store.short(_DEPLOYMENTS).to_dicts()


def _limited(store: Store, deployment: Deployment) -> Deployment:
    """The deployment judged by the limits given."""
    return replace(
        deployment,
        slo=tuple(goodput.attainment(store, deployment.id)),
        unmatched=goodput.unmatched(store, deployment.id),
        surface=tuple(goodput.surface(store, deployment.id)),
        fluidity=tuple(goodput.fluid(store, deployment.id)),
    )


def _judged(
    store: Store,
    deployment: Deployment,
    findings: list[tuple[Finding, Row]],
    facts: list[dict[str, Any]],
    dependence: list[dict[str, Any]],
    slo: Slo,
) -> Deployment:
    """The deployment with its verdict, and request by request where nothing tells of the inside."""
    mine = [fact for fact in facts if fact["deployment"] == deployment.id]
    notes = marks.notes(mine)
    pools = marks.pools(store, deployment.id)
    if len(pools) > 1:
        notes.append(wording.models(pools))
    deployment = replace(deployment, calls=coverage.calls(mine, deployment.requests))
    if not deployment.requests["count"] or wording.only_refused(deployment):
        deployment = replace(deployment, figures=tuple(marks.figures(store, deployment.id)))
    if deployment.latency and not wording.phases_known(deployment):
        deployment = replace(
            deployment,
            marks=tuple(marks.marks(store, deployment.id, slo)),
            dependence=tuple(
                _without(d, "deployment") for d in dependence if d["deployment"] == deployment.id
            ),
        )
    deployment = replace(deployment, notes=tuple(notes))
    rows = {f.id: row for f, row in findings if f.deployment == deployment.id}
    telling = replace(deployment, findings=tuple(f for f in deployment.findings if f.id in rows))
    return replace(deployment, verdict=wording.verdict(telling, rows))


def _findings(
    store: Store, asked: Mapping[str, Mapping[str, object]], problems: list[str]
) -> list[tuple[Finding, Row]]:
    """The rows of these finding queries (parameters by name), with their words."""
    found: list[tuple[Finding, Row]] = []
    windows = _windows(store, problems)
    for name, parameters in asked.items():
        try:
            rows = store.query(name, **parameters)
            found += [
                (wording.finding(name, row, windows.get((row["deployment"], name))), row)
                for row in rows.iter_rows(named=True)
            ]
        except BaseException as error:  # one that breaks down leaves the others alone
            reraise_stop(error)
            _log.debug("finding %s failed", name, exc_info=True)
            problems.append(f"finding {name} failed: {in_one_line(error)}; {REPORT}")
    return found


def _windows(store: Store, problems: list[str]) -> dict[tuple[str | None, str], Row]:
    """The stretch of time in which a finding is concentrated, by deployment and finding."""
    try:
        rows = store.query("finding_windows").filter("concentrated").to_dicts()
    except BaseException as error:
        reraise_stop(error)
        _log.debug("finding_windows failed", exc_info=True)
        problems.append(f"when findings happened: {in_one_line(error)}; {REPORT}")
        return {}
    return {(row["deployment"], row["finding"]): row for row in rows}


def _finding_queries(
    policy: SloPolicy | None, hold: Callable[[str], bool]
) -> dict[str, dict[str, object]]:
    """The findings that can have rows, with those of their parameters that the user's limits set."""
    slo = policy.single() if policy else Slo()
    limits = {f"slo_{key}": value for key, value in slo.limits().items()}
    return {
        query.name: {p.name: limits[p.name] for p in query.params if p.name in limits}
        for query in library.queries().values()
        # Planning one whose condition (`when:` of its header) does not hold is not worth it.
        if query.kind == "findings" and (not query.when or hold(query.when))
    }


def _problems(store: Store) -> list[str]:
    """What stages before could not do."""
    rows = store.rows("SELECT DISTINCT value FROM facts WHERE key = ? ORDER BY value", [PROBLEM])
    return [str(value) for (value,) in rows]


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
        "alone": bool(row["alone"]),
    }


def _outcomes(store: Store) -> dict[str, list[Row]]:
    """How the requests of each deployment ended, and how many of them without a first token."""
    found: dict[str, list[Row]] = {}
    for row in store.short(_OUTCOMES).iter_rows(named=True):
        found.setdefault(row["deployment"], []).append(row)
    return found


def _counts(outcomes: Sequence[Row]) -> dict[str, int]:
    known = {row["outcome"]: row["requests"] for row in outcomes}
    counts = {name: known.get(name, 0) for name in ("completed", "failed", "aborted", "unknown")}
    return {"count": sum(known.values()), **counts}


def _latency(rows: Sequence[Row], outcomes: Sequence[Row]) -> tuple[dict[str, Any], ...]:
    """Latency of a deployment; a TTFT without those that did not get that far says so."""
    left_out = wording.survivors({row["outcome"]: row for row in outcomes})
    told = [_without(row, "deployment") for row in rows]
    for row in told:
        if left_out and row["metric"] == "ttft_ms":
            row["definition"] = f"{row['definition'] or 'definition unknown'}; {left_out}"
    return tuple(told)


def _without(row: Row, *names: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in names}
