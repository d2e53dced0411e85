"""A million requests of seven phases and fifty token gaps each: from interpreted tables to the diagnosis.

    python -m bench.scale --requests 1000000
    python -m bench.scale --requests 100000 1000000 3000000    whether time and memory grow with the requests

A router and four engines; each request has a leg at both, seven measured intervals and one token stream. The tables that
reading makes (legs, intervals, streams) are written first and not timed: as spans they would be eight million, whose
reading bench.ingest measures. Timed is a fresh process that opens the file, joins the legs, cuts the phases, runs the
methods and the findings and prints the diagnosis. Stages that run at the same time share the process: the CPU seconds
of partition and methods are those of both.
"""

from __future__ import annotations

import argparse
import re
import sys
from itertools import pairwise
from pathlib import Path

from bench.measure import Figure, Run, run, table
from pdtrace.store import Store

STAGES = re.compile(r"^stage (.+) (\S+) (\S+) (\S+)$", re.MULTILINE)
LIMIT_S, LIMIT_MB = 60, 6 * 1024

# Milliseconds of one request: waits and work drawn by hashing its number, so that nothing is stored twice.
_REQUESTS = """
CREATE OR REPLACE TEMP TABLE drawn AS
SELECT i, substr(md5(i::VARCHAR), 1, 32) AS trace_id, 'req-' || md5((-i)::VARCHAR) AS request_id,
       1795993000000000000 + i * 50000000 AS start_ns, i % 4 AS engine,
       (0.1 + 2 * u(i, 1)) * 1e6 AS router_queue, (0.05 + 0.1 * u(i, 2)) * 1e6 AS decide,
       30e6 * u(i, 3) ** 3 AS queued, 3e6 * u(i, 4) AS kv_load, (10 + 90 * u(i, 5)) * 1e6 AS prefill,
       (5 + 30 * u(i, 6)) * 1e6 AS stall, (200 + (i % 7)) * 1000 AS jitter_us
FROM range({n}) AS numbers(i)
"""
_UNIFORM = "CREATE OR REPLACE TEMP MACRO u(i, k) AS (hash(i * 16 + k) % 1000003) / 1000003.0"
_INSTANTS = """
CREATE OR REPLACE TEMP TABLE placed AS
SELECT *, t3 + prefill::BIGINT AS first_ns, t3 + prefill::BIGINT + 50 * 20 * 1000000 AS t5,
       t3 + prefill::BIGINT + 50 * 20 * 1000000 + stall::BIGINT AS end_ns
FROM (SELECT *, t2 + kv_load::BIGINT AS t3
FROM (SELECT *, t1 + queued::BIGINT AS t2
FROM (SELECT *, t0 + decide::BIGINT AS t1 FROM (SELECT *, start_ns + router_queue::BIGINT AS t0 FROM drawn))))
"""
_LEGS = """
INSERT INTO legs BY NAME
SELECT trace_id || '/r' AS leg, 'instance:router' AS worker, 'router' AS observer, 'router' AS role, 'span' AS role_basis,
       false AS container, trace_id, substr(trace_id, 1, 16) AS span_id, request_id AS external_id, 'wall' AS clock,
       start_ns, first_ns AS first_token_ns, end_ns, 1 AS resolution_ns, (first_ns - start_ns) / 1e6 AS ttft_ms,
       (end_ns - start_ns) / 1e6 AS e2e_ms, 'router: request to first byte' AS ttft_definition, 'completed' AS status
FROM placed
UNION ALL BY NAME
SELECT trace_id || '/e' AS leg, 'instance:engine-' || engine AS worker, 'engine' AS observer, 'aggregated' AS role,
       'span' AS role_basis, false AS container, trace_id, substr(trace_id, 17, 16) AS span_id,
       substr(trace_id, 1, 16) AS parent_span_id, request_id, 'wall' AS clock, t1 AS start_ns,
       first_ns AS first_token_ns, end_ns, 1 AS resolution_ns, (first_ns - t1) / 1e6 AS ttft_ms,
       (end_ns - t1) / 1e6 AS e2e_ms, 'arrival to first token' AS ttft_definition, 'model' AS model,
       (prefill / 6e4)::BIGINT AS prompt_tokens, 51 AS output_tokens, 'completed' AS status
FROM placed
"""
_INTERVALS = """
INSERT INTO intervals BY NAME
SELECT trace_id || CASE WHEN part.k < 2 THEN '/r' ELSE '/e' END AS leg, part.detail, part.a AS start_ns, part.b AS end_ns,
       'measured' AS basis, 'wall' AS clock, 1 AS resolution_ns, false AS censored, 'exec' AS semantics
FROM (SELECT trace_id, unnest([
  {k: 0, detail: 'router_queue', a: start_ns, b: t0}, {k: 1, detail: 'router_decide', a: t0, b: t1},
  {k: 2, detail: 'prefill_queue', a: t1, b: t2}, {k: 3, detail: 'kv_load', a: t2, b: t3},
  {k: 4, detail: 'prefill_exec', a: t3, b: first_ns}, {k: 5, detail: 'decode_exec', a: first_ns, b: t5},
  {k: 6, detail: 'decode_stall', a: t5, b: end_ns}]) AS part FROM placed)
"""
_STREAMS = """
INSERT INTO streams BY NAME
SELECT trace_id || '/e' AS leg, 0 AS stream, first_ns,
       list_transform(range(50), lambda k: (19800 + jitter_us // 1000 + (k * 7 + i) % 13)::INTEGER) AS gaps_us,
       'token' AS emission, 'wall' AS clock, 'engine' AS observer
FROM placed
"""
_WORKERS = """
INSERT INTO workers BY NAME
SELECT 'instance:router' AS worker, 'router' AS name, 'router' AS role, 'span' AS role_basis
UNION ALL BY NAME SELECT 'instance:engine-' || k AS worker, 'engine ' || k AS name, 'aggregated' AS role,
       'span' AS role_basis, 'engine' AS engine FROM range(4) AS numbers(k)
"""


def generate(path: Path, requests: int) -> None:
    """Write the tables of so many requests as reading and interpretation leave them."""
    path.unlink(missing_ok=True)
    store = Store(path)
    for statement in (
        _UNIFORM,
        _REQUESTS.replace("{n}", str(requests)),
        _INSTANTS,
        _LEGS,
        _INTERVALS,
        _STREAMS,
        _WORKERS,
    ):
        store.execute(statement)
    store.append("sources", [{"source": 0, "path": "scale", "collector": "bench", "used": True,
                              "rows_read": requests, "rows_kept": requests, "rows_skipped": 0}])  # fmt: skip
    store.close()


# What a fresh process runs: the stages behind reading, then everything that `pdtrace diagnose` does.
_PROGRAM = """
import resource, sys, time
from pdtrace import _no_pandas, _own_process
_own_process.prepare()
_no_pandas.leave_out()
from contextlib import contextmanager
from pathlib import Path
from pdtrace import clocks, identity, ingest, terminal, twins
from pdtrace.diagnose import diagnose
from pdtrace.store import Store

@contextmanager
def stage(name):
    began, before = time.perf_counter(), time.process_time()
    yield
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"stage {name} {time.perf_counter() - began:.1f} {time.process_time() - before:.1f} {peak:.0f}")

store = Store(Path(sys.argv[1]), scratch=True)
with stage("joining legs"):
    twins.unite(store)
    identity.link(store)
    clocks.align(store)
with stage("requests"):
    identity.build_requests(store)
with stage("partition and methods"):
    ingest.cut_to_window(store, ingest.Options())
with stage("views, findings, words"):
    terminal.show_diagnosis(diagnose(store), "text")
"""


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--folder", type=Path, default=Path("bench/data"))
    parser.add_argument("--show", action="store_true", help="print the diagnosis too")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    runs = {requests: _measured(options.folder, requests) for requests in options.requests}
    if options.show:
        print("\n".join(measured.output for measured in runs.values()))
    table(
        f"Requests of 7 phases and 50 token gaps (goal at 1,000,000: {LIMIT_S} s, {LIMIT_MB} MB)",
        [("requests", "stage", "wall s", "CPU s", "peak MB"), *_rows(runs)],
    )
    if len(runs) > 1:
        table("Growth from one run to the next", [_GROWTH, *_growth(runs)])
    return [
        Figure(
            f"diagnosis of {requests:,} requests of 7 phases and 50 tokens",
            f"{measured.wall_s:.0f} s, {measured.peak_mb:,.0f} MB",
            f"{LIMIT_S} s, {LIMIT_MB:,} MB at 1,000,000",
        )
        for requests, measured in runs.items()
    ]


_GROWTH = ("from", "to", "requests", "CPU s", "peak MB")


def _measured(folder: Path, requests: int) -> Run:
    """One fresh process over so many requests."""
    path = folder / f"scale-{requests}.duckdb"
    generate(path, requests)
    try:
        return run([sys.executable, "-c", _PROGRAM, str(path)])
    finally:
        path.unlink()


def _rows(runs: dict[int, Run]) -> list[tuple[str, ...]]:
    """The stages of each run, then the whole process."""
    rows: list[tuple[str, ...]] = []
    for requests, measured in runs.items():
        rows += [(f"{requests:,}", *found) for found in STAGES.findall(measured.output)]
        whole = (f"{measured.wall_s:.1f}", f"{measured.cpu_s:.1f}", f"{measured.peak_mb:.0f}")
        rows.append((f"{requests:,}", "the whole process", *whole))
    return rows


def _growth(runs: dict[int, Run]) -> list[tuple[str, ...]]:
    """From each run to the next: times the CPU seconds and the memory for times the requests."""
    return [
        (f"{few:,}", f"{many:,}", f"x {many / few:.1f}", f"x {runs[many].cpu_s / runs[few].cpu_s:.1f}",
         f"x {runs[many].peak_mb / runs[few].peak_mb:.1f}")
        for few, many in pairwise(runs)
    ]  # fmt: skip


if __name__ == "__main__":
    main()
