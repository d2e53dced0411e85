"""The story of one request: its records, why they are one request, where its time went, what each system said."""

from __future__ import annotations

from typing import Any

from pdtrace import numbers
from pdtrace.errors import PdtraceError
from pdtrace.phrases import shorten, worker_names
from pdtrace.store import Store

SLOWEST = "slowest"
COARSE_NS = 10_000_000  # instants coarser than this say so


def explain(store: Store, wanted: str) -> dict[str, Any]:
    """Everything known of a request, found by any of its ids (or 'slowest').

    Raises PdtraceError when no request or more than one has that id.
    """
    wanted = wanted.encode("utf-8", "replace").decode()  # arguments may hold bytes that are no text
    request = find(store, wanted)
    row = _rows(store, "SELECT * FROM requests WHERE request = ?", request)[0]
    names = _names(store, row["deployment"])
    return {
        "request": request,
        "title": f"request {request}",
        "lines": _summary(row, names),
        "sections": [
            section
            for section in (
                _observations(store, request),
                _phases(store, request, row, names),
                _legs(store, request, row, names),
                _edges(store, request),
                _clocks(store, request, names),
                _reported(store, request),
                _streams(store, request),
            )
            if section["rows"]
        ],
    }


def _clocks(store: Store, request: str, names: dict[str, str]) -> dict[str, Any]:
    """By how much the clocks of its workers were moved, and how well that is known."""
    found = _rows(
        store,
        """SELECT c.domain, c.reference, w.offset_ns, w.half_width_ns, w.drift_ppm, w.feasible
           FROM clocks c
           JOIN clock_windows w ON w.domain = c.domain AND w.reference = c.reference
           JOIN (SELECT worker, min(start_ns) AS start_ns FROM legs WHERE request = ? GROUP BY worker) l
             ON l.worker = c.domain AND w.start_ns <= coalesce(l.start_ns, w.start_ns)
           QUALIFY row_number() OVER (PARTITION BY c.domain, c.reference ORDER BY w.start_ns DESC) = 1
           ORDER BY c.domain""",
        request,
    )
    rows = [
        {
            "clock of": names.get(row["domain"], row["domain"]),
            "against": names.get(row["reference"], row["reference"]),
            "moved by": _signed(-row["offset_ns"]),
            "±": "unknown: bounds cross"
            if row["half_width_ns"] is None
            else numbers.duration(row["half_width_ns"] / 1e6),
        }
        for row in found
    ]
    return {"title": "Clocks that were moved", "rows": rows}


def _signed(offset_ns: int) -> str:
    return ("-" if offset_ns < 0 else "+") + numbers.duration(abs(offset_ns) / 1e6)


def _after(instant: int | None, origin: int | None, resolution_ns: int | None = None) -> str:
    """An instant counted from the start of the window; coarse ones say how coarse they are."""
    if instant is None or origin is None:
        return ""
    ms = (instant - origin) / 1e6
    text = ("-" if ms < 0 else "+") + numbers.duration(abs(ms))
    if (resolution_ns or 1) >= COARSE_NS:
        text += f" ±{numbers.short((resolution_ns or 1) / 1e6)}"
    return text


def _names(store: Store, deployment: str | None) -> dict[str, str]:
    """Short names of the deployment's workers."""
    rows = _rows(store, "SELECT worker, name, role FROM workers WHERE deployment = ?", deployment)
    return worker_names(rows)


def _rows(store: Store, query: str, *parameters: object) -> list[dict[str, Any]]:
    cursor = store.cursor()
    relation = cursor.execute(query, list(parameters))
    names = [item[0] for item in relation.description or ()]
    return [dict(zip(names, values, strict=True)) for values in relation.fetchall()]


def find(store: Store, wanted: str) -> str:
    """The request that has this id, whoever gave it, or the slowest one."""
    if not wanted.strip():
        raise PdtraceError(
            "no request has the id ''", "give a request id, trace id or span id, or 'slowest'"
        )
    if wanted == SLOWEST:
        rows = _rows(
            store,
            "SELECT request FROM requests ORDER BY coalesce(ttft_ms, e2e_ms) DESC NULLS LAST, request LIMIT 1",
        )
        if not rows:
            raise PdtraceError(
                "there are no requests in these data", "`pdtrace coverage` shows what there is"
            )
        return str(rows[0]["request"])
    exact = _rows(store, "SELECT request FROM requests WHERE request = ?", wanted)
    if exact:
        return wanted
    found = _rows(
        store,
        """SELECT DISTINCT r.request, r.deployment FROM requests r LEFT JOIN legs l USING (request)
           WHERE list_contains([r.external_id, r.trace_id, l.request_id, l.external_id, l.trace_id, l.leg,
                                l.span_id, l.remote_id], ?)
              OR starts_with(l.request_id, ?) OR starts_with(r.request, ?)
           ORDER BY r.request LIMIT 20""",
        wanted, wanted, wanted,
    )  # fmt: skip
    if not found:
        raise PdtraceError(
            f"no request has the id {wanted}",
            "give a request id, trace id or span id, or 'slowest'; `pdtrace query requests PATH` lists them",
        )
    if len(found) > 1:
        names = ", ".join(str(row["request"]) for row in found[:6])
        raise PdtraceError(
            f"{wanted} fits {len(found)}{' or more' if len(found) == 20 else ''} requests",
            f"name one of: {names}",
        )
    return str(found[0]["request"])


def _summary(row: dict[str, Any], names: dict[str, str]) -> list[str]:
    tokens = f"{numbers.count(row['prompt_tokens'])} prompt tokens ({numbers.count(row['cached_tokens'])} cached), {numbers.count(row['output_tokens'])} output tokens"
    lines = [
        f"{row['outcome']}{' (' + row['error'] + ')' if row['error'] else ''}, {'mode unknown' if row['mode'] in {None, 'unknown'} else row['mode']}, {tokens}",
        (
            f"TTFT {numbers.duration(row['ttft_ms'])}, whole {numbers.duration(row['e2e_ms'])}, "
            f"per output token {numbers.duration(row['tpot_ms'])} as the {row['first_token_observer'] or 'records'} saw it"
        ),
    ]
    if (row["streams"] or 1) > 1:
        lines.append(f"{row['streams']} streams (n = {row['streams']})")
    if (row["attempts"] or 1) > 1:
        lines.append(f"{row['attempts']} attempts")
    workers = [w for w in (row["prefill_worker"], row["decode_worker"]) if w]
    if workers:
        lines.append(
            "workers: " + " → ".join(names.get(w, shorten(w)) for w in dict.fromkeys(workers))
        )
    if row["note"]:
        lines.append(f"note: {row['note']}")
    return lines


def _observations(store: Store, request: str) -> dict[str, Any]:
    rows = _rows(
        store, "SELECT * FROM observations WHERE request = ? ORDER BY start_ns NULLS LAST", request
    )
    return {
        "title": "As each observer saw it",
        "columns": ["observer", "TTFT", "total", "per token", "level", "from … to"],
        "rows": [
            [r["observer"], *(numbers.duration(r[k]) for k in ("ttft_ms", "e2e_ms", "tpot_ms")),
             f"{r['level'] or '?'} {r['basis'] or ''}", r["definition"] or ""]
            for r in rows
        ],
    }  # fmt: skip


def _phases(
    store: Store, request: str, row: dict[str, Any], names: dict[str, str]
) -> dict[str, Any]:
    rows = _rows(store, "SELECT * FROM phases WHERE request = ? ORDER BY start_ns", request)
    origin = row["start_ns"]
    checks = _rows(store, "SELECT * FROM partition_checks WHERE request = ?", request)
    note = ""
    if checks:
        c = checks[0]
        note = (
            f"the phases add up to {c['window_ns'] / 1e6:,.3f} ms exactly; {c['clip_ns'] / 1e6:.3f} ms were cut off "
            f"intervals that stick out, {c['overlap_ns'] / 1e6:.3f} ms were covered twice"
        )
    first = row["first_token_ns"]
    return {
        "title": "Where its time went (from the start of its window)",
        "columns": ["from", "duration", "phase", "detail", "worker", "basis", "remark"],
        "rows": [
            [
                _after(r["start_ns"], origin),
                numbers.duration((r["end_ns"] - r["start_ns"]) / 1e6),
                r["phase"] + (" ◂ first token" if first is not None and r["start_ns"] <= first < r["end_ns"] else ""),
                r["detail"], _short(r["worker"], names), "up to" if r["basis"] == "upper_bound" else r["basis"] or "", r["semantics"] or "",
            ]
            for r in rows
        ],
        "note": note,
    }  # fmt: skip


def _short(worker: str | None, names: dict[str, str]) -> str:
    return "" if worker is None else names.get(worker, shorten(worker))


def _legs(store: Store, request: str, row: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    rows = _rows(
        store,
        """SELECT l.*, s.path FROM legs l LEFT JOIN sources s USING (source)
           WHERE request = ? ORDER BY start_ns NULLS LAST, leg""",
        request,
    )
    origin = row["start_ns"]

    return {
        "title": "Records of it",
        "columns": ["observer", "role", "worker", "start", "first token", "end", "status", "id", "source"],
        "rows": [
            [r["observer"] or "", (r["role"] or "?") + (" (hop)" if r["container"] else ""), _short(r["worker"], names),
             *(_after(r[key], origin, r["resolution_ns"]) for key in ("start_ns", "first_token_ns", "end_ns")),
             "not said" if r["status"] in {None, "unknown"} else r["status"],
             r["request_id"] or r["leg"].removeprefix(r["path"] or " "), r["path"] or ""]
            for r in rows
        ],
    }  # fmt: skip


def _edges(store: Store, request: str) -> dict[str, Any]:
    rows = _rows(
        store,
        """SELECT e.rule, e.key, count(*) AS n FROM identity_edges e JOIN legs l ON l.leg = e.leg_b
           WHERE l.request = ? GROUP BY ALL ORDER BY 1, 2""",
        request,
    )
    return {
        "title": "Why these records are one request",
        "columns": ["rule", "what matched", "joins"],
        "rows": [[r["rule"], r["key"] or "", r["n"]] for r in rows],
    }


def _reported(store: Store, request: str) -> dict[str, Any]:
    rows = _rows(
        store,
        """SELECT r.*, l.observer, l.role FROM reported r JOIN legs l USING (leg)
           WHERE l.request = ? ORDER BY l.start_ns, r.quantity""",
        request,
    )
    return {
        "title": "What each system says of itself (untouched)",
        "columns": ["quantity", "value", "by", "what it computes"],
        "rows": [
            [r["quantity"], numbers.quantity(r["value"] * 1000, "ms") if r["unit"] == "s" and r["value"] is not None
             else numbers.quantity(r["value"], r["unit"]), r["role"] or r["observer"] or "", r["definition"] or ""]
            for r in rows
        ],
    }  # fmt: skip


def _streams(store: Store, request: str) -> dict[str, Any]:
    rows = _rows(
        store,
        """SELECT s.observer, s.stream, s.emission, len(gaps_us) AS n, list_aggregate(gaps_us, 'median') / 1e3 AS p50,
                  list_max(gaps_us) / 1e3 AS worst, list_position(gaps_us, list_max(gaps_us)) AS at
           FROM streams s JOIN legs l USING (leg) WHERE l.request = ? ORDER BY 1, 2""",
        request,
    )
    return {
        "title": "Its stream",
        "columns": ["observer", "stream", "gaps", "median gap", "longest gap", "after emission"],
        "rows": [
            [r["observer"] or "", r["stream"] or 0, f"{r['n']} per {r['emission'] or 'emission'}",
             numbers.duration(r["p50"]), numbers.duration(r["worst"]), r["at"]]
            for r in rows
        ],
    }  # fmt: skip
