"""A comparison in words, and as blocks of text and tables that terminal and Markdown show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pdtrace import numbers
from pdtrace.blocks import Block
from pdtrace.phrases import shorten, shorten_path

if TYPE_CHECKING:
    from pdtrace._compare_model import Comparison, Condition, Delta, Pair, Ranking

NOT_SUPPORTED = (
    "that the difference would come again: each side is one run, without repeats",
    "a capacity or 'times more goodput' claim: each side ran at one load",
    "anything about a load, a workload or a machine that neither side ran",
)
DELTA_HEADS = ("figure", "A", "B", "difference", "95 % interval", "ratio", "level")
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E", "goodput": "goodput"}


def attribution(changed: Sequence[tuple[str, str, str]], one: bool | None, twin: bool) -> str:
    """What the difference may be put down to."""
    if twin:
        return "Nothing changed: both sides are the same data."
    if one:
        key, a, b = changed[0]
        return (
            f"Exactly one setting changed: {key} ({a} → {b}). Where a difference is shown and the workload is the"
            " same, it may be put down to it, as far as single runs can tell."
        )
    if len(changed) > 1:
        return (
            f"{len(changed)} settings changed ({', '.join(shorten(k, 40) for k, *_ in changed)}):"
            " the difference cannot be put down to one of them."
        )
    if one is None:
        which = f"{changed[0][0]} changed, and " if changed else ""
        return f"Whether exactly one setting changed is unknown: {which}not all settings are known on both sides."
    return "No setting that these data tell of changed: a difference is one between runs of the same set-up."


def verdict(
    rankings: Sequence[Ranking], winner: str | None, twin: bool, figures: Sequence[Delta]
) -> str:
    """One or two sentences: who is better, in what, or why that cannot be said."""
    if twin:
        return "The same data on both sides: no difference."
    closed = [r for r in rankings if r.result == "not_comparable" and r.metric != "goodput"]
    parts = []
    if closed:
        reasons = _by_status(dict.fromkeys(reason for r in closed for reason in r.reasons))
        which = "" if len(closed) == 4 else f" in {', '.join(NAMES[r.metric] for r in closed)}"
        parts.append(f"not comparable{which}: {reasons}")
    for side in ("A", "B"):
        better = [r.metric for r in rankings if r.result == side]
        if better:
            parts.append(f"{side} is better in {_list([_size(m, side, figures) for m in better])}")
    for result, text in (
        ("mixed", "better and worse at once in"), ("no_difference", "no difference found in"),
        ("unknown", "too few requests to tell in"),
    ):  # fmt: skip
        found = [NAMES[r.metric] for r in rankings if r.result == result and r.metric != "goodput"]
        found += [
            "goodput"
            for r in rankings
            if r.result == result and r.metric == "goodput" and result != "unknown"
        ]
        if found:
            parts.append(f"{text} {_list(found)}")
    if winner:
        parts.insert(0, f"{winner} is better")
    return "; ".join(parts) + "."


def _by_status(reasons: Iterable[str]) -> str:
    """What differs first, then what nobody knows."""
    parts = []
    for status in ("different", "unknown"):
        ending = f" ({status})"
        names = [reason.removesuffix(ending) for reason in reasons if reason.endswith(ending)]
        if names:
            parts.append(f"{status}: {', '.join(names)}")
    return "; ".join(parts)


def _size(metric: str, side: str, figures: Sequence[Delta]) -> str:
    """The figure of a group that is surest, as `TTFT (p50 120 ms against 240 ms)`."""
    rows = [d for d in figures if d.group == metric and d.better == side]
    row = next((d for d in rows if d.statistic == "p50"), rows[0])
    values = [_value(v, row.unit) for v in (row.found.a, row.found.b)]
    first, second = values if side == "A" else reversed(values)
    name = row.statistic if row.statistic != "share" else row.metric
    return f"{NAMES[metric]} ({name} {first} against {second})"


def _list(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def assumptions(known: Sequence[Condition], twin: bool) -> tuple[str, ...]:
    """What remains assumed."""
    if twin:
        return ()
    stated = [c.name for c in known if c.stated]
    return (
        "one run of each, without repeats: what changes from run to run is seen only as far as it changes within a run",
        "time of day, neighbours on the machine and temperature did not matter",
        "95 % intervals from stretches of requests drawn again (block bootstrap); better or worse is said only where intervals that hold together leave no doubt",
        *([f"stated, not seen in the data, to be the same: {', '.join(stated)}"] if stated else []),
    )


def blocks(comparison: Comparison) -> list[Block]:
    """The whole comparison."""
    found = []
    for pair in comparison.pairs:
        found += _pair(pair, comparison)
    for side, names in (("A", comparison.unmatched_a), ("B", comparison.unmatched_b)):
        if names:
            found.append(
                Block(
                    lines=(
                        f"not compared, of {side}: {', '.join(names)} (--deployment names pairs)",
                    )
                )
            )
    return [*found, Block("What these data do not support", items=comparison.not_supported)]


def _pair(pair: Pair, comparison: Comparison) -> list[Block]:
    title = " against ".join(
        f"{side} {shorten_path(path, 40)} ({numbers.plural(told['requests']['count'], 'request')}, {told['mode']})"
        for side, path, told in (("A", comparison.a, pair.a), ("B", comparison.b, pair.b))
    )
    names = [told["name"] or told["id"] for told in (pair.a, pair.b)]
    where = f"deployments {names[0]} and {names[1]}, matched by {pair.matched_by}" if pair.matched_by in {"name", "mode"} else ""  # fmt: skip
    return [
        Block(title, strong=(pair.verdict,), lines=tuple(x for x in (where, pair.attribution) if x)),
        Block("Conditions", heads=("condition", "is it the same?", "A", "B", "remark"),
              rows=tuple(_condition(c) for c in pair.conditions), lines=_vouching(pair.conditions)),
        Block("Differences (B − A)", heads=DELTA_HEADS, fixed=DELTA_HEADS,
              rows=tuple(_delta(d) for d in pair.deltas if d.group != "phase"),
              lines=_notes([d for d in pair.deltas if d.group != "phase"])),
        Block("Seconds per request, by phase (B − A)", heads=DELTA_HEADS[:-2], fixed=DELTA_HEADS,
              rows=tuple(_phase(d) for d in pair.deltas if d.group == "phase"), lines=_bounds(pair.deltas)),
        Block("Findings", heads=("finding", "change", "A", "B"), rows=tuple(
            (str(f["id"]), str(f["change"]), str(f["title_a"] or ""), str(f["title_b"] or "")) for f in pair.findings)),
        Block("Assumed", items=pair.assumptions),
    ]  # fmt: skip


def _vouching(known: Sequence[Condition]) -> tuple[str, ...]:
    """How to go on where the data do not say enough."""
    open_ = [c.id for c in known if c.status == "unknown" and c.blocks and c.blocks != ("goodput",)]
    if not open_:
        return ()
    return (
        f"what the data do not say you may vouch for: --same {open_[-1]}, or --same unknown for all of it",
    )


def _condition(c: Condition) -> tuple[str, ...]:
    word = f"{c.status} (stated)" if c.stated else c.status
    return (c.name, word, c.a or numbers.UNKNOWN, c.b or numbers.UNKNOWN, c.note)


def _interval(interval: tuple[float, float] | None, unit: str) -> str:
    if interval is None:
        return numbers.UNKNOWN
    low, high = (_signed(v, unit) for v in interval)
    return f"{low} … {high}"


def _signed(value: float | None, unit: str) -> str:
    if value is None:
        return numbers.UNKNOWN
    if unit == "1":
        return f"{100 * value:+.1f} points".replace("-", "−")
    text = _value(abs(value), unit)
    return text if not value else f"{'+' if value > 0 else '−'}{text}"


def _value(value: float | None, unit: str) -> str:
    """A quantity; rates per second, whose unit the name of the figure tells, as 1.47 /s."""
    if value is None or not unit.endswith("/s"):
        return numbers.quantity(value, unit)
    return f"{value:,.0f} /s" if value >= 100 else f"{value:.3g} /s"


def _delta(d: Delta) -> tuple[str, ...]:
    f = d.found
    ratio = numbers.UNKNOWN if f.ratio is None else f"{f.ratio:.2f}"
    return (_figure(d), _value(f.a, d.unit), _value(f.b, d.unit), _signed(f.difference, d.unit),
            _interval(f.interval, d.unit), ratio, d.level or "")  # fmt: skip


def _figure(d: Delta) -> str:
    """The name of a figure: TTFT p50, attainment."""
    if d.group in NAMES and d.group != "goodput":
        return f"{NAMES[d.group]} {d.statistic}"
    return d.metric.replace("_", " ")


def _notes(figures: Sequence[Delta]) -> tuple[str, ...]:
    """Each remark once, with the figures that it is about."""
    about: dict[str, list[str]] = {}
    for d in figures:
        for note in (d.note, d.found.note):
            if note:
                about.setdefault(note, []).append(_figure(d))
    return tuple(f"{', '.join(names)}: {note}" for note, names in about.items())


def _phase(d: Delta) -> tuple[str, ...]:
    f = d.found
    values = [None if v is None else 1000 * v for v in (f.a, f.b, f.difference)]
    span = None if f.interval is None else (1000 * f.interval[0], 1000 * f.interval[1])
    a, b = (
        at_most(numbers.duration(v), bound) for v, bound in zip(values[:2], d.at_most, strict=True)
    )
    change = {(True, False): "≥ ", (False, True): "≤ "}.get(d.at_most, "") + _signed(
        values[2], "ms"
    )
    if all(d.at_most):
        change = f"{change} of the bounds"
    return (d.metric, a, b, change, _interval(span, "ms"))


def at_most(text: str, bound: bool) -> str:  # a mark on a value
    """A value with the mark of an upper bound."""
    return f"≤ {text}" if bound else text


def _bounds(figures: Sequence[Delta]) -> tuple[str, ...]:
    """What the marks of upper bounds mean, where there are any."""
    if not any(any(d.at_most) for d in figures if d.group == "phase"):
        return ()
    told = (
        "≤: an upper bound, since the data do not tell the time from another (a wait from a transfer, a transfer from the"
        " prefill that it ran in); a difference with one has no interval"
    )
    return (told,)
