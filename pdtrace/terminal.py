"""Results as text for people (rich on terminals, plain when piped), Markdown, JSON and CSV."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pdtrace import numbers
from pdtrace.errors import printable
from pdtrace.phrases import evidence_line, facts_line, shorten, shorten_path

if TYPE_CHECKING:
    import polars as pl

    from pdtrace.diagnose import Deployment, Diagnosis
    from pdtrace.ingest import Progress
    from pdtrace.model import Finding
    from pdtrace.options import Check

PLAIN_WIDTH = 110  # when the output is no terminal
SEVERITY_STYLE = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
BAR_CELLS = 24
NAME_CELLS = 14  # what a column of `query` needs at least to be read


def console(*, stderr: bool = False) -> Console:
    """A console that knows whether it may use colour (terminal, NO_COLOR) and how wide it is."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return _SafeConsole(file=stream, width=width, highlight=False, emoji=False)


class _SafeConsole(Console):
    """A console that takes no orders from data: control signs in ids and names are replaced."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments of a renderable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """Leave `pdtrace … | head` to the door."""
        raise BrokenPipeError


@contextmanager
def progress() -> Iterator[Progress | None]:
    """A progress bar on stderr while files are read; nothing when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
        console=console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("reading", total=None)

        def report(path: str, done: int, total: int) -> None:
            bar.update(task, description=escape(path[-40:]), completed=done, total=total or None)

        yield report


def print_json(value: object) -> None:
    """JSON on stdout; NaN and infinities become null."""
    data = orjson.dumps(
        _rounded(value), option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str
    )
    text = _STEERING.sub(lambda sign: f"\\u{ord(sign.group()):04x}", data.decode())
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.flush()


# JSON escapes the other controls by itself.
_STEERING = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def _rounded(value: Any) -> Any:
    """Floats to 12 significant digits: sums over threads differ behind them from run to run."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def show_diagnosis(diagnosis: Diagnosis, style: str) -> None:
    """Print the whole diagnosis as text, Markdown or JSON."""
    if style == "json":
        print_json(diagnosis.to_dict())
    elif style == "md":
        from pdtrace.markdown import diagnosis_markdown

        sys.stdout.write(diagnosis_markdown(diagnosis))
    else:
        write_diagnosis(diagnosis, console())


def write_diagnosis(diagnosis: Diagnosis, out: Console) -> None:
    """The whole diagnosis as text for people, on a console of the caller's choice."""
    _DiagnosisText(out).show(diagnosis)


class _DiagnosisText:
    """The diagnosis as a page of text."""

    def __init__(self, out: Console) -> None:
        self.out = out

    def show(self, diagnosis: Diagnosis) -> None:
        self.out.print(Text(diagnosis.overview))
        for deployment in diagnosis.deployments:
            self._deployment(deployment)
        self._list("What these data do not support", diagnosis.not_supported)
        self._list("What stays unknown, and how to find out", diagnosis.unknown)
        self._sources(diagnosis.sources)

    def _heading(self, text: str) -> None:
        self.out.print()
        self.out.print(Text(text, style="bold"))

    def _list(self, title: str, items: Sequence[str]) -> None:
        if items:
            self._heading(title)
            for item in items:
                self.out.print(Padding(Text("- " + item), (0, 0, 0, 2)))

    def _deployment(self, deployment: Deployment) -> None:
        self.out.print()
        self.out.rule(
            Text(deployment.name or deployment.id, style="bold"), align="left", characters="─"
        )
        self.out.print(Text(deployment.verdict, style="bold"))
        self.out.print(Text(facts_line(deployment), style="dim"))
        if deployment.conditions:
            line = " · ".join(f"{key} {value}" for key, value in deployment.conditions)
            self.out.print(Text("conditions: " + line, style="dim"))
        self._latency(deployment)
        self._slo(deployment)
        self._phases(deployment)
        self._marks(deployment)
        self._findings(deployment.findings)

    def _marks(self, deployment: Deployment) -> None:
        if not deployment.marks:
            return
        self._heading("Marked requests")
        table = _table("request", "in", "out", "TTFT", "total", "per token", "mark", "note")
        for row in deployment.marks:
            table.add_row(
                *map(escape, (
                    shorten(str(row["request"])), numbers.count(row["prompt_tokens"]),
                    numbers.count(row["output_tokens"]), numbers.duration(row["ttft_ms"]),
                    numbers.duration(row["e2e_ms"]), numbers.duration(row["tpot_ms"]),
                    row["mark"], row["note"] or "",
                ))
            )  # fmt: skip
        self.out.print(table)

    def _latency(self, deployment: Deployment) -> None:
        if not deployment.latency:
            return
        self._heading("Latency, as each observer saw it (* headline)")
        table = _table("metric", "observer", "n", "p50", "p90", "p99", "max", "level", "from … to")
        for row in deployment.latency:
            metric = row["metric"].removesuffix("_ms").upper()
            table.add_row(
                metric + (" *" if row["headline"] else ""), escape(row["observer"] or numbers.UNKNOWN),
                numbers.count(row["count"]), *(numbers.duration(row[q]) for q in ("p50", "p90", "p99", "max")),
                f"{row['level'] or '?'} {row['basis'] or ''}", escape(row["definition"] or ""),
            )  # fmt: skip
        self.out.print(table)

    def _slo(self, deployment: Deployment) -> None:
        for row in deployment.slo:
            limit = (
                "all limits"
                if row["metric"] == "all"
                else f"{row['metric'].removesuffix('_ms').upper()} ≤ {numbers.duration(row['limit_ms'])}"
            )
            low, high = row["interval"]
            self.out.print(
                Text(
                    f"  SLO {limit}: {numbers.share(row['attainment'])} of {numbers.plural(row['arrivals'], 'arrival')} "
                    f"(95 % interval {numbers.share(low)} – {numbers.share(high)}), "
                    f"{numbers.share(row['attainment_of_completed'])} of the {row['completed']:,} completed"
                )
            )

    def _phases(self, deployment: Deployment) -> None:
        if not deployment.phases:
            return
        self._heading("Where the time went")
        table = _table(
            "phase", "detail", "n", "p50", "p90", "p99", "of TTFT", "", "of whole", "basis"
        )
        for row in deployment.phases:
            table.add_row(
                row["phase"], row["detail"], numbers.count(row["count"]),
                *(numbers.duration(row[q]) for q in ("p50_ms", "p90_ms", "p99_ms")),
                numbers.share(row["share_of_ttft"]), bar(row["share_of_ttft"]),
                numbers.share(row["share_of_e2e"]), f"{row['basis'] or ''} ({row['level'] or '?'})",
            )  # fmt: skip
        self.out.print(table)

    def _findings(self, findings: Sequence[Finding]) -> None:
        self._heading("Findings, by seconds lost" if findings else "No findings")
        for finding in findings:
            cost = f"{numbers.seconds(finding.cost_s)} lost" if finding.cost_s is not None else ""
            head = Text()
            head.append(f"[{finding.severity}] ", style=SEVERITY_STYLE.get(finding.severity, ""))
            head.append(finding.title, style="bold")
            self.out.print(head)
            lines = [finding.detail, evidence_line(finding, cost)]
            lines += [f"assumes: {text}" for text in finding.assumptions]
            lines += [f"try: {text}" for text in finding.suggestions]
            for line in lines:
                if line:
                    self.out.print(Padding(Text(line), (0, 0, 0, 2)))

    def _sources(self, sources: Sequence[Mapping[str, Any]]) -> None:
        """Files by collector, and every one that was not used or not read whole, with its reason."""
        self._heading("Sources")
        table = _table("read as", "files", "read", "kept", "skipped")
        for name in sorted({row["collector"] for row in sources if row["collector"]}):
            rows = [row for row in sources if row["collector"] == name]
            sums = (sum(r[key] for r in rows) for key in ("rows_read", "rows_kept", "rows_skipped"))
            table.add_row(name, numbers.count(len(rows)), *map(numbers.count, sums))
        if table.row_count:
            self.out.print(table)
        unused: dict[str, list[str]] = {}
        for row in sources:
            if not row["used"] or row["why"].startswith(("damaged", "cannot")):
                reason = row["why"] or max(row["skipped_reasons"], key=row["skipped_reasons"].get, default="")
                unused.setdefault(reason, []).append(row["path"])
        for reason, paths in unused.items():
            names = ", ".join(shorten_path(path, 40) for path in paths[:3])
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            self.out.print(Padding(Text(f"not used: {names}{more}: {reason}"), (0, 0, 0, 2)))
        self.out.print(Text("`pdtrace coverage` lists every file with its counts and reasons", style="dim"))


def bar(value: float | None, cells: int = BAR_CELLS // 2) -> str:
    """A share of 0..1 as a bar of blocks."""
    if value is None:
        return ""
    filled = round(max(0.0, min(1.0, value)) * cells)
    return "█" * filled + "·" * (cells - filled)


class _Table(Table):
    """A table that refuses a row of another width; rich would shift it under the wrong headings silently."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns: {cells}")
        super().add_row(*cells, **options)


def _table(*names: str) -> Table:
    table = _Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    numeric = {
        "n",
        "files",
        "p50",
        "p90",
        "p99",
        "max",
        "of TTFT",
        "of whole",
        "read",
        "kept",
        "skipped",
        "in",
        "out",
        "TTFT",
        "total",
        "per token",
        "rows",
    }
    for name in names:
        right = name in numeric
        table.add_column(
            name, justify="right" if right else "left", no_wrap=right or name in {"phase", "detail", "metric", "", "basis"},
            overflow="fold",
        )  # fmt: skip
    return table


def show_checks(results: Sequence[tuple[Check, str, float | None, bool]]) -> None:
    """One line per check and deployment, on stderr: the result itself stays on stdout."""
    err = console(stderr=True)
    for check, name, value, holds in results:
        share = check.metric in {"failed", "attainment"}
        shown = numbers.share(value) if share else numbers.duration(value)
        verdict = "holds" if holds else "cannot be checked: unknown" if value is None else "FAILED"
        err.print(Text(f"check {check.text}: {verdict} ({name}: {shown})"))


def show_rows(rows: pl.DataFrame, style: str, limit: int) -> None:
    """Rows as a table, CSV, JSON or Markdown."""
    if style == "csv":
        nested = [name for name, kind in rows.schema.items() if kind.is_nested()]
        flat = rows.with_columns(_as_json(rows[name]) for name in nested)
        text = flat.write_csv()
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        return
    if style == "json":
        print_json(rows.to_dicts())
        return
    shown = rows.head(limit) if limit > 0 else rows
    names = rows.columns
    cells = [["" if v is None else str(v) for v in row] for row in shown.iter_rows()]
    if style == "md":
        from pdtrace.markdown import table as markdown_table

        sys.stdout.write(markdown_table(names, cells))
        return
    out = console()
    if sum(min(len(name), NAME_CELLS) + 2 for name in names) > out.width:
        _show_records(out, names, cells)
    else:
        _show_columns(out, rows, cells)
    if rows.height > shown.height:
        console(stderr=True).print("more rows; --limit 0 shows all")


def _show_columns(out: Console, rows: pl.DataFrame, cells: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, kind in rows.schema.items():
        table.add_column(
            escape(name), justify="right" if kind.is_numeric() else "left", overflow="fold"
        )
    for row in cells:
        table.add_row(*map(escape, row))
    out.print(table)


def _show_records(out: Console, names: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """One line per column, for rows that are too wide to stand beside each other."""
    for number, row in enumerate(cells, 1):
        out.print(Text(f"row {number}", style="bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, cell in zip(names, row, strict=True):
            table.add_row(escape(name), escape(cell))
        out.print(Padding(table, (0, 0, 1, 2)))


def _as_json(column: pl.Series) -> pl.Series:
    import polars as pl

    values = [
        None if v is None else orjson.dumps(v, default=list).decode() for v in column.to_list()
    ]
    return pl.Series(column.name, values, dtype=pl.String)


def show_sources_summary(rows: Sequence[Mapping[str, Any]], output: str) -> None:
    """What an import took, in one line per source, on stdout."""
    out = console()
    table = _table("path", "read as", "read", "kept", "skipped", "remark")
    for row in rows:
        table.add_row(
            escape(shorten_path(row["path"])), row["collector"] or numbers.UNKNOWN,
            *(numbers.count(row[key]) for key in ("rows_read", "rows_kept", "rows_skipped")), escape(row["why"]),
        )  # fmt: skip
    out.print(table)
    out.print(Text(f"made {output}"))


def show_collectors(rows: Sequence[Mapping[str, str]], style: str) -> None:
    """The formats that can be read."""
    if style == "json":
        print_json(list(rows))
        return
    table = _table("system", "collector", "what it reads")
    for row in rows:
        table.add_row(*(escape(row[key]) for key in ("title", "name", "reads")))
    console().print(table)


def show_schema(entries: Sequence[Mapping[str, Any]], style: str) -> None:
    """Tables, views and findings with their columns."""
    if style == "json":
        print_json(list(entries))
        return
    out = console()
    if len(entries) > 1:
        table = _table("name", "kind", "what it holds")
        for entry in entries:
            table.add_row(entry["name"], entry["kind"], escape(entry["text"]))
        out.print(table)
        return
    for entry in entries:
        out.print(Text(f"{entry['name']} ({entry['kind']}): {entry['text']}", style="bold"))
        for name, value in (
            ("one row is", entry.get("grain")),
            ("key", ", ".join(entry.get("key", []))),
        ):
            if value:
                out.print(Text(f"{name}: {value}"))
        for parameter in entry.get("params", []):
            out.print(
                Text(
                    f"  parameter {parameter['name']} = {parameter['default']}: {parameter['text']}"
                )
            )
        table = _table("column", "type", "unit", "what it is")
        for column in entry["columns"]:
            table.add_row(*(escape(column[key]) for key in ("name", "type", "unit", "text")))
        out.print(table)


def show_coverage(report: Mapping[str, Any], style: str) -> None:
    """What the dumps contain and what is missing."""
    if style == "json":
        print_json(report)
        return
    out = console()
    for deployment in report["deployments"]:
        out.print(
            Text(
                f"{deployment['name']} ({deployment['mode']}, {numbers.plural(deployment['requests'], 'request')})",
                style="bold",
            )
        )
        table = _table("item", "present", "from", "how to add it")
        for item in deployment["items"]:
            ratio = item["present_ratio"]
            shown = "no" if not ratio else "yes" if ratio >= 0.995 else numbers.share(ratio)
            table.add_row(
                escape(item["item"]),
                shown,
                escape(item["found_in"] or ""),
                escape("" if ratio and ratio >= 0.995 else item["switch"] or ""),
            )
        out.print(table)
        out.print()
    table = _table("path", "read as", "read", "kept", "skipped", "remark")
    for row in report["sources"]:
        reasons = ", ".join(f"{reason}: {n:,}" for reason, n in row["skipped_reasons"].items())
        table.add_row(
            escape(shorten_path(row["path"])), row["collector"] or numbers.UNKNOWN,
            *(numbers.count(row[key]) if row["collector"] else "" for key in ("rows_read", "rows_kept", "rows_skipped")),
            escape("; ".join(part for part in (row["why"], reasons) if part)),
        )  # fmt: skip
    out.print(table)


def show_explanation(explanation: Mapping[str, Any], style: str) -> None:
    """The story of one request."""
    if style == "json":
        print_json(explanation)
        return
    out = console()
    out.print(Text(explanation["title"], style="bold"))
    for line in explanation["lines"]:
        out.print(Text(line))
    for section in explanation["sections"]:
        out.print()
        out.print(Text(section["title"], style="bold"))
        table = _table(*section["columns"])
        for row in section["rows"]:
            table.add_row(*(escape(str(cell)) for cell in row))
        out.print(table)
        if section.get("note"):
            out.print(Text(section["note"], style="dim"))
