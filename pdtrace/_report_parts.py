"""Parts of the report and the live page as HTML: everything that came from outside is escaped here."""

from __future__ import annotations

import base64
import html
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
import polars as pl

from pdtrace import numbers, phrases
from pdtrace.errors import printable

if TYPE_CHECKING:
    from pdtrace.diagnosis import Deployment, Diagnosis
    from pdtrace.model import Finding
    from pdtrace.pictures import Picture

LONG_ID = 36  # signs; longer words are shortened, with all of them to copy
_LONG = re.compile(rf"[^\s,;()\"']{{{LONG_ID},}}")
_NUMBER_UNIT = re.compile(r"(?<=\d) (%|ms\b|s\b|min\b|[kMGT]?B\b)")
_CODE = re.compile(r"`([^`\n]{1,200})`")
_SAFE_INTEGER = 2**53  # beyond it JavaScript's numbers lose digits
MANY_SOURCES = 15  # more of them are shown on demand
NOT_DRAWN = "Views without data here"


def escaped(value: object) -> str:
    """Text that stays text, in content and in attributes."""
    return html.escape(printable(str(value)), quote=True)


def text(value: object) -> str:
    """Text in which long ids are shortened, to copy whole, and numbers stay with their units."""
    whole, parts, end = printable(str(value)), [], 0
    for match in _LONG.finditer(whole):
        parts += [_prose(whole[end : match.start()]), _identifier(match.group())]
        end = match.end()
    return "".join([*parts, _prose(whole[end:])])


def _prose(words: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escaped(_NUMBER_UNIT.sub("\u00a0\\1", words)))


def _identifier(word: str) -> str:
    short = phrases.shorten(word, LONG_ID)
    return (
        f'<button type="button" class="id" data-full="{escaped(word)}" title="{escaped(word)}" '
        f'aria-label="copy {escaped(word)}">{escaped(short)}</button>'
    )


def tag(name: str, content: str, **attributes: object) -> str:
    """An element; `class_` and `data_x` become class and data-x. Content is HTML already."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>{content}</{name}>"


def listed(items: Iterable[str]) -> str:
    """A list of sentences."""
    return tag("ul", "".join(tag("li", text(item)) for item in items), class_="plain-list")


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()) -> str:
    """A table that scrolls by itself; the columns of these places hold numbers."""
    right = set(numeric)

    def cells(name: str, row: Sequence[str], **more: object) -> str:
        return "".join(
            tag(name, text(cell), class_="number" if n in right else None, **more)
            for n, cell in enumerate(row)
        )

    head = tag("thead", tag("tr", cells("th", heads, scope="col")))
    body = tag("tbody", "".join(tag("tr", cells("td", row)) for row in rows))
    return tag("div", tag("table", head + body), class_="scroll", tabindex=0)


def instant(iso: str | None) -> str:
    """An instant that the page shows in the reader's zone; in UTC without scripts."""
    return "" if iso is None else tag("time", f"{iso[:10]} {iso[11:19]} UTC", datetime=iso)


# --- a deployment


def deployment(part: Deployment, pictures: Sequence[Picture], number: int) -> str:
    """One deployment: verdict, findings, pictures, figures."""
    pieces = [
        opening(part),
        *(figure(picture, f"d{number}") for picture in pictures if picture.there),
        _absent(pictures),
        closing(part),
    ]
    return tag("section", "".join(pieces), class_="deployment", id=f"d{number}")


def opening(part: Deployment, remarks: Mapping[str, str] | None = None) -> str:
    """What is said first: verdict, findings (with a remark each, by id), limits."""
    remarks = remarks or {}
    found = "".join(finding(one, remarks.get(one.id, "")) for one in part.findings)
    pieces = [
        tag("h2", text(part.name or part.id)),
        tag("p", text(part.verdict), class_="verdict"),
        _facts(part),
        tag("h2", "Findings, by seconds lost" if part.findings else "No findings"),
        tag("ol", found, class_="findings"),
        _items("Limits (SLO)", phrases.slo_lines(part) if part.slo else []),
    ]
    return "".join(pieces)


def closing(part: Deployment) -> str:
    """What is said last: figures, requests one by one, notes."""
    pieces = [
        _latency(part),
        _marks(part),
        _items("Looked for, not shown", part.judged),
        _items("How the table was read", part.notes),
    ]
    return "".join(pieces)


def _facts(part: Deployment) -> str:
    line, start, end = phrases.facts_line(part), *part.window
    parts = [escaped(piece) for piece in line.split(" · ") if not piece.endswith(" UTC")]
    if start and end:
        parts.insert(2, f"{instant(start)} to {instant(end)} <span data-zone></span>")
    conditions = " · ".join(f"{key} {value}" for key, value in part.conditions)
    return tag("p", " · ".join(parts), class_="facts") + (
        tag("p", "conditions: " + text(conditions), class_="conditions") if conditions else ""
    )


def finding(found: Finding, remark: str = "") -> str:
    """A finding: its sentence and evidence, a remark on what it is of; the rest on demand."""
    more = [tag("p", text(found.detail))] if found.detail else []
    more += [tag("p", "assumes: " + text(line)) for line in found.assumptions]
    tries = "".join(tag("p", tag("b", "try: ") + text(line)) for line in found.suggestions)
    head = tag("span", found.severity, class_="severity") + text(found.title)
    body = (
        tag("h3", head)
        + tag("p", text(phrases.evidence_line(found)), class_="evidence")
        + (tag("p", escaped(remark), class_="remark") if remark else "")
        + tries
        + (_details("what it rests on", "".join(more), class_="finding-more") if more else "")
    )
    return tag("li", body, class_=f"finding {found.severity}", id=None)


def _items(title: str, items: Sequence[str]) -> str:
    return tag("h2", escaped(title)) + listed(items) if items else ""


def _details(summary: str, content: str, **attributes: object) -> str:
    return tag("details", tag("summary", escaped(summary)) + content, **attributes)


def _latency(part: Deployment) -> str:
    if not part.latency:
        return ""
    heads = ("metric", "observer", "n", "p50", "p90", "p99", "max", "level", "basis")
    rows = [
        [
            phrases.metric_name(row) + (" *" if row["headline"] else ""),
            row["observer"] or numbers.UNKNOWN, numbers.count(row["count"]),
            numbers.duration(row["p50"]), numbers.duration(row["p90"]),
            numbers.duration(row["p99"]) if row["count"] >= phrases.MANY else numbers.UNKNOWN,
            numbers.duration(row["max"]), row["level"] or "?", row["basis"] or "",
        ]
        for row in part.latency
    ]  # fmt: skip
    notes = "".join(tag("p", text(line), class_="note") for line in phrases.definitions(part))
    title = "Latency, as each observer saw it (* headline)"
    return tag("h2", title) + grid(heads, rows, range(2, 7)) + notes


def _marks(part: Deployment) -> str:
    lines = phrases.dependence_lines(part)
    if not part.marks:
        return _items("What the lengths drive", lines)
    heads = ("request", "in", "cached", "out", "TTFT", "total", "per token", "mark", "note")
    counts, times = (
        ("prompt_tokens", "cached_tokens", "output_tokens"),
        ("ttft_ms", "e2e_ms", "tpot_ms"),
    )
    rows = [
        [
            row["label"], *(numbers.count(row[key]) for key in counts),
            *(numbers.duration(row[key]) for key in times), row["mark"], row["note"] or "",
        ]
        for row in part.marks
    ]  # fmt: skip
    note = tag("p", text(phrases.mark_note(part)), class_="note")
    return tag("h2", "Request by request") + grid(heads, rows, range(1, 7)) + note + listed(lines)


# --- a picture


def figure(picture: Picture, prefix: str, *, remark: str = "", inline: bool = True) -> str:
    """A picture with its sentence, evidence, query and rows; scripts draw it.

    `inline`: the data stand in the page; else whoever shows it has them.
    """
    name = f"{prefix}-{picture.name}"
    level = f"evidence {picture.level}" if picture.level else "evidence level not stated"
    caption = (
        tag("h3", escaped(picture.title))
        + tag("p", escaped(picture.question), class_="question")
        + tag("p", text(capital(picture.sentence or "")), class_="sentence")
        + tag("span", escaped(level), class_="level")
        + (tag("span", escaped(remark), class_="remark") if remark else "")
    )
    chart = (
        tag("div", "", class_="chart", role="img", aria_label=picture.sentence)
        if picture.spec is not None
        else ""
    )
    size = numbers.plural(picture.rows.height, "row")
    query = _details(
        f"query and {size}",
        tag("p", escaped(f"pdtrace query {picture.query} PATH"), class_="note")
        + tag("pre", tag("code", escaped(picture.sql)), tabindex=0)
        + tag("div", "", class_="rows", tabindex=0)
        + tag("button", "download CSV", class_="csv", type="button", data_file=f"{name}.csv"),
        class_="query",
    )
    data = f'<script type="text/plain" class="data">{packed(picture)}</script>' if inline else ""
    body = tag("figcaption", caption, id=f"{name}-caption") + chart + query + data
    return tag("figure", body, class_="picture", id=name)


def capital(sentence: str) -> str:
    """A sentence with a capital in front, unless it begins with a name in code."""
    return sentence[:1].upper() + sentence[1:]


def _absent(pictures: Sequence[Picture]) -> str:
    absent = [picture for picture in pictures if not picture.there]
    lines = [
        f"{picture.title} ({picture.question})"
        + (f": could not be made: {picture.problem}" if picture.problem else "")
        for picture in absent
    ]
    return tag("h2", NOT_DRAWN) + listed(lines) if lines else ""


def packed(picture: Picture) -> str:
    """Rows, spec and data of a picture as base64 of zlib of JSON: no sign of it means anything to HTML."""
    return base64.b64encode(zlib.compress(orjson.dumps(payload(picture)), 9)).decode()


def payload(picture: Picture) -> dict[str, Any]:
    """What scripts need of a picture: its rows, and its spec with data that point at the rows' columns."""
    columns = {column.name: _values(column) for column in picture.rows.get_columns()}
    spec = dict(picture.spec) if picture.spec is not None else None
    datasets = {
        name: _dataset(records, columns)
        for name, records in (spec.pop("datasets", {}) if spec else {}).items()
    }
    if spec:
        spec.pop("$schema", None)
    return {
        "rows": {"length": picture.rows.height, "columns": columns},
        "datasets": datasets,
        "spec": spec,
    }


def _dataset(records: Sequence[Mapping[str, Any]], columns: Mapping[str, list[Any]]) -> Any:
    names = list(records[0]) if records else []
    found: dict[str, Any] = {}
    for name in names:
        values = [_rounded(record.get(name)) for record in records]
        found[name] = {"same": name} if columns.get(name) == values else values
    return {"length": len(records), "columns": found}


def _values(column: pl.Series) -> list[Any]:
    """A column as JSON has it: twelve digits; whole numbers that JavaScript cannot hold as text."""
    if column.dtype.is_integer():
        large = column.drop_nulls().cast(pl.Int128).abs().gt(_SAFE_INTEGER).any()
        return column.cast(pl.String).to_list() if large else column.to_list()
    if column.dtype.is_temporal():
        return column.cast(pl.String).to_list()
    return [_rounded(value) for value in column.to_list()]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.12g}") if value == value and abs(value) != float("inf") else None
    return value


# --- the whole


def lists(diagnosis: Diagnosis) -> str:
    """What the data do not support, what stays unknown, and the sources."""
    return (
        _items("What these data do not support", diagnosis.not_supported)
        + _items("What stays unknown, and how to find out", diagnosis.unknown)
        + _sources(diagnosis.sources)
    )


def _sources(sources: Sequence[Mapping[str, Any]]) -> str:
    heads = ("path", "read as", "read", "kept", "skipped", "remark")
    rows = [
        [
            row["path"], row["collector"] or numbers.UNKNOWN,
            *(numbers.count(row[key]) for key in ("rows_read", "rows_kept", "rows_skipped")),
            "; ".join(filter(None, (row["why"], *(f"{why}: {n:,}" for why, n in row["skipped_reasons"].items())))),
        ]
        for row in sources
    ]  # fmt: skip
    table = tag("div", grid(heads, rows, (2, 3, 4)), class_="remarks")
    if len(rows) > MANY_SOURCES:
        used = sum(1 for row in sources if row["used"])
        table = _details(f"{len(rows)} sources, {used} used", table)
    return tag("h2", "Sources, and what was not understood") + table
