"""How each table is cut to a selection, and what a query's numbers are then of.

A request and all that is told of it go together. What belongs to a worker (steps, samples, events) is cut by worker and
time only: a step has all requests of its worker in it, whoever sent them. What was computed from the whole run when it
was read (interference, links, clocks, changes) stays what it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdtrace import library

Kind = Literal["request", "leg", "edge", "tied", "worker", "member", "totals", "deployment"]


@dataclass(frozen=True)
class Cut:
    """How a table follows the choice of requests: by which columns, where it is not by request."""

    kind: Kind
    workers: tuple[str, ...] = ()
    instant: str = ""


_BY_REQUEST = Cut("request")
_BY_LEG = Cut("leg")
_TOTALS = Cut("totals", ("worker",))
_BY_DEPLOYMENT = Cut("deployment")
CUTS: dict[str, Cut] = {
    "requests": _BY_REQUEST,
    "legs": _BY_REQUEST,
    "observations": _BY_REQUEST,
    "phases": _BY_REQUEST,
    "phase_sums": _BY_REQUEST,
    "partition_checks": _BY_REQUEST,
    "transfer_requests": _BY_REQUEST,
    "transfer_waits": _BY_REQUEST,
    "reported": _BY_LEG,
    "intervals": _BY_LEG,
    "streams": _BY_LEG,
    "identity_edges": Cut("edge"),
    "transfers": Cut("tied", ("source_worker", "destination_worker"), "start_ns"),
    "decisions": Cut("tied", ("router", "worker"), "time_ns"),
    "samples": Cut("worker", ("worker",), "time_ns"),
    "events": Cut("worker", ("worker",), "time_ns"),
    "steps": Cut("worker", ("worker",), "coalesce(t.start_ns, t.start_lower_ns)"),
    "step_members": Cut("member", ("worker",)),
    "interference_step_losses": Cut("worker", ("worker",), "start_ns"),
    "interference_events": Cut("worker", ("worker",), "end_ns"),
    "interference_steps": _TOTALS,
    "interference_gaps": _TOTALS,
    "interference_gap_losses": _TOTALS,
    "interference_requests": _TOTALS,
    "kv_sizes": _BY_DEPLOYMENT,
    "transfer_fits": _BY_DEPLOYMENT,
    "clocks": _BY_DEPLOYMENT,
    "clock_windows": _BY_DEPLOYMENT,
    "changes": _BY_DEPLOYMENT,
    "deployments": _BY_DEPLOYMENT,
    "workers": _BY_DEPLOYMENT,
}
# Tables of things that are no measurements, and what was read: whole in every selection.
WHOLE = ("sources", "skipped", "resources", "spans", "worker_aliases", "facts")
GIVEN = ("slo_classes", "slo_fluidity")  # the limits are part of the selection

# Computed over the whole deployment, whatever the cut needs it for.
_OF_THE_RUN = {"transfer_fits", "clocks", "clock_windows", "changes"}

# Views whose rows are one request's each and depend on other requests (which of them count, who else was in flight,
# the turn before): they are taken from the whole run. True: held as a table.
IN_CONTEXT = {
    "request_values": True,
    "request_attributes": True,
    "request_streams": False,
    "session_turns": True,
    "slo_requests": True,
}
# Views that many queries read: computed once for each selection.
HELD = frozenset(
    {
        *(name for name, held in IN_CONTEXT.items() if held),
        "phase_by_request", "counted_requests", "value_quartiles", "deployment_sources", "transfer_times",
        "prompt_reuse", "load_spread", "decision_outcomes", "gap_summary", "token_dependence",
        "interference_by_worker",
    }
)  # fmt: skip

Scope = Literal["selection", "workers", "run"]


def tables_below(name: str) -> frozenset[str]:
    """The tables that a query's numbers rest on; those read only to name the sources are left out."""
    if name not in library.queries():
        return frozenset({name})
    found: set[str] = set()
    for need in library.queries()[name].needs:
        if need != "deployment_sources":
            found |= tables_below(need)
    return frozenset(found)


def scope(name: str, *, by_request: bool, by_time: bool, by_worker: bool) -> tuple[Scope, ...]:
    """What a query's numbers are of, where requests were cut by these kinds of conditions."""
    below = tables_below(name)
    kinds = {CUTS[table].kind for table in below if table in CUTS}
    found: list[Scope] = []
    if kinds & {"request", "leg", "edge", "tied"}:
        found.append("selection")
    if kinds & {"worker", "member"}:
        # cut exactly where only workers and times were asked for
        found.append("workers" if by_request else "selection")
    if "totals" in kinds:
        found.append("run" if by_request or by_time else "selection")
    if below & _OF_THE_RUN:
        found.append("run" if by_request or by_time or by_worker else "selection")
    return tuple(dict.fromkeys(found))
