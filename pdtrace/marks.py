"""What a table of requests shows request by request: marks, what lengths drive, how the table was read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pdtrace.model import Slo
from pdtrace.store import Store

SHOWN = 40  # a table of so many rows is shown whole; of more, so many of the marked ones
_BOOLEANS = ("slow_first_token", "slow_stream", "long_input", "long_output")


def marks(store: Store, deployment: str, slo: Slo) -> list[dict[str, Any]]:
    """The requests of a deployment with their marks: all in their order; of more than SHOWN the worst marked ones."""
    limits = ", ".join(
        f"slo_{key} := {value!r}"
        for key, value in (("ttft_ms", slo.ttft_ms), ("tpot_ms", slo.tpot_ms))
        if value is not None
    )
    rows = store.short(
        f"""WITH place AS (
              SELECT l.request, min(s.path) AS path, min(l.record) AS record
              FROM legs l LEFT JOIN sources s USING (source)
              WHERE l.deployment = $deployment AND l.container IS NOT TRUE GROUP BY l.request),
            marked AS (
              SELECT m.*, r.error, r.note, p.path, p.record, count(*) OVER () AS total,
                CASE WHEN m.slow_first_token OR m.slow_stream THEN 0
                     WHEN m.outcome IN ('failed', 'aborted') THEN 1 ELSE 2 END AS rank,
                greatest(m.ttft_ms / m.ttft_limit_ms, m.tpot_ms / m.tpot_limit_ms) AS excess
              FROM request_marks({limits}) m JOIN requests r ON r.request = m.request
              LEFT JOIN place p ON p.request = m.request
              WHERE m.deployment = $deployment)
            SELECT * FROM marked WHERE total <= {SHOWN} OR rank < 2
            ORDER BY CASE WHEN total > {SHOWN} THEN rank ELSE 0 END,
                     CASE WHEN total > {SHOWN} THEN excess END DESC NULLS LAST, path, record, request
            LIMIT {SHOWN}""",
        deployment=deployment,
    )
    return [_mark(row) for row in rows.iter_rows(named=True)]


def _mark(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "request": row["request"],
        "label": _label(row),
        "prompt_tokens": row["prompt_tokens"],
        "cached_tokens": row["cached_tokens"],
        "output_tokens": row["output_tokens"],
        "ttft_ms": row["ttft_ms"],
        "e2e_ms": row["e2e_ms"],
        "tpot_ms": row["tpot_ms"],
        "outcome": row["outcome"],
        **{name: row[name] for name in _BOOLEANS},
        "mark": _words(row),
        "note": row["note"],
    }


def _label(row: Mapping[str, Any]) -> str:
    """The id of the request; where the table gives none, the number of its row."""
    if row["path"] and row["request"] == f"{row['path']}#{row['record']}":
        return f"row {row['record'] + 1}"
    return str(row["request"])


def _words(row: Mapping[str, Any]) -> str:
    if row["outcome"] in {"failed", "aborted"}:
        return f"{row['outcome']} ({row['error']})" if row["error"] else str(row["outcome"])
    parts = []
    if row["slow_first_token"]:
        parts.append("slow first token" + (" (long prompt)" if row["long_input"] else ""))
    elif row["long_input"]:
        parts.append("long prompt")
    if row["slow_stream"]:
        parts.append("slow stream" + (" (long answer)" if row["long_output"] else ""))
    elif row["long_output"]:
        parts.append("long answer")
    return ", ".join(parts)


def pools(store: Store, deployment: str) -> list[dict[str, Any]]:
    """The models of a deployment that has several: requests, typical values; most requests first."""
    named = "SELECT 1 FROM request_values WHERE deployment = ? AND model IS NOT NULL LIMIT 1"
    if not store.rows(named, [deployment]):
        return []
    return store.short(
        """SELECT model, count(*) AS requests, quantile_cont(ttft_ms, 0.5) AS ttft_p50_ms,
                  quantile_cont(tpot_ms, 0.5) AS tpot_p50_ms, max(ttft_typical_ms) IS NOT NULL
                  OR max(tpot_typical_ms) IS NOT NULL AS judged
           FROM request_marks() WHERE deployment = $deployment AND counted AND model IS NOT NULL
           GROUP BY model ORDER BY requests DESC, model""",
        deployment=deployment,
    ).to_dicts()


def figures(store: Store, deployment: str) -> list[dict[str, Any]]:
    """What steps and metrics say of a deployment without requests: step classes, means, ranges."""
    steps = store.short(
        """SELECT 'steps' AS kind, class AS name, 'ms' AS unit, sum(count)::BIGINT AS count, NULL::DOUBLE AS mean,
                  NULL::DOUBLE AS low, NULL::DOUBLE AS high, NULL::BOOLEAN AS since_start,
                  CASE WHEN count(*) = 1 THEN min(p50_ms) END AS p50,
                  CASE WHEN count(*) = 1 THEN min(p99_ms) END AS p99,
                  sum(elapsed_s) / sum(sum(elapsed_s)) OVER () AS share, 'A' AS level
           FROM step_classes WHERE deployment = $deployment GROUP BY class ORDER BY count DESC, class""",
        deployment=deployment,
    ).to_dicts()
    metrics = store.short(
        """SELECT kind, metric AS name, unit, count, mean, low, high, since_start,
                  NULL::DOUBLE AS p50, NULL::DOUBLE AS p99, NULL::DOUBLE AS share, 'D' AS level
           FROM metric_summary WHERE deployment = $deployment ORDER BY kind, metric""",
        deployment=deployment,
    ).to_dicts()
    return steps + metrics


def notes(facts: Iterable[Mapping[str, Any]]) -> list[str]:
    """How a table was read and what was assumed, from the facts that its collector left."""
    lines: dict[str, None] = {}
    said = sorted(
        facts, key=lambda f: (_ORDER.get(f["key"].partition(":")[0], 99), f["source"] or 0)
    )
    for fact in said:
        key, _, column = fact["key"].partition(":")
        if key in _NOTES:
            value = _few(fact["value"]) if key == "columns_not_used" else fact["value"]
            lines[_NOTES[key].format(column=column, value=value)] = None
    return list(lines)


def _few(names: str, shown: int = 10) -> str:
    """The first of many column names."""
    parts = names.split(", ")
    return names if len(parts) <= shown else f"{', '.join(parts[:shown])} and others"


_NOTES = {
    "columns_read": "columns read: {value}",
    "unit_guess": "{column} taken as {value}",
    "time_zone": "{value}",
    "status_basis": "{value}",
    "zero_ttft": "{value}",
    "ttft_equals_total": "{value}",
    "pace_from_rate": "{value}",
    "long_notes_not_stored": "{value}",
    "columns_not_used": "columns not used: {value}",
}
_ORDER = {key: place for place, key in enumerate(_NOTES)}
