"""The words of when: warm-up, changes over the run, and what is concentrated in a part of it."""

from __future__ import annotations

from datetime import UTC, datetime

from pdtrace._words import Row, Words, sentence
from pdtrace.model import DATED_FROM_NS
from pdtrace.numbers import duration, plural, seconds, share

_NOUNS = {
    "arrival_rate": "arrivals",
    "ttft": "median TTFT",
    "turn": "the median time until a first token once the request's turn had come",
    "tpot": "median time per output token",
    "failures": "failures",
}
_SHOWN = 4  # changes that are told one by one


def clock_time(instant_ns: int) -> str:
    """An instant as 12:03:05 UTC; of a clock without a date as its seconds."""
    if instant_ns < DATED_FROM_NS:
        return f"{instant_ns / 1e9:,.1f} s of the servers' clock"
    return f"{datetime.fromtimestamp(instant_ns / 1e9, UTC):%H:%M:%S} UTC"


def between(start_ns: int, end_ns: int) -> str:
    """Two instants as `between 12:03:05 and 12:05:00 UTC`; one where they are the same."""
    start, end = clock_time(start_ns), clock_time(end_ns)
    return f"at {start}" if start == end else f"between {start.removesuffix(' UTC')} and {end}"


def concentrated(row: Row) -> str:
    """One sentence of finding_windows for the finding that it is about."""
    return (
        f"{share(row['weight_ratio'])} of it came {between(row['start_ns'], row['end_ns'])}, "
        f"in {share(row['window_ratio'])} of the time with {share(row['request_ratio'])} of the requests."
    )


def _level(metric: str, value: float) -> str:
    if metric == "arrival_rate":
        return f"{value:.3g}/s"
    return share(value) if metric == "failures" else duration(value)


def _told(change: Row) -> str:
    """One change: what, when, from what to what."""
    where = f" on {change['worker']}" if change["worker"] else ""
    if change["kind"] == "restart":
        return f"{clock_time(change['at_ns'])}: a worker began anew{where} ({change['note']})"
    metric = change["metric"]
    before, after = (
        f"{_level(metric, change[f'level_{side}'])} ({_level(metric, change[f'{side}_low'])} to "
        f"{_level(metric, change[f'{side}_high'])})"
        for side in ("before", "after")
    )
    noun = _NOUNS[metric]
    if change["kind"] == "drift":
        return f"all along: {noun}{where} drifted from {before} to {after}"
    low, high = change["at_low_ns"], change["at_high_ns"]
    wide = high - low > 2e9
    when = f"{clock_time(change['at_ns'])}{f' ({between(low, high)})' if wide else ''}"
    return f"{when}: {noun}{where} went from {before} to {after}{_along(change)}"


def _along(change: Row) -> str:
    """What else was different on the two sides by a quarter or more."""
    found = []
    for name, noun in (
        ("arrival_rate", "arrivals {}/s"),
        ("in_flight", "requests in flight {}"),
        ("prompt_tokens", "median prompt {} tokens"),
    ):
        before, after = change[f"{name}_before"], change[f"{name}_after"]
        other = change["metric"] != name and before and after
        if other and max(before, after) >= 1.25 * min(before, after):
            found.append(noun.format(f"{_short(before)} → {_short(after)}"))
    return f", along with {', '.join(found)}" if found else ""


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def regime_change(row: Row) -> Words:
    """The run was not one."""
    changes = row["changes"]
    named = [c for c in changes if c["kind"] != "restart"]
    restarts = len(changes) - len(named)
    if named:
        first = max(
            (c for c in named if c["at_ns"] == row["at_ns"]),
            key=lambda c: c["metric"] != "arrival_rate",
        )
        place = (
            "drifted all along" if first["kind"] == "drift" else f"at {clock_time(row['at_ns'])}"
        )
        title = (
            f"the run was not one: {_NOUNS[first['metric']]} {_level(first['metric'], first['level_before'])}"
            f" → {_level(first['metric'], first['level_after'])}, {place}"
        )
    else:
        title = f"{plural(restarts, 'restart')} of workers in use, first at {clock_time(changes[0]['at_ns'])}"
    shown = "; ".join(_told(change) for change in changes[:_SHOWN])
    more = f"; and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    return Words(
        title=title,
        detail=sentence(
            f"{shown}{more}.",
            "Figures over the whole run mix these parts." if named else None,
        ),
        assumptions=(
            ("what changed at the same time is shown, which proves no cause",) if named else ()
        ),
        suggestions=(
            "diagnosing the parts by themselves: `--since` and `--until`"
            if named
            else "reading the log of the worker before that time",
        ),
    )


def warm_up(row: Row) -> Words:
    """The first requests were slower."""
    noun = "first tokens" if row["metric"] == "ttft" else "streams"
    first, later = row["arrival_rate_before"], row["arrival_rate_after"]
    busier = first is not None and later is not None and first >= 1.5 * later
    return Words(
        title=f"warm-up: {noun} of the first {plural(row['requests'], 'request')} were slower",
        detail=sentence(
            f"Median {duration(row['level_before'])} against {duration(row['level_after'])} after it, over the first "
            f"{seconds(row['warm_up_s'])}.",
            f"With them p99 is {duration(row['p99_ms'])}, without {duration(row['p99_without_ms'])}.",
            f"More requests came in a second meanwhile ({_short(first)}/s against {_short(later)}/s): a burst at the start "
            "explains it as well as cold caches."
            if busier
            else None,
        ),
        assumptions=("the run begins where these data begin",),
        suggestions=(
            f"leaving it out for steady figures: --since {_iso(row['until_ns'])}",
            "sending some requests before traffic is let in",
        ),
    )


def _iso(instant_ns: int) -> str:
    return f"{datetime.fromtimestamp(instant_ns / 1e9, UTC):%Y-%m-%dT%H:%M:%SZ}"
