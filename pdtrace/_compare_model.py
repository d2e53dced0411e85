"""What a comparison consists of: conditions, deltas, rankings, pairs of deployments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from pdtrace.methods.two_samples import Difference
from pdtrace.records import dataclass

SCHEMA = "pdtrace.comparison/1"
Status = Literal["same", "different", "unknown"]
Kind = Literal["measure", "workload", "setting"]
METRICS = ("ttft", "tpot", "itl", "e2e", "goodput")


@dataclass(frozen=True)
class Condition:
    """One condition: its value on both sides, whether they are the same, and which metrics it keeps from being ranked."""

    id: str
    name: str
    kind: Kind
    status: Status
    a: str | None
    b: str | None
    note: str = ""
    blocks: tuple[str, ...] = METRICS  # metrics that may be ranked only where it is the same
    stated: bool = False  # the user vouches that it is the same
    changes: tuple[tuple[str, str, str], ...] = ()  # settings that differ: key, A, B

    def to_dict(self) -> dict[str, Any]:
        """Its JSON."""
        return {
            "id": self.id, "name": self.name, "kind": self.kind, "status": self.status, "a": self.a, "b": self.b,
            "note": self.note, "stated": self.stated, "blocks": [] if self.status == "same" else list(self.blocks),
        }  # fmt: skip


def status_of(a: str | None, b: str | None) -> Status:
    """Same, different, or unknown as soon as one side is."""
    if a is None or b is None:
        return "unknown"
    return "same" if a == b else "different"


def condition(
    key: str,
    name: str,
    kind: Kind,
    values: Sequence[str | None],
    *,
    status: Status | None = None,
    note: str = "",
    blocks: tuple[str, ...] = METRICS,
    changes: tuple[tuple[str, str, str], ...] = (),
) -> Condition:
    """A condition from the values of A and B; same where they are equal, unless `status` says more."""
    a, b = values
    return Condition(
        key, name, kind, status or status_of(a, b), a, b, note, blocks, changes=changes
    )


@dataclass(frozen=True)
class Delta:
    """One figure on both sides."""

    group: str  # ttft, tpot, itl, e2e, goodput, failures, throughput or phase
    metric: str  # such as ttft_ms, or the phase and its detail
    statistic: str  # mean, p50, p90, p99, share or rate
    unit: str
    found: Difference
    level: str | None  # the weaker evidence level of both sides
    lower_is_better: bool | None = True  # None: neither is better
    judged: bool = False  # takes part in the ranking of its group
    note: str = ""
    at_most: tuple[bool, bool] = (False, False)  # A's, B's value is an upper bound

    @property
    def better(self) -> Literal["A", "B"] | None:
        """The better side where the joint interval leaves no doubt."""
        if not self.judged or self.lower_is_better is None or self.found.joint is None:
            return None
        low, high = self.found.joint
        if low <= 0 <= high:
            return None
        return "B" if (high < 0) is self.lower_is_better else "A"

    def to_dict(self) -> dict[str, Any]:
        """Its JSON."""
        found = self.found
        return {
            "group": self.group, "metric": self.metric, "statistic": self.statistic, "unit": self.unit,
            "a": found.a, "b": found.b, "n_a": found.n_a, "n_b": found.n_b, "difference": found.difference,
            "interval": found.interval, "joint_interval": found.joint, "ratio": found.ratio,
            "ratio_interval": found.ratio_interval, "level": self.level,
            "lower_is_better": self.lower_is_better, "judged": self.judged,
            "upper_bound_a": self.at_most[0], "upper_bound_b": self.at_most[1],
            "note": "; ".join(part for part in (self.note, found.note) if part),
        }  # fmt: skip


@dataclass(frozen=True)
class Ranking:
    """Which side is better in one group of figures, or why that cannot be said."""

    metric: str
    result: Literal["A", "B", "mixed", "no_difference", "unknown", "not_comparable"]
    reasons: tuple[
        str, ...
    ] = ()  # of not_comparable: missing or different conditions; else the figures behind it


@dataclass(frozen=True)
class Pair:
    """Two deployments, one of each side."""

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    matched_by: str
    same_data: bool
    conditions: tuple[Condition, ...]
    changed: tuple[tuple[str, str, str], ...]
    one_setting_changed: bool | None
    attribution: str
    deltas: tuple[Delta, ...]
    findings: tuple[Mapping[str, Any], ...]
    rankings: tuple[Ranking, ...]
    winner: Literal["A", "B"] | None
    verdict: str
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Its JSON."""
        return {
            "a": dict(self.a), "b": dict(self.b), "matched_by": self.matched_by, "same_data": self.same_data,
            "verdict": self.verdict, "winner": self.winner,
            "conditions": [c.to_dict() for c in self.conditions],
            "changed_settings": [{"setting": k, "a": a, "b": b} for k, a, b in self.changed],
            "one_setting_changed": self.one_setting_changed, "attribution": self.attribution,
            "rankings": [asdict(r) for r in self.rankings],
            "deltas": [d.to_dict() for d in self.deltas],
            "findings": [dict(f) for f in self.findings],
            "assumptions": list(self.assumptions),
        }  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Everything that `pdtrace compare` says."""

    a: str
    b: str
    pairs: tuple[Pair, ...]
    unmatched_a: tuple[str, ...] = ()
    unmatched_b: tuple[str, ...] = ()
    not_supported: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON (schemas/comparison.schema.json)."""
        return {
            "schema": SCHEMA, "a": self.a, "b": self.b,
            "pairs": [pair.to_dict() for pair in self.pairs],
            "unmatched": {"a": list(self.unmatched_a), "b": list(self.unmatched_b)},
            "not_supported": list(self.not_supported),
        }  # fmt: skip
