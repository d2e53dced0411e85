"""The words of findings about placement: load, affinity, the router's belief, reuse of caches."""

from __future__ import annotations

from pdtrace._words import Row, Words, sentence
from pdtrace.numbers import count, duration, plural, seconds, share

_BOUND = (
    "what another placement saves is a bound: the tokens may have been evicted there, and that worker would have "
    "had the work on top of its own"
)


def routing(row: Row) -> Words:
    """How requests were placed, and what that cost or could have saved."""
    saved = row["value"]
    if saved and (row["share"] is None or row["share"] >= 0.01):
        title = (
            f"at most {count(saved)} prompt tokens were computed though another worker had them"
            if row["share"] is None
            else f"at most {share(row['share'])} of the prompt tokens were computed though another worker had them"
        )
    elif row["decide_p50_ms"] is not None:
        title = f"the router chooses in {duration(row['decide_p50_ms'])} and {_evenness(row)}"
    else:
        title = f"placement {_evenness(row)}"
    return Words(
        title,
        sentence(
            _decided(row), _load(row), _affinity(row), _prefixes(row), _saved(row), _belief(row)
        ),
        _routing_assumptions(row),
        _routing_advice(row),
    )


def _evenness(row: Row) -> str:
    worst = max(row["requests_over_mean"] or 0, row["decode_over_mean"] or 0)
    if not worst:
        return "leaves no load to compare"
    return f"gives no worker more than {worst:.2f}× its share of the requests"


def _decided(row: Row) -> str | None:
    if not row["decisions"]:
        return None
    policy = f" (policy {row['policies']})" if row["policies"] else ""
    if row["decide_p50_ms"] is None:
        return f"{plural(row['decisions'], 'choice')}{policy}; how long they took is not stated."
    part = (
        f", {share(row['decide_ttft_ratio'])} of the time before first tokens"
        if row["decide_ttft_ratio"] is not None
        else ""
    )
    return (
        f"{plural(row['decisions'], 'choice')}{policy}: p50 {duration(row['decide_p50_ms'])}, "
        f"p99 {duration(row['decide_p99_ms'])}, {seconds(row['decide_s'])} in all{part}."
    )


def _load(row: Row) -> str | None:
    parts = []
    if row["requests_over_mean"] is not None:
        parts.append(
            f"Of {plural(row['workers_seen'], 'worker')} that compute prompts the busiest got "
            f"{_spread(row, 'requests')} the mean of requests"
            + (
                f", {_spread(row, 'tokens')} of prompt tokens less cached ones where known"
                if row["tokens_over_mean"] is not None
                else ""
            )
            + (
                f", {row['seconds_over_mean']:.2f}× of the time"
                if row["seconds_over_mean"] is not None
                else ""
            )
            + (
                f"; {plural(row['idle_workers'], 'worker')} got nothing"
                if row["idle_workers"]
                else ""
            )
            + "."
        )
    if row["decode_over_mean"] is not None:
        parts.append(
            f"Of {plural(row['decode_workers'], 'decode worker')} the busiest got {row['decode_over_mean']:.2f}× the mean "
            "of requests"
            + (
                f", {row['decode_tokens_over_mean']:.2f}× of output tokens"
                if row["decode_tokens_over_mean"] is not None
                else ""
            )
            + (
                f"; {plural(row['decode_idle_workers'], 'worker')} got nothing"
                if row["decode_idle_workers"]
                else ""
            )
            + "."
        )
    return " ".join(parts) or None


def _spread(row: Row, measure: str) -> str:
    value, low, high = (row[f"{measure}_{end}"] for end in ("over_mean", "low", "high"))
    return f"{value:.2f}× ({low:.2f} to {high:.2f})"


def _affinity(row: Row) -> str | None:
    if not row["later_turns"]:
        return None
    return (
        f"{share(row['kept_ratio'])} ({share(row['kept_low_ratio'])} to {share(row['kept_high_ratio'])}) of "
        f"{plural(row['later_turns'], 'later turn')} went to the worker of the turn before; without regard to sessions it "
        f"would be {share(row['chance_ratio'])}."
    )


def _prefixes(row: Row) -> str | None:
    """How prompts that begin alike were placed."""
    if not row["prefix_requests"]:
        return None
    if not row["repeated_requests"]:
        return f"No prompt of {row['prefix_requests']:,} begins as one before it."
    hot = ""
    if row["hot_prefix_requests"]:
        of = (
            f" ({count(row['hot_prefix_tokens'])} tokens)"
            if row["hot_prefix_tokens"] is not None
            else ""
        )
        hot = (
            f" The beginning with most to share{of} opens {plural(row['hot_prefix_requests'], 'prompt')} on "
            f"{plural(row['hot_prefix_workers'], 'worker')}."
        )
    return (
        f"{row['repeated_requests']:,} of {plural(row['prefix_requests'], 'prompt')} begin as an earlier one did; "
        f"{share(row['prefix_kept_ratio'])} ({share(row['prefix_kept_low_ratio'])} to "
        f"{share(row['prefix_kept_high_ratio'])}) of those went to a worker that had had the longest such beginning; "
        f"without regard to prompts it would be {share(row['prefix_chance_ratio'])}.{hot}"
    )


def _saved(row: Row) -> str | None:
    parts = []
    if row["prefix_saved_tokens"] is not None and row["repeated_requests"]:
        parts.append(
            f"of {count(row['prefix_seen_tokens'])} tokens that earlier prompts began with "
            f"{count(row['prefix_saved_tokens'])} were computed again on a worker that had not had them, another had"
        )
    if row["moved_saved_tokens"] is not None and row["later_turns"]:
        parts.append(
            f"turns that moved computed {count(row['moved_saved_tokens'])} tokens again that the worker before had"
        )
    if row["index_saved_tokens"] is not None:
        parts.append(
            f"by its own index the router passed over {count(row['index_saved_tokens'])} cached tokens of better matches"
        )
    return f"{'; '.join(parts)[:1].upper()}{'; '.join(parts)[1:]}." if parts else None


def _belief(row: Row) -> str | None:
    return {
        "engine": "What the router believed cached is held against the engines' own counts in router_belief.",
        "answer": "What the router believed cached is held against the answers' counts in router_belief.",
        "copy": "The cached tokens in the answers equal the router's belief every time, so they may be a copy of it: "
        "whether the belief was right cannot be told.",
    }.get(row["belief"])


def _routing_assumptions(row: Row) -> tuple[str, ...]:
    if not row["value"]:
        return ()
    counters = ("the router's counters run since its start",) if row["level"] == "D" else ()
    return (_BOUND, *counters)


def _routing_advice(row: Row) -> tuple[str, ...]:
    if row["severity"] == "warning":
        return (
            "more weight on cache affinity in the router, and watching the queue of the workers it prefers",
        )
    return (
        "comparing with worker_imbalance, low_cache_reuse and router_queue before changing the policy",
    )


def router_belief(row: Row) -> Words:
    """What the router believed cached against what was there."""
    wrong = (
        f"{share(row['share'])} of what the router believed cached was not there"
        if row["share"] is not None
        else f"the router missed {count(row['missed_tokens'])} cached tokens"
    )
    if not row["too_high"] and not row["too_low"]:
        wrong = "what the router believed cached was there"
    return Words(
        title=wrong,
        detail=f"Over {plural(row['requests'], 'choice')} it believed {count(row['believed_tokens'])} tokens cached on the "
        f"workers it chose, {count(row['found_tokens'])} were found: {count(row['value'])} "
        f"({count(row['interval_low'])} to {count(row['interval_high'])}) expected in vain, {count(row['missed_tokens'])} found "
        f"unexpected. {row['too_high']:,} choices expected too much, {row['too_low']:,} too little (by a few blocks at least); "
        f"mean difference {row['bias_tokens']:+,.0f} tokens, 90 % of them within {count(row['error_p90_tokens'])}.",
        assumptions=()
        if row["cached_basis"] == "engine"
        else ("found tokens stand in the answers; a front end may fill them in from the router",),
        suggestions=(
            "cache events from the engines to the router, and their delay; blocks evicted since are believed too long",
        )
        if row["severity"] == "warning"
        else (),
    )


def slow_worker(row: Row) -> Words:
    """A worker that takes longer than its peers for the same work."""
    more = (
        f" So do {plural(len(row['workers']) - 1, 'other worker')}."
        if len(row["workers"]) > 1
        else ""
    )
    return Words(
        title=f"{row['label'] or row['workers'][0]} is slower than its peers: a decode step takes {row['value']:.2f} times"
        " as long at the same batch",
        detail=f"{duration(row['step_ms'])} against {duration(row['peer_ms'])} ({plural(row['peers'], 'peer')}) for a step of "
        f"{plural(round(row['batch']), 'request')} without prompts, from {plural(row['steps'], 'step')}; interval "
        f"{row['interval_low']:.2f} to {row['interval_high']:.2f} over the batches that were run.{more}",
        assumptions=(
            "equal batches are equal work: "
            + (
                "their context is accounted for, "
                if row["context_known"]
                else "steps do not say the context of their batch, so longer contexts there look the same; "
            )
            + "other hardware or settings on it would be a cause, not a fault",
        ),
        suggestions=(
            "clock and power limits, heat, other jobs on that host; its hardware and settings against a peer's",
            "less of the load for it meanwhile",
        ),
    )


def worker_imbalance(row: Row) -> Words:
    """Unequal shares of workers."""
    side = "" if row["side"] == "both" else f"{row['side']} "
    idle = f" {plural(row['idle_workers'], 'worker')} got nothing." if row["idle_workers"] else ""
    return Words(
        title=f"one {side}worker got {row['value']:.2f} times the mean of its role ({row['measure']})",
        detail=f"{plural(row['workers_seen'], 'worker')}; requests {_times(row['requests_over_mean'])}, tokens "
        f"{_times(row['tokens_over_mean'])}, time {_times(row['seconds_over_mean'])} of the mean, the least loaded "
        f"{_times(row['least_over_mean'])}; {row['sigma']:.1f} standard deviations from chance.{idle}",
        assumptions=(
            "a router that follows prefix caches is uneven on purpose: unevenness alone is no fault",
        ),
        suggestions=(
            "comparing queue times of these workers; weighing load against cache affinity in the router",
        ),
    )


def _times(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}×"


def low_cache_reuse(row: Row) -> Words:
    """Later turns, or prompts that begin alike, computed their prefix again."""
    if row["basis"] == "prefix":
        return _low_prefix_reuse(row)
    moved = row["moved_ratio"]
    apart = None
    if moved is not None and row["stayed_ratio"] is not None:
        apart = (
            f"Turns that stayed reused {share(row['stayed_ratio'])}, turns that moved {share(moved)}: "
            + (
                f"at most {count(row['elsewhere_tokens'])} tokens are due to moving, the rest to eviction or changed prompts."
                if row["elsewhere_tokens"]
                else "moving is not the reason."
            )
        )
    elif row["stayed_ratio"] is not None and moved is None:
        apart = "No turn moved: placement is not the reason; eviction or changed prompts are."
    return Words(
        title=f"later turns computed {share(row['share'])} of a reusable prefix again",
        detail=sentence(
            f"{count(row['value'])} of {count(row['reusable_tokens'])} tokens in {plural(row['sessions'], 'session')}; "
            f"{row['moved_turns']:,} of {plural(row['requests'], 'later turn')} went to another worker than the turn before.",
            apart,
        ),
        suggestions=(
            ("cache size and eviction",)
            if apart and not row["elsewhere_tokens"]
            else ("routing the turns of a session to one worker; cache size and eviction",)
        ),
    )


def _low_prefix_reuse(row: Row) -> Words:
    """Prompts that begin as earlier ones did computed that beginning again."""
    elsewhere = row["elsewhere_tokens"]
    apart = None
    if elsewhere is not None:
        apart = (
            f"At most {count(elsewhere)} of them are due to placement ({row['moved_turns']:,} prompts went to a worker that "
            "had not had all of it); the rest this worker had had: evicted since, not ready yet when the prompt came, or "
            "not kept at all."
            if elsewhere
            else "All of them the same worker had had: placement is not the reason; eviction, or a cache that is off, is."
        )
    return Words(
        title=f"prompts that begin as earlier ones did computed {share(row['share'])} of that beginning again",
        detail=sentence(
            f"{count(row['value'])} of {count(row['reusable_tokens'])} tokens in {plural(row['requests'], 'prompt')}.",
            apart,
        ),
        assumptions=("a cache that never forgets is the measure: no real one finds all of it",),
        suggestions=(
            (
                "routing prompts that begin alike to one worker, where its queue allows; cache size and eviction",
            )
            if elsewhere
            else ("whether prefix caching is on; cache size and eviction",)
        ),
    )
