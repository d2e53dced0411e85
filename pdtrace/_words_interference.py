"""The words of prefill interference: what was lost, who took it, how it is known, where it is not."""

from __future__ import annotations

from collections.abc import Sequence

from pdtrace._words import Row, Words, sentence
from pdtrace.numbers import duration, plural, seconds, share

NOT_FASTER = "Taking the cause away makes streams steadier; that is not the same as faster."
SAID_AGAIN, MOSTLY_AGAIN = 0.05, 0.5  # parts of the loss from which on it is said, and comes first
LEAST_STRETCHES = 12  # of counters; fewer say nothing
CHANCE = 0.01  # a rank correlation of counters that chance gives more often says nothing
SHOWN = 5  # workers without a flag that get a line of their own
LEVELS = {
    "A": "engine steps", "B": "token times and prefill intervals", "C": "durations of requests",
}  # fmt: skip
_TIME = {
    "A": "step-counted decode time",
    "B": "the decode time of the streams with token times",
    "C": "the decode time of the requests, first token to end",
}


def prefill_interference(row: Row) -> Words:
    """Decode time taken by others' prompts."""
    least = "at least " if row["level"] == "C" else ""
    return Words(
        title=f"{_cause(row)} held decodes up for {least}{seconds(row['value'])}: "
        f"{share(row['share'])} of decode time",
        detail=sentence(
            f"Interval {seconds(row['interval_low'])} to {seconds(row['interval_high'])}, "
            f"from {_levels(row['levels'])}; the denominator is {_denominator(row['levels'])}, "
            f"{seconds(row['decode_s'])}{_counted(row['levels'])}.",
            _steps(row),
            _again(row),
            _tokens(row),
            _shift(row),
            _who(row),
            _others(row),
        ),
        assumptions=_assumptions(row),
        suggestions=_suggestions(row),
    )


def _part_again(row: Row) -> float:
    """Part of the loss that preempted requests took by being computed again."""
    return (row["again_lost_s"] or 0.0) / row["value"] if row["value"] else 0.0


def _cause(row: Row) -> str:
    part = _part_again(row)
    if part < SAID_AGAIN:
        return "prompts of others"
    if part > 1 - SAID_AGAIN:
        return "preempted requests, computed again,"
    named = ("preempted requests, computed again,", "prompts of others")
    return " and ".join(named if part >= MOSTLY_AGAIN else named[::-1])


def _again(row: Row) -> str | None:
    if _part_again(row) < SAID_AGAIN:
        return None
    return (
        f"{seconds(row['again_lost_s'])} of it went into computing again what preempted requests had lost for want of"
        " KV space; new prompts took the rest."
    )


def _suggestions(row: Row) -> tuple[str, ...]:
    part = _part_again(row)
    fewer = (
        "fewer requests admitted at once, or more KV cache, so that none is preempted and computed again",
    )
    prompts = (
        "a lower token budget of a step (chunked prefill), a cap on long prefills, or other"
        " workers for long prompts. " + NOT_FASTER,
    )
    if part > 1 - SAID_AGAIN:
        return fewer
    return (
        (fewer + prompts if part >= MOSTLY_AGAIN else prompts + fewer)
        if part >= SAID_AGAIN
        else prompts
    )


def _levels(levels: Sequence[str]) -> str:
    said = [f"{LEVELS[level]} (level {level})" for level in levels]
    return " on some workers and ".join(said)


def _denominator(levels: Sequence[str]) -> str:
    return " and ".join(_TIME[level] for level in levels)


def _counted(levels: Sequence[str]) -> str:
    return " (step duration × requests decoding in it)" if "A" in levels else ""


def _steps(row: Row) -> str | None:
    if "A" not in row["levels"]:
        return None
    held = (
        f"{plural(row['affected_steps'], 'step')} held decodes up, the longest for "
        f"{duration(row['longest_step_ms'])}."
    )
    gaps = row["gaps_lost_s"]
    if row["mixed_p50_ms"] is None:  # prompts were computed in steps of their own only
        return sentence(
            f"A step that only decodes takes {duration(row['decode_only_p50_ms'])} (median); {held}",
            None if gaps is None else f"Token times of the same workers say {seconds(gaps)}.",
        )
    return (
        f"A step that only decodes takes {duration(row['decode_only_p50_ms'])}, one that also "
        f"computes prompts {duration(row['mixed_p50_ms'])} (medians); {held} "
        f"Cross-check by plain excess over the decode-only median: {seconds(row['plain_lost_s'])}"
        + (f"; token times of the same workers say {seconds(gaps)}." if gaps is not None else ".")
    )


def _tokens(row: Row) -> str | None:
    if row["tail_explained_ratio"] is None:
        return None
    events = (
        f"; {plural(row['events'], 'single stall')} of {duration(row['event_ms'])} or more can be"
        " called (table interference_events)"
        if row["events"]
        else ""
    )
    return (
        f"Prompts explain {share(row['tail_explained_ratio'])} of what the longest hundredth of"
        f" the token gaps lasts beyond the ordinary{events}."
    )


def _shift(row: Row) -> str | None:
    """The check of the clocks: by how much prefills would have to move to fit the stalls best."""
    worst = row["best_shift_ms"]
    if worst is None:
        return None
    if not worst:
        return (
            "Check of the clocks: prefills fit the stalls best where they are (to a step); moved by up"
            " to a second either way they fit worse."
        )
    way = "later" if worst > 0 else "earlier"
    return (
        f"Check of the clocks: prefills would fit the stalls best {duration(abs(worst))} {way}"
        f" ({row['shift_label'] or row['shift_worker']}), so clocks of prefills and tokens disagree, or placed prefills lie that"
        " far off; losses from token times are then too low."
    )


def _who(row: Row) -> str | None:
    parts = []
    if row["culprits"]:
        first = row["culprits"][0]
        parts.append(f"The prompt of {first['request']} took most ({seconds(first['value'])})")
    if row["victims"]:
        first = row["victims"][0]
        parts.append(f"{first['request']} lost most ({seconds(first['value'])})")
    return "; ".join(parts) + "." if parts else None


def _others(row: Row) -> str | None:
    """Workers that are not in the sum: judged without a flag, or not judged."""
    judged = row["workers_judged"] - max(1, len(row["workers"]))
    parts = []
    if judged:
        parts.append(f"{plural(judged, 'other worker')} judged, nothing shown there")
    if row["workers_unknown"]:
        parts.append(f"{plural(row['workers_unknown'], 'worker')} cannot be judged")
    return "; ".join(parts) + "." if parts else None


def _assumptions(row: Row) -> tuple[str, ...]:
    levels = row["levels"]
    told = []
    if "A" in levels:
        told.append(
            "a step without prompt tokens would have taken what a fit of decode-only steps gives; where steps do"
            " not say the context of their batch, with what the steps around it take beyond the fit"
        )
    if "B" in levels:
        told.append("a gap without a prefill would have lasted what a fit of such gaps gives")
    if "C" in levels:
        told.append(
            "a lower value: what prompts cost whatever their length cannot be told from load"
        )
        told.append(
            "whatever else always comes with long prompts (pauses that follow them) counts as theirs"
        )
    if row["named_by"] in {"token times", "both"} and "A" in levels:
        told.append(
            "the sum comes from engine steps, which name no requests; who took it and who lost it"
            " comes from token times (level B)"
        )
    if "C" in levels and (row["mixed_ranks"] or 1) > 1:
        told.append(
            f"durations do not say which of {row['mixed_ranks']:,} data-parallel ranks served a request: prompts of all"
            " are held against each"
        )
    if row["named_by"] in {"token times", "both"} and (row["mixed_ranks"] or 1) > 1:
        told.append(
            f"token times do not say which of {row['mixed_ranks']:,} data-parallel ranks served a request: prompts on one"
            " are laid over the tokens of all, so the requests that took most are likely, not certain"
        )
    if len(levels) > 1:
        told.append("workers are judged at different levels; each is counted once, at its best")
    return (*told, *(row["notes"] or ()))


def judged(rows: Sequence[Row]) -> list[str]:
    """One sentence for each worker that was judged and not flagged, and one for decode workers.

    `rows` of view interference_by_worker; of many workers those that lost most.
    """
    quiet = sorted(
        (row for row in rows if row["flagged"] is False), key=lambda row: -(row["lost_s"] or 0.0)
    )
    lines = [
        f"prefill interference on {row['label'] or row['worker'] or 'no worker known'}, judged by "
        f"{LEVELS[row['level']]} (level {row['level']}): {_amount(row)} of "
        f"{seconds(row['decode_s'])} of decode time; {_why_quiet(row)}"
        for row in quiet[:SHOWN]
    ]
    if len(quiet) > SHOWN:
        lines.append(
            f"prefill interference on {plural(len(quiet) - SHOWN, 'more worker')}, each of which"
            " lost less (view interference_by_worker)"
        )
    away = [row for row in rows if row["role"] == "decode" and row["flagged"] is None]
    if away and away[0]["notes"]:
        who = plural(len(away), "decode worker")
        lines.append(f"prefill interference on {who}: {away[0]['notes'][0]}")
    return lines


LEAST = 0.01  # share of decode time that the loss must surely exceed to be flagged, at every level


def _why_quiet(row: Row) -> str:
    """Why what was found on a worker is no finding."""
    if (row["lost_low_s"] or 0.0) <= 0:
        return "it may as well be nothing"
    if (row["lost_ratio_low"] or 0.0) <= LEAST:
        return f"sure of it is only {share(max(row['lost_ratio_low'] or 0.0, 0.0))} of that time"
    return row["notes"][0] if row["notes"] else "too few stalls to call it how the worker runs"


def _amount(row: Row) -> str:
    low, high = row["lost_low_s"], row["lost_high_s"]
    if row["lost_s"] is None:
        return "unknown seconds"
    if low is None or high is None:
        return seconds(row["lost_s"])
    return f"{seconds(row['lost_s'])} (interval {seconds(low)} to {seconds(high)})"


def unjudged(rows: Sequence[Row], counters: Sequence[Row] = ()) -> str | None:
    """Why prompts that held up streams cannot be told, for workers where they might have.

    `counters`: rows of view interference_by_counters; periodic counters never show it, they may be consistent with it.
    """
    missing = "neither engine steps nor token times are there"
    able = [row for row in rows if row["role"] not in {"decode", "prefill"}]
    blind = [row for row in able if row["flagged"] is None]
    if able and not blind:
        return None
    claim = "whether prompts of some requests held up the streams of others"
    if not able:
        said = [_counted_words(row) for row in counters][:SHOWN]
        return None if rows else "; ".join([f"{claim}: {missing}", *said])
    if len(blind) < len(able):
        claim += f" on {len(blind)} of {plural(len(able), 'worker')}"
    notes = [note for row in blind for note in row["notes"]]
    judged = {row["worker"] for row in able if row["flagged"] is not None}
    said = [_counted_words(row) for row in counters if row["worker"] not in judged][:SHOWN]
    return "; ".join([f"{claim}: {notes[0] if notes else missing}", *said])


def _counted_words(row: Row) -> str:
    """What periodic counters of one worker say (level D): consistent with, or nothing that points to it."""
    who = (
        f"the periodic counters of {row['name']} (level D, {row['stretches']:,} stretches of about"
    )
    who += f" {seconds(row['stretch_s'])})"
    few, many = row["few_ms"], row["many_ms"]
    if row["stretches"] < LEAST_STRETCHES or None in (row["correlation"], few, many):
        return f"{who} are too few or too even to say anything"
    what = "mean gap between tokens" if row["measure"] == "gap" else "time for a token"
    told = (
        f"{what} {duration(many)} in the third with most prompt tokens, {duration(few)} in that with fewest,"
        f" rank correlation {row['correlation']:.2f}"
    )
    if row["correlation"] > 0 and row["correlation_p"] <= CHANCE and many > few:
        return (
            f"{who} are consistent with it ({told}), and with larger batches or anything else that comes with"
            " more load"
        )
    return f"{who} do not point to it ({told}), though a mean over seconds can hide it"
