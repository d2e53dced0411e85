"""The diagnosis as a page of text for people, at any width."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdtrace import _sparks, numbers
from pdtrace._grid import Column, grid, wrapped
from pdtrace._paper import Plain, put, rule
from pdtrace.phrases import (
    MANY,
    NO_CAPACITY,
    definitions,
    dependence_lines,
    evidence_line,
    facts_line,
    figure_heading,
    figure_note,
    figure_tables,
    mark_note,
    metric_name,
    phase_cell,
    shorten,
    shorten_path,
    slo_lines,
    surfaces,
    unused_reason,
)

if TYPE_CHECKING:
    from rich.console import Console

    from pdtrace.blocks import Block
    from pdtrace.diagnosis import Deployment, Diagnosis
    from pdtrace.model import Finding
    from pdtrace.over_time import Series

# What a cell of numbers looks like: a signed quantity with its unit, an interval, or the sign for unknown.
_NUMBER = re.compile(
    r"[≤+−-]?[0-9][0-9.,]*( ?[%a-zµ/]+)?( … [+−-]?[0-9.,]+( ?[%a-zµ/]+)?)?( \([^)]*\))?|–"
)
WIDE = 100  # bars of shares are drawn from this width on
BAR_CELLS = 12
SEVERITY_STYLE = {"critical": "bold red", "warning": "yellow", "info": "cyan"}


class Page:
    """Prints the parts of a diagnosis on a console."""

    def __init__(self, out: Console | Plain, series: Series | None = None) -> None:
        self.out = out
        self.series = series or {}

    def show(self, diagnosis: Diagnosis) -> None:
        """The whole diagnosis."""
        self._text(diagnosis.overview)
        for deployment in diagnosis.deployments:
            self._deployment(deployment)
        self._list("What these data do not support", diagnosis.not_supported)
        self._list("What stays unknown, and how to find out", diagnosis.unknown)
        self._sources(diagnosis.sources)

    def show_blocks(self, blocks: Sequence[Block]) -> None:
        """Blocks one below the other."""
        for block in blocks:
            if block.empty:
                continue
            if block.title:
                self._heading(block.title)
            for line in block.strong:
                self._text(line, "bold")
            if block.rows:
                numeric = [
                    all(_NUMBER.fullmatch(row[n]) for row in block.rows if row[n])
                    for n in range(len(block.heads))
                ]
                columns = [
                    Column(h, right=r, wraps=not r)
                    for h, r in zip(block.heads, numeric, strict=True)
                ]
                grid(self.out, columns, block.rows)
            for line in block.lines:
                self._text(line)
            for item in block.items:
                self._item(item)

    def _text(self, text: str, style: str = "") -> None:
        for line in wrapped(text, self.out.width):
            put(self.out, line, style)

    def _indented(self, text: str, style: str = "") -> None:
        for line in wrapped(text, max(20, self.out.width - 2)):
            put(self.out, "  " + line, style)

    def _item(self, text: str) -> None:
        """A list item whose further lines stand under its text."""
        for place, line in enumerate(wrapped(text, max(20, self.out.width - 4))):
            put(self.out, ("  - " if place == 0 else "    ") + line)

    def _heading(self, text: str) -> None:
        put(self.out)
        self._text(text, "bold")

    def _list(self, title: str, items: Sequence[str]) -> None:
        if items:
            self._heading(title)
            for item in items:
                self._item(item)

    def _deployment(self, deployment: Deployment) -> None:
        put(self.out)
        name = shorten(deployment.name or deployment.id, max(20, self.out.width - 10))
        rule(self.out, name)
        self._text(deployment.verdict, "bold")
        self._text(facts_line(deployment), "dim")
        if deployment.conditions:
            line = " · ".join(f"{key} {value}" for key, value in deployment.conditions)
            self._text("conditions: " + line, "dim")
        self._latency(deployment)
        self._over_time(deployment)
        self._limits(deployment)
        self._figures(deployment)
        self._phases(deployment)
        self._marks(deployment)
        self._findings(deployment.findings)
        self._list("Looked for, not shown", deployment.judged)
        self._list("How the table was read", deployment.notes)

    def _latency(self, deployment: Deployment) -> None:
        if not deployment.latency:
            return
        starred = any(row["headline"] for row in deployment.latency)
        self._heading("Latency, as each observer saw it" + (" (* headline)" if starred else ""))
        tails = any(row["count"] >= MANY for row in deployment.latency)
        columns = (
            Column("metric"), Column("observer"), Column("n", right=True), Column("p50", right=True),
            Column("p90", right=True, optional=1), Column("p99", right=True), Column("max", right=True),
            Column("level"), Column("basis", optional=2),
        )  # fmt: skip
        grid(self.out, columns, [
            [
                metric_name(row) + (" *" if row["headline"] else ""), row["observer"] or numbers.UNKNOWN,
                numbers.count(row["count"]), numbers.duration(row["p50"]), numbers.duration(row["p90"]),
                "" if not tails else numbers.duration(row["p99"]) if row["count"] >= MANY else numbers.UNKNOWN,
                numbers.duration(row["max"]), row["level"] or "?", row["basis"] or "",
            ]
            for row in deployment.latency
        ])  # fmt: skip
        for line in definitions(deployment):
            self._indented(line, "dim")

    def _over_time(self, deployment: Deployment) -> None:
        """Charts of what moves; lines of a chart are not broken."""
        rows = self.series.get(deployment.id)
        lines = _sparks.time_lines(rows, self.out.width - 2) if rows else []
        if lines:
            self._heading("Over time")
            for line in lines[:-1]:
                put(self.out, "  " + line, whole=True)
            self._indented(lines[-1], "dim")

    def _limits(self, deployment: Deployment) -> None:
        if deployment.slo:
            self._list("Limits (SLO)", slo_lines(deployment))
            self._indented(NO_CAPACITY, "dim")
        for title, heads, rows in surfaces(deployment):
            self._heading(title)
            grid(self.out, [Column(head, right=True) for head in heads], rows)

    def _figures(self, deployment: Deployment) -> None:
        tables = figure_tables(deployment)
        if not tables:
            return
        self._heading(figure_heading(deployment))
        for heads, rows in tables:
            words = {heads[0], "over", "level"}
            columns = [
                Column(h, right=h not in words, wraps=h == "over", optional=h == "over")
                for h in heads
            ]
            grid(self.out, columns, rows)
        if note := figure_note(deployment):
            self._indented(note, "dim")

    def _phases(self, deployment: Deployment) -> None:
        if not deployment.phases:
            return
        self._heading("Where the time went")
        bars = self.out.width >= WIDE
        tails = any(row["count"] >= MANY for row in deployment.phases)
        columns = (
            Column("phase"), Column("detail"), Column("n", right=True), Column("p50", right=True),
            Column("p90", right=True, optional=2), Column("p99", right=True, optional=1), Column("of TTFT", right=True),
            Column(""), Column("of whole", right=True), Column("basis", optional=3),
        )  # fmt: skip
        grid(self.out, columns, [
            [
                row["phase"], row["detail"], numbers.count(row["count"]),
                *(phase_cell(row, key) for key in ("p50_ms", "p90_ms")), phase_cell(row, "p99_ms") if tails else "",
                numbers.share(row["share_of_ttft"]), bar(row["share_of_ttft"]) if bars else "",
                numbers.share(row["share_of_e2e"]),
                ("up to" if row["basis"] == "upper_bound" else row["basis"] or "") + f" ({row['level'] or '?'})",
            ]
            for row in deployment.phases
        ])  # fmt: skip
        if self.out.is_terminal and not bars:
            for line in _sparks.stacked(deployment.phases, self.out.width - 2):
                self._indented(line)
        if any(row["basis"] == "upper_bound" for row in deployment.phases):
            self._indented("≤: up to so much; the wait may hold other things too", "dim")

    def _marks(self, deployment: Deployment) -> None:
        if not deployment.marks:
            if lines := dependence_lines(deployment):
                self._list("What the lengths drive", lines)
            return
        self._heading("Request by request")
        columns = (
            Column("request"), Column("in", right=True), Column("cached", right=True, optional=2), Column("out", right=True),
            Column("TTFT", right=True), Column("total", right=True), Column("per token", right=True),
            Column("mark", wraps=True), Column("note", wraps=True, optional=1),
        )  # fmt: skip
        grid(self.out, columns, [
            [
                shorten(row["label"], 28), *(_known(row[key], numbers.count) for key in ("prompt_tokens", "cached_tokens", "output_tokens")),
                *(_known(row[key], numbers.duration) for key in ("ttft_ms", "e2e_ms", "tpot_ms")),
                row["mark"], shorten(row["note"] or "", 60),
            ]
            for row in deployment.marks
        ])  # fmt: skip
        if note := mark_note(deployment):
            self._indented(note, "dim")
        for line in dependence_lines(deployment):
            self._indented(line)

    def _findings(self, findings: Sequence[Finding]) -> None:
        self._heading("Findings, by seconds lost" if findings else "No findings")
        for finding in findings:
            mark = f"[{finding.severity}] "
            for place, line in enumerate(wrapped(mark + finding.title, self.out.width)):
                colour = SEVERITY_STYLE.get(finding.severity, "") if place == 0 else ""
                put(self.out, line, "bold", mark=colour, cells=len(mark))
            lines = [finding.detail, evidence_line(finding)]
            lines += [f"assumes: {text}" for text in finding.assumptions]
            lines += [f"try: {text}" for text in finding.suggestions]
            for line in lines:
                if line:
                    self._indented(line)

    def _sources(self, sources: Sequence[Mapping[str, Any]]) -> None:
        """Files by collector, and every one that was not used or not read whole, with its reason."""
        self._heading("Sources")
        rows = []
        for name in sorted({row["collector"] for row in sources if row["collector"]}):
            mine = [row for row in sources if row["collector"] == name]
            sums = (sum(r[key] for r in mine) for key in ("rows_read", "rows_kept", "rows_skipped"))
            rows.append([name, numbers.count(len(mine)), *map(numbers.count, sums)])
        names = ("files", "read", "kept", "skipped")
        grid(self.out, (Column("read as"), *(Column(n, right=True) for n in names)), rows)
        unused: dict[str, list[str]] = {}
        for row in sources:
            if not row["used"] or row["why"].startswith(("damaged", "cannot")):
                reason = unused_reason(row)
                unused.setdefault(reason, []).append(row["path"])
        for reason, paths in unused.items():
            shown = ", ".join(shorten_path(path, 40) for path in paths[:3])
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            self._indented(f"not used: {shown}{more}: {reason}")
        self._text("`pdtrace coverage` lists every file with its counts and reasons", "dim")


def _known(value: Any, write: Any) -> str:
    """A value in words; nothing where it is unknown, so that a column without any goes away."""
    return "" if value is None else str(write(value))


def bar(value: float | None, cells: int = BAR_CELLS) -> str:
    """A share of 0..1 as a bar of blocks."""
    if value is None:
        return ""
    filled = round(max(0.0, min(1.0, value)) * cells)
    return "█" * filled + "·" * (cells - filled)
