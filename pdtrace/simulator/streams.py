"""The tokens of each request, as made and as seen."""

from __future__ import annotations

from dataclasses import dataclass

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
