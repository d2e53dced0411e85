"""Why are these slow: the slow requests, or those that miss their limits, against the rest, attribute by attribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from pdtrace import _slow_attributes, _slow_predicate, goodput
from pdtrace.methods import contrast
from pdtrace.model import SloPolicy
from pdtrace.records import dataclass
from pdtrace.store import Store

SCHEMA = "pdtrace.slow/1"
TENTH = 0.9  # the slowest tenth lies above this quantile
EXAMPLES = 5
_HELD = ("request_values", "phase_by_request")
_MEASURES = ("ttft_ms", "e2e_ms", "tpot_ms", "prompt_tokens", "output_tokens")
_WANTED = ", ".join(
    dict.fromkeys(["deployment", "request", "counted", *_MEASURES, *_slow_attributes.COLUMNS])
)


@dataclass(frozen=True)
class Question:
    """How the requests were parted."""

    kind: str  # where, slo or slowest_tenth
    text: str  # the condition, the limits, or the measure
    columns: frozenset[str]  # what the parting looked at
    measure: str  # ttft_ms or e2e_ms: what is shown first
    threshold_ms: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two groups of requests of one deployment, and what sets them apart."""

    deployment: str
    name: str
    question: Question
    selected: int
    rest: int
    unknown: int  # the condition cannot be told
    left_out: int  # not asked: failed or aborted requests
    observer: str | None  # whose TTFT it is
    level: str
    medians: Mapping[str, tuple[float | None, float | None]]  # of the selected and of the rest
    attributes: tuple[contrast.Attribute, ...]
    not_tried: Mapping[str, str]
    examples: tuple[Mapping[str, Any], ...]

    @property
    def titles(self) -> Mapping[str, str]:
        """How people call the attributes."""
        return _slow_attributes.TITLES

    @property
    def too_few(self) -> bool:
        """Whether one of the groups is too small to compare."""
        return min(self.selected, self.rest) < contrast.NEEDED


@dataclass(frozen=True)
class Answer:
    """Each deployment's comparison."""

    comparisons: tuple[Comparison, ...]
    alpha: float = contrast.ALPHA  # chance of naming any attribute when nothing differs
    needed: int = contrast.NEEDED  # requests that each group needs

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON (docs/slow.md)."""
        return {"schema": SCHEMA, "deployments": [_dict(c) for c in self.comparisons]}


def slow(store: Store, where: str | None = None, policy: SloPolicy | None = None) -> Answer:
    """Each deployment's slow requests against its others: by a condition, by limits, or the slowest tenth by TTFT.

    Raises BadOption for a condition that is none.
    """
    columns = _slow_predicate.named(store, where) if where is not None else frozenset()
    goodput.give(store, policy if where is None else None)
    with store.computed_once(*_HELD):
        if where is not None:
            rows = _slow_predicate.chosen(store, where, _WANTED)
        elif policy is not None:
            rows = store.sql(_BY_LIMITS)
        else:
            rows = store.sql(
                f"SELECT {_WANTED}, NULL::BOOLEAN AS selected FROM {_slow_predicate.REQUESTS}"
            )
        deployments = store.sql(_DEPLOYMENTS).to_dicts()
    return Answer(
        tuple(
            _compared(
                rows.filter(pl.col("deployment") == d["deployment"]), d, where, policy, columns
            )
            for d in deployments
        )
    )


_BY_LIMITS = f"""
SELECT a.*, CASE WHEN s.ended = 'completed' THEN NOT s.good END AS selected, s.ended
FROM (SELECT {_WANTED} FROM {_slow_predicate.REQUESTS}) AS a
JOIN slo_requests AS s ON s.request = a.request
WHERE s.position IS NOT NULL
"""

# Whose TTFT it is: the headline's; where there is none, that of the only observer who saw any (view request_values).
_DEPLOYMENTS = """
WITH seen AS (
  SELECT deployment, observer, max(level) AS level, count(*) OVER (PARTITION BY deployment) AS observers
  FROM observations
  WHERE ttft_ms IS NOT NULL
  GROUP BY deployment, observer
)
SELECT d.deployment, coalesce(d.name, d.deployment) AS name, s.observer, coalesce(s.level, 'C') AS level
FROM deployments AS d
JOIN (SELECT deployment, count(*) AS n FROM requests GROUP BY deployment) AS r
  ON r.deployment = d.deployment
LEFT JOIN seen AS s ON s.deployment = d.deployment
  AND (s.observer = d.headline_observer OR (d.headline_observer IS NULL AND s.observers = 1))
ORDER BY r.n DESC, d.name, d.deployment
"""


def _compared(
    rows: pl.DataFrame,
    deployment: Mapping[str, Any],
    where: str | None,
    policy: SloPolicy | None,
    columns: frozenset[str],
) -> Comparison:
    """The deployment's requests parted and compared."""
    everything = rows.height
    if where is not None:
        question = Question("where", where, columns, "e2e_ms" if "e2e_ms" in columns else "ttft_ms")
    elif policy is not None:
        rows = rows.filter(pl.col("ended") == "completed")
        question = Question("slo", _limits(policy), _asked(policy), "ttft_ms")
    else:
        rows, question = _slowest(rows.filter("counted"))
    parted = rows.filter(pl.col("selected").is_not_null())
    group = parted["selected"].fill_null(value=False).to_numpy().astype(bool)
    selected = int(group.sum())
    symptom = "ttft_phase" if question.measure == "ttft_ms" else "main_phase"
    tried, left = (
        _slow_attributes.gather(parted, question.columns, symptom) if parted.height else ({}, {})
    )
    enough = min(selected, len(group) - selected) >= contrast.NEEDED
    return Comparison(
        deployment["deployment"], deployment["name"], question, selected, len(group) - selected,
        rows.height - parted.height, everything - rows.height, deployment["observer"], deployment["level"],
        _medians(parted), contrast.contrast(group, tried) if enough and tried else (), left,
        _examples(parted, question.measure),
    )  # fmt: skip


def _slowest(rows: pl.DataFrame) -> tuple[pl.DataFrame, Question]:
    """The slowest tenth by TTFT; by the whole duration where no first token was seen."""
    measure = "ttft_ms" if rows["ttft_ms"].null_count() < rows.height else "e2e_ms"
    limit = rows[measure].quantile(TENTH, "linear") if rows.height else None
    # With no value at all there is no limit, and nothing is known of any request.
    rows = rows.with_columns(selected=pl.col(measure) > pl.lit(limit, dtype=pl.Float64))
    columns = frozenset([measure])
    return rows, Question("slowest_tenth", measure, columns, measure, limit)


def _limits(policy: SloPolicy) -> str:
    parts = []
    for c in policy.classes:
        limits = ", ".join(
            f"{k.removesuffix('_ms')} {v:g} ms" for k, v in c.limits.limits().items()
        )
        parts.append(f"{c.name}: {limits}")
    return "; ".join(parts)


def _asked(policy: SloPolicy) -> frozenset[str]:
    """Columns that the limits look at."""
    return frozenset(key for c in policy.classes for key in c.limits.limits())


def _medians(parted: pl.DataFrame) -> dict[str, tuple[float | None, float | None]]:
    groups = [parted.filter("selected"), parted.filter(~pl.col("selected"))]
    return {
        key: tuple(None if v is None else float(v) for v in (g[key].median() for g in groups))  # type: ignore[arg-type,misc]
        for key in _MEASURES
    }


def _examples(parted: pl.DataFrame, measure: str) -> tuple[Mapping[str, Any], ...]:
    """The slowest of the selected."""
    found = parted.filter("selected").sort(measure, descending=True, nulls_last=True).head(EXAMPLES)
    return tuple(found.select("request", *_MEASURES).to_dicts())


def _dict(c: Comparison) -> dict[str, Any]:
    return {
        "id": c.deployment,
        "name": c.name,
        "question": {"kind": c.question.kind, "text": c.question.text, "threshold_ms": c.question.threshold_ms},
        "observer": c.observer,
        "level": c.level,
        "requests": {"selected": c.selected, "rest": c.rest, "unknown": c.unknown, "left_out": c.left_out},
        "too_few": c.too_few,
        "medians": {k: {"selected": a, "rest": b} for k, (a, b) in c.medians.items()},
        "correction": "Holm",
        "alpha": contrast.ALPHA,
        "tried": len(c.attributes),
        "attributes": [_attribute(a) for a in c.attributes],
        "not_tried": dict(c.not_tried),
        "examples": [dict(e) for e in c.examples],
    }  # fmt: skip


def _attribute(a: contrast.Attribute) -> dict[str, Any]:
    return {
        "name": a.name,
        "title": _slow_attributes.TITLES[a.name],
        "known": a.known,
        "p": a.p,
        "p_adjusted": a.p_adjusted,
        "stands_out": a.stands_out,
        "association": a.association,
        "proxy_of": a.proxy_of,
        "not_told_from": list(a.not_told_from),
        "values": [
            {
                "value": v.value, "selected": v.selected, "requests": v.requests, "share": v.share,
                "share_interval": [v.share_low, v.share_high], "share_of_others": v.share_of_others,
                "difference": v.difference, "interval": [v.low, v.high], "lift": v.lift,
            }
            for v in a.values
        ],
    }  # fmt: skip
