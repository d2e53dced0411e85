"""A comparison as one HTML file: conditions first, then both runs on the same axes, then every figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pdtrace import _compare_words as words
from pdtrace import _report_parts as parts
from pdtrace import numbers, pictures, report
from pdtrace._compare_model import Comparison
from pdtrace._report_parts import escaped, tag, text
from pdtrace.pictures import Picture

if TYPE_CHECKING:
    from pdtrace._compare_model import Pair
    from pdtrace.blocks import Block
    from pdtrace.store import Store

_NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E", "itl_ms": "ITL"}
LEAST_MS = 0.01  # a phase that takes less in both runs is not drawn


def check(output: str, *, force: bool = False) -> None:
    """Raise PdtraceError where write() would, before the runs are read."""
    report.check_target(Path(output), force=force)


def write(comparison: Comparison, stores: tuple[Store, Store], output: str, *, force: bool = False) -> None:  # fmt: skip
    """Write the comparison of two stores as a page; it appears under its name only when it is whole."""
    target = Path(output)
    report.check_target(target, force=force)
    vega = report.Vega()
    try:
        page = page_of(comparison, stores, vega.text())
    finally:
        vega.stop()
    report.put(target, page)


def page_of(comparison: Comparison, stores: tuple[Store, Store], vega: str) -> str:
    """The page: one section a pair of deployments, then what these data do not support."""
    quantiles = [store.query("latency_quantiles") for store in stores]
    sections = [_pair(pair, n, comparison, quantiles) for n, pair in enumerate(comparison.pairs)]
    last = [block for block in words.blocks(comparison) if not block.empty][-1:]
    main = "".join(sections) + "".join(_block(block) for block in last)
    names = f"A {comparison.a} against B {comparison.b}"
    return report.shell(names, report.header("pdtrace compare", names), main, vega)


def _pair(pair: Pair, number: int, comparison: Comparison, quantiles: Sequence[pl.DataFrame]) -> str:  # fmt: skip
    """One pair: verdict and conditions, pictures, tables."""
    alone = Comparison(comparison.a, comparison.b, (pair,))
    first, conditions, *rest = words.blocks(alone)[:-1]
    drawn = [picture for picture in pair_pictures(pair, quantiles) if picture.there]
    content = (
        tag("h2", text(first.title))
        + tag("p", text(" ".join(first.strong)), class_="verdict")
        + "".join(tag("p", text(line), class_="facts") for line in first.lines)
        + _block(conditions)
        + "".join(_figure(picture, f"p{number}") for picture in drawn)
        + "".join(_block(block) for block in rest)
    )
    return tag("section", content, class_="deployment", id=f"d{number}")


def _block(block: Block) -> str:
    if block.empty:
        return ""
    content = tag("h2", text(block.title)) if block.title else ""
    content += "".join(tag("p", text(line)) for line in block.strong)
    if block.rows:
        content += tag("div", parts.grid(block.heads, block.rows), class_="words")
    content += "".join(tag("p", text(line), class_="note") for line in block.lines)
    return content + (parts.listed(block.items) if block.items else "")


def _figure(picture: Picture, prefix: str) -> str:
    """A picture with its sentence and rows; they come from both runs, so no single query gives them."""
    name = f"{prefix}-{picture.name}"
    level = f"evidence {picture.level}" if picture.level else "evidence level not stated"
    caption = (
        tag("h3", escaped(picture.title))
        + tag("p", escaped(picture.question), class_="question")
        + tag("p", text(parts.capital(picture.sentence or "")), class_="sentence")
        + tag("span", level, class_="level")
    )
    rows = (
        tag("summary", numbers.plural(picture.rows.height, "row"))
        + tag("div", "", class_="rows", tabindex=0)
        + tag("button", "download CSV", class_="csv", type="button", data_file=f"{name}.csv")
    )
    body = (
        tag("figcaption", caption, id=f"{name}-caption")
        + tag("div", "", class_="chart", role="img", aria_label=picture.sentence)
        + tag("details", rows, class_="query")
        + f'<script type="text/plain" class="data">{parts.packed(picture)}</script>'
    )
    return tag("figure", body, class_="picture", id=name)


def pair_pictures(pair: Pair, quantiles: Sequence[pl.DataFrame]) -> list[Picture]:
    """Differences, latency by share of requests and time by phase; those without data have no sentence."""
    charts = import_module("pdtrace.dashboards._comparison")
    rows = _ratio_rows(pair)
    curves = _curve_rows(pair, quantiles)
    phases = _phase_rows(pair)
    return [
        _picture("differences", "Differences", "How do the figures of B stand to those of A?", _ratio_sentence(rows), rows, charts.ratios),
        _picture("curves", "Latency by share of requests", "Where do the runs differ: for most requests, or for the slowest?", _curve_sentence(curves), curves, charts.curves),
        _picture("phases", "Time by phase", "In which phase does the time of B differ from that of A?", _phase_sentence(phases), phases, charts.phases),
    ]  # fmt: skip


def _picture(
    name: str, title: str, question: str, sentence: str | None, rows: pl.DataFrame, chart: Callable[[pl.DataFrame], Any]
) -> Picture:  # fmt: skip
    spec = None if sentence is None else pictures.vega_lite(chart(rows))
    levels = rows["level"].drop_nulls() if "level" in rows.columns else pl.Series(dtype=pl.String)
    level = None if levels.is_empty() else str(levels.max())
    return Picture(name, title, question, sentence, level, "", "", rows, spec)


def _ratio_rows(pair: Pair) -> pl.DataFrame:
    """Every figure but the phases with its ratio and interval, in words who is lower or higher."""
    found = []
    for d in pair.deltas:
        f = d.found
        if d.group == "phase" or f.ratio is None or f.ratio <= 0:
            continue
        low, high = f.ratio_interval or (None, None)
        kind = "no difference shown"
        if low is not None and high is not None and (high < 1 or low > 1):
            kind = "lower in B" if high < 1 else "higher in B"
        name = f"{_NAMES[d.metric]} {d.statistic}" if d.metric in _NAMES else d.metric.replace("_", " ")  # fmt: skip
        found.append(
            {"figure": name, "a": numbers.quantity(f.a, d.unit), "b": numbers.quantity(f.b, d.unit), "ratio": f.ratio,
             "low": low, "high": high, "kind": kind, "level": d.level}
        )  # fmt: skip
    kinds = {"ratio": pl.Float64, "low": pl.Float64, "high": pl.Float64}
    names = ("figure", "a", "b", "ratio", "low", "high", "kind", "level")
    return pl.DataFrame(found, schema={name: kinds.get(name, pl.String) for name in names})


def _ratio_sentence(rows: pl.DataFrame) -> str | None:
    if rows.is_empty():
        return None
    shown = rows.filter(pl.col("kind") != "no difference shown")
    if shown.is_empty():
        return "no figure differs beyond its interval."
    said = []
    for word in ("lower", "higher"):
        part = shown.filter(pl.col("kind") == f"{word} in B").select("figure", "ratio")
        times = ", ".join(f"{figure} ({ratio:.2f} times)" for figure, ratio in part.iter_rows())
        said += [f"{word} in B: {times}"] if times else []
    return "; ".join(said) + f"; {rows.height - shown.height} of {rows.height} figures show no difference."  # fmt: skip


def _curve_rows(pair: Pair, quantiles: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The curves of both deployments, run by run; metrics that only one of them has are left out."""
    both = [
        rows.filter(pl.col("deployment").eq_missing(pl.lit(told["id"], dtype=pl.String))).with_columns(run=pl.lit(run))
        for run, rows, told in zip("AB", quantiles, (pair.a, pair.b), strict=True)
    ]  # fmt: skip
    shared = set(both[0]["metric"]) & set(both[1]["metric"])
    return pl.concat(both).filter(pl.col("metric").is_in(shared)).with_columns(level=pl.lit("C"))


def _curve_sentence(rows: pl.DataFrame) -> str | None:
    metric = next((name for name in ("ttft_ms", "e2e_ms", "tpot_ms") if name in set(rows["metric"])), None)  # fmt: skip
    if metric is None:
        return None
    said = []
    for share, word in ((0.5, "half of the requests"), (0.9, "nine in ten")):
        values = [_at(rows, metric, run, share) for run in "AB"]
        if None not in values:
            said.append(f"{word} stay at or below {numbers.duration(values[0])} in A, {numbers.duration(values[1])} in B")  # fmt: skip
    return f"{_NAMES[metric]}: {'; '.join(said)}." if said else "both runs on the same axes."


def _at(rows: pl.DataFrame, metric: str, run: str, share: float) -> float | None:
    mine = rows.filter(pl.col("metric") == metric, pl.col("run") == run)
    found = mine.filter((pl.col("share_ratio") - share).abs() < 1e-9)
    return float(found["value_ms"][0]) if found.height else None


def _phase_rows(pair: Pair) -> pl.DataFrame:
    """Mean time per request of each phase in both runs; what takes no time in either is left out."""
    found = []
    for d in pair.deltas:
        values = (d.found.a, d.found.b)
        if d.group != "phase" or max((1000 * v for v in values if v is not None), default=0) < LEAST_MS:  # fmt: skip
            continue
        found += [
            {"phase": d.metric.rpartition("/")[2], "run": run, "mean_ms": 1000 * v, "upper_bound": bound,
             "text": words.at_most(numbers.duration(1000 * v), bound), "level": d.level}
            for run, v, bound in zip("AB", values, d.at_most, strict=True)
            if v is not None
        ]  # fmt: skip
    schema = {"phase": pl.String, "run": pl.String, "mean_ms": pl.Float64, "upper_bound": pl.Boolean, "text": pl.String, "level": pl.String}  # fmt: skip
    return pl.DataFrame(found, schema=schema)


def _phase_sentence(rows: pl.DataFrame) -> str | None:
    wide = rows.pivot("run", index="phase", values="mean_ms") if rows.height else rows
    if not {"A", "B"} <= set(wide.columns):
        return None
    found = wide.drop_nulls().with_columns(change=pl.col("B") - pl.col("A"))
    if found.is_empty():
        return None
    row = found.sort(pl.col("change").abs(), descending=True).row(0, named=True)
    more = "more" if row["change"] > 0 else "less"
    known = rows.filter(pl.col("phase") == row["phase"]).select("run", "upper_bound").iter_rows()
    at_most = [run for run, bound in known if bound]
    bound = f", an upper bound in {' and '.join(at_most)}" if at_most else ""
    a, b = (words.at_most(numbers.duration(row[run]), run in at_most) for run in "AB")
    return (
        f"the greatest change is in {row['phase']}{bound}: {numbers.duration(abs(row['change']))} {more} per request in B "
        f"({a} in A, {b} in B)."
    )
