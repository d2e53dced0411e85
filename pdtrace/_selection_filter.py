"""Which requests are wanted, and what that means in SQL: of the requests themselves and of what belongs to them.

The tables named in these conditions (`_chosen`, `_legs`, `_place`, `_wanted`) are made by the selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pdtrace import _selection_tables as cuts
from pdtrace.model import SloPolicy
from pdtrace.records import dataclass

State = Literal["met", "missed", "open"]  # open: cannot be told, or no class of limits takes it


@dataclass(frozen=True)
class Band:
    """Numbers from `low` (inclusive) below `high`; None is open. `unknown`: those that are not known instead."""

    low: int | None = None
    high: int | None = None
    unknown: bool = False


@dataclass(frozen=True)
class Filter:
    """Which requests are wanted. Nothing set: all of them. A None among texts means those of unknown value."""

    deployment: str | None = None
    from_ns: int | None = None
    until_ns: int | None = None
    models: tuple[str | None, ...] = ()
    workers: tuple[str | None, ...] = ()
    tenants: tuple[str | None, ...] = ()
    prompt: Band | None = None
    output: Band | None = None
    states: tuple[State, ...] = ()
    limits: SloPolicy | None = None

    @property
    def by_time(self) -> bool:
        """Whether requests are chosen by when they started."""
        return self.from_ns is not None or self.until_ns is not None

    @property
    def by_request(self) -> bool:
        """Whether requests are chosen by what they are, so that steps and samples cannot follow."""
        return bool(self.models or self.tenants or self.prompt or self.output or self.states)

    @property
    def chooses(self) -> bool:
        """Whether any request may be left out."""
        return bool(self.deployment or self.by_time or self.by_request or self.workers)

    def scope(self, name: str) -> tuple[cuts.Scope, ...]:
        """What the numbers of a query are of: the selection, all requests of its workers, or the whole run."""
        by_worker = bool(self.workers)
        return cuts.scope(
            name, by_request=self.by_request, by_time=self.by_time, by_worker=by_worker
        )

    def conditions(self) -> tuple[str, list[object]]:
        """One SQL condition over `r` (requests of the deployment) and `s` (slo_requests), and its parameters.

        NULL where a request does not say enough to be told.
        """
        found = ["true"]
        given: list[object] = []

        def add(condition: str, *parameters: object) -> None:
            found.append(f"({condition})")
            given.extend(parameters)

        if self.from_ns is not None:
            add("r.start_ns >= ?", self.from_ns)
        if self.until_ns is not None:
            add("r.start_ns < ?", self.until_ns)
        for column, values in (("r.model", self.models), ("r.tenant", self.tenants)):
            if values:
                add(*_among(f"nullif({column}, '')", values))
        if self.workers:
            add(*_served_by(self.workers))
        for column, band in (("r.prompt_tokens", self.prompt), ("r.output_tokens", self.output)):
            if band is not None:
                add(*_inside(column, band))
        if self.states:
            state = "CASE WHEN s.good THEN 'met' WHEN NOT s.good THEN 'missed' ELSE 'open' END"
            add(f"list_contains(?, {state})", list(self.states))
        return f"({' AND '.join(found)})", given


def _among(column: str, values: Sequence[str | None]) -> tuple[Any, ...]:
    known = [v for v in values if v is not None]
    condition = f"list_contains(?, {column})"
    if None in values:
        condition = f"{column} IS NULL OR coalesce({condition}, false)"
    return condition, known


def _served_by(workers: Sequence[str | None]) -> tuple[Any, ...]:
    """The worker computed its prompt or decoded it; not told where one of the two is unknown and the other is not it."""
    known = [w for w in workers if w is not None]
    condition = "list_contains(?, r.prefill_worker) OR list_contains(?, r.decode_worker)"
    if None in workers:
        condition = (
            f"r.prefill_worker IS NULL AND r.decode_worker IS NULL OR coalesce({condition}, false)"
        )
    return condition, known, known


def _inside(column: str, band: Band) -> tuple[Any, ...]:
    if band.unknown:
        return (f"{column} IS NULL",)
    ends = [(f"{column} >= ?", band.low), (f"{column} < ?", band.high)]
    asked = [(text, value) for text, value in ends if value is not None]
    if not asked:
        return (f"{column} IS NOT NULL",)
    return " AND ".join(text for text, _ in asked), *(value for _, value in asked)


def of_deployment(alias: str) -> str:
    """The condition that a row is of the wanted deployment."""
    return f"{alias}.deployment IS NOT DISTINCT FROM (SELECT wanted_deployment FROM _wanted)"


def left_of(wanted: Filter, cut: cuts.Cut, base: str) -> str:
    """The join or condition that leaves of a table `t` what belongs to the wanted requests; `base` has the whole run."""
    if cut.kind == "request":
        return " SEMI JOIN _chosen AS c ON c.request = t.request"
    if cut.kind == "leg":
        return " SEMI JOIN _legs AS c ON c.leg = t.leg"
    if cut.kind == "edge":
        return " SEMI JOIN _legs AS c ON c.leg = t.leg_b"
    if cut.kind == "deployment":
        return "" if wanted.deployment is None else f" WHERE {of_deployment('t')}"
    if cut.kind == "tied":
        untied = f"t.leg IS NULL OR t.leg IN (SELECT leg FROM {base}.legs WHERE request IS NULL)"
        loose = "" if wanted.by_request else f" OR ({untied}) AND {_there(wanted, cut)}"
        return f" WHERE t.leg IN (SELECT leg FROM _legs){loose}"
    if cut.kind == "member" and wanted.by_time:
        same = "s.worker = t.worker AND s.seq = t.seq AND s.rank IS NOT DISTINCT FROM t.rank"
        return f" SEMI JOIN steps AS s ON {same}"
    return f" WHERE {_there(wanted, cut)}"


def _there(wanted: Filter, cut: cuts.Cut) -> str:
    """The condition on worker and, where there is one, instant."""
    parts = []
    if wanted.deployment is not None or wanted.workers:
        inside = (f"t.{column} IN (SELECT worker FROM _place)" for column in cut.workers)
        parts.append(f"({' OR '.join(inside)})")
    instant = cut.instant if "." in cut.instant else f"t.{cut.instant}"
    if cut.instant and wanted.from_ns is not None:
        parts.append(f"{instant} >= (SELECT wanted_from FROM _wanted)")
    if cut.instant and wanted.until_ns is not None:
        parts.append(f"{instant} < (SELECT wanted_until FROM _wanted)")
    return " AND ".join(parts) or "true"
