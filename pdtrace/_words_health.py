"""The words of findings about capacity, failures and the data themselves."""

from __future__ import annotations

from collections.abc import Callable

from pdtrace._words import Row, Words, sentence
from pdtrace._words_time import clock_time
from pdtrace.numbers import count, duration, plural, quantity, seconds, share

GAP_WORDS = {
    "missing_first_token": "requests without a first-token time",
    "missing_output_tokens": "requests without output tokens",
    "missing_prompt_tokens": "requests without prompt tokens",
    "missing_worker": "requests whose worker is unknown",
    "unknown_outcome": "requests whose outcome is unknown",
    "sampled_steps": "engine steps that are only sampled",
    "steps_without_sum": "engine steps that give no sum",
    "skipped_records": "records not used",
    "conflicting_copies": "copies of one record that differ",
    "unjoined_legs": "records of requests that join no other",
}


def kv_pressure(row: Row) -> Words:
    """The KV cache was nearly full."""
    waiting = row["waiting_max"]
    return Words(
        title=f"KV cache at {share(row['high_from_ratio'])} or more "
        + (
            f"for {share(row['value'])} of the time"
            if row["level"] == "A"
            else f"in {share(row['value'])} of the observations"
        )
        + (
            f" on the fullest of {row['ranks']:,} ranks ({row['ranks_pressed']:,} nearly full)"
            if row["ranks"]
            else ""
        ),
        detail=sentence(
            f"Median usage {share(row['usage_p50_ratio'])}, greatest {share(row['usage_max_ratio'])} "
            f"({plural(row['observations'], 'observation')}).",
            f"Meanwhile up to {quantity(waiting, 'requests')} waited." if waiting else None,
        ),
        suggestions=("more memory for the KV cache, fewer requests at once, or shorter contexts",),
        assumptions=tuple(
            f"{metric} is a share of one, though its name says percent: no value of it is above 1; "
            "in percent these caches would be nearly empty"
            for metric in row["guessed_metrics"]
        ),
    )


def waiting_with_room(row: Row) -> Words:
    """Requests waited and the KV cache had room."""
    seen, limit = row["seen"], row["limit_requests"]
    reached = limit is not None and row["at_limit"] > 0
    return Words(
        title=f"requests waited in {share(row['value'])} of the observations while the KV cache had room",
        detail=sentence(
            f"Up to {quantity(row['waiting_max'], 'requests')} waited (median {row['waiting_p50']:,.0f}) "
            f"while {_span(row['running_min'], row['running_max'], '{:,.0f}'.format)} ran and the cache was "
            f"{_span(row['usage_min_ratio'], row['usage_max_ratio'], share)} full ({seen:,} of {plural(row['observations'], 'observation')}).",
            f"The limit of {limit:,.0f} requests at once (max_num_seqs) was reached, or nine tenths of it, in {row['at_limit']:,} of these {seen:,}."
            if reached
            else f"The limit of {limit:,.0f} requests at once (max_num_seqs) was not reached."
            if limit is not None
            else None,
            f"Prompt tokens were computed at {row['prompt_rate_p50']:,.0f} per second then (median)."
            if row["prompt_rate_p50"]
            else None,
            None
            if reached and row["at_limit"] >= 0.5 * seen
            else "What held them is not in the data: the token budget of a step, a prompt longer than the room left, or a limit of the scheduler.",
            None
            if row["deferred_told"]
            else "Requests that wait for a grammar, an adapter or KV from elsewhere are counted, too.",
        ),
        suggestions=(
            "a higher max_num_seqs, while the KV cache has room"
            if reached
            else "max_num_batched_tokens against the prompt tokens per second, and the lengths of the prompts that wait",
        ),
    )


def _span(low: float, high: float, told: Callable[[float], str]) -> str:
    """Two ends of a range, or the one value."""
    return told(low) if told(low) == told(high) else f"{told(low)} to {told(high)}"


def preemption(row: Row) -> Words:
    """Running requests that were put off."""
    total = "in total since the start of the worker" if row["counter_total"] else "in this period"
    return Words(
        title=quantity(row["value"], "preemptions"),
        detail=sentence(
            _told_by(row, total),
            f"Known cost {seconds(row['cost_s'])}."
            if row["cost_s"] is not None
            else "What they cost is not in the data.",
        ),
        suggestions=("the remedies of kv_pressure: preemption follows from a full KV cache",),
    )


def _told_by(row: Row, total: str) -> str | None:
    """Who tells of preemptions: lines and spans that name them, counters, or both."""
    events, counted = row["from_events"], row["from_counters"]
    told = (
        f"{plural(events, 'event')} {'tells' if events == 1 else 'tell'} of them"
        if events
        else None
    )
    said = f"counters say {count(counted)} {total}" if counted is not None else None
    whole = "; ".join(part for part in (told, said) if part)
    return f"{whole[0].upper()}{whole[1:]}." if whole else None


def _first_at(time_ns: int | None) -> str:
    return f", first at {clock_time(time_ns)}" if time_ns is not None else ""


def failed_requests(row: Row) -> Words:
    """Failures, aborts, HTTP errors."""
    parts = []
    if row["failed"]:
        parts.append(f"{row['failed']:,} failed")
    if row["aborted"]:
        parts.append(f"{row['aborted']:,} aborted")
    if row["http_errors"]:
        parts.append(
            f"{plural(row['http_errors'], 'HTTP error')} without a request seen ({row['server_errors']:,} of the server)"
        )
    kinds = ", ".join(f"{e['error']}: {e['requests']:,}" for e in (row["errors"] or [])[:5])
    of = f" of {plural(row['seen'], 'request')}" if row["seen"] else ""
    if row["calls_whole_log"]:
        of = "; of how many calls in this stretch of time is not known"
    elif row["calls"]:
        of = f" of {row['calls']:,} calls that the access lines of the log count"
    return Words(
        title=f"{' and '.join(parts) or 'no'}{of}",
        detail=sentence(
            "The log names no request that went well: the requests in these data are the failed ones."
            if row["calls"]
            else None,
            f"In the whole log the access lines count {row['calls']:,} calls, {row['calls_failed']:,} with an error:"
            " calls that went well have no time of their own there, so that --since and --until cannot cut the count."
            if row["calls_whole_log"]
            else None,
            f"Kinds: {kinds}." if kinds else None,
            f"{plural(row['retried'], 'request')} needed more than one attempt."
            if row["retried"]
            else None,
            "Aborted requests count neither as failed nor as good.",
        ),
        suggestions=("reading the log around these requests: `pdtrace query events PATH`",),
    )


def engine_failure(row: Row) -> Words:
    """An engine died or ran out of memory."""
    kinds = "; ".join(
        f"{k['detail'] or 'no more is said'} ({k['events']:,} x)" for k in (row["kinds"] or [])[:5]
    )
    whole = len(row["workers"] or [])
    return Words(
        title=f"an engine failed: {kinds}",
        detail=sentence(
            f"{plural(whole, 'worker')} logged it{_first_at(row['first_ns'])}.",
            f"Of {plural(row['requests'], 'request')} in flight then no success is known; that this was why is not in the data."
            if row["requests"]
            else None,
            f"{plural(row['restarts'], 'start')} of a worker followed."
            if row["restarts"]
            else None,
        ),
        suggestions=(
            "reading the log before its first such line; less memory for the KV cache, or a smaller token budget, where memory ran out",
        ),
    )


def engine_stall(row: Row) -> Words:
    """Requests ran and no token was counted."""
    return Words(
        title=f"no token for {seconds(row['longest_s'])} while up to {row['running']:,.0f} requests ran",
        detail=sentence(
            f"{plural(row['stretches'], 'time')}, {seconds(row['value'])} together{_first_at(row['first_ns'])}.",
            f"{plural(row['lasting'], 'engine')} had not come back when the observations end."
            if row["lasting"]
            else None,
            f"The engine says itself {plural(row['lines'], 'time')} that a worker took no work."
            if row["lines"]
            else None,
            "A hung engine looks so, and so does a compilation, a paused process or one very long prompt: which it was is not in the data.",
        ),
        suggestions=("the engine's log and a stack of its process (py-spy dump) from that time",),
    )


def log_warning(row: Row) -> Words:
    """What servers warn of themselves."""
    kinds = row["kinds"] or []
    told = "; ".join(f"{k['detail']} ({k['events']:,} x)" for k in kinds[:5])
    more = f"; and {plural(len(kinds) - 5, 'other')}" if len(kinds) > 5 else ""
    return Words(
        title=f"the log warns: {told}{more}",
        detail=f"{plural(len(row['workers'] or []), 'worker')} logged it{_first_at(row['first_ns'])}. What it cost is not in the log.",
        suggestions=("reading the log around these lines: `pdtrace query events PATH`",),
    )


def kv_alarm(row: Row) -> Words:
    """Answers may rest on wrong KV."""
    kinds = ", ".join(f"{k['kind']}: {k['alarms']:,}" for k in row["kinds"] or [])
    return Words(
        title=f"{quantity(row['value'], 'KV alarms')}: answers may be wrong, not only slow",
        detail=f"{kinds}. Such a request can end with status 200 and a wrong answer; whether one did is not in the data.",
        suggestions=(
            "repeating the requests named; keeping KV longer for the decode side, or shortening the wait before it is read",
        ),
    )


def clock_skew(row: Row) -> Words:
    """Clocks disagree, or the times do."""
    parts = []
    if row["clocks_off"]:
        width = row["half_width_ms"]
        parts.append(
            f"{plural(row['clocks_off'], 'clock')} off by {'at least' if row['at_least'] else 'up to'} "
            f"{duration(row['value'])}"
            + (" (messages one way only bound it from one side)" if row["at_least"] else "")
            + (f" ± {duration(width)}" if width is not None else "")
            + (f", drifting by up to {row['drift_ppm']:.1f} ppm" if row["drift_ppm"] else "")
        )
    if row["infeasible_windows"]:
        parts.append(
            f"in {plural(row['infeasible_windows'], 'window')} of a minute bounds cross: a clock stepped or messages were paired wrongly"
        )
    if row["clocks_wide"]:
        parts.append(f"{plural(row['clocks_wide'], 'clock')} known only roughly")
    if row["early_requests"]:
        parts.append(
            f"in {plural(row['early_requests'], 'request')} an effect begins before its cause (up to {duration(row['worst_early_ms'])})"
        )
    if row["negative_requests"]:
        parts.append(f"negative remainders in {plural(row['negative_requests'], 'request')}")
    if row["clipped_requests"]:
        parts.append(
            f"in {plural(row['clipped_requests'], 'request')} intervals stick out of the window"
        )
    return Words(
        title="times of different records do not fit together exactly",
        detail="; ".join(parts)
        + ". Nothing was clamped; only a worker whose clock is clearly off was shifted, minute by minute, by the middle of its bounds.",
        suggestions=("synchronising the hosts' clocks, or comparing only times of one host",),
    )


def data_gaps(row: Row) -> Words:
    """What is missing."""
    gaps = row["gaps"] or []
    lines = [
        f"{g['missing']:,} of {g['total']:,} {GAP_WORDS.get(g['gap'], g['gap'])}"
        + (f" ({g['detail']})" if g["detail"] else "")
        for g in gaps
    ]
    return Words(
        title="parts of the data are missing",
        detail="; ".join(lines) + ".",
        suggestions=("the switches that `pdtrace coverage` names",),
    )
