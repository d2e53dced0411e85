"""Lines and shortened names that text and Markdown share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from pdtrace import numbers, wording
from pdtrace._words_figures import METRIC_HEADS, STEP_HEADS
from pdtrace._words_figures import SHOWN as SHOWN_METRICS
from pdtrace._words_slo import NO_CAPACITY as NO_CAPACITY
from pdtrace._words_slo import slo_line as slo_line
from pdtrace._words_slo import slo_lines as slo_lines
from pdtrace._words_slo import surfaces as surfaces
from pdtrace.marks import SHOWN as SHOWN_MARKS
from pdtrace.wording import MANY as MANY

if TYPE_CHECKING:
    from pdtrace.diagnosis import Deployment
    from pdtrace.model import Finding


def facts_line(deployment: Deployment) -> str:
    """Mode, counts, window and workers in one line."""
    counts = deployment.requests
    parts = [f"mode {deployment.mode}" if deployment.mode == "unknown" else deployment.mode]
    parts.append(numbers.plural(counts["count"], "request"))
    parts += [f"{counts[key]:,} {key}" for key in ("failed", "aborted") if counts[key]]
    if counts["unknown"]:
        parts.append(f"{counts['unknown']:,} of unknown outcome")
    if deployment.calls:
        answered, failed = deployment.calls["answered"], deployment.calls["failed"]
        beyond = (
            " (of the whole log, not only of this stretch)" if deployment.calls["whole_log"] else ""
        )
        parts.append(
            f"{numbers.plural(answered, 'call')} in the access lines, {failed:,} with an error{beyond}"
        )
    if window := _window(*deployment.window):
        parts.append(window)
    alone = sum(1 for worker in deployment.workers if worker.get("alone"))
    roles = Counter(worker["role"] for worker in deployment.workers if not worker.get("alone"))
    if roles:
        named = [
            f"{n} {role}" for role, n in sorted(roles.items(), key=lambda r: r[0] or "~") if role
        ]
        named += [f"{roles[None]} of unknown role"] if roles[None] else []
        named += [f"{alone} by their own log only (these may be the same)"] if alone else []
        parts.append("workers: " + ", ".join(named))
    return " · ".join(parts)


def _window(start: str | None, end: str | None) -> str:
    """The period to the second, the date once where it is one day."""
    if start is None or end is None:
        return ""
    day, first = start[:10], start[11:19]
    last = end[11:19] if end[:10] == day else f"{end[:10]} {end[11:19]}"
    return f"{day} {first} to {last} UTC"


def metric_name(row: Mapping[str, Any]) -> str:
    """TTFT, E2E, TPOT or ITL."""
    return str(row["metric"]).removesuffix("_ms").upper()


def definitions(deployment: Deployment) -> list[str]:
    """What each latency means, each definition once; the headline's first."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in sorted(deployment.latency, key=lambda r: not r["headline"]):
        text = (row["definition"] or "definition unknown") + _coarse(row)
        text = text.replace(f" as the {row['observer']} saw it", " as that observer saw it")
        said.setdefault((metric_name(row), text), []).append(row["observer"])
    order = ("TTFT", "E2E", "TPOT", "ITL")
    lines = sorted(said.items(), key=lambda item: order.index(item[0][0]))
    many = Counter(metric for metric, _ in said)
    return [
        f"{metric}{' (' + ', '.join(who) + ')' if many[metric] > 1 else ''}: {text}"
        for (metric, text), who in lines
    ]


def _coarse(row: Mapping[str, Any]) -> str:
    """How coarse the stamps are that the values come from, where it matters."""
    step = row.get("resolution_ms")
    if step is None:
        return ""
    each = (
        ""
        if row["metric"] == "tpot_ms"
        else f": each value is known to within {numbers.short(step)}"
    )
    return f"; from stamps no finer than {numbers.short(step)}{each}"


def phase_cell(row: Mapping[str, Any], key: str) -> str:
    """A duration of a phase; upper bounds say so."""
    text = numbers.duration(row[key])
    return f"≤ {text}" if row["basis"] == "upper_bound" and row[key] is not None else text


def mark_note(deployment: Deployment) -> str:
    """How many rows of a longer table are shown."""
    total, shown = deployment.requests["count"], len(deployment.marks)
    if shown >= total:
        return ""
    which = "the worst" if shown == SHOWN_MARKS else "all"
    return f"{which} {shown} marked ones of {total:,} requests; `pdtrace query request_marks PATH` gives every request"


def dependence_lines(deployment: Deployment) -> list[str]:
    """Whether long input drives first tokens and long output the total."""
    return wording.dependence(deployment.dependence)


def figure_tables(deployment: Deployment) -> list[tuple[Sequence[str], list[list[str]]]]:
    """What steps and metrics say where no request is known: heads and rows."""
    tables = (
        (STEP_HEADS, wording.step_rows(deployment.figures)),
        (METRIC_HEADS, wording.metric_rows(deployment.figures)),
    )
    return [(heads, rows) for heads, rows in tables if rows]


def figure_heading(deployment: Deployment) -> str:
    """What stands over these tables."""
    known = " that went well" if deployment.requests["count"] else ""
    return f"What steps and metrics say (no request{known} is known)"


def figure_note(deployment: Deployment) -> str:
    """What the metrics are taken over, and how many are not shown."""
    metrics = sum(1 for row in deployment.figures if row["kind"] != "steps")
    left = metrics - SHOWN_METRICS
    told = []
    if metrics and len(deployment.workers) > 1:
        told.append(f"means and ranges are over {len(deployment.workers)} workers together")
    if left > 0:
        told.append(f"{left} more metrics: `pdtrace query metric_summary PATH`")
    return "; ".join(told)


def evidence_line(finding: Finding) -> str:
    """Number, interval, requests, cost, level and sources of a finding."""
    cost = f"{numbers.seconds(finding.cost_s)} lost" if finding.cost_s else ""
    main = numbers.quantity(finding.value, finding.unit) if finding.value is not None else ""
    if main and cost == f"{main} lost":
        main, cost = cost, ""
    parts = [f"{_VALUE_NAMES.get(finding.id, '')}{main}" if main else ""]
    if finding.interval is not None and finding.interval[0] < finding.interval[1]:
        low, high = (numbers.quantity(v, finding.unit) for v in finding.interval)
        parts.append(f"interval {low} – {high}")
    if finding.requests is not None:
        parts.append(numbers.plural(finding.requests, "request"))
    parts.append(cost)
    parts.append(f"evidence {finding.level}")
    if finding.sources:
        names = short_paths(finding.sources)[:3]
        more = f" +{len(finding.sources) - 3}" if len(finding.sources) > 3 else ""
        parts.append("from " + ", ".join(names) + more)
    return " · ".join(part for part in parts if part)


# What the main number of a finding is, where its title does not say so.
_VALUE_NAMES = {"slow_first_token": "p95 ", "slow_stream": "p95 ", "clock_skew": "worst "}


def unused_reason(row: Mapping[str, Any]) -> str:
    """Why a source gave nothing: its own words, and what became of its records."""
    why, reasons = row["why"], row["skipped_reasons"]
    main = max(reasons, key=reasons.get, default="")
    if not main or row["used"] or main in why:
        return str(why or main)
    return f"{why}; {main}: {reasons[main]:,}" if why else main


def short_paths(paths: Sequence[str]) -> list[str]:
    """File names, with so many folders as tell them apart."""
    for parts in (1, 2, 3):
        short = ["/".join(PurePosixPath(path).parts[-parts:]) for path in paths]
        if len(set(short)) == len(set(paths)):
            return [shorten_path(name, 48) for name in short]
    return [shorten_path(path, 48) for path in paths]


def worker_names(workers: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Short names by worker id: its own name where unique and short, else role and number."""
    rows = sorted(workers, key=lambda w: (w["role"] or "worker", w["name"] or "", w["worker"]))
    own = Counter(row["name"] for row in rows)
    of_role = Counter(row["role"] or "worker" for row in rows)
    seen: Counter[str] = Counter()
    names = {}
    for row in rows:
        role = row["role"] or "worker"
        seen[role] += 1
        if row["name"] and own[row["name"]] == 1 and not _is_id(row["name"]):
            names[row["worker"]] = shorten(row["name"], 28)
        else:
            names[row["worker"]] = role if of_role[role] == 1 else f"{role}-{seen[role]}"
    return names


def _is_id(name: str) -> bool:
    """Whether a name is a uuid, a hash or a number, which says nothing to people."""
    plain = name.replace("-", "").replace(":", "")
    return len(plain) >= 12 and sum(c in "0123456789abcdef" for c in plain.lower()) == len(plain)


def shorten(text: str, width: int = 32) -> str:
    """Long ids keep their beginning and end; a kind in front of a long id keeps eight signs of it."""
    if len(text) <= width:
        return text
    kind, colon, rest = text.partition(":")
    if colon and len(kind) <= 12 and _is_id(rest):
        return f"{kind}:{rest[:8]}…"
    if width < 20:
        return text[: width - 1] + "…"
    return f"{text[: width - 9]}…{text[-8:]}"


def shorten_path(path: str, width: int = 48) -> str:
    """Long paths keep their end."""
    return path if len(path) <= width else "…" + path[-(width - 1) :]
