"""The diagnosis as Markdown, to paste into a ticket or a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pdtrace import numbers
from pdtrace.errors import printable
from pdtrace.phrases import (
    MANY,
    NO_CAPACITY,
    definitions,
    dependence_lines,
    evidence_line,
    facts_line,
    figure_tables,
    mark_note,
    metric_name,
    phase_cell,
    shorten,
    shorten_path,
    slo_lines,
    surfaces,
)

if TYPE_CHECKING:
    from pdtrace.blocks import Block
    from pdtrace.diagnosis import Deployment, Diagnosis


def cell(text: object) -> str:
    """A table cell: pipes, line breaks and angle brackets cannot break out of it."""
    plain = (
        printable(str(text))
        .replace("\\", "\\\\")
        .replace("|", "\\|")
        .replace("\r", " ")
        .replace("\n", " ")
    )
    return plain.replace("<", "&lt;").replace("`", "\\`")


_NUMBERS = {
    "n", "p50", "p90", "p99", "max", "of TTFT", "of whole", "in", "out", "TTFT", "total", "per token", "read", "kept",
    "skipped", "mean", "least", "most", "of step time",
}  # fmt: skip


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    right = [name in _NUMBERS for name in names]
    lines = [
        "| " + " | ".join(map(cell, names)) + " |",
        "|" + "".join(" ---: |" if r else " --- |" for r in right),
    ]
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


def blocks_markdown(blocks: Sequence[Block]) -> str:
    """Blocks one below the other."""
    parts = []
    for block in blocks:
        if block.empty:
            continue
        parts += [f"### {cell(block.title)}", ""] if block.title else []
        parts += [f"**{cell(line)}**\n" for line in block.strong]
        parts += [table(block.heads, block.rows)] if block.rows else []
        parts += [f"{cell(line)}\n" for line in block.lines]
        parts += [*(f"- {cell(item)}" for item in block.items), ""] if block.items else []
    return "\n".join(parts)


def _deployment(deployment: Deployment) -> list[str]:
    parts = [
        f"## {cell(deployment.name or deployment.id)}",
        "",
        f"**{cell(deployment.verdict)}**",
        "",
    ]
    parts += [cell(facts_line(deployment)), ""]
    if deployment.conditions:
        parts += [
            "conditions: " + " · ".join(f"{cell(k)} {cell(v)}" for k, v in deployment.conditions),
            "",
        ]
    parts += _latency(deployment)
    if deployment.slo:
        parts += [*(f"- {cell(line)}" for line in slo_lines(deployment)), "", cell(NO_CAPACITY), ""]
    for title, heads, rows in surfaces(deployment):
        parts += [f"{cell(title)}:", "", table(heads, rows)]
    for heads, rows in figure_tables(deployment):
        parts += [table(heads, rows)]
    if deployment.phases:
        phases = [
            (r["phase"], r["detail"], numbers.count(r["count"]), *(phase_cell(r, q) for q in ("p50_ms", "p90_ms", "p99_ms")),
             numbers.share(r["share_of_ttft"]), numbers.share(r["share_of_e2e"]), f"{r['basis']} ({r['level']})")
            for r in deployment.phases
        ]  # fmt: skip
        names = ("phase", "detail", "n", "p50", "p90", "p99", "of TTFT", "of whole", "basis")
        parts += [table(names, phases)]
    if deployment.marks:
        marks = [
            (r["label"], *(numbers.count(r[k]) for k in ("prompt_tokens", "output_tokens")),
             *(numbers.duration(r[k]) for k in ("ttft_ms", "e2e_ms", "tpot_ms")), r["mark"], shorten(r["note"] or "", 60))
            for r in deployment.marks
        ]  # fmt: skip
        parts += [
            table(("request", "in", "out", "TTFT", "total", "per token", "mark", "note"), marks)
        ]
        parts += [f"- {cell(note)}" for note in (mark_note(deployment),) if note]
    if lines := dependence_lines(deployment):
        parts += [*(f"- {cell(line)}" for line in lines), ""]
    for finding in deployment.findings:
        parts += [
            f"- **[{finding.severity}] {cell(finding.title)}**  ",
            f"  {cell(finding.detail)}  ",
        ]
        parts += [f"  {cell(evidence_line(finding))}"]
        parts += [f"  - assumes: {cell(text)}" for text in finding.assumptions]
        parts += [f"  - try: {cell(text)}" for text in finding.suggestions]
    if deployment.judged:
        parts += ["", "Looked for, not shown:", ""]
        parts += [f"- {cell(line)}" for line in deployment.judged]
    if deployment.notes:
        parts += [
            "",
            "How the table was read:",
            "",
            *(f"- {cell(note)}" for note in deployment.notes),
        ]
    return [*parts, ""]


def _latency(deployment: Deployment) -> list[str]:
    if not deployment.latency:
        return []
    rows = [
        (metric_name(r) + (" *" if r["headline"] else ""), r["observer"], numbers.count(r["count"]),
         *(numbers.duration(r[q]) for q in ("p50", "p90")),
         numbers.duration(r["p99"]) if r["count"] >= MANY else numbers.UNKNOWN, numbers.duration(r["max"]),
         f"{r['level']} {r['basis']}")
        for r in deployment.latency
    ]  # fmt: skip
    heads = ("metric (* headline)", "observer", "n", "p50", "p90", "p99", "max", "evidence")
    return [table(heads, rows), *(f"- {cell(line)}" for line in definitions(deployment)), ""]
