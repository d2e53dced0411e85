"""What sets slow requests apart, in words and tables that text and Markdown share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pdtrace.numbers import UNKNOWN, count, duration, plural, share

if TYPE_CHECKING:
    from pdtrace.methods.contrast import Attribute, Value
    from pdtrace.slow import Comparison

HEADS = (
    "what",
    "value",
    "selected",
    "of",
    "share",
    "of others",
    "difference",
    "95 % interval",
    "lift",
)
EXAMPLE_HEADS = ("request", "TTFT", "total", "per token", "in", "out")
VALUES_SHOWN = 3
NO_CAUSE = (
    "A difference is no cause: something that nobody recorded may stand behind it. Bands are made from these requests, "
    "not from what is slow; the same question on another period is the test."
)


def headline(c: Comparison) -> str:
    """Who is compared with whom."""
    question = c.question
    others = f"against {plural(c.rest, 'other')}"
    if question.kind == "where":
        who = f"{plural(c.selected, 'request')} where {question.text}, {others}"
    elif question.kind == "slo":
        who = (
            f"{plural(c.selected, 'completed request')} known to miss a limit ({question.text}), against {count(c.rest)} "
            "known to meet all of theirs"
        )
    else:
        name = "TTFT" if question.measure == "ttft_ms" else "total time (no first token is known)"
        seen = (
            f" as the {c.observer} saw it" if c.observer and question.measure == "ttft_ms" else ""
        )
        limit = (
            f" over {duration(question.threshold_ms)}" if question.threshold_ms is not None else ""
        )
        groups = (
            f"{plural(c.selected, 'request')}{limit}, {others}" if c.selected + c.rest else "none"
        )
        who = f"No condition was given, so the slowest tenth by {name}{seen}: {groups}"
    return f"{who}.{_left_out(c)}"


def _left_out(c: Comparison) -> str:
    further = "more request" if c.selected + c.rest else "request"
    text = f" Of {plural(c.unknown, further)} it is not known." if c.unknown else ""
    if c.left_out:
        why = "do not count here (failed, aborted, of no class, or of unknown outcome)"
        text += f" {plural(c.left_out, 'request')} {why}; ask for them with --where \"outcome <> 'completed'\"."
    return text


def medians(c: Comparison) -> str:
    """The middle of both groups, in what is known."""
    names = {"ttft_ms": "TTFT", "e2e_ms": "total", "tpot_ms": "per token", "prompt_tokens": "prompt tokens", "output_tokens": "output tokens"}  # fmt: skip
    parts = []
    for key, (selected, rest) in c.medians.items():
        if selected is not None and rest is not None:
            write = duration if key.endswith("_ms") else count
            parts.append(f"{names[key]} {write(selected)} against {write(rest)}")
    return "Medians: " + ", ".join(parts) if parts else ""


def too_few(c: Comparison, needed: int) -> str:
    """Why nothing is ranked; empty where something is."""
    if not c.too_few:
        return ""
    if not c.selected + c.rest:
        return "Of no request it is known whether it was slow; `pdtrace coverage PATH` says what would tell."
    small, which = min((c.selected, "selected"), (c.rest, "other"))
    return (
        f"What sets them apart cannot be told from {plural(small, f'{which} request')}: each group needs {needed}. "
        'Give more requests, or a condition that more of them meet, such as --where "ttft_ms > 1000".'
    )


def rows(c: Comparison) -> list[list[str]]:
    """The attributes that stand out, each with the values that are more often selected than the others."""
    table = []
    for attribute in c.attributes:
        if attribute.stands_out:
            for place, value in enumerate(_shown(attribute)):
                table.append(_row(_title(c, attribute.name) if place == 0 else "", value))
    return table


def _shown(attribute: Attribute) -> list[Value]:
    ranked = sorted(attribute.values, key=lambda v: -(v.difference or 0.0))
    clear = [v for v in ranked if v.low is not None and v.low > 0]
    return (clear or ranked[:1])[:VALUES_SHOWN]


def _row(title: str, v: Value) -> list[str]:
    points = UNKNOWN if v.difference is None else f"{100 * v.difference:+.0f} points"
    between = (
        "" if v.low is None or v.high is None else f"{100 * v.low:+.0f} to {100 * v.high:+.0f}"
    )
    lift = "" if v.lift is None else f"x {v.lift:.1f}"
    return [
        title, v.value, count(v.selected), count(v.requests), share(v.share),
        share(v.share_of_others), points, between, lift,
    ]  # fmt: skip


def _title(c: Comparison, name: str) -> str:
    return str(c.titles[name])


def remarks(c: Comparison, alpha: float) -> Iterator[str]:
    """What explains what, what cannot be told apart, what does not stand out, what was not tried."""
    said: set[frozenset[str]] = set()
    for a in c.attributes:
        if a.stands_out and a.proxy_of:
            yield f"{_title(c, a.name)}: nothing is left of it once {_title(c, a.proxy_of)} is held equal; it only goes along with it"
        for b in a.not_told_from:
            if frozenset((a.name, b)) not in said and not a.proxy_of:
                said.add(frozenset((a.name, b)))
                yield f"{_title(c, a.name)} and {_title(c, b)} go together (confounded): these requests cannot tell which of the two it is"
    quiet = [a for a in c.attributes if not a.stands_out]
    if c.attributes and len(quiet) == len(c.attributes):
        yield f"Nothing stands out among {plural(len(quiet), 'attribute')} tried (smallest corrected p {min(a.p_adjusted for a in quiet):.2g})"
    elif quiet:
        yield "does not stand out: " + ", ".join(
            f"{_title(c, a.name)} (p {a.p_adjusted:.2g})" for a in quiet
        )
    if c.attributes:
        yield (
            f"{plural(len(c.attributes), 'attribute')} tried; p values corrected for that (Holm): where nothing differs, the chance "
            f"that any is named is {share(alpha)}; evidence {c.level}"
        )
    reasons: dict[str, list[str]] = {}
    for name, why in c.not_tried.items():
        reasons.setdefault(why, []).append(_title(c, name))
    for why, names in sorted(reasons.items()):
        yield f"not tried, {why}: {', '.join(names)}"


def example_rows(c: Comparison) -> list[list[str]]:
    """The slowest of the selected."""
    return [
        [str(e["request"]), *(duration(e[k]) for k in ("ttft_ms", "e2e_ms", "tpot_ms")),
         *(count(e[k]) for k in ("prompt_tokens", "output_tokens"))]
        for e in c.examples
    ]  # fmt: skip


def blocks(c: Comparison, needed: int) -> Sequence[str]:
    """The sentences above the table."""
    return [text for text in (headline(c), medians(c), too_few(c, needed)) if text]
