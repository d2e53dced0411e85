"""What the data cannot support, each claim with its reason; asked once of all deployments, however many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pdtrace import _words_interference
from pdtrace.numbers import duration, plural

if TYPE_CHECKING:
    from pdtrace.diagnosis import Deployment
    from pdtrace.store import Store

LINKS_SHOWN = 3  # links with messages one way only that get a line of their own
Rows = dict[str, list[dict[str, Any]]]  # by deployment

_STEPS = """
SELECT deployment, count(*) AS steps, count(*) FILTER (capture = 'full') AS whole
FROM steps JOIN workers USING (worker) GROUP BY deployment
"""

_MEMBERS = """
SELECT deployment, count(*) AS members
FROM step_members JOIN workers USING (worker) GROUP BY deployment
"""

_PAIRS = """
SELECT deployment, count(*) AS pairs
FROM interference_gap_losses JOIN workers USING (worker)
WHERE culprit IS NOT NULL GROUP BY deployment
"""

_BOUNDED = """
SELECT deployment FROM clocks WHERE offset_ns IS NOT NULL AND NOT starts_with(domain, 'perf')
UNION SELECT deployment FROM workers WHERE role IN ('prefill', 'decode')
GROUP BY deployment HAVING count(DISTINCT host) = 1 AND bool_and(host IS NOT NULL)
"""

_ONE_WAY = """
SELECT c.deployment, coalesce(d.label, c.domain) AS clock, coalesce(r.label, c.reference) AS beside,
  c.lower_ns, c.upper_ns
FROM clocks c
LEFT JOIN worker_labels d ON d.worker = c.domain
LEFT JOIN worker_labels r ON r.worker = c.reference
WHERE c.offset_ns IS NULL AND coalesce(c.lower_ns, c.upper_ns) IS NOT NULL
ORDER BY c.upper_ns, c.domain, c.reference
"""

_HOMELESS = """
SELECT what, sum(n)::BIGINT AS n, list(DISTINCT path ORDER BY path) AS paths
FROM (SELECT 'engine step' AS what, worker, source, count(*) AS n FROM steps GROUP BY ALL
      UNION ALL SELECT 'metric sample', worker, source, count(*) FROM samples GROUP BY ALL) r
JOIN workers w ON w.worker = r.worker AND w.deployment IS NULL
JOIN sources s ON s.source = r.source
GROUP BY what ORDER BY what
"""

STATEMENTS = (_STEPS, _MEMBERS, _PAIRS, _BOUNDED, _ONE_WAY, _HOMELESS)


class _Known:
    """What the tables hold of each deployment, read when it is first asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def _counts(self, sql: str) -> dict[str, int]:
        return dict(self._store.short(sql).iter_rows())

    def _named(self, query: str) -> Rows:
        """The rows of a query that has a column `deployment`."""
        found: Rows = defaultdict(list)
        for row in self._store.query(query).sort("worker").iter_rows(named=True):
            found[row["deployment"]].append(row)
        return found

    @cached_property
    def steps(self) -> dict[str, tuple[int, int]]:
        """Engine steps, and those of a full record."""
        rows = self._store.short(_STEPS).iter_rows()
        return {deployment: (count, full) for deployment, count, full in rows}

    @cached_property
    def members(self) -> dict[str, int]:
        """Requests named in steps."""
        return self._counts(_MEMBERS)

    @cached_property
    def pairs(self) -> dict[str, int]:
        """Held-up gaps of which it is known who held them up."""
        return self._counts(_PAIRS)

    @cached_property
    def judged(self) -> Rows:
        """Whether prompts held up streams, worker by worker."""
        return self._named("interference_by_worker")

    @cached_property
    def counters(self) -> Rows:
        """What periodic counters say of that."""
        return self._named("interference_by_counters")

    @cached_property
    def bounded(self) -> set[str]:
        """Deployments in which hops bound the offsets between workers' clocks, or all workers ran on one host."""
        return set(self._store.short(_BOUNDED)["deployment"])

    @cached_property
    def one_way(self) -> dict[str, list[tuple[str, str, int | None, int | None]]]:
        """Links whose messages were seen one way only: (clock, reference, lower, upper bound of the offset)."""
        found = defaultdict(list)
        for deployment, *link in self._store.short(_ONE_WAY).iter_rows():
            found[deployment].append(tuple(link))
        return found


def not_supported(store: Store, deployments: Sequence[Deployment]) -> list[str]:
    """Claims that these data do not support, each with its reason."""
    known = _Known(store)
    with_requests = [d for d in deployments if d.requests["count"]]
    if not with_requests:
        lines = ["anything about latency: there are no requests in these data"]
        for deployment in deployments:  # counters alone: words, never a finding
            where = f"{deployment.name}: " if len(deployments) > 1 else ""
            if _counters(known, deployment) and (said := _interference(known, deployment)):
                lines.append(where + said)
        return lines
    several = len(deployments) > 1
    lines = []
    for deployment in with_requests:
        where = f"{deployment.name}: " if several else ""
        lines += [where + line for line in _limits(known, deployment)]
    loads = "each deployment ran at one load" if several else "this is one period at one load"
    lines.append(f"a capacity or 'times more goodput' claim: {loads}")
    lines.append(
        "that another set-up (P/D split or not, another ratio, another chunk size) would be faster: nothing here ran it"
    )
    if several:
        lines.append("a ranking of the deployments: their conditions were not matched")
    return lines + _homeless(store)


def _homeless(store: Store) -> list[str]:
    """Steps and samples that were read and stand for no deployment: nothing says whose they are."""
    return [
        f"what {plural(count, what)} of {', '.join(p.rpartition('/')[2] for p in paths[:3])}{f' and {len(paths) - 3:,} more files' if len(paths) > 3 else ''}"
        f" {'tells' if count == 1 else 'tell'}: nothing says to which of these deployments {'it belongs' if count == 1 else 'they belong'}, so no number here rests on {'it' if count == 1 else 'them'}"
        " (files of one server in a folder of their own, or a log that names its requests, would say so)"
        for what, count, paths in store.short(_HOMELESS).iter_rows()
    ]


def _limits(known: _Known, deployment: Deployment) -> list[str]:
    details = {row["detail"]: row for row in deployment.phases}
    steps, members = known.steps.get(deployment.id, (0, 0))
    named, pairs = known.members.get(deployment.id), known.pairs.get(deployment.id)
    lines = []
    if set(details) <= {"unattributed"}:
        lines.append(
            "where the time went inside the server: only durations of whole requests are there"
            if deployment.latency
            else "anything about the latency of single requests: their times are not there"
        )
    if why := _interference(known, deployment):
        lines.append(why)
    if steps and not members:
        lines.append("sums over engine steps: only samples of them are there")
    elif steps and not named and not pairs:
        lines.append("which request's prompt stalled which stream: nothing here names both")
    bounds, transfers = (
        details.get(detail, {"count": 0})["count"]
        for detail in ("kv_wait_upper_bound", "kv_transfer")
    )
    if bounds > transfers:
        lines.append(
            "how long the KV transfer itself took: only the whole wait on the decode side is known (upper bound)"
        )
    if deployment.mode == "disaggregated" and not any(
        row["phase"] == "prefill" for row in deployment.phases
    ):
        lines.append(
            "how the time before first tokens divides into prefill and KV transfer: no record places the end of the prefill"
        )
    if "before_queue" in details:
        lines.append(
            "whether the front end or the running step made requests wait before the engine's queue"
        )
    one_way = _one_way(known.one_way.get(deployment.id, []))
    lines += one_way
    split = deployment.mode in {"disaggregated", "mixed"}
    if split and not one_way and deployment.id not in known.bounded:
        lines.append(
            "waits between the prefill and the decode worker to better than their clocks agree:"
            " nothing in these data bounds the offset"
        )
    headline = next(
        (row for row in deployment.latency if row["metric"] == "ttft_ms" and row["headline"]), None
    )
    if headline is None:
        lines.append(
            "a headline TTFT: no observer saw start and first token of 90 % of the completed requests"
        )
    elif headline["observer"] != "client":
        lines.append(
            f"what the user waited: the outermost observer is the {headline['observer']}, the way to the client is not in it"
        )
    small = deployment.requests["count"]
    if small < 100:
        lines.append(
            f"99th percentiles: {plural(small, 'request')} {'has' if small == 1 else 'have'} no 99th percentile to speak of"
        )
    return lines


def _interference(known: _Known, deployment: Deployment) -> str | None:
    """Why it cannot be told whether prompts held up streams; None where every worker was judged."""
    judged = known.judged.get(deployment.id, [])
    if _words_interference.unjudged(judged) is None:
        return None
    return _words_interference.unjudged(judged, _counters(known, deployment))


def _counters(known: _Known, deployment: Deployment) -> list[dict[str, Any]]:
    """What periodic counters say of the deployment's workers, under the names that people read."""
    names = {w["id"]: w["name"] for w in deployment.workers}
    return [
        {**row, "name": names.get(row["worker"]) or _short(row["worker"])}
        for row in known.counters.get(deployment.id, [])
    ]


def _short(worker: str) -> str:
    """The id of a worker without a name; of one known by its file, the file without its folder."""
    kind, _, value = worker.partition(":")
    return value.rpartition("/")[2] if kind == "file" else worker


def _one_way(rows: Sequence[tuple[str, str, int | None, int | None]]) -> list[str]:
    """Links whose messages were seen one way only: the interval in which the offset of the clocks lies."""
    if not rows:
        return []
    links = [
        f"the clock of {domain} is {_interval(lower, upper)} that of {reference}"
        for domain, reference, lower, upper in rows[:LINKS_SHOWN]
    ]
    if len(rows) > LINKS_SHOWN:
        links.append(f"{plural(len(rows) - LINKS_SHOWN, 'more link')} likewise (table clocks)")
    return [
        "waits between workers to better than their clocks agree: messages went one way only, so that "
        + "; ".join(links)
    ]


def _interval(lower_ns: int | None, upper_ns: int | None) -> str:
    """Where an offset lies, in words that end before the other clock; a side without a bound is open."""
    sides = []
    if upper_ns is not None:
        far = duration(abs(upper_ns) / 1e6)
        sides.append(f"at most {far} ahead of" if upper_ns >= 0 else f"at least {far} behind")
    if lower_ns is not None:
        far = duration(abs(lower_ns) / 1e6)
        sides.append(f"at least {far} ahead of" if lower_ns >= 0 else f"at most {far} behind")
    return " and ".join(sides)
