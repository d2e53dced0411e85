"""What the live page is told: the run, the choices, the diagnosis, the pictures and single requests of a selection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from pdtrace import __version__, _live_state, _report_parts, library, numbers, pictures
from pdtrace._report_parts import escaped, tag, text
from pdtrace.diagnose import diagnose
from pdtrace.diagnosis import Deployment, Diagnosis, iso
from pdtrace.errors import PdtraceError
from pdtrace.explain import explain
from pdtrace.model import Finding, SloPolicy
from pdtrace.phrases import shorten, worker_names
from pdtrace.records import dataclass
from pdtrace.selection import Filter, Selection, Selections, Stop
from pdtrace.store import Store

BINS = 120  # stretches of the time brush
SHOWN_REQUESTS = 50
_DEPLOYMENTS = """
SELECT d.deployment AS id, coalesce(d.name, d.deployment) AS name, d.mode, coalesce(r.n, 0) AS requests
FROM deployments AS d
LEFT JOIN (SELECT deployment, count(*) AS n FROM requests GROUP BY deployment) AS r USING (deployment)
ORDER BY requests DESC, name, id
"""
_SCOPES = {
    ("workers",): "of the workers in that time: all of their requests, not only the selected ones",
    ("run",): "of the whole run, not of the selection",
}
_MIXED = {
    "workers": "steps and samples in it are of all requests of the workers",
    "run": "what was computed once for the whole run (interference, links, clocks, changes) stays that of the whole run",
}
# Findings whose own number was computed once, when the run was read.
_COMPUTED_ONCE = {"prefill_interference", "regime_change", "warm_up", "clock_skew"}
_NAMES_ONE = "of_request"  # parameter of queries that can be asked for one request
_ORDERS = {"ttft": "ttft_ms", "total": "e2e_ms", "token": "tpot_ms"}


@dataclass(frozen=True)
class Run:
    """What the page is about."""

    selections: Selections
    title: str
    limits: SloPolicy | None = None
    whole: dict[Filter, Diagnosis] = field(default_factory=dict)  # of each deployment, once made

    @classmethod
    def of(cls, store: Store, title: str, limits: SloPolicy | None = None) -> Run:
        """The run that a store holds; `limits` hold where the page is asked with none."""
        return cls(Selections(store), title, limits)

    def wanted(self, query: _live_state.Query, stop: Stop) -> Filter:
        """The selection that a query string asks for; of the deployment with most requests where it names none.

        Raises BadOption, and PdtraceError where the run has no such deployment.
        """
        chosen = _live_state.wanted(query, self.limits)
        known = [row["id"] for row in self._deployments(stop)]
        if chosen.deployment is None:
            return replace(chosen, deployment=known[0] if known else None)
        if chosen.deployment not in known:
            raise PdtraceError(
                "this run has no such deployment", "is the address one of another run? Leave it out"
            )
        return chosen

    def _deployments(self, stop: Stop) -> list[dict[str, Any]]:
        with self.selections.open(Filter(), stop) as whole:
            return whole.sql(_DEPLOYMENTS).to_dicts()

    def overview(self, stop: Stop) -> dict[str, Any]:
        """The run, its deployments and the pictures that there can be."""
        return {
            "title": self.title,
            "version": __version__,
            "deployments": self._deployments(stop),
            "views": [
                {"name": v.name, "title": v.title, "question": v.question}
                for v in pictures.views().values()
            ],
            "limits": [c.name for c in self.limits.classes] if self.limits else [],
            "config": pictures.config("page"),
        }


def choices(run: Run, chosen: Filter, stop: Stop) -> dict[str, Any]:
    """By what can be chosen and how many requests that has, in the deployment and in the selection."""
    whole = Filter(deployment=chosen.deployment, limits=chosen.limits)
    with run.selections.open(whole, stop) as everything:
        all_values, all_times = _values(everything), _arrivals(everything)
        names = _names(everything)
    ends = {}
    if all_times:
        first, last = all_times[0], all_times[-1]
        ends = {"from_ns": first["start_ns"], "until_ns": last["end_ns"]}
    with run.selections.open(chosen, stop) as selection:
        some = {(row["attribute"], row["value"]): row["requests"] for row in _values(selection)}
        times = {row["bin"]: row["requests"] for row in _arrivals(selection, **ends)}
        counts = selection.counts()
    return {
        "counts": counts,
        "conditions": [
            {"text": line, "key": key}
            for line, key in _live_state.words(chosen, lambda worker: names.get(worker, worker))
        ],
        "attributes": _by_attribute(all_values, some, names),
        "arrivals": _bars(all_times, times),
    }


def _values(selection: Selection) -> list[dict[str, Any]]:
    rows = selection.query("request_choices")
    return rows.sort("attribute", "from_tokens", "requests", "value", descending=[False, False, True, False], nulls_last=True).to_dicts()  # fmt: skip


def _arrivals(selection: Selection, **ends: int) -> list[dict[str, Any]]:
    return selection.query("arrivals", bins=BINS, **ends).sort("bin").to_dicts()


def _by_attribute(
    rows: Iterable[Mapping[str, Any]],
    some: Mapping[tuple[str, str | None], int],
    names: Mapping[str, str],
) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        attribute, value = row["attribute"], row["value"]
        found.setdefault(attribute, []).append(
            {
                "value": value,
                "label": _label(row, names),
                "all": row["requests"],
                "chosen": some.get((attribute, value), 0),
            }
        )
    return found


def _label(row: Mapping[str, Any], names: Mapping[str, str]) -> str:
    value = row["value"]
    if value is None:
        return _live_state.UNKNOWN
    if row["attribute"] == "worker":
        return names.get(value, row["label"] or value)
    if row["attribute"] == "slo":
        return _live_state.STATE_WORDS[value]
    if row["attribute"] in {"prompt", "output"}:
        low, high = numbers.count(row["from_tokens"]), row["below_tokens"]
        return f"{low} and more" if high is None else f"{low} to {numbers.count(high - 1)}"
    return str(value)


def _bars(rows: Sequence[Mapping[str, Any]], chosen: Mapping[int, int]) -> dict[str, Any] | None:
    """Arrivals over time, by stretch; None where no request has a time of day."""
    if not rows:
        return None
    everything = {row["bin"]: row["requests"] for row in rows}
    first = rows[0]
    width = (rows[-1]["end_ns"] - first["start_ns"]) / (rows[-1]["bin"] + 1)
    return {
        "start_ms": first["start_ns"] / 1e6,
        "width_ms": width / 1e6,
        "all": [everything.get(n, 0) for n in range(rows[-1]["bin"] + 1)],
        "chosen": [chosen.get(n, 0) for n in range(rows[-1]["bin"] + 1)],
    }


def _names(selection: Selection) -> dict[str, str]:
    return worker_names(selection.sql("SELECT worker, name, role FROM workers").to_dicts())


def remark(chosen: Filter, query: str) -> str:
    """What the numbers of a query are of, in words; nothing where they are of the selection."""
    scope = chosen.scope(query)
    if scope in _SCOPES:
        return _SCOPES[scope]
    return "; ".join(_MIXED[part] for part in scope if part in _MIXED)


def diagnosis(run: Run, chosen: Filter, stop: Stop) -> dict[str, Any]:
    """The diagnosis of the selection, as two pieces of the page: what is said first, and last.

    The verdict rests on what is of the selection; findings of the whole run stand apart, as the whole run has them.
    """
    everything = Filter(deployment=chosen.deployment, limits=chosen.limits)
    # What the whole run says beside a selection does not depend on limits.
    base = everything if chosen == everything else replace(everything, limits=run.limits)
    whole = run.whole.get(base)
    if whole is None:
        with run.selections.open(base, stop) as selection:
            whole = run.whole[base] = diagnose(selection, base.limits)
    part = _part(whole, chosen)
    if part is None:
        nothing = tag("p", text(whole.overview), class_="verdict")
        return {"opening": nothing, "closing": _report_parts.lists(whole)}
    if chosen == everything:
        closing = _report_parts.closing(part) + _report_parts.lists(whole)
        return {"opening": _report_parts.opening(part), "closing": closing}
    return _of_selection(run, chosen, part, stop)


def _of_selection(run: Run, chosen: Filter, whole: Deployment, stop: Stop) -> dict[str, Any]:
    others = [f for f in whole.findings if _is_of(f, chosen, "run")]
    with run.selections.open(chosen, stop) as selection:
        if not selection.counts()["chosen"]:
            nothing = tag("p", "No request fits these filters.", class_="verdict")
            return {"opening": nothing + _apart(others, chosen), "closing": ""}
        found = diagnose(
            selection, chosen.limits, lambda name: set(chosen.scope(name)) <= {"selection"}
        )
        ((start, end),) = selection.rows("SELECT min(start_ns), max(end_ns) FROM requests")
    part = _part(found, chosen) or whole
    others += [f for f in part.findings if _is_of(f, chosen, "workers")]
    mine = [f for f in part.findings if not _is_of(f, chosen, "run", "workers")]
    part = replace(part, findings=tuple(mine), window=(iso(start), iso(end)), judged=())
    remarks = {f.id: remark(chosen, f.id) for f in mine}
    return {
        "opening": _report_parts.opening(part, remarks) + _apart(others, chosen),
        "closing": _report_parts.closing(part) + _report_parts.lists(found),
    }


def _part(found: Diagnosis, chosen: Filter) -> Deployment | None:
    return next((d for d in found.deployments if d.id == chosen.deployment), None)


def _is_of(finding: Finding, chosen: Filter, *places: str) -> bool:
    """Whether a finding's number is of the whole run or of workers, and not of the selection."""
    scope = chosen.scope(finding.id)
    if "run" in scope and ("selection" not in scope or finding.id in _COMPUTED_ONCE):
        return "run" in places
    return scope == ("workers",) and "workers" in places


def _apart(findings: Sequence[Finding], chosen: Filter) -> str:
    """Findings that are not of the selection."""
    if not findings:
        return ""
    said = "".join(
        _report_parts.finding(
            f, _SCOPES[("workers",) if _is_of(f, chosen, "workers") else ("run",)]
        )
        for f in findings
    )
    return tag("h2", "Not of the selection") + tag("ol", said, class_="findings")


def view(run: Run, chosen: Filter, name: str, stop: Stop) -> dict[str, Any]:
    """One picture of the selection: its card, and what scripts draw it from. `there` is false without data."""
    with run.selections.open(chosen, stop) as selection:
        picture = pictures.picture(selection, name, chosen.deployment)
    stop.check()
    return _shown(picture, remark(chosen, pictures.view(name).query))


def _shown(picture: pictures.Picture, remark: str = "") -> dict[str, Any]:
    told = {
        "name": picture.name, "title": picture.title, "question": picture.question,
        "there": picture.there, "problem": picture.problem,
    }  # fmt: skip
    if not picture.there:
        return told
    card = _report_parts.figure(picture, "view", remark=remark, inline=False)
    return {**told, "html": card, "payload": _report_parts.payload(picture)}


def requests(run: Run, chosen: Filter, order: str, stop: Stop) -> dict[str, Any]:
    """The slowest requests of the selection, as a table whose rows lead to each."""
    column = _ORDERS.get(order, "ttft_ms")
    with run.selections.open(chosen, stop) as selection:
        rows = selection.sql(
            f"SELECT * FROM request_values ORDER BY {column} DESC NULLS LAST, request LIMIT {SHOWN_REQUESTS}"
        ).to_dicts()
    heads = (
        "request",
        "start",
        "prompt",
        "cached",
        "answer",
        "TTFT",
        "per token",
        "total",
        "outcome",
    )
    lines = [
        tag("th", request_link(row["request"]), scope="row")
        + tag("td", _report_parts.instant(iso(row["start_ns"])))
        + "".join(tag("td", numbers.count(row[key]), class_="number") for key in ("prompt_tokens", "cached_tokens", "output_tokens"))
        + "".join(tag("td", numbers.duration(row[key]), class_="number") for key in ("ttft_ms", "tpot_ms", "e2e_ms"))
        + tag("td", escaped(row["outcome"] or "unknown"))
        for row in rows
    ]  # fmt: skip
    numeric = {"prompt", "cached", "answer", "TTFT", "per token", "total"}
    head = "".join(
        tag("th", escaped(name), scope="col", class_="number" if name in numeric else None)
        for name in heads
    )
    body = tag("tbody", "".join(tag("tr", line) for line in lines))
    table = tag("table", tag("thead", tag("tr", head)) + body)
    return {
        "html": tag("div", table, class_="scroll", tabindex=0) if rows else "",
        "shown": len(rows),
    }


def request_link(request: str) -> str:
    """A request's id that leads to its story."""
    return tag(
        "a",
        escaped(shorten(request, _report_parts.LONG_ID)),
        href="#",
        data_request=request,
        title=request,
    )


def request(run: Run, chosen: Filter, wanted: str, stop: Stop) -> dict[str, Any]:
    """The story of one request of the run, whether the selection has it or not."""
    with run.selections.open(Filter(limits=chosen.limits), stop) as whole:
        told = explain(whole, wanted)
        found = told["request"]
        deployment = whole.rows("SELECT deployment FROM requests WHERE request = ?", [found])[0][0]
        drawn = [
            pictures.picture(whole, v.name, deployment, **{_NAMES_ONE: found})
            for v in pictures.views().values()
            if _shows_one(v)
        ]
    with run.selections.open(chosen, stop) as selection:
        inside = bool(selection.rows("SELECT 1 FROM requests WHERE request = ?", [found]))
    stop.check()
    sections = "".join(_section(section) for section in told["sections"])
    lines = "".join(tag("p", text(line)) for line in told["lines"])
    note = "" if inside else tag("p", "It is not in the selection.", class_="remark")
    return {
        "request": found,
        "html": lines + note,
        "sections": sections,
        "pictures": [_shown(_of_one(picture)) for picture in drawn if picture.there],
    }


def _of_one(picture: pictures.Picture) -> pictures.Picture:
    return replace(picture, title="Step by step", question="Where did its time go?")


def _shows_one(view: pictures.View) -> bool:
    """Whether a picture can be asked for one request."""
    query = library.queries().get(view.query)
    return query is not None and any(p.name == _NAMES_ONE for p in query.params)


def _section(section: Mapping[str, Any]) -> str:
    rows = section["rows"]
    heads = list(section.get("columns") or rows[0])
    cells = [list(row.values()) if isinstance(row, Mapping) else list(row) for row in rows]
    note = tag("p", text(section["note"]), class_="note") if section.get("note") else ""
    table = _report_parts.grid(heads, [[str(cell) for cell in row] for row in cells])
    return tag("h3", escaped(section["title"])) + table + note
