"""What the data contain, what is missing, and which switch adds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdtrace import registry

if TYPE_CHECKING:
    from pdtrace.diagnosis import Deployment
    from pdtrace.store import Store

ENOUGH = 0.9  # from here on an item counts as there

# Items of the view coverage_items in words.
ITEM_WORDS = {
    "arrival_time": "arrival times",
    "input_tokens": "input tokens",
    "output_tokens": "output tokens",
    "cached_tokens": "cached prompt tokens",
    "first_token": "times to first token",
    "total_time": "whole durations",
    "outcome": "outcomes",
    "queue_wait": "queue wait",
    "prefill_time": "prefill time",
    "decode_time": "decode time",
    "token_times": "token times",
    "worker_ids": "worker ids",
    "mode": "whether prefill and decode were split",
    "client_view": "the client's view",
    "session": "session ids",
    "explained_time": "an account of the whole request",
    "engine_steps": "engine steps",
    "engine_counters": "engine counters over time",
    "kv_usage": "KV cache usage",
    "router_time": "time in the router",
    "router_decisions": "router decisions",
    "kv_transfer": "KV transfer times",
    "kv_transfer_bytes": "bytes of KV transfers",
    "clocks": "clock offsets",
}

# How to get an item where no collector knows a switch for it.
GENERAL_SWITCHES = {
    "arrival_time": "log the time at which each request arrives",
    "input_tokens": "ask for usage in the answers (stream_options.include_usage)",
    "output_tokens": "ask for usage in the answers (stream_options.include_usage)",
    "cached_tokens": "ask the server for cached tokens in usage.prompt_tokens_details",
    "first_token": "stream the answers and log when the first chunk arrives",
    "total_time": "log when each answer ends",
    "outcome": "log status or finish reason of each request",
    "token_times": "log the time of every chunk on the client",
    "worker_ids": "log which worker served each request",
    "client_view": "add the load generator's per-request file or a client-side log",
    "explained_time": "trace every hop between the outermost observer and the engine",
    "session": "send a session or conversation id and log it",
    "engine_steps": "turn on the engine's per-iteration log",
    "queue_wait": "turn on the engine's request tracing",
    "prefill_time": "turn on the engine's request tracing",
    "decode_time": "turn on the engine's request tracing",
    "kv_usage": "scrape the engine's metrics once a second",
    "engine_counters": "scrape the engine's metrics once a second",
    "router_time": "trace the router",
    "router_decisions": "turn on the router's decision log",
    "kv_transfer": "turn on the transfer engine's telemetry",
    "kv_transfer_bytes": "turn on the transfer engine's telemetry",
    "clocks": "trace both sides of a hop, or synchronise the hosts",
}

# What is missing where every arrival is known, but only from that of the others.
RELATIVE_ARRIVALS = "arrival times on a dated clock (relative ones are there)"
CLOCK_SWITCH = "log the instant, with its date, at which each request arrives, or add a server's records of these requests"

# How to get them where the two workers of P/D pairs are the only observers.
OUTER_SWITCHES = dict.fromkeys(
    ("first_token", "total_time"),
    "trace the router or proxy in front, or add a client-side log: no worker sees a whole request",
)

# Facts that numbers depend on, in the order in which they are shown.
CONDITION_KEYS = (
    "version", "model", "tensor_parallel_size", "data_parallel_size", "max_num_batched_tokens", "max_num_seqs",
    "max_model_len", "chunked_prefill", "prefix_caching", "kv_cache_tokens", "kv_connector", "kv_role", "router_mode",
    "request_rate", "max_concurrency", "num_prompts", "slo", "log_time_zone",
)  # fmt: skip


# A fact about no worker belongs to the deployment of its file's requests.
FACTS = """
WITH single AS (
  SELECT source, min(deployment) AS deployment FROM legs WHERE deployment IS NOT NULL
  GROUP BY source HAVING min(deployment) = max(deployment)
)
SELECT f.*, w.role, coalesce(w.deployment, o.deployment) AS deployment
FROM facts f
LEFT JOIN workers w ON w.worker = f.worker
LEFT JOIN single o ON f.worker IS NULL AND o.source = f.source
"""

_ENGINES = "SELECT DISTINCT deployment, engine FROM workers"
_PAIRS_ALONE = (
    "SELECT deployment FROM deployments WHERE mode = 'disaggregated' AND headline_observer IS NULL"
)
_SKIPPED = "SELECT source, reason, records FROM skipped ORDER BY source, records DESC, reason"
_SOURCES = "FROM sources ORDER BY path"
_SCOPES = "SELECT DISTINCT scope_name FROM spans"
STATEMENTS = (FACTS, _ENGINES, _PAIRS_ALONE, _SKIPPED, _SOURCES, _SCOPES)


def deployment_facts(store: Store) -> list[dict[str, Any]]:
    """What was said of each deployment, and the role of the worker it was said of."""
    return store.short(FACTS).to_dicts()


def conditions(facts: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The facts of a deployment that its numbers depend on; several values are joined by ' / '."""
    values: dict[str, list[str]] = {}
    for fact in facts:
        if fact["value"] not in values.setdefault(fact["key"], []):
            values[fact["key"]].append(fact["value"])
    return [(key, " / ".join(sorted(values[key]))) for key in CONDITION_KEYS if key in values]


def calls(facts: Iterable[Mapping[str, Any]], requests: Mapping[str, int]) -> dict[str, Any] | None:
    """The calls for an answer that access lines count, where they are more than the requests known.

    `whole_log`: they were counted beyond the stretch of time that the requests were cut to.
    """
    counted = {"answered": 0, "failed": 0, "whole_log": False}
    for fact in facts:
        if fact["key"] == "http_calls_whole_log":
            counted["whole_log"] = True
        if fact["key"] in ("http_calls", "http_calls_failed"):
            key = "failed" if fact["key"].endswith("failed") else "answered"
            counted[key] += int(fact["value"])
    return counted if counted["answered"] > requests["count"] else None


def switches(engines: Iterable[str | None]) -> dict[str, str]:
    """How each item is added, for these systems; a collector says it in its SWITCHES."""
    wanted = {engine.lower() for engine in engines if engine}
    found: dict[str, list[str]] = {}
    for module in registry.collectors().values():
        # A title for people may say more than the name that the system's workers bear.
        if {module.TITLE.lower(), str(getattr(module, "ENGINE", "")).lower()} & wanted:
            for item, text in getattr(module, "SWITCHES", {}).items():
                if text not in found.setdefault(item, []):
                    found[item].append(text)
    general = {item: text for item, text in GENERAL_SWITCHES.items() if item not in found}
    return general | {item: "; ".join(texts) for item, texts in found.items()}


def items(store: Store) -> list[dict[str, Any]]:
    """The rows of coverage_items with words and the switch that adds each."""
    engines: dict[str, set[str | None]] = {}
    for deployment, engine in store.short(_ENGINES).iter_rows():
        engines.setdefault(deployment, set()).add(engine)
    known = {deployment: switches(names) for deployment, names in engines.items()}
    general = switches(())
    # Prefill and decode worker each saw a part: their switches are on, an outer observer is missing.
    for deployment in store.short(_PAIRS_ALONE)["deployment"]:
        known.setdefault(deployment, dict(general)).update(OUTER_SWITCHES)
    rows = [
        row
        | {
            "words": ITEM_WORDS.get(row["item"], row["item"]),
            "switch": known.get(row["deployment"], general).get(row["item"]),
        }
        for row in store.query("coverage_items").iter_rows(named=True)
    ]
    undated = [row for row in rows if row["item"] == "arrival_time" and not row["present"]]
    relative = _relative(store) if undated else set()
    for row in undated:
        if row["deployment"] in relative:
            row.update(words=RELATIVE_ARRIVALS, switch=CLOCK_SWITCH)
    return rows


def _relative(store: Store) -> set[str]:
    """Deployments whose requests all have a time on a clock without a date (a trace that starts at 0)."""
    return {
        deployment
        for (deployment,) in store.rows(
            """SELECT deployment FROM legs WHERE request IS NOT NULL AND deployment IS NOT NULL
               GROUP BY deployment HAVING count(DISTINCT request) FILTER (clock_start_ns IS NOT NULL) = count(DISTINCT request)"""
        )
    }


def sources(store: Store) -> list[dict[str, Any]]:
    """Every file, archive member and stream: who read it, its counts, why records were not kept."""
    reasons: dict[int, dict[str, int]] = {}
    for number, reason, records in store.short(_SKIPPED).iter_rows():
        reasons.setdefault(number, {})[reason] = records
    return [
        {
            "path": row["path"],
            "collector": row["collector"],
            "used": bool(row["used"]),
            "why": row["why"] or "",
            "rows_read": row["rows_read"] or 0,
            "rows_kept": row["rows_kept"] or 0,
            "rows_skipped": row["rows_skipped"] or 0,
            "skipped_reasons": reasons.get(row["source"], {}),
        }
        for row in store.short(_SOURCES).iter_rows(named=True)
    ]


def report(store: Store) -> dict[str, Any]:
    """What `pdtrace coverage` shows."""
    rows = items(store)
    deployments = store.short(
        """SELECT d.deployment, d.name, d.mode, count(r.request) AS requests
           FROM deployments d LEFT JOIN requests r USING (deployment) GROUP BY ALL ORDER BY requests DESC, name"""
    ).to_dicts()
    return {
        "deployments": [
            {
                "id": d["deployment"], "name": d["name"], "mode": d["mode"], "requests": d["requests"],
                "items": [
                    {
                        "item": r["words"], "present_ratio": r["present_ratio"], "present": r["present"],
                        "expected": r["expected"], "unit": r["unit"], "applies": r["applies"],
                        "found_in": r["evidence"] if r["present"] else "", "enables": r["enables"], "switch": r["switch"],
                    }
                    for r in rows
                    if r["deployment"] == d["deployment"] and r["applies"] is not False
                ],
            }
            for d in deployments
        ],
        "sources": sources(store),
    }  # fmt: skip


def unknown(store: Store, deployments: Sequence[Deployment]) -> list[str]:
    """What stays unknown and the switch that would tell; what one switch adds stands in one line."""
    names = {d.id: d.name for d in deployments}
    where: dict[tuple[str, str], list[str]] = {}
    nameless = {d.id for d in deployments if not d.requests["count"]}
    place = {d.id: place for place, d in enumerate(deployments)}
    for row in sorted(items(store), key=lambda row: place.get(row["deployment"], len(place))):
        if row["deployment"] in nameless and row["item"] == "first_token" and row["switch"]:
            name = f"{names[row['deployment']]}: " if len(deployments) > 1 else ""
            where.setdefault(("single requests", row["switch"]), []).append(f"{name}none")
        missing = (
            row["applies"] is not False and row["expected"] and row["present_ratio"] is not None
        )
        if missing and row["present_ratio"] < ENOUGH and row["deployment"] in names:
            known = f"{row['present']:,} of {row['expected']:,} {row['unit']}"
            name = f"{names[row['deployment']]}: " if len(deployments) > 1 else ""
            where.setdefault((row["words"], row["switch"] or ""), []).append(name + known)
    lines: dict[tuple[str, str], list[str]] = {}
    for (words, switch), parts in where.items():
        lines.setdefault(("; ".join(parts), switch), []).append(words)
    return _foreign_spans(store) + [
        f"{', '.join(words)}: {'' if parts.endswith('none') else 'known for '}{parts}"
        + (f". To add: {switch}" if switch else "")
        for (parts, switch), words in lines.items()
    ]


def _foreign_spans(store: Store) -> list[str]:
    """Scopes most of whose spans stand in traces without a request: nobody here knows what they mean.

    Most, not all: a gateway that is understood may have started some of their traces.
    """
    claims = registry.claims()
    owners = {
        scope: registry.owner(scope or "no scope", "", frozenset())
        for scope in store.short(_SCOPES)["scope_name"]
    }
    strange = [s for s, owner in owners.items() if owner is None or claims[owner].fallback]
    if not strange:
        return []
    rows = store.rows(
        """WITH known AS (SELECT DISTINCT trace_id FROM legs WHERE trace_id IS NOT NULL)
           SELECT coalesce(nullif(scope_name, ''), 'no scope') AS scope,
             count(*) FILTER (trace_id NOT IN (FROM known)) AS outside
           FROM spans WHERE list_contains($1, coalesce(scope_name, '')) GROUP BY scope_name
           HAVING outside > count(*) / 2
           ORDER BY outside DESC, scope""",
        [[scope or "" for scope in strange]],
    )
    if not rows:
        return []
    scopes = ", ".join(f"{scope} ({spans:,})" for scope, spans in rows[:5])
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return [
        f"what the spans of {scopes}{more} tell: their traces hold no request that is known here"
    ]
