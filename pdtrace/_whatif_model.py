"""What is asked of a what-if, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any, Literal

from pdtrace.records import dataclass

SCHEMA = "pdtrace.whatif/1"
Transfer = Literal["bulk", "layerwise"]


@dataclass(frozen=True)
class Asked:
    """The set-up to play; None is what was recorded, where that is known."""

    pd: tuple[int, int] | None = None  # prefill and decode workers
    workers: int | None = None  # aggregated workers
    chunk_tokens: int | None = (
        None  # token budget of a step; 0: prompts whole, in steps of their own
    )
    bandwidth_gbps: tuple[float, float] | None = None  # gigabits a second
    latency_ms: float | None = None
    kv_tokens: int | None = None
    kv_bytes_per_token: float | None = None
    transfer: Transfer | None = None

    @property
    def anything(self) -> bool:
        """Whether a set-up other than the recorded one is named."""
        return any(v is not None for v in (self.pd, self.workers, self.chunk_tokens, self.bandwidth_gbps, self.transfer, self.latency_ms))  # fmt: skip

    @property
    def moves_kv(self) -> bool:
        """Whether it is said how KV moves, which only a split does."""
        return any(v is not None for v in (self.bandwidth_gbps, self.transfer, self.latency_ms))


@dataclass(frozen=True)
class Check:
    """One figure of the deployment as it ran: recorded, replayed, relative error (points for shares)."""

    figure: str
    unit: str
    recorded: float | None
    replayed: float | None

    @property
    def error(self) -> float | None:
        """Replayed / recorded - 1; for shares the difference."""
        if self.recorded is None or self.replayed is None:
            return None
        if self.unit == "1":
            return self.replayed - self.recorded
        return self.replayed / self.recorded - 1 if self.recorded > 0 else None


@dataclass(frozen=True)
class Answer:
    """One figure of the set-up that was asked for: a band, never a point alone."""

    figure: str
    unit: str
    first_token: str | None  # who delivers the first token of a split: prefill or decode
    low: float
    central: float
    high: float
    as_it_ran: float | None  # the same figure of the replay of the recorded deployment

    @property
    def change(self) -> Literal["lower", "higher", "cannot tell"]:
        """Against the replay of the recorded deployment; only where the whole band lies on one side."""
        if self.as_it_ran is None or self.low <= self.as_it_ran <= self.high:
            return "cannot tell"
        return "lower" if self.high < self.as_it_ran else "higher"


@dataclass(frozen=True)
class WhatIf:
    """Everything that `pdtrace whatif` says."""

    path: str
    deployment: Mapping[str, Any]
    asked: Mapping[str, Any]
    verdict: str
    refusal: str | None
    missing: tuple[str, ...] = ()  # what would have to be known or given
    self_check: tuple[Check, ...] = ()
    fit: Mapping[str, Any] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    waits: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    not_supported: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON (schemas/whatif.schema.json)."""
        return {
            "schema": SCHEMA, "path": self.path, "deployment": dict(self.deployment), "asked": dict(self.asked),
            "verdict": self.verdict, "refused": self.refusal is not None, "refusal": self.refusal,
            "missing": list(self.missing),
            "self_check": [asdict(c) | {"error": c.error} for c in self.self_check],
            "fit": dict(self.fit),
            "answers": [asdict(a) | {"change": a.change} for a in self.answers],
            "waits": dict(self.waits),
            "assumptions": list(self.assumptions), "not_supported": list(self.not_supported),
        }  # fmt: skip
