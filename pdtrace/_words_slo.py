"""Limits in words: attainment of each, goodput, fluidity, and the table under other limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdtrace import numbers
from pdtrace.numbers import UNKNOWN, count, duration, plural

if TYPE_CHECKING:
    from pdtrace.diagnosis import Deployment

NO_CAPACITY = (
    "At the load of this period, with the latencies of these requests. How much load could be served within the "
    "limits (capacity) needs runs at several loads: one period's log does not say it."
)

MANY = 1_000  # shares of so many requests have a decimal


def share(value: float | None, of: int = 0) -> str:
    """A share as per cent, finer of many requests; what is not all is never written as 100 %."""
    if value is not None and 0 < value < 1 - 1e-9 and (value > 0.99 or of >= MANY):
        return f"{math.floor(1000 * value) / 10:.1f} %"
    return numbers.share(value)


def slo_lines(deployment: Deployment) -> list[str]:
    """Class by class: each limit, all of them, goodput, aborts, fluidity; then what no class takes."""
    lines: list[str] = []
    names = list(dict.fromkeys(row["class"] for row in deployment.slo))
    for name in names:
        rows = [row for row in deployment.slo if row["class"] == name]
        if len(names) > 1 or rows[0]["conditions"]:
            lines.append(_class_line(rows[-1]))
        lines += [slo_line(row) for row in rows if len(rows) != 2 or row["metric"] != "all"]
        lines += _joint_lines(rows[-1])
        lines += [_fluidity_line(f) for f in deployment.fluidity if f["class"] == name]
    if len(names) > 1:
        lines.append(
            "Findings and marks below go by the run itself: no one limit holds for every request"
        )
    if deployment.unmatched:
        lines.append(f"{plural(deployment.unmatched, 'request')} of no class: in no figure above")
    return lines


def _class_line(row: Mapping[str, Any]) -> str:
    conditions = row["conditions"] or "what no class before it takes"
    open_ = (
        f"; of {count(row['undecided'])} an earlier class asks something that is not known of them"
        if row["undecided"]
        else ""
    )
    return f"Class {row['class']} ({conditions}): {plural(row['arrivals'], 'request')}{open_}"


def slo_line(row: Mapping[str, Any]) -> str:
    """Attainment of a limit, with its interval and both denominators."""
    n = row["arrivals"]
    low, high = (share(end, n) for end in row["interval"])
    return (
        f"SLO {_limit(row)}: met by {row['good']:,} of {plural(n, 'arrival')} = {share(row['attainment'], n)} "
        f"(95 % interval {low} – {high}); "
        f"{share(row['attainment_of_completed'], n)} of the {row['completed']:,} completed{_unknown(row)}{_single(row)}"
    )


def _limit(row: Mapping[str, Any]) -> str:
    if row["metric"] == "all":
        return "all limits"
    name = row["metric"].removesuffix("_ms").upper()
    if row["metric"] == "itl_ms" and row.get("quantile"):
        which = "longest" if row["quantile"] == 1 else f"p{100 * row['quantile']:g}"
        name = f"{name} ({which} of each request's own gaps)"
    return f"{name} ≤ {duration(row['limit_ms'])}"


def _unknown(row: Mapping[str, Any]) -> str:
    if not row["unknown"]:
        return ""
    best = row.get("attainment_if_unknown_good")
    could = f": {share(best)} of all arrivals if they met it" if best is not None else ""
    return f"; {row['unknown']:,} unknown, counted as missed{could}"


def _single(row: Mapping[str, Any]) -> str:
    n = row.get("single")
    meet = "meets" if n == 1 else "meet"
    return f"; {plural(n, 'answer')} of one token {meet} any limit on pace" if n else ""


def _joint_lines(row: Mapping[str, Any]) -> Iterator[str]:
    if row["good_per_s"] is not None:
        yield (
            f"goodput {row['good_per_s']:.3g} good requests/s: {row['good']:,} in the {row['window_s']:,.1f} s from the first "
            "arrival to the last end of all requests here"
        )
    else:
        yield "goodput per second unknown: the starts of these requests are not known on one clock"
    product, joint = row["product_of_parts"], row["attainment_of_completed"]
    if product is not None and joint is not None and abs(product - joint) >= 0.005:
        yield f"the limits hang together: {share(joint)} of the completed meet all, where the product of the parts would be {share(product)}"
    if row["client_aborts"]:
        yield (
            f"{plural(row['client_aborts'], 'request')} aborted by the client, as far as is known; not good above; "
            f"without them {share(row['attainment_without_client_aborts'])}"
        )


def _fluidity_line(row: Mapping[str, Any]) -> str:
    per = "chunk" if row["emission"] == "chunk" else "token"
    without = f"; {row['without']:,} without token times not judged" if row["without"] else ""
    return (
        f"fluidity of {plural(row['requests'], 'request')} (first token in {duration(row['first_deadline_ms'])}, then {duration(row['deadline_ms'])} "
        f"a {per}): fluidity_doc {row['doc_mean']:.3f} on average, ≥ 0.9 in {share(row['doc_90_ratio'])}; fluidity_code "
        f"{row['code_mean']:.3f}, ≥ 0.9 in {share(row['code_90_ratio'])}{without}"
    )


def surfaces(deployment: Deployment) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """The table under other limits of each class: title, heads, rows; nothing where only one limit was asked."""
    tables = []
    for name in dict.fromkeys(row["class"] for row in deployment.surface):
        rows = [row for row in deployment.surface if row["class"] == name]
        if len(rows) > 1:
            rest = [
                _limit(row)
                for row in deployment.slo
                if row["class"] == name and row["metric"] in ("itl_ms", "e2e_ms")
            ]
            tables.append((_title(name, rows, rest), *_grid(rows)))
    return tables


def _title(name: str, rows: Sequence[Mapping[str, Any]], rest: Sequence[str]) -> str:
    rate = any(row["good_per_s"] is not None for row in rows)
    what = "Good requests per second, and attainment," if rate else "Attainment"
    held = f"; {' and '.join(rest)} in force" if rest else ""
    return f"{what} under other limits ({name}; * as given{held})"


def _grid(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], list[list[str]]]:
    across = list(dict.fromkeys(row["tpot_limit_ms"] for row in rows))
    down = list(dict.fromkeys(row["ttft_limit_ms"] for row in rows))
    cells = {(row["ttft_limit_ms"], row["tpot_limit_ms"]): _cell(row) for row in rows}
    heads = ["TTFT", *(f"TPOT {_at_most(limit)}" for limit in across)]
    return heads, [[_at_most(t), *(cells[t, p] for p in across)] for t in down]


def _at_most(limit: float | None) -> str:
    return "any" if limit is None else f"≤ {duration(limit)}"


def _cell(row: Mapping[str, Any]) -> str:
    rate = f"{row['good_per_s']:.3g}/s " if row["good_per_s"] is not None else ""
    text = UNKNOWN if row["attainment"] is None else f"{rate}{share(row['attainment'])}"
    return text + ("*" if row["given"] else "")
