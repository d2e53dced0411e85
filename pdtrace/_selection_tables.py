"""How each table is cut to a selection, and what a query's numbers are then of.

A request and all that is told of it go together. What belongs to a worker (steps, samples, events) is cut by worker and
time only: a step has all requests of its worker in it, whoever sent them. What was computed from the whole run when it
was read (interference, links, clocks, changes) stays what it is.
"""

from __future__ import annotations

from typing import Literal

from pdtrace import library
from pdtrace.records import dataclass

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
# A table with a column request, leg or deployment is cut by the first of them; these are the others, and the exceptions.
_CUTS: dict[str, Cut] = {
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
    "changes": _BY_DEPLOYMENT,
    "workers": _BY_DEPLOYMENT,
}
# Tables of things that are no measurements, and what was read: whole in every selection.
WHOLE = frozenset({"sources", "skipped", "resources", "spans", "worker_aliases", "facts"})
GIVEN = frozenset({"slo_classes", "slo_fluidity"})  # the limits are part of the selection

# Cut by deployment, and no measurement: what things are.
_DESCRIBES = {"deployments", "workers", "kv_sizes"}

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
        "prompt_reuse", "side_sums", "side_workers", "load_spread", "decision_outcomes", "gap_lengths", "gap_summary", "token_dependence",
        "interference_by_worker", "coverage_items", "latency_by_observer", "phase_summary", "request_choices",
        "load_points",
    }
)  # fmt: skip


def cut_of(table: str) -> Cut | None:
    """How a table is cut; None where it stays whole."""
    if table in _CUTS or table in WHOLE | GIVEN:
        return _CUTS.get(table)
    columns = {column.name for column in library.tables()[table].columns}
    if "request" in columns:
        return _BY_REQUEST
    if "leg" in columns:
        return _BY_LEG
    return _BY_DEPLOYMENT if "deployment" in columns else None


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
    rules = {table: cut_of(table) for table in below & library.tables().keys() - _DESCRIBES}
    kinds = {cut.kind for cut in rules.values() if cut}
    found: list[Scope] = []
    if kinds & {"request", "leg", "edge", "tied"}:
        found.append("selection")
    if kinds & {"worker", "member"}:
        # cut exactly where only workers and times were asked for
        found.append("workers" if by_request else "selection")
    if "totals" in kinds:
        found.append("run" if by_request or by_time else "selection")
    if "deployment" in kinds:
        found.append("run" if by_request or by_time or by_worker else "selection")
    return tuple(dict.fromkeys(found))
