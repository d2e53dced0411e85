"""The tokens of each request, as made and as seen; its attempts that failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdtrace.simulator.engine import server_of
from pdtrace.simulator.run import Run


@dataclass(frozen=True)
class Stream:
    """Instants (ns, true time) and tokens of one request's emissions."""

    made: list[int]
    seen: list[int]
    tokens: list[int]

    @property
    def ends(self) -> tuple[int, int]:
        """First and last instant at the client."""
        return self.seen[0], self.seen[-1]


def streams(run: Run) -> dict[str, Stream]:
    """By request."""
    grouped = run.emissions.group_by("request", maintain_order=True).agg(
        "time_ns", "seen_ns", "tokens"
    )
    return {
        request: Stream(made, seen, count) for request, made, seen, count in grouped.iter_rows()
    }


NO_STREAM = Stream([], [], [])  # of a request that made no token


def tries_by_request(run: Run) -> dict[str, list[dict[str, Any]]]:
    """The failed attempts that another one followed, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in run.tries.iter_rows(named=True):
        found.setdefault(row["request"], []).append(row)
    return found


def servers(run: Run) -> dict[str, list[str]]:
    """The engines' servers and the workers in each: its data-parallel ranks."""
    found: dict[str, list[str]] = {}
    for worker in run.steps["worker"].unique().sort():
        found.setdefault(server_of(worker)[0], []).append(worker)
    return found
