"""A what-if in words, and as blocks of text and tables that terminal and Markdown show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdtrace import numbers
from pdtrace.blocks import Block
from pdtrace.phrases import shorten_path

if TYPE_CHECKING:
    from pdtrace._whatif_inputs import Inputs, Link
    from pdtrace._whatif_model import Answer, Asked, Check, WhatIf
    from pdtrace.methods.step_cost import Fitted

# Claims that no replay of one period supports.
NOT_SUPPORTED = (
    "a benefit at a load that was not observed, and near saturation: small errors of the costs become large waits",
    "users that wait for an answer before they ask again: the recorded arrivals would have come later or earlier",
    "prefix-cache hits after the change: another routing hits other caches; the recorded hits are kept",
    "other hardware, another tensor parallelism, another model or precision than recorded",
    "a transfer bandwidth that nobody measured: the band is only as good as the value given",
    "conversations whose later turns send KV back from D to P",
    "answers that were cut short by aborts or failures: their full lengths are unknown",
    "'X times the goodput': that needs both SLO values, the attainment target, a load sweep, P:D, device counts and where KV cost is counted",
)


def figure_name(figure: str) -> str:
    """ttft_p50 as TTFT p50, attainment_all as attainment of all limits."""
    kind, _, rest = figure.partition("_")
    if kind == "attainment":
        return "attainment of all limits" if rest == "all" else f"attainment of {rest.upper()}"
    return f"{kind.upper()} {rest}"


def refused(why: str) -> str:
    """The refusal as the answer."""
    return f"These data cannot say: {why}."


SCATTERED = 0.1  # a median residual of step costs from which on the shape of the cost does not hold
EXPLAINED = 0.03  # and up to which it surely does


def why_it_misses(fitted: Fitted, checks: Sequence[Check]) -> str:
    """What the fit says of the reason, to go on a refusal's sentence; empty where it tells none."""
    worst = max(fitted.decode_error, fitted.prefill_error)
    basis = "engine steps" if fitted.level == "A" else "token gaps and prefills"
    if worst > SCATTERED:
        return (
            f". What a step costs is not told by its batch, context and prompt tokens here ({basis} lie {worst:.0%} off"
            " the best fit in the median): something else keeps the machine busy, or its steps cost otherwise"
        )
    short = [
        c.recorded - c.replayed
        for c in checks
        if c.figure == "ttft_p50" and c.recorded is not None and c.replayed is not None
    ]
    if worst <= EXPLAINED and short and short[0] > 0:
        return (
            f". The steps themselves are explained to {worst:.1%}, so {numbers.duration(short[0])} of the median first"
            " token pass outside of them, between front end, router and engine, and no replay of steps shows that"
        )
    return ""


def missing(items: Sequence[str]) -> str:
    """What is neither recorded nor given."""
    return f"neither recorded nor given: {'; '.join(items)}"


def verdict(given: Sequence[Answer], checks: Sequence[Check]) -> str:
    """What would change, where the whole band says so."""
    parts = []
    for origin in dict.fromkeys(a.first_token for a in given):
        mine = [
            a
            for a in given
            if a.first_token == origin and (a.figure.endswith(("_p50", "_p90")) or a.unit == "1")
        ]
        sides: dict[str, list[str]] = {}
        for a in mine:
            sides.setdefault(a.change, []).append(figure_name(a.figure))
        text = "; ".join(f"{change}: {', '.join(names)}" for change, names in sides.items())
        parts.append(f"with the first token from {origin}: {text}" if origin else text)
    return (
        f"Replayed on the set-up asked for, against the replay of how it ran: {'. '.join(parts)}."
    )


def assumptions(
    found: Inputs, fitted: Fitted, asked: Asked, link: Link | None, closed_loop: bool
) -> tuple[str, ...]:
    """What the answer takes for granted."""
    split = asked.pd is not None or (found.split and asked.workers is None)
    lines = [
        "the same requests arrive at the same instants, with the same lengths and the same cached tokens",
        f"batching of the engine: {fitted.budget_basis}",
        "what a step costs: "
        + (
            "the engine's own steps"
            if fitted.level == "A"
            else "gaps between tokens and prefill intervals"
        )
        + f" (level {fitted.level})",
        (
            "bands: fits of stretches of the data drawn anew, and runs whose steps scatter as the recorded ones,"
            " widened by the error of the self-check; central is the mean of those runs"
        ),
    ]
    if not fitted.alone_rows:
        lines.append(
            "a step that only computes prompts was never seen alone: its fixed part is taken from the decode steps, the band goes down to 0.4 of it"
        )
    elif fitted.fixed_range:
        low, high = (1e3 * value for value in fitted.fixed_range)
        lines.append(
            f"a step that only computes prompts was seen {fitted.alone_rows} times: its fixed part is taken from those, the band from {low:.1f} to {high:.1f} ms of it"
        )
    if split:
        lines.append("P serves first come first served, transfers leave a P worker one after the other, D reserves KV room before a transfer")  # fmt: skip
        lines.append("band over the transfer: bulk (all of it after the prefill) and layer-wise (hidden behind the prefill)"
                     if asked.transfer is None else f"transfer: {asked.transfer}")  # fmt: skip
        if asked.bandwidth_gbps is not None and asked.bandwidth_gbps[0] == asked.bandwidth_gbps[1]:
            lines.append("band over the bandwidth: from half of the value given (small transfers reach no more) to all of it; central is the value given")  # fmt: skip
        if asked.bandwidth_gbps is None and link is not None:
            lines.append(f"bandwidth from {link.transfers} recorded transfers")
        if asked.latency_ms is None and link is None:
            lines.append("no latency on top of the bandwidth (--latency-ms)")
    entries = asked.pd[0] if asked.pd else asked.workers or found.entries
    if found.cached_ratio >= 0.05 and entries > found.entries:
        lines.append(
            f"{found.cached_ratio:.0%} of the prompt tokens were found in prefix caches of {found.entries} workers: band from"
            " those hits to none, since more caches hold less each"
        )
    if found.ranked:
        lines.append("each data-parallel rank counts as a worker, those asked for too")
    ran = found.entries + found.decoders
    played = sum(asked.pd) if asked.pd else asked.workers or ran
    if played != ran:
        lines.append(
            f"{numbers.plural(ran, 'worker')} ran, {played} are asked for: not the same hardware, and not the same cost"
        )
    if asked.chunk_tokens and fitted.chunk_tokens is None:
        lines.append(
            "steps that mix prompts and decodes were never seen: they are taken to add nothing to the sum of both"
        )
    if asked.pd or asked.workers:
        lines.append("requests go to the workers in turn")
    if found.cached_known < 0.9:
        lines.append("cached tokens are not recorded: every prompt is taken as computed whole")
    if found.lost:
        lines.append(
            f"{numbers.plural(found.lost, 'failed or aborted request')} played with the lengths they reached"
        )
    if closed_loop:
        lines.append(
            "the load came from a fixed number of users: their arrivals would follow the latency, here they do not"
        )
    return tuple(lines)


def blocks(found: WhatIf) -> list[Block]:
    """The whole answer."""
    name = found.deployment["name"] or found.deployment["id"]
    asked = ", ".join(f"{k.replace('_', ' ')} {_setting(v)}" for k, v in found.asked.items()) or "nothing but the self-check"  # fmt: skip
    return [
        Block(f"What if: {asked}", strong=(found.verdict,),
              lines=(f"{name} ({found.deployment['mode']}) from {shorten_path(found.path, 60)}",)),
        Block("Replayed as it ran (self-check)", heads=("figure", "recorded", "replayed", "error"),
              fixed=("figure", "recorded", "replayed", "error"), rows=tuple(_check(c) for c in found.self_check)),
        *(_answers(found, origin) for origin in dict.fromkeys(a.first_token for a in found.answers)),
        Block("What a step costs (fitted)", items=_fit(found)),
        Block("Assumed", items=found.assumptions),
        Block("What these data do not support", items=found.not_supported),
    ]  # fmt: skip


def _setting(value: object) -> str:
    if isinstance(value, tuple | list):
        low, high = value
        return (
            f"{low:g}:{high:g}"
            if isinstance(low, int)
            else f"{low:g}"
            if low == high
            else f"{low:g} to {high:g}"
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check(c: Check) -> tuple[str, ...]:
    error = numbers.UNKNOWN
    if c.error is not None:
        error = f"{100 * c.error:+.1f} {'points' if c.unit == '1' else '%'}".replace("-", "−")
    return (
        figure_name(c.figure),
        numbers.quantity(c.recorded, c.unit),
        numbers.quantity(c.replayed, c.unit),
        error,
    )


def _answers(found: WhatIf, origin: str | None) -> Block:
    title = "On the set-up asked for"
    heads = ("figure", "from", "central", "to", "as it ran (replayed)", "change")
    rows = tuple(
        (figure_name(a.figure), *(numbers.quantity(v, a.unit) for v in (a.low, a.central, a.high, a.as_it_ran)), a.change)
        for a in found.answers
        if a.first_token == origin
    )  # fmt: skip
    lines: tuple[str, ...] = ()
    if origin:
        title += f", first token delivered by the {origin} worker (KV cost {'in the gap after it' if origin == 'prefill' else 'in TTFT'})"
        w = found.waits[origin]
        text = (
            f"transfer p50 {numbers.duration(w['transfer_p50_ms'])}, p99 {numbers.duration(w['transfer_p99_ms'])};"
            f" wait for KV room on D p99 {numbers.duration(w['kv_memory_wait_p99_ms'])};"
            f" busiest P worker computes {numbers.share(w['prefill_busy_ratio'])} of the time"
        )
        lines = (text,)
        if w["prefill_busy_ratio"] > 0.9:
            lines += ("P is near saturation: no claim holds there",)
        if w["unfinished_variants"]:
            lines += (
                f"{w['unfinished_variants']} of {w['variants']} variants do not carry the load: no upper end",
            )
    return Block(title, heads=heads, fixed=heads, rows=rows, lines=lines)


def _fit(found: WhatIf) -> tuple[str, ...]:
    f = found.fit
    if not f:
        return ()
    prefill = (
        f"prefill: {f['prefill_fixed_ms']:.2f} ms + {f['prefill_per_token_us']:.1f} µs a token"
        f" + {f['prefill_per_token_squared_ns']:.2f} ns a token squared, from"
        f" {numbers.plural(f['prefill_rows'], 'prefill')}, median error {numbers.share(f['prefill_residual_ratio'])}"
    )
    decode = (
        f"decode: {f['decode_fixed_ms']:.2f} ms + {f['decode_per_request_us']:.1f} µs a request"
        f" + {f['decode_per_context_token_ns']:.2f} ns a token of context, from"
        f" {numbers.plural(f['decode_rows'], 'gap')}, median error {numbers.share(f['decode_residual_ratio'])}"
    )
    return (
        prefill,
        decode,
        f"evidence level {f['level']} · {numbers.plural(f['requests'], 'request')} replayed",
    )
