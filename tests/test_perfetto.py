"""A timeline keeps the rules of its format: slices nest, lanes do not overlap, flows hit slices, nothing is dropped unsaid."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pdtrace import perfetto
from pdtrace.cli import cli
from pdtrace.errors import PdtraceError
from pdtrace.methods.lanes import lanes
from pdtrace.perfetto import Selection, export
from pdtrace.store import Store

T0 = 1_790_000_000_000_000_000
MS = 10**6


def test_lanes_hold_no_two_at_a_time_and_are_as_few_as_can_be() -> None:
    start = np.array([0, 5, 10, 3, 12, 12])
    end = np.array([10, 12, 20, 4, 12, 15])
    lane = lanes(np.zeros(6, np.int64), start, end)
    assert lane[0] == 0
    assert set(lane) == {0, 1, 2}  # at 12: the third, the point and the last
    assert lane[2] == lane[0]  # free at 10, taken at 10
    assert lanes(np.zeros(0, np.int64), start[:0], end[:0]).size == 0


@pytest.mark.parametrize("seed", range(20))
def test_lanes_of_random_intervals(seed: int) -> None:
    rng = np.random.default_rng(seed)
    group, start = rng.integers(0, 3, 80), rng.integers(0, 100, 80)
    end = np.maximum(start + rng.integers(0, 20, 80), start + 1)
    lane = lanes(group, start, end)
    for g in set(group.tolist()):
        mine = group == g
        at_once = max(int(((start[mine] <= t) & (end[mine] > t)).sum()) for t in start[mine])
        assert lane[mine].max() + 1 == at_once
        for row in set(lane[mine].tolist()):
            here = np.flatnonzero(mine & (lane == row))
            here = here[np.argsort(start[here])]
            assert (end[here][:-1] <= start[here][1:]).all()


@pytest.fixture
def split(store: Store) -> Store:
    """Two overlapping requests over a prefill and a decode worker, with steps, a movement, an event and a decision."""
    store.append("deployments", [{"deployment": "d", "name": "<script>", "start_ns": T0, "end_ns": T0 + 90 * MS}])  # fmt: skip
    store.append("workers", [
        {"worker": "w:p", "deployment": "d", "name": "P", "role": "prefill"},
        {"worker": "w:d", "deployment": "d", "name": "D", "role": "decode"},
        {"worker": "w:r", "deployment": "d", "name": "R", "role": "router"},
    ])  # fmt: skip
    for n, name in enumerate(["</script><script>alert(1)", "b\n\x1b[31m\"'\\"]):
        at = T0 + 5 * MS * n + 1  # not on a microsecond
        store.append("requests", [{
            "request": name, "deployment": "d", "start_ns": at, "end_ns": at + 60 * MS, "first_token_ns": at + 30 * MS,
            "prefill_worker": "w:p", "decode_worker": "w:d", "mode": "disaggregated", "outcome": "completed",
        }])  # fmt: skip
        pieces = [("queue", 0, 5, "w:p", "measured"), ("prefill", 5, 20, "w:p", "measured"),
                  ("kv_wait", 20, 25, "w:d", "upper_bound"), ("decode", 25, 60, "w:d", "measured")]  # fmt: skip
        store.append("phases", [
            {"request": name, "phase": phase, "detail": f"{phase}_x", "start_ns": at + a * MS, "end_ns": at + b * MS,
             "worker": worker, "basis": basis} for phase, a, b, worker, basis in pieces
        ])  # fmt: skip
        store.append("legs", [{"leg": f"l{n}", "request": name, "deployment": "d", "worker": "w:d", "request_id": f"id{n}"}])  # fmt: skip
        store.append("transfers", [{
            "leg": f"l{n}", "request_id": f"id{n}", "source_worker": "w:p", "destination_worker": "w:d",
            "start_ns": at + 20 * MS, "end_ns": at + 24 * MS, "bytes": 1000, "direction": "prefill_to_decode",
        }])  # fmt: skip
        store.append("streams", [{"leg": f"l{n}", "stream": 0, "first_ns": at + 30 * MS, "gaps_us": [1000, 2000], "observer": "client"}])  # fmt: skip
    store.append("steps", [
        {"worker": "w:p", "rank": "0", "seq": 1, "start_ns": T0 + 5 * MS, "elapsed_ns": 10 * MS, "prefill_requests": 1,
         "prefill_tokens": 100, "decode_requests": 0, "running": 1, "waiting": 2, "kv_usage_ratio": 0.25},
        {"worker": "w:p", "rank": "0", "seq": 2, "start_lower_ns": T0, "start_upper_ns": T0 + 10**9, "elapsed_ns": MS},
    ])  # fmt: skip
    store.append("events", [{"worker": "w:d", "time_ns": T0 + 40 * MS, "kind": "preemption", "severity": "warning", "count": 1}])  # fmt: skip
    store.append("decisions", [{"router": "w:r", "worker": "w:p", "time_ns": T0 + MS, "request_id": "id0", "leg": "l0"}])  # fmt: skip
    return store


def drawn(
    store: Store, folder: Path, selection: Selection | None = None
) -> tuple[list[dict[str, Any]], perfetto.Timeline]:
    path = folder / "trace.json"
    timeline = export(store, str(path), selection, force=True)
    content = json.loads(path.read_text("utf-8"))
    assert set(content) == {"displayTimeUnit", "otherData", "traceEvents"}
    return content["traceEvents"], timeline


def exact(value: str | float) -> int:
    return round(float(value) * 1000)


def slices(events: list[dict[str, Any]]) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
    for event in events:
        if event["ph"] == "X":
            yield event["tid"], exact(event["ts"]), exact(event["ts"]) + exact(event["dur"]), event


def well_formed(events: list[dict[str, Any]]) -> None:
    """The rules that Perfetto's importer holds traces to."""
    owner: dict[int, int] = {}
    for event in events:
        assert event["ph"] in set("XiCMstf"), event
        assert event.get("ts", 0) >= 0
        if event["ph"] != "C":
            assert owner.setdefault(event["tid"], event["pid"]) == event["pid"] or event["tid"] == 0
    lanes_of = defaultdict(list)
    for tid, start, end, event in slices(events):
        lanes_of[tid].append((start, -end, event))
    for rows in lanes_of.values():  # each slice ends before its parent does
        open_until: list[int] = []
        for start, end, _ in sorted(rows, key=lambda row: row[:2]):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or -end <= open_until[-1]
            open_until.append(-end)
    parts = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            parts[event["id"]].append(event)
            inside = [s for s in lanes_of[event["tid"]] if s[0] <= exact(event["ts"]) < -s[1]]
            assert inside, event
    for chain in parts.values():
        assert "".join(part["ph"] for part in chain) in {"sf", "stf"}
        assert [part["ts"] for part in chain] == sorted(part["ts"] for part in chain)


def test_requests_workers_steps_and_movements_are_drawn(split: Store, tmp_path: Path) -> None:
    events, timeline = drawn(split, tmp_path)
    well_formed(events)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["D (decode)", "KV movements", "P (prefill)", "R (router)", "pdtrace: what this is", "requests"]  # fmt: skip
    by_process = defaultdict(list)
    for *_, event in slices(events):
        by_process[names[event["pid"]]].append(event["name"])
    assert sorted(by_process["requests"]) == sorted(
        ["</script><script>alert(1)", "b\n\x1b[31m\"'\\"]
        + 2 * ["queue", "prefill", "kv_wait (at most)", "decode"]
    )
    assert sorted(by_process["P (prefill)"]) == sorted(2 * ["queue", "prefill"] + ["prefill step"])
    assert by_process["KV movements"] == 2 * ["KV prefill to decode"]
    lanes_drawn = {e["tid"] for *_, e in slices(events) if names[e["pid"]] == "requests"}
    assert len(lanes_drawn) == 2  # they overlap
    assert [e["ph"] for e in events if e["ph"] in "stf"] == list("stfstf")
    counters = {(e["name"], *e["args"].items()) for e in events if e["ph"] == "C"}
    assert ("requests", ("waiting", 2.0)) in counters
    assert ("KV cache", ("used %", 25.0)) in counters
    assert [e["name"] for e in events if e["ph"] == "i" and names[e["pid"]] == "D (decode)"] == ["preemption"]  # fmt: skip
    assert any(e["name"] == "routed" for e in events)
    assert timeline.left_out == ["engine steps whose start is not known well enough for a line (what they count is drawn): 1"]  # fmt: skip


def test_instants_are_exact_to_the_nanosecond(split: Store, tmp_path: Path) -> None:
    events, timeline = drawn(split, tmp_path)
    found = [s for _, s, _, e in slices(events) if e["name"] == "decode"]
    assert timeline.base_ns == T0
    assert {25 * MS + 1, 30 * MS + 1} == set(found)


def test_a_named_request_brings_its_tokens_and_what_ran_beside_it(
    split: Store, tmp_path: Path
) -> None:
    events, timeline = drawn(split, tmp_path, Selection(requests=("id1",)))
    well_formed(events)
    assert sum(1 for e in events if e["name"] == "tokens") == 2
    assert timeline.counts["requests"] == 2


def test_a_stretch_of_time_and_a_limit_say_what_they_leave_out(
    split: Store, tmp_path: Path
) -> None:
    _, timeline = drawn(split, tmp_path, Selection(end="+3ms"))
    assert timeline.counts["requests"] == 1
    assert "requests outside of the stretch drawn: 1" in timeline.left_out
    _, timeline = drawn(split, tmp_path, Selection(limit=1))
    assert timeline.counts["requests"] == 1
    assert any("--limit" in text for text in timeline.left_out)
    with pytest.raises(PdtraceError, match="not before"):
        export(split, str(tmp_path / "x.json"), Selection(start="+5s", end="+1s"))


def test_requests_without_a_window_are_counted(split: Store, tmp_path: Path) -> None:
    split.append("requests", [{"request": "open", "start_ns": T0}, {"request": "backwards", "start_ns": T0 + 5, "end_ns": T0}])  # fmt: skip
    _, timeline = drawn(split, tmp_path)
    assert timeline.left_out[:2] == ["requests without start or end: 1", "requests that end before they start: 1"]  # fmt: skip


def test_one_request_without_anything_else(store: Store, tmp_path: Path) -> None:
    store.append("requests", [{"request": "only", "start_ns": T0, "end_ns": T0}])
    events, timeline = drawn(store, tmp_path)
    well_formed(events)
    assert timeline.counts["requests"] == 1


def test_metrics_alone_are_drawn_and_nothing_at_all_is_refused(
    store: Store, tmp_path: Path
) -> None:
    with pytest.raises(PdtraceError, match="nothing to draw"):
        export(store, str(tmp_path / "x.json"))
    assert not list(tmp_path.iterdir())  # no draft stays behind
    store.append("workers", [{"worker": "w"}])
    store.append("samples", [{"worker": "w", "time_ns": T0, "metric": "num_requests_running", "value": 3.0, "kind": "gauge"}])  # fmt: skip
    events, _ = drawn(store, tmp_path)
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"running": 3.0}]


def test_counters_begin_with_the_value_that_holds_and_early_events_are_counted(
    split: Store, tmp_path: Path
) -> None:
    split.append("samples", [
        {"worker": "w:d", "time_ns": T0 - k * 10**9, "metric": "num_requests_running", "value": float(k), "kind": "gauge"} for k in (9, 8, 7)
    ])  # fmt: skip
    split.append("events", [{"worker": "w:d", "time_ns": T0 - 10**12, "kind": "started"}])
    events, timeline = drawn(split, tmp_path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    running = [
        (e["ts"], e["args"]["running"]) for e in events if e["ph"] == "C" and names[e["pid"]] == "D (decode)" and "running" in e["args"]
    ]  # fmt: skip
    assert running == []  # the last of them is 7 s old at T0, and nothing came after it
    assert "events and routing decisions before the first thing drawn, or without instant or worker: 1" in timeline.left_out  # fmt: skip
    split.append("samples", [{"worker": "w:d", "time_ns": T0 + 10**7, "metric": "num_requests_running", "value": 1.0, "kind": "gauge"}])  # fmt: skip
    events, _ = drawn(split, tmp_path)
    running = [
        (e["ts"], e["args"]["running"]) for e in events if e["ph"] == "C" and names[e["pid"]] == "D (decode)" and "running" in e["args"]
    ]  # fmt: skip
    assert running == [(0.0, 7.0), (10_000.0, 1.0)]


def test_two_deployments_are_apart(split: Store, tmp_path: Path) -> None:
    split.append("deployments", [{"deployment": "e", "name": "other"}])
    split.append("requests", [{"request": "c", "deployment": "e", "start_ns": T0, "end_ns": T0 + MS}])  # fmt: skip
    events, _ = drawn(split, tmp_path)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"<script> · requests", "other · requests"} <= names


def test_the_same_data_give_the_same_file_and_files_are_not_overwritten(
    split: Store, tmp_path: Path
) -> None:
    first, second = tmp_path / "a.json.gz", tmp_path / "b.json.gz"
    export(split, str(first))
    export(split, str(second))
    assert first.read_bytes() == second.read_bytes()
    assert json.loads(gzip.decompress(first.read_bytes()))
    with pytest.raises(PdtraceError, match="exists already"):
        export(split, str(first))


def test_the_command_says_what_it_made(tmp_path: Path) -> None:
    table = tmp_path / "requests.csv"
    table.write_text("request_id,start,ttft_ms,e2e_ms\na,2026-01-01T00:00:00Z,10,100\n")
    out = tmp_path / "t.json"
    result = CliRunner().invoke(cli, ["export", str(table), "--perfetto", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "drawn: requests 1" in result.output
    assert "time 0 is 2026-01-01T00:00:00" in result.output
    well_formed(json.loads(out.read_text())["traceEvents"])
