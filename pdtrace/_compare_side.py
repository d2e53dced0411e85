"""One side of a comparison: a deployment's requests, gaps, phases, facts and diagnosis, ready to be set beside another's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pdtrace import coverage
from pdtrace.methods.statistics import Floats
from pdtrace.methods.two_samples import Sample
from pdtrace.records import dataclass

if TYPE_CHECKING:
    import polars as pl

    from pdtrace.diagnosis import Deployment, Diagnosis
    from pdtrace.store import Store

_REQUESTS = """
SELECT
  v.request, v.counted, v.start_ns, v.end_ns, v.first_token_ns, v.ttft_ms, v.tpot_ms, v.e2e_ms, v.prompt_tokens,
  v.cached_tokens, v.output_tokens, v.outcome, v.mode, r.model, r.first_token_origin,
  r.prefill_worker, r.decode_worker, g.good
FROM request_values AS v
JOIN requests AS r ON r.request = v.request
LEFT JOIN slo_requests AS g ON g.request = v.request
WHERE v.deployment = $deployment
ORDER BY v.start_ns NULLS LAST, v.request
"""

# The fuller record of a stream, as in gap_summary.
_GAPS = """
SELECT l.request, s.gaps_us, s.emission
FROM streams AS s
JOIN legs AS l ON l.leg = s.leg
JOIN counted_requests AS c ON c.request = l.request
WHERE c.deployment = $deployment AND coalesce(s.observer, l.observer) = $observer AND len(s.gaps_us) > 0
QUALIFY row_number() OVER (
  PARTITION BY l.request, coalesce(s.stream, 0), l.attempt ORDER BY len(s.gaps_us) DESC, s.leg
) = 1
"""

_STREAMING = """
SELECT DISTINCT streaming FROM legs
WHERE deployment = $deployment AND streaming IS NOT NULL AND NOT coalesce(container, false)
"""

_DIGESTS = """
SELECT DISTINCT s.sha256 FROM sources AS s
WHERE s.used AND s.source IN (
  SELECT source FROM legs WHERE deployment = $deployment
  UNION SELECT a.source FROM worker_aliases AS a JOIN workers AS w ON w.worker = a.worker WHERE w.deployment = $deployment
  UNION SELECT source FROM spans
)
"""


MANY = 100_000  # of more requests than this, every second, third, ... gives its gaps
ENGINE_ROLES = ("prefill", "decode", "aggregated")


@dataclass(frozen=True)
class Side:
    """What is known of one deployment."""

    path: str
    deployment: Deployment
    requests: pl.DataFrame  # all arrivals, in order
    gaps: pl.DataFrame  # request, gaps_us, emission: as the headline observer saw them
    phases: pl.DataFrame  # request, detail, duration_ms, basis: of counted requests
    facts: tuple[Mapping[str, Any], ...]
    streaming: frozenset[bool]
    digests: frozenset[str]
    sources: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name for people."""
        return self.deployment.name or self.deployment.id

    def counted(self) -> pl.DataFrame:
        """The requests that latency figures are made of, in order of arrival."""
        return self.requests.filter("counted")

    def sample(self, column: str) -> Sample:
        """Known values of a column over the counted requests."""
        values = self.counted()[column].cast(float).to_numpy()
        return Sample(values[np.isfinite(values)])

    def gap_sample(self) -> Sample:
        """Gaps between emissions; a request's gaps stay together."""
        import polars as pl

        if self.gaps.is_empty():
            return Sample(np.empty(0))
        order = self.counted().select("request").with_row_index("place")
        order = order.gather_every(1 + self.gaps.height // MANY)
        rows = (
            self.gaps.join(order, on="request")
            .sort("place")
            .explode("gaps_us")
            .filter(pl.col("gaps_us").is_not_null())
        )
        return Sample(
            rows["gaps_us"].cast(float).to_numpy() / 1e3, rows["place"].cast(float).to_numpy()
        )

    def bounds(self) -> frozenset[str]:
        """Details of phases whose time is, on some request, known only as an upper bound."""
        return frozenset(self.phases.filter(self.phases["basis"] == "upper_bound")["detail"])

    def arrivals_s(self) -> Floats:
        """Known instants of arrival, in seconds from the first, in order."""
        starts = self.requests["start_ns"].drop_nulls().to_numpy()
        found: Floats = (starts - starts[:1].repeat(len(starts))) / 1e9
        return found

    def window_s(self) -> float | None:
        """From the first arrival to the last end; None where instants are unknown."""
        start, end = self.requests["start_ns"].min(), self.requests["end_ns"].max()
        if start is None or end is None or end <= start:  # type: ignore[operator]
            said = self.fact("bench_duration_s", client=True)
            return float(said[0]) if len(said) == 1 else None
        return float(end - start) / 1e9  # type: ignore[arg-type, operator]

    def fact(self, *keys: str, client: bool = False) -> tuple[str, ...]:
        """Distinct values of the first of these facts that is known; of load generators or of all others."""
        for key in keys:
            found = {
                str(f["value"])
                for f in self.facts
                if f["key"] == key and f["value"] is not None and client is (f["role"] == "client")
            }
            if found:
                return tuple(sorted(found))
        return ()

    def engines(self) -> list[Mapping[str, Any]]:
        """The workers that compute."""
        return [w for w in self.deployment.workers if w["role"] in ENGINE_ROLES]

    def roles(self) -> list[str]:
        """Roles of the engine workers, one entry each."""
        return sorted(w["role"] for w in self.engines())


def sides(store: Store, diagnosis: Diagnosis, path: str) -> list[Side]:
    """Every deployment of a store that has requests."""
    facts = coverage.deployment_facts(store)
    evidence = store.query("deployment_sources").to_dicts()
    return [
        _side(store, deployment, path, facts, evidence)
        for deployment in diagnosis.deployments
        if deployment.requests["count"]
    ]


def _side(
    store: Store,
    deployment: Deployment,
    path: str,
    facts: Sequence[Mapping[str, Any]],
    evidence: Sequence[Mapping[str, Any]],
) -> Side:
    observer = next((r["observer"] for r in deployment.latency if r["headline"]), None)
    seen = {r["observer"] for r in deployment.latency if r["metric"] == "itl_ms"}
    if observer not in seen and len(seen) == 1:
        observer = next(iter(seen))
    gaps = store.sql(_GAPS, deployment=deployment.id, observer=observer or "")
    phases = store.sql(
        """SELECT request, phase, detail, duration_ms, basis FROM phase_by_request
           WHERE deployment = $deployment AND counted""",
        deployment=deployment.id,
    )
    paths = sorted(
        {p for row in evidence if row["deployment"] == deployment.id for p in row["paths"]}
    )
    return Side(
        path=path,
        deployment=deployment,
        requests=store.sql(_REQUESTS, deployment=deployment.id),
        gaps=gaps,
        phases=phases,
        facts=tuple(f for f in facts if f["deployment"] == deployment.id),
        streaming=frozenset(store.sql(_STREAMING, deployment=deployment.id)["streaming"].to_list()),
        digests=frozenset(
            d for d in store.sql(_DIGESTS, deployment=deployment.id)["sha256"].to_list() if d
        ),
        sources=tuple(paths),
    )
