"""SGLang's own spans: one request told by many threads, on one server or on two, by every version."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_made import MS, T0, Traces, one_server, pair, sender

from pdtrace.ingest import ingest
from pdtrace.store import Store

FIXTURE = Path(__file__).parent / "fixtures" / "sglang" / "real_code.otlp.jsonl"
ROOM = 0x76EC7113B0E508E5


def read(path: Path, made: Traces) -> Store:
    store = Store()
    ingest([str(made.write(path / "traces.jsonl"))], store)
    return store


def details(store: Store, which: str = "true") -> dict[str, float]:
    """Milliseconds of each detail, of one request."""
    rows = store.rows(
        f"""SELECT detail, round(sum(p.end_ns - p.start_ns) / 1e6, 3) FROM phases p
            JOIN requests r USING (request) WHERE {which} GROUP BY detail"""
    )
    return dict(rows)


def test_a_request_on_one_server_is_cut_as_its_stages_say(tmp_path: Path) -> None:
    made = Traces()
    one_server(made, 1, 0)
    store = read(tmp_path, made)
    assert details(store) == {
        "frontend": 4, "before_queue": 6, "prefill_queue": 30, "prefill_wall": 60, "stream_out": 2, "decode_queue": 3,
        "decode_wall": 81, "unattributed": 4,
    }  # fmt: skip
    leg = store.sql("FROM legs").row(0, named=True)
    assert (leg["prompt_tokens"], leg["cached_tokens"], leg["output_tokens"]) == (500, 100, 5)
    assert (leg["ttft_ms"], leg["e2e_ms"], leg["tpot_ms"]) == pytest.approx((102, 190, 22))
    assert (leg["role"], leg["rank"], leg["status"], leg["finish_reason"]) == ("aggregated", "0", "completed", "stop")  # fmt: skip
    stream = store.sql("FROM streams").row(0, named=True)
    # From the token that the prompt made: the wait for the first decode batch is in the first gap.
    assert stream["gaps_us"] == [25_000, 20_000, 20_000, 20_000]
    assert (stream["emission"], stream["emission_tokens"]) == ("token", [1] * 5)


def test_every_tensor_rank_tells_the_same_stages_and_counts_once(tmp_path: Path) -> None:
    alone, four = Traces(), Traces()
    one_server(alone, 1, 0)
    one_server(four, 1, 0, tp=4)
    (tmp_path / "four").mkdir()
    one, many = read(tmp_path, alone), read(tmp_path / "four", four)
    assert details(one) == details(many)
    assert many.scalar("SELECT count(*) FROM intervals") == one.scalar("SELECT count(*) FROM intervals")  # fmt: skip
    assert many.rows("SELECT len(gaps_us) FROM streams") == [(4,)]
    assert many.rows("SELECT count(DISTINCT worker) FROM legs") == [(1,)]


PAIR = {
    "frontend": 3, "kv_space_wait": 6, "before_queue": 1, "prefill_queue": 4, "prefill_wall": 50, "kv_transfer": 20,
    "kv_wait_upper_bound": 3, "decode_queue": 4, "stream_out": 1, "decode_wall": 50, "unattributed": 3,
}  # fmt: skip


def test_prefill_and_decode_server_meet_in_their_room_though_ids_and_traces_differ(
    tmp_path: Path,
) -> None:
    made = Traces()
    p_rid, d_rid = pair(made, 1, 0, room=ROOM)
    store = read(tmp_path, made)
    assert store.rows("SELECT request_id, role, bootstrap_room FROM legs ORDER BY role") == [
        (d_rid, "decode", str(ROOM)), (p_rid, "prefill", str(ROOM)),
    ]  # fmt: skip
    assert store.rows("SELECT rule, key FROM identity_edges") == [("bootstrap_room", str(ROOM))]
    assert store.rows("SELECT mode, ttft_ms FROM requests") == [("disaggregated", 92.0)]
    assert details(store) == PAIR


def test_a_bare_service_name_is_as_many_servers_as_there_are_processes(tmp_path: Path) -> None:
    made = Traces()
    for n in range(8):
        pair(made, n, 200 * n, room=ROOM + n, prefill_pid=200 + 10 * (n % 2), decode_pid=300 + 10 * (n // 4))  # fmt: skip
    store = read(tmp_path, made)
    assert store.rows("SELECT role, count(DISTINCT worker) FROM legs GROUP BY role ORDER BY role") == [("decode", 2), ("prefill", 2)]  # fmt: skip
    assert store.rows("SELECT count(*), count(DISTINCT deployment) FROM requests") == [(8, 1)]
    assert {row[0] for row in store.rows("SELECT worker FROM workers WHERE role = 'prefill'")} == {
        "pid:200@3d1219c7", "pid:210@3d1219c7",
    }  # fmt: skip


def test_processes_that_export_under_ids_of_their_own_are_one_server(tmp_path: Path) -> None:
    made = Traces()
    one_server(made, 1, 0)
    for at, (resource, _, span) in enumerate(made.spans):
        scheduler = at >= 4
        made.spans[at] = ({**resource, "service.instance.id": "s" if scheduler else "a"}, "sglang server", span)  # fmt: skip
    store = read(tmp_path, made)
    assert store.rows("SELECT DISTINCT worker FROM legs") == [("instance:a",)]
    assert store.rows("SELECT worker, role FROM workers") == [("instance:a", "aggregated")]


def test_mooncakes_senders_give_the_movement_its_time_by_the_room(tmp_path: Path) -> None:
    made = Traces()
    p_rid, _ = pair(made, 1, 0, room=ROOM)
    sender(made, ROOM, 40, 82, trace=f"{99:032x}")
    store = read(tmp_path, made)
    moved = store.sql("FROM transfers").row(0, named=True)
    assert (moved["start_ns"] - T0, moved["end_ns"] - T0) == (40 * MS, 82 * MS)
    assert (moved["request_id"], moved["backend"], moved["direction"]) == (p_rid, "Mooncake", "prefill_to_decode")  # fmt: skip
    assert store.count("transfers") == 1
    assert details(store) == PAIR


def test_a_router_above_is_the_request_and_its_traceparent_carries_both_sides(
    tmp_path: Path,
) -> None:
    made = Traces()
    trace = f"{7:032x}"
    top = made.add(
        trace, "http_request", -5, 150, resource={"service.name": "smg"}, scope="smg", method="POST",
        path="/v1/chat/completions", request_id="chatcmpl-1", status_code="200",
        events=[("Sending concurrent requests", -1)],
    )  # fmt: skip
    pair(made, 1, 0, room=ROOM, router=top, trace=trace)
    store = read(tmp_path, made)
    assert store.rows("SELECT window_observer, mode FROM requests") == [("router", "disaggregated")]
    assert store.rows("SELECT count(DISTINCT request), count(*) FROM legs") == [(1, 3)]
    found = details(store)
    assert {k: v for k, v in found.items() if k in ("prefill_wall", "kv_transfer", "kv_space_wait")} == {
        "prefill_wall": 50, "kv_transfer": 20, "kv_space_wait": 6,
    }  # fmt: skip


def test_up_to_0_5_8_the_room_stands_above_and_a_prompt_span_begins_in_the_queue(
    tmp_path: Path,
) -> None:
    made = Traces()
    trace = f"{5:032x}"
    top = made.add(trace, f"Bootstrap Room {hex(ROOM)}", 0, 200, bootstrap_room=hex(ROOM))
    root = made.add(trace, "prefill Req aaaaaaaa", 0, 90, top, rid="a" * 32)
    made.thread(trace, root, "Prefill Scheduler", 21, [("prefill_prepare", 1, 2), ("prefill_bootstrap", 2, 10), ("chunked_prefill", 10, 50, [("schedule", 30.0)]), ("prefill_forward", 50, 70), ("prefill_transfer_kv_cache", 70, 85)])  # fmt: skip
    root = made.add(trace, "decode Req bbbbbbbb", 0, 150, top, rid="b" * 32)
    made.thread(trace, root, "Decode Scheduler", 31, [("decode_prepare", 1, 2), ("decode_bootstrap", 2, 10), ("decode_transferred", 10, 88), ("fake_output", 88, 90, [("schedule", 89.0)]), ("decode_loop", 90, 110), ("decode_loop", 110, 130)])  # fmt: skip
    store = read(tmp_path, made)
    assert store.rows("SELECT role, bootstrap_room FROM legs ORDER BY 1") == [("decode", str(ROOM)), ("prefill", str(ROOM))]  # fmt: skip
    found = details(store)
    assert (found["prefill_queue"], found["prefill_wall"], found["kv_transfer"]) == (20, 40, 15)
    assert (found["kv_space_wait"], found["decode_queue"], found["decode_wall"]) == (8, 2, 40)
    assert store.rows("SELECT ttft_ms, first_token_ns - start_ns FROM legs WHERE role = 'decode'") == [(90.0, 90 * MS)]  # fmt: skip


def test_0_5_3_tells_no_queue_so_its_prompt_span_is_an_upper_bound(tmp_path: Path) -> None:
    made = Traces()
    trace = f"{5:032x}"
    root = made.add(trace, "Req aaaaaaaa", 0, 100, rid="a" * 32, bootstrap_room="None")
    made.thread(trace, root, "Tokenizer", 20, [("tokenize", 0, 2), ("dispatch", 2, 3)])
    made.thread(trace, root, "Scheduler", 21, [("process req", 5, 6), ("prefill", 6, 60), ("decode loop", 60, 80), ("decode loop", 80, 99)], tp_rank=0)  # fmt: skip
    store = read(tmp_path, made)
    assert store.rows("SELECT role, bootstrap_room FROM legs") == [("aggregated", None)]
    assert store.rows("SELECT DISTINCT basis FROM phases WHERE detail = 'prefill_wall'") == [("upper_bound",)]  # fmt: skip
    assert details(store) == {
        "frontend": 3, "before_queue": 3, "prefill_wall": 54, "decode_wall": 39, "unattributed": 1,
    }  # fmt: skip


def test_aborts_retractions_and_health_checks(tmp_path: Path) -> None:
    made = Traces()
    made.add(f"{1:032x}", " Req HEALTH_C", 0, 9, rid="HEALTH_CHECK_1", module="sglang::request")
    left = made.add(f"{2:032x}", " Req aaaaaaaa", 0, 50, rid="a" * 32, module="sglang::request")
    made.thread(f"{2:032x}", left, "Scheduler", 11, [("prefill_waiting", 1, 50)], error=True, type="abort")  # fmt: skip
    full = made.add(f"{3:032x}", " Req bbbbbbbb", 0, 2, rid="b" * 32, module="sglang::request")
    made.thread(f"{3:032x}", full, "Scheduler", 11, [("request_process", 0, 1)], error=True, type="abort", status_code=503)  # fmt: skip
    put_off = made.add(f"{4:032x}", " Req cccccccc", 0, 200, rid="c" * 32, module="sglang::request")  # fmt: skip
    made.thread(f"{4:032x}", put_off, "Scheduler", 11, [("prefill_waiting", 0, 1), ("prefill_forward", 1, 50), ("decode_forward", 50, 200, [("retract", 70.0)]), ("prefill_forward", 100, 140)])  # fmt: skip
    store = read(tmp_path, made)
    assert store.rows("SELECT status, error FROM legs ORDER BY request_id") == [("aborted", None), ("failed", "HTTP 503"), ("completed", None)]  # fmt: skip
    assert store.rows("SELECT kind, request_id, time_ns FROM events") == [("preemption", "c" * 32, T0 + 70 * MS)]  # fmt: skip
    found = details(store, "r.e2e_ms = 200")  # fmt: skip
    assert (found["prefill_wall"], found["prefill_recompute"], found["decode_wall"]) == (49, 40, 110)  # fmt: skip


def test_spans_of_sglangs_own_tracing_code() -> None:
    store = Store()
    ingest([str(FIXTURE)], store)
    assert store.rows("SELECT count(*), count(*) FILTER (mode = 'disaggregated') FROM requests") == [(2, 1)]  # fmt: skip
    rows = dict(store.rows("SELECT role, round(ttft_ms) FROM legs"))
    assert rows == {"prefill": 135, "decode": 176, "aggregated": 104}
    assert store.rows("SELECT sum(rows_kept), sum(rows_skipped) FROM sources")[0][1] == 0


def test_spans_without_ends_parents_or_sense_break_nothing(tmp_path: Path) -> None:
    made = Traces()
    root = made.add(f"{1:032x}", " Req aaaaaaaa", 0, None, rid="a" * 32, module="sglang::request", bootstrap_room="0x" + "f" * 40, gen_ai__latency__time_to_first_token=1e300)  # fmt: skip
    made.thread(f"{1:032x}", root, "Scheduler", 7, [("prefill_forward", 50, 10), ("decode_forward", 60, 5e9, [("decode_loop", 60, 5e9)])], tp_rank=-3)  # fmt: skip
    made.add(f"{2:032x}", "decode Req bbbbbbbb", 0, 5, rid="b" * 32)  # no thread told of it
    made.add(f"{3:032x}", "prefill_forward", 0, 5, "00000000000000aa")  # no request either
    made.add(f"{4:032x}", "Sender Req 0x1", 0, 5, rid="0x1", bootstrap_room="0x1", module="sglang::mooncake")  # fmt: skip
    store = read(tmp_path, made)
    assert store.rows("SELECT request_id, status, bootstrap_room FROM legs ORDER BY 1") == [("a" * 32, "unknown", None), ("b" * 32, "completed", None)]  # fmt: skip
