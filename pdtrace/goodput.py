"""Limits against what happened: attainment, goodput, fluidity, and the same under other limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import polars as pl

from pdtrace import slo
from pdtrace.methods import fluidity
from pdtrace.model import Slo, SloPolicy
from pdtrace.store import Store

READ_BY_MANY = ("slo_requests",)
_GAPS_AT_ONCE = 4_000_000  # streams of so many gaps are judged together, so that memory stays flat

_STREAMS = """
SELECT s.leg, s.stream, s.request, hash(s.request) % {parts} AS part, o.ttft_ms * 1e3 AS ttft_us,
  round(r.ttft_limit_ms * 1e3) AS first_deadline_us,
  CAST(round(coalesce(r.tpot_limit_ms, r.itl_limit_ms) * 1e3) AS BIGINT) AS deadline_us
FROM request_streams AS s
JOIN slo_requests AS r ON r.request = s.request
JOIN observations AS o ON o.request = s.request AND o.observer = s.observer
WHERE r.ended = 'completed' AND o.ttft_ms IS NOT NULL AND r.ttft_limit_ms IS NOT NULL
  AND coalesce(r.tpot_limit_ms, r.itl_limit_ms) > 0.001
"""

_PART = """
SELECT j.request, j.ttft_us, j.first_deadline_us, j.deadline_us, s.gaps_us, s.emission_tokens
FROM _streams_to_judge AS j
JOIN streams AS s ON s.leg = j.leg AND coalesce(s.stream, 0) = j.stream
WHERE j.part = {part}
"""


def as_policy(given: Slo | SloPolicy | None) -> SloPolicy | None:
    """Limits for every request as one class; None where there is no limit at all."""
    if given is None or isinstance(given, SloPolicy):
        return given
    return slo.one_class(given) if given.limits() else None


def give(store: Store, policy: SloPolicy | None) -> None:
    """Fill the classes that the views of limits read."""
    store.give("slo_classes", slo.rows(policy) if policy else [])
    store.give("slo_fluidity", [])


def judge_streams(store: Store) -> None:
    """Fill the fluidity of each request; nothing where no class has both deadlines. After `give`."""
    gaps = store.scalar(
        """SELECT sum(len(gaps_us))::BIGINT FROM streams
           WHERE EXISTS (FROM slo_classes WHERE coalesce(tpot_ms, itl_ms) > 0 AND ttft_ms > 0)"""
    )
    if not gaps:
        return
    parts = 1 + int(gaps) // _GAPS_AT_ONCE
    store.temporary("_streams_to_judge", store.sql(_STREAMS.format(parts=parts)))
    judged = [fluidity.fluidity(store.sql(_PART.format(part=part))) for part in range(parts)]
    store.execute("DROP TABLE _streams_to_judge")
    store.give("slo_fluidity", pl.concat(judged))


def attainment(store: Store, deployment: str) -> list[dict[str, Any]]:
    """Each class's limits one by one and all together: who met them, of whom, with intervals."""
    rows = store.sql(
        """SELECT a.*, c.conditions, coalesce(c.itl_quantile, 0) AS quantile
           FROM slo_attainment a JOIN slo_classes c USING (position)
           WHERE deployment = $deployment AND metric <> 'none'
           ORDER BY position, list_position(['ttft_ms', 'tpot_ms', 'itl_ms', 'e2e_ms', 'all'], metric)""",
        deployment=deployment,
    ).to_dicts()
    return [_row(row, rows) for row in rows]


def _row(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    parts = [
        r["completed_ratio"]
        for r in rows
        if r["position"] == row["position"] and r["metric"] != "all"
    ]
    joint = row["metric"] == "all" and len(parts) > 1 and None not in parts
    return {
        "class": row["class"],
        "conditions": row["conditions"],
        "metric": row["metric"],
        "quantile": row["quantile"] if row["metric"] == "itl_ms" else None,
        **{
            key: row[key]
            for key in ("limit_ms", "good", "arrivals", "completed", "failed", "client_aborts", "unknown", "single",
                        "undecided", "attainment")
        },
        "interval": [row["attainment_low"], row["attainment_high"]],
        "attainment_if_unknown_good": row["attainment_high_ratio"],
        "attainment_of_completed": row["completed_ratio"],
        "interval_of_completed": [row["completed_low"], row["completed_high"]],
        "attainment_without_client_aborts": row["without_aborts_ratio"],
        "good_per_s": row["good_per_s"],
        "window_s": row["window_s"],
        "product_of_parts": math.prod(parts) if joint else None,
    }  # fmt: skip


def surface(store: Store, deployment: str) -> list[dict[str, Any]]:
    """Goodput and attainment of each class under other limits, first token by time per token."""
    return store.sql(
        """SELECT * EXCLUDE (deployment, position) FROM goodput_surface WHERE deployment = $deployment
           ORDER BY position, ttft_limit_ms NULLS LAST, tpot_limit_ms NULLS LAST""",
        deployment=deployment,
    ).to_dicts()


def fluid(store: Store, deployment: str) -> list[dict[str, Any]]:
    """Both fluidity indices of each class."""
    return store.sql(
        """SELECT * EXCLUDE (deployment, position) FROM fluidity_summary
           WHERE deployment = $deployment ORDER BY position""",
        deployment=deployment,
    ).to_dicts()


def unmatched(store: Store, deployment: str) -> int:
    """Requests that no class takes."""
    rows = store.rows(
        "SELECT arrivals FROM slo_attainment WHERE deployment = ? AND metric = 'none'", [deployment]
    )
    return int(rows[0][0]) if rows else 0
