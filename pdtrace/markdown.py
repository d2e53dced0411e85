"""The diagnosis as Markdown, to paste into a ticket or a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pdtrace import numbers
from pdtrace.errors import printable
from pdtrace.phrases import evidence_line, facts_line, shorten, shorten_path

if TYPE_CHECKING:
    from pdtrace.diagnose import Deployment, Diagnosis


def cell(text: object) -> str:
    """A table cell: pipes, line breaks and angle brackets cannot break out of it."""
    plain = (
        printable(str(text)).replace("\\", "\\\\").replace("|", "\\|").replace("\r", " ").replace("\n", " ")
    )
    return plain.replace("<", "&lt;").replace("`", "\\`")


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(map(cell, names)) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def diagnosis_markdown(diagnosis: Diagnosis) -> str:
    """The whole diagnosis."""
    parts = [cell(diagnosis.overview), ""]
    for deployment in diagnosis.deployments:
        parts += _deployment(deployment)
    for title, items in (
        ("What these data do not support", diagnosis.not_supported),
        ("What stays unknown, and how to find out", diagnosis.unknown),
    ):
        if items:
            parts += [f"### {title}", "", *(f"- {cell(item)}" for item in items), ""]
    rows = [
        (
            shorten_path(s["path"]),
            s["collector"] or "",
            s["rows_read"],
            s["rows_kept"],
            s["rows_skipped"],
            s["why"],
        )
        for s in diagnosis.sources
    ]
    parts += [
        "### Sources",
        "",
        table(("path", "read as", "read", "kept", "skipped", "remark"), rows),
    ]
    return "\n".join(parts)


def _deployment(deployment: Deployment) -> list[str]:
    parts = [
        f"## {cell(deployment.name or deployment.id)}",
        "",
        f"**{cell(deployment.verdict)}**",
        "",
    ]
    parts += [cell(facts_line(deployment)), ""]
    if deployment.latency:
        rows = [
            (r["metric"].removesuffix("_ms").upper() + (" *" if r["headline"] else ""), r["observer"], r["count"],
             *(numbers.duration(r[q]) for q in ("p50", "p90", "p99", "max")), f"{r['level']} {r['basis']}")
            for r in deployment.latency
        ]  # fmt: skip
        parts += [
            table(
                ("metric (* headline)", "observer", "n", "p50", "p90", "p99", "max", "evidence"),
                rows,
            )
        ]
    if deployment.phases:
        phases = [
            (r["phase"], r["detail"], r["count"], *(numbers.duration(r[q]) for q in ("p50_ms", "p90_ms", "p99_ms")),
             numbers.share(r["share_of_ttft"]), numbers.share(r["share_of_e2e"]), f"{r['basis']} ({r['level']})")
            for r in deployment.phases
        ]  # fmt: skip
        names = ("phase", "detail", "n", "p50", "p90", "p99", "of TTFT", "of whole", "basis")
        parts += [table(names, phases)]
    if deployment.marks:
        marks = [
            (shorten(str(r["request"])), r["prompt_tokens"], r["output_tokens"], numbers.duration(r["ttft_ms"]),
             numbers.duration(r["e2e_ms"]), r["mark"], r["note"] or "")
            for r in deployment.marks
        ]  # fmt: skip
        parts += [table(("request", "in", "out", "TTFT", "total", "mark", "note"), marks)]
    for finding in deployment.findings:
        cost = f"{numbers.seconds(finding.cost_s)} lost" if finding.cost_s is not None else ""
        parts += [
            f"- **[{finding.severity}] {cell(finding.title)}**  ",
            f"  {cell(finding.detail)}  ",
        ]
        parts += [f"  {cell(evidence_line(finding, cost))}"]
        parts += [f"  - assumes: {cell(text)}" for text in finding.assumptions]
        parts += [f"  - try: {cell(text)}" for text in finding.suggestions]
    return [*parts, ""]
