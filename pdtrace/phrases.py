"""Lines and shortened names that text and Markdown share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdtrace import numbers

if TYPE_CHECKING:
    from pdtrace.diagnose import Deployment
    from pdtrace.model import Finding


def facts_line(deployment: Deployment) -> str:
    """Mode, counts, window and workers in one line."""
    counts = deployment.requests
    parts = [deployment.mode, numbers.plural(counts["count"], "request")]
    parts += [f"{counts[key]:,} {key}" for key in ("failed", "aborted", "unknown") if counts[key]]
    if deployment.window[0]:
        parts.append(f"{deployment.window[0]} to {deployment.window[1]}")
    roles: dict[str, int] = {}
    for worker in deployment.workers:
        role = worker["role"] or "role unknown"
        roles[role] = roles.get(role, 0) + 1
    parts.append("workers: " + ", ".join(f"{n} {role}" for role, n in sorted(roles.items())))
    return " · ".join(parts)


def evidence_line(finding: Finding, cost: str) -> str:
    """Number, interval, requests, level and sources of a finding."""
    parts = [
        f"{numbers.quantity(finding.value, finding.unit)}" if finding.value is not None else ""
    ]
    if finding.interval is not None and finding.interval[0] < finding.interval[1]:
        low, high = (numbers.quantity(v, finding.unit) for v in finding.interval)
        parts.append(f"interval {low} – {high}")
    if finding.requests is not None:
        parts.append(numbers.plural(finding.requests, "request"))
    parts.append(cost)
    parts.append(f"evidence {finding.level}")
    if finding.sources:
        names = [shorten_path(path, 40) for path in finding.sources[:3]]
        more = f" +{len(finding.sources) - 3}" if len(finding.sources) > 3 else ""
        parts.append("from " + ", ".join(names) + more)
    return " · ".join(part for part in parts if part)


def shorten(text: str, width: int = 32) -> str:
    """Long ids keep their beginning and end."""
    return text if len(text) <= width else f"{text[: width - 9]}…{text[-8:]}"


def shorten_path(path: str, width: int = 48) -> str:
    """Long paths keep their end."""
    return path if len(path) <= width else "…" + path[-(width - 1) :]
