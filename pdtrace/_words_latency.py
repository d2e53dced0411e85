"""The words of findings about time: first tokens, streams, queues, transfers, interference."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pdtrace._words import Row, Words, of_ttft, phase, sentence, wait_spread
from pdtrace.numbers import count, duration, plural, seconds, share


def prompt_advice(row: Row) -> str:
    """What to try where first tokens follow the prompt; a split that is there already is not advised against."""
    advice = "prefix caching or shorter contexts"
    return advice if row["split"] else f"{advice} before splitting prefill and decode"


def survivors(outcomes: Mapping[str, Row]) -> str:
    """Of whom a latency of completed requests does not tell, from how the requests ended; empty where all completed.

    Who left or failed while waiting is missing among the slowest: the figures look better than what people met.
    """
    lost = {name: outcomes[name] for name in ("failed", "aborted") if name in outcomes}
    if not lost:
        return ""
    kinds = " and ".join(f"{row['requests']:,} {name}" for name, row in lost.items())
    waiting = sum(row["waiting"] for row in lost.values())
    if not waiting:
        return f"completed requests only, without the {kinds}"
    left = lost.get("aborted", {}).get("waited_ms")
    after = (
        f" (the aborted ones ended after a median of {duration(left)})" if left is not None else ""
    )
    return (
        f"completed requests only, without the {kinds}: of {waiting:,} of these no first token is on record{after},"
        " so waits that were not sat out are missing here"
    )


SURE = 0.3  # a rank correlation surely above it is one to speak of (view token_dependence)


MAY_HOLD_QUEUE = "(or the wait for the engine: nobody tells it apart)"


def _so_far(row: Row, name: str) -> str:
    """A phase in words, told as a bound where its time is mainly one."""
    if name in (row.get("bounded_phases") or ()):
        return f"{phase(name)}, which is an upper bound"
    if name == "prefill" and row.get("queue_apart") is False:
        return f"{phase(name)} {MAY_HOLD_QUEUE}"
    return phase(name)


def slow_first_token(row: Row) -> Words:
    """First tokens that came late."""
    driver = None
    if row["prompt_driven"]:
        driver = f"It follows the prompt: {_prompt_strength(row)}."
    elif row["prompt_driven"] is False:
        verb = (
            "follows the prompt length only weakly"
            if (row["prompt_rho_low"] or 0) > 0
            else "does not follow the prompt length"
        )
        driver = f"It {verb}: {_prompt_strength(row)}."
    elif row["prompt_rho"] is not None:
        driver = f"No clear link to the prompt length ({_prompt_strength(row)})."
    elif not row["prompts_known"]:
        driver = "Prompt lengths are not known."
    else:
        driver = f"Too few prompt lengths are known ({row['prompts_known']:,}) to say whether they drive it."
    grown = None
    dark = row["top_phase"] == "unattributed" and (row["top_phase_ratio"] or 0) > 0.999
    if row["grown_phase"] and not dark and (row["grown_ratio"] or 0) > 0.3:
        grown = (
            f"Most of the difference to the other requests is {_so_far(row, row['grown_phase'])} "
            f"({share(row['grown_ratio'])})."
        )
    where = None
    if row["top_phase"] and row["top_phase"] != "unattributed":
        where = f"Their time before the first token went mostly to {_so_far(row, row['top_phase'])} ({share(row['top_phase_ratio'])})."
    elif row["top_phase"] and (row["top_phase_ratio"] or 1) < 1:
        where = f"Nobody accounts for {share(row['top_phase_ratio'])} of their time before the first token."
    return Words(
        title=f"first token slow on {row['requests']:,} of {plural(row['measured'], 'request')}"
        if row["requests"]
        else "first-token time grows with the prompt",
        detail=sentence(
            _limit(row, "request"),
            f"TTFT p50 {duration(row['ttft_p50_ms'])}, p95 {duration(row['value'])}, {_tail(row, 'ttft_p99_ms')}.",
            where,
            grown,
            driver,
        ),
        assumptions=()
        if row["cached_known"] or not row["prompts_known"]
        else ("cached tokens are unknown: whole prompts stand for what had to be computed",),
        suggestions=_first_token_advice(row),
    )


def _limit(row: Row, unit: str) -> str:
    """What slow means here."""
    per = " per output token" if unit == "token" else ""
    if row["limit_given"]:
        return f"Above the limit given ({duration(row['limit_ms'])}{per})."
    if row["models"] > 1:
        return f"Against what is ordinary for their model in this run ({row['models']:,} models, each by itself)."
    if row["limit_ms"] is None:
        return "Too few requests to say what is ordinary in this run."
    return f"Above what is ordinary in this run ({duration(row['limit_ms'])}{per}; typical {duration(row['typical_ms'])})."


def _tail(row: Row, key: str) -> str:
    """The 99th percentile where there are values enough for one, else the slowest."""
    if row["measured"] >= 100:
        return f"p99 {duration(row[key])}"
    slowest = row["culprits"][0]["value"] if row["culprits"] else None
    return f"slowest {duration(slowest)}" if slowest is not None else f"n = {row['measured']:,}"


def _groups(
    slow: int, slow_long: int | None, measured: int, other_long: int | None, what: str
) -> str:
    return (
        f"{slow_long or 0:,} of {slow:,} slow ones have a long {what}, "
        f"{other_long or 0:,} of the {measured - slow:,} others"
    )


def _prompt_strength(row: Row) -> str:
    if row["prompt_rho"] is None and not row["requests"]:
        return "all prompts are of one length"
    if row["prompt_rho"] is None or (row["prompt_driven"] and row["prompt_rho_low"] <= SURE):
        return _groups(
            row["requests"],
            row["slow_long_input"],
            row["measured"],
            row["other_long_input"],
            "prompt",
        )
    slope = (
        f", {duration(row['prompt_slope_ms'])} for each 1,000 prompt tokens"
        if row["prompt_slope_ms"] is not None
        else ""
    )
    return (
        f"rank correlation {row['prompt_rho']:.2f} "
        f"({row['prompt_rho_low']:.2f} to {row['prompt_rho_high']:.2f}, n = {row['prompt_pairs']:,}){slope}"
    )


def _first_token_advice(row: Row) -> tuple[str, ...]:
    top = row["grown_phase"] or row["top_phase"]
    if top in {"kv_wait", "kv_transfer", "kv_load"}:
        return (
            "KV space on the decode workers, the link between prefill and decode, the size of the prompts",
        )
    if top in {"queue", "router"}:
        return ("load and admission: requests wait before any of their tokens is computed",)
    if row["prompt_driven"]:
        return (prompt_advice(row),)
    if top == "unattributed":
        return ("tracing the hop in front of the engine: nobody accounts for this time",)
    return ()


def slow_stream(row: Row) -> Words:
    """Streams that came slowly or stood still."""
    gaps = None
    if row["gaps"]:
        word = {"chunk": "chunks (a chunk may hold several tokens)", "token": "tokens"}.get(
            row["gap_emission"], "emissions"
        )
        gaps = (
            f"Gaps between {word} as the {row['gap_observer']} saw them: p50 {duration(row['gap_p50_ms'])}, "
            f"p99 {duration(row['gap_p99_ms'])}, longest {duration(row['gap_max_ms'])}; stalls (beyond three times "
            f"the median) hold {share(row['stall_ratio'])} of the stream time."
        )
    if (row["requests"] or 0) == 0:
        title = f"streams stall: {share(row['stall_ratio'])} of the stream time"
    else:
        title = f"slow stream on {row['requests']:,} of {plural(row['measured'], 'request')}"
    return Words(
        title=title,
        detail=sentence(
            _limit(row, "token"),
            f"Time per output token p50 {duration(row['tpot_p50_ms'])}, p95 {duration(row['value'])}, {_tail(row, 'tpot_p99_ms')}.",
            gaps,
            _on_one_worker(row),
            _growth(row),
        ),
        suggestions=_stream_advice(row),
    )


def _on_one_worker(row: Row) -> str | None:
    """Where the slow streams were decoded, if one worker stands out."""
    if row["slow_worker"] is None:
        return None
    # The short name of a nameless one would number it anew: its own first.
    own = row["slow_worker"].partition(":")[2]
    told = own if re.fullmatch(r"(?![0-9a-f-]{12,}$)\D.{0,27}", own) else None
    name = told or row["slow_worker_label"] or row["slow_worker"]
    part = share(row["slow_worker_slow"] / row["slow_worker_requests"])
    return (
        f"{row['slow_worker_slow']:,} of them were decoded on {name}: {part} of its "
        f"{plural(row['slow_worker_requests'], 'request')} are slow, {share(row['other_slow_ratio'])} of the others'. "
        "The data say where, not why: compare its load, prompts and hardware."
    )


def _growth(row: Row) -> str | None:
    """Whether the time per token grows with the answer; only said where some streams are slow."""
    if not row["requests"] or row["output_rho"] is None:
        return None
    strength = _groups(
        row["requests"],
        row["slow_long_output"],
        row["measured"],
        row["other_long_output"],
        "answer",
    )
    if not row["output_driven"] or row["output_rho_low"] > SURE:
        strength = (
            f"rank correlation {row['output_rho']:.2f}, {row['output_rho_low']:.2f} to {row['output_rho_high']:.2f}, "
            f"n = {row['output_pairs']:,}"
        )
    if row["output_driven"]:
        return f"The time per token grows with the length of the answer ({strength})."
    if row["output_driven"] is False:
        if row["output_rho_low"] > 0:
            return (
                f"The time per token grows only weakly with the length of the answer ({strength})."
            )
        return f"The time per token does not grow with the length of the answer ({strength})."
    return f"No clear link to the length of the answer ({strength})."


def _stream_advice(row: Row) -> tuple[str, ...]:
    if row["gaps"] is None and not row["workers"]:
        more = "logging the time of every chunk, and the engine's steps: they show which prompts or batches hold streams up"
        return (
            ("capping long answers; batch size and KV-cache pressure", more)
            if row["output_driven"]
            else (more,)
        )
    return (
        "reading the findings prefill_interference, preemption and kv_pressure: they say what holds streams up",
    )


def long_output(row: Row) -> Words:
    """Long answers explain long requests."""
    return Words(
        title=f"the length of the answers explains {share(row['share'])} of how long requests take",
        detail=sentence(
            f"Each output token adds {duration(row['value'])}; median answer {count(row['output_p50_tokens'])} tokens, "
            f"p95 {count(row['output_p95_tokens'])}.",
            f"{plural(row['long_outputs'], 'request')} with long answers hold {share(row['long_output_time_ratio'])} of all time."
            if row["long_outputs"]
            else None,
        ),
        assumptions=("a correlation over the run's requests, not a cause",),
        suggestions=("limiting answers where users do not need their length",),
    )


def engine_queue(row: Row) -> Words:
    """Waiting in front of or inside the engine."""
    before = row["before_queue_s"] or 0.0
    assumptions = []
    if before > 0:
        assumptions.append(
            f"{seconds(before)} of it lie before the engine's own queue (front end, wait for the running step, "
            "hand-over: the engine does not split them)"
        )
    if (row["placed_ratio"] or 0) > 0.5:
        assumptions.append(
            "laid out from durations that the engine reports, not measured at both ends"
        )
    return Words(
        title=f"requests wait for the engine: {of_ttft(row)}",
        detail=f"{wait_spread(row)} In the engine's queue {seconds(row['prefill_queue_s'])}, before it {seconds(before)}"
        + (
            f" (p99 {duration(row['before_queue_p99_ms'])})"
            if row["before_queue_p99_ms"] is not None
            else ""
        )
        + (
            f", for the first decode step {seconds(row['decode_queue_s'])}"
            if row["decode_queue_s"]
            else ""
        )
        + ".",
        assumptions=tuple(assumptions),
        suggestions=(
            "a lower token budget of a step where steps are long; more workers or fewer admitted at once where requests queue",
        ),
    )


def router_queue(row: Row) -> Words:
    """Time in the router."""
    return Words(
        title=f"the router costs {of_ttft(row)}",
        detail=f"{wait_spread(row)} Queueing {seconds(row['router_queue_s'])}, deciding {seconds(row['router_decide_s'])}, "
        f"dispatching {seconds(row['dispatch_s'])}.",
        suggestions=("the router's queue limits, and its CPU",),
    )


def unattributed_time(row: Row) -> Words:
    """Time that nobody accounts for."""
    if not row["observed"]:
        return Words(
            title="nothing here tells where inside the requests the time went",
            detail="Only whole requests as one observer saw them are there: no component says what it did in that time.",
            suggestions=("tracing the server; `pdtrace coverage` lists the switches",),
        )
    detail = (
        f"Per request p50 {duration(row['unknown_p50_ms'])}, p99 {duration(row['unknown_p99_ms'])}"
        + (
            f"; {share(row['ttft_ratio'])} of the time before first tokens"
            if row["ttft_ratio"] is not None
            else ""
        )
        + "."
    )
    return Words(
        title=f"{share(row['share'])} of the requests' time is accounted for by nobody",
        detail=detail,
        suggestions=(
            "tracing the components that are missing; `pdtrace coverage` lists the switches",
        ),
    )
