"""Two prefill and two decode servers of SGLang behind smg, spans and logs together, on clocks of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_made import MS, T0, fleet

from pdtrace.diagnose import Diagnosis, diagnose
from pdtrace.ingest import ingest
from pdtrace.store import Store

REQUESTS = 24
# Of a request whose two servers keep the router's time, from the router's arrival; 4 ms it chose, 1 ms it sent.
PHASES = {
    "router_decide": 4, "frontend": 3, "kv_space_wait": 6, "before_queue": 1, "prefill_queue": 4, "prefill_wall": 50,
    "kv_transfer": 20, "kv_wait_upper_bound": 3, "decode_queue": 4, "stream_out": 1, "decode_wall": 50, "unattributed": 5,
}  # fmt: skip


def read(path: Path) -> tuple[Store, Diagnosis]:
    store = Store()
    ingest([str(path)], store)
    return store, diagnose(store)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Diagnosis]:
    path = tmp_path_factory.mktemp("pd")
    fleet(path, REQUESTS)
    return read(path)


def test_every_request_and_server_is_there_once_though_span_and_log_tell_of_it(whole: tuple[Store, Diagnosis]) -> None:  # fmt: skip
    store, _ = whole
    assert store.rows("SELECT count(*), count(DISTINCT deployment) FROM requests WHERE mode = 'disaggregated'") == [(REQUESTS, 1)]  # fmt: skip
    assert store.rows("SELECT role, count(*) FROM workers WHERE deployment IS NOT NULL GROUP BY role ORDER BY role") == [("decode", 2), ("prefill", 2), ("router", 1)]  # fmt: skip
    assert store.rows("SELECT observer, count(*) FROM legs GROUP BY observer ORDER BY observer") == [("engine", 2 * REQUESTS), ("router", REQUESTS)]  # fmt: skip
    for row in store.rows("SELECT rows_read, rows_kept + rows_skipped FROM sources"):
        assert row[0] == row[1]


def test_phases_where_the_clocks_agree_are_those_that_were_made(whole: tuple[Store, Diagnosis]) -> None:  # fmt: skip
    store, _ = whole
    rows = store.rows(
        """SELECT r.external_id, detail, sum(p.end_ns - p.start_ns) / 1e6 FROM phases p JOIN requests r USING (request)
           GROUP BY ALL"""
    )
    for n in range(0, REQUESTS, 4):  # prefill-0 and decode-0
        found = {detail: ms for name, detail, ms in rows if name == f"gnt-{n}"}
        assert found == pytest.approx(PHASES, abs=1e-3)


def test_first_tokens_are_the_decode_servers_own_whatever_the_clocks(whole: tuple[Store, Diagnosis]) -> None:  # fmt: skip
    _, told = whole
    (deployment,) = told.deployments
    ttft = next(row for row in deployment.latency if row["metric"] == "ttft_ms")
    assert (ttft["count"], ttft["p50"], ttft["max"]) == (REQUESTS, 92, 92)


def test_true_offsets_lie_in_the_bounds_that_are_stated(whole: tuple[Store, Diagnosis]) -> None:
    store, _ = whole
    bounds = {w: (a, b) for w, a, b in store.rows("SELECT w.worker, lower_ns / 1e6, upper_ns / 1e6 FROM clocks c JOIN workers w ON w.worker = c.domain")}  # fmt: skip
    told = {name: bound for worker, bound in bounds.items() for name in ("13000", "15000") if name in worker}  # fmt: skip
    assert told["13000"][0] <= 300 <= told["13000"][1]
    assert told["15000"][0] <= -200 <= told["15000"][1]
    assert len(bounds) == 2  # those of prefill-0 and decode-0 allow none


def test_a_movement_has_the_spans_times_and_the_logs_bytes(whole: tuple[Store, Diagnosis]) -> None:
    store, _ = whole
    assert store.rows("SELECT count(*), min(bytes), max(bytes), min(end_ns - start_ns), max(end_ns - start_ns) FROM transfers") == [(REQUESTS, 40 * 2**20, 40 * 2**20, 20 * MS, 20 * MS)]  # fmt: skip
    chosen = store.rows("SELECT phase, count(DISTINCT d.worker), count(w.worker) FROM decisions d LEFT JOIN workers w ON w.worker = d.worker AND w.role = d.phase GROUP BY phase ORDER BY phase")  # fmt: skip
    assert chosen == [("decode", 2, REQUESTS), ("prefill", 2, REQUESTS)]
    (first,) = store.rows("SELECT min(time_ns), max(time_ns) FROM samples WHERE metric = 'log:prefill_batch_tokens'")  # fmt: skip
    assert T0 - 10**9 < first[0] < first[1] < T0 + 7 * 10**9  # one host stamps Seoul's time of day


def test_logs_alone_say_durations_and_that_the_transfer_is_inside_them(tmp_path: Path) -> None:
    fleet(tmp_path, REQUESTS, spans=False)
    store, told = read(tmp_path)
    (deployment,) = told.deployments
    assert (deployment.requests["count"], deployment.mode) == (REQUESTS, "disaggregated")
    ttft = next(row for row in deployment.latency if row["metric"] == "ttft_ms")
    assert (ttft["p50"], ttft["max"]) == (86, 86)  # from the scheduler's entry on D
    bases = dict(
        store.rows("SELECT detail, string_agg(DISTINCT basis) FROM phases GROUP BY detail")
    )
    assert bases["prefill_wall"] == bases["kv_wait_upper_bound"] == "upper_bound"
    assert "kv_transfer" not in bases
    assert any("how long the KV transfer itself took" in line for line in told.not_supported)
