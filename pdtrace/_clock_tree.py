"""Which bounds between clocks are used: the narrowest that connect all, leading to the outermost clock.

Offsets between pairs of workers make a graph; a worker that two others know would be moved by whichever came
first, and workers that only a third one connects would stay apart. A spanning tree of the narrowest bounds
(Kruskal 1956) moves each worker once, along its path.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from pdtrace.records import dataclass


@dataclass(frozen=True)
class Link:
    """What is known of one clock against another; without windows they may be the same."""

    domain: str
    reference: str
    half_width_ns: int
    pairs: int
    row: dict[str, object]  # of clocks
    windows: pl.DataFrame | None  # of clock_windows
    told: bool = True  # whether it is more than that nothing speaks against the same clock

    def turned(self) -> Link:
        """The same, told of the other clock."""
        row = {
            **self.row,
            "domain": self.reference,
            "reference": self.domain,
            **_negated(self.row),
        }
        windows = self.windows
        if windows is not None:
            moved = [pl.col(c) + pl.col("offset_ns") for c in ("start_ns", "middle_ns")]
            windows = windows.with_columns(
                *moved,
                -pl.col("offset_ns"),
                -pl.col("drift_ppm"),
                domain=pl.col("reference"),
                reference=pl.col("domain"),
            )
        return replace(self, domain=self.reference, reference=self.domain, row=row, windows=windows)


def _negated(row: dict[str, object]) -> dict[str, object]:
    """Offset, bounds and drift seen from the other side; what is not known there is not known here."""
    ways = {
        "offset_ns": "offset_ns", "lower_ns": "upper_ns", "upper_ns": "lower_ns", "drift_ppm": "drift_ppm",
    }  # fmt: skip
    return {
        to: -v if isinstance(v := row.get(of), int | float) else None
        for to, of in ways.items()
        if {to, of} & row.keys()
    }


def span(links: list[Link]) -> list[Link]:
    """One link for each worker but the outermost ones, from the worker on its way to them."""
    group: dict[str, str] = {}

    def top(worker: str) -> str:
        while group.setdefault(worker, worker) != worker:
            worker = group[worker]
        return worker

    kept: list[Link] = []
    for link in sorted(links, key=lambda x: (x.half_width_ns, x.domain, x.reference)):
        a, b = top(link.domain), top(link.reference)
        if a != b:
            group[a] = b
            kept.append(link)
    beside: dict[str, list[Link]] = {}
    for link in kept:
        beside.setdefault(link.domain, []).append(link.turned())
        beside.setdefault(link.reference, []).append(link)
    inner = {link.domain for link in links}
    told = dict.fromkeys(beside, 0)
    for link in links:
        for worker in (link.domain, link.reference):
            told[worker] += link.pairs
    way: list[Link] = []
    reached: set[str] = set()
    for root in sorted(beside, key=lambda w: (w in inner, -told[w], w)):
        if root in reached:
            continue
        reached.add(root)
        todo = [root]
        while todo:
            for link in beside[todo.pop()]:
                if link.domain not in reached:
                    reached.add(link.domain)
                    way.append(link)
                    todo.append(link.domain)
    return way
