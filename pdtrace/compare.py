"""Sets two runs side by side: conditions first, then differences with intervals, a winner only where conditions allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pdtrace import _compare_words as words
from pdtrace._compare_conditions import blocked, changed_settings, conditions, same_data
from pdtrace._compare_deltas import deltas, findings
from pdtrace._compare_model import METRICS, Comparison, Condition, Delta, Pair, Ranking
from pdtrace._compare_side import Side, sides
from pdtrace.blocks import Block
from pdtrace.diagnose import diagnose
from pdtrace.errors import BadOption
from pdtrace.goodput import as_policy
from pdtrace.model import Slo, SloPolicy
from pdtrace.store import Store

VOUCHED = "unknown"  # --same unknown: whatever the data do not say


def compare(
    a: Store,
    b: Store,
    paths: tuple[str, str],
    slo: Slo | SloPolicy | None = None,
    same: Sequence[str] = (),
    deployments: Sequence[str] = (),
) -> Comparison:
    """Compare what two stores hold, deployment by deployment; nothing is pooled.

    `same`: ids of conditions that the user vouches for where the data do not say. `deployments`: names of
    those to compare, as NAME or NAME=NAME (side A, side B).
    """
    policy = as_policy(slo)
    found = [
        sides(store, diagnose(store, policy), path)
        for store, path in zip((a, b), paths, strict=True)
    ]
    for side, path in zip(found, paths, strict=True):
        if not side:
            raise BadOption(
                f"{path}: no requests to compare",
                "give dumps with requests in them; `pdtrace coverage` says what a dump has",
            )
    matched, left = _matched(found[0], found[1], deployments)
    pairs = tuple(compared_sides(x, y, how, policy, same) for x, y, how in matched)
    unknown = set(same) - {VOUCHED} - {c.id for pair in pairs for c in pair.conditions}
    if unknown:
        raise BadOption(
            f"--same {', '.join(sorted(unknown))}: no such condition",
            f"name one of {', '.join(c.id for c in pairs[0].conditions)}, or `unknown` for all that the data do not say",
        )
    return Comparison(
        paths[0], paths[1], pairs,
        tuple(s.name for s in left[0]), tuple(s.name for s in left[1]), words.NOT_SUPPORTED,
    )  # fmt: skip


def report(comparison: Comparison) -> list[Block]:
    """The comparison as blocks of text and tables."""
    return words.blocks(comparison)


def _matched(
    a: list[Side], b: list[Side], asked: Sequence[str]
) -> tuple[list[tuple[Side, Side, str]], tuple[list[Side], list[Side]]]:
    """Which deployment of A stands against which of B: as asked, the only ones, by name, by mode."""
    pairs: list[tuple[Side, Side, str]] = []
    if asked:
        for text in asked:
            first, _, second = text.partition("=")
            pairs.append((_named(a, first), _named(b, second or first), "as asked"))
    elif len(a) == len(b) == 1:
        pairs.append((a[0], b[0], "the only ones"))
    else:
        pairs += _by(a, b, lambda s: s.name, "name", pairs)
        pairs += _by(a, b, lambda s: s.deployment.mode, "mode", pairs)
    if not pairs:
        raise BadOption(
            "the deployments of A and B match neither by name nor by mode",
            f"name one of each: --deployment NAME=NAME; A has {_names(a)}; B has {_names(b)}",
        )
    used = {id(s) for x, y, _ in pairs for s in (x, y)}
    return pairs, ([s for s in a if id(s) not in used], [s for s in b if id(s) not in used])


def _by(
    a: list[Side], b: list[Side], key: Any, how: str, taken: Sequence[tuple[Side, Side, str]]
) -> list[tuple[Side, Side, str]]:
    """Pairs of those that alone on their side have this key."""
    used = {id(s) for x, y, _ in taken for s in (x, y)}
    groups: list[dict[str, list[Side]]] = [{}, {}]
    for group, side in zip(groups, (a, b), strict=True):
        for one in side:
            if id(one) not in used:
                group.setdefault(key(one), []).append(one)
    return [
        (groups[0][k][0], groups[1][k][0], how)
        for k in groups[0]
        if len(groups[0][k]) == 1 == len(groups[1].get(k, ()))
    ]


def _named(side: list[Side], name: str) -> Side:
    found = [s for s in side if name in {s.name, s.deployment.id}]
    if len(found) != 1:
        raise BadOption(f"--deployment: no deployment named {name}", f"there are {_names(side)}")
    return found[0]


def _names(side: list[Side]) -> str:
    return ", ".join(s.name for s in side)


def compared_sides(
    a: Side,
    b: Side,
    how: str = "as asked",
    policy: SloPolicy | None = None,
    same: Sequence[str] = (),
) -> Pair:
    """One deployment against another."""
    known = conditions(a, b, policy, same)
    figures = deltas(a, b, policy)
    twin = same_data(a, b)
    changed, settled = changed_settings(known)
    one = False if len(changed) > 1 else (len(changed) == 1 if settled or twin else None)
    rankings = tuple(_ranking(metric, figures, known) for metric in METRICS)
    winner = _winner(rankings)
    return Pair(
        a=_told(a), b=_told(b), matched_by=how, same_data=twin, conditions=tuple(known),
        changed=tuple(changed), one_setting_changed=one,
        attribution=words.attribution(changed, one, twin), deltas=tuple(figures), findings=tuple(findings(a, b)),
        rankings=rankings, winner=winner, verdict=words.verdict(rankings, winner, twin, figures),
        assumptions=words.assumptions(known, twin),
    )  # fmt: skip


def _told(side: Side) -> Mapping[str, Any]:
    d = side.deployment
    return {
        "path": side.path, "id": d.id, "name": d.name, "mode": d.mode,
        "window": {"start": d.window[0], "end": d.window[1]}, "requests": dict(d.requests), "sources": list(side.sources),
    }  # fmt: skip


def _ranking(metric: str, figures: Sequence[Delta], known: Sequence[Condition]) -> Ranking:
    """Who is better in one group of figures; figures that contradict each other are mixed."""
    judged = [d for d in figures if d.group == metric and d.judged]
    if reasons := blocked(known)[metric]:
        return Ranking(metric, "not_comparable", tuple(reasons))
    sure = {d.better: d for d in judged if d.better}
    if len(sure) > 1:
        return Ranking(metric, "mixed", tuple(f"{d.statistic} {d.better}" for d in sure.values()))
    if sure:
        side = next(iter(sure))
        return Ranking(metric, side, tuple(d.statistic for d in judged if d.better))
    if all(d.found.joint is None for d in judged):
        return Ranking(metric, "unknown", ("too few values for an interval, or none",))
    return Ranking(metric, "no_difference", ())


def _winner(rankings: Sequence[Ranking]) -> Literal["A", "B"] | None:
    """The side that is better somewhere and worse nowhere, where every latency could be ranked."""
    if any(r.result == "not_comparable" for r in rankings if r.metric in {"ttft", "tpot", "e2e"}):
        return None
    results = {r.result for r in rankings} & {"A", "B", "mixed"}
    if results == {"A"}:
        return "A"
    return "B" if results == {"B"} else None
