"""SGLang's server logs of all eras: batches are samples, requests legs, failures events; no text is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtrace import wording
from pdtrace.collectors import sglang_log
from pdtrace.diagnose import diagnose
from pdtrace.ingest import ingest
from pdtrace.model import Head
from pdtrace.store import Store

T = 1_793_520_000_000_000_000  # 2026-11-01 08:00:00 UTC
MS = 1_000_000


def read(path: Path, **logs: str) -> Store:
    for name, text in logs.items():
        (path / f"{name}.log").write_text(text, "utf-8")
    store = Store()
    ingest([str(path)], store)
    for row in store.rows("SELECT rows_read, rows_kept, rows_skipped FROM sources"):
        assert row[0] == row[1] + row[2]
    return store


BATCHES = """\
[2026-11-01 08:00:00] server_args=ServerArgs(model_path='m/x', host='10.0.0.1', port=30000, tp_size=4, dp_size=2, enable_dp_attention=True, chunked_prefill_size=8192, disaggregation_mode='null', api_key='s3cret', disable_radix_cache=False)
[2026-11-01 08:00:00 DP0 TP0] max_total_num_tokens=123456, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=32768
[2026-11-01 08:00:01 DP0 TP0] Prefill batch. #new-seq: 3, #new-token: 2048, #cached-token: 512, token usage: 0.31, #running-req: 7, #queue-req: 4, \n\
[2026-11-01 08:00:02 DP0 TP0] Decode batch. #running-req: 33, #token: 91234, token usage: 0.44, cuda graph: True, gen throughput (token/s): 1875.32, #queue-req: 0
[2026-11-01 08:00:03 DP1 TP2] Decode batch, #running-req: 5, #token: 900, token usage: 0.01, cuda graph: True, gen throughput (token/s): 100.00, #queue-req: 0, \n\
[2026-11-01 08:00:04 DP0 TP0] Prefill batch [117], #new-seq: 1, #new-token: 8192, #cached-token: 0, token usage: 0.42, #running-req: 33, #queue-req: 5, cuda graph: False, input throughput (token/s): 15234.10, fwd occupancy: 91.20%, fwd+idle occupancy: 95.00%
[2026-11-01 08:00:04.500 DP0 TP0] Prefill batch, #new-seq: 1, #new-token: 1808, #cached-token: 0, full token usage: 0.42, swa token usage: 0.11, mamba usage: 0.10, #running-req: 33, #queue-req: 5, #pending-token: 70000, cuda graph: False, input throughput (token/s): 15234.10
\x1b[32m[2026-11-01 08:00:06 DP0 TP0] Decode batch, #running-req: 34, #full token: 40100, full token usage: 0.19, #swa token: 900, swa token usage: 0.02, accept len: 2.75, accept rate: 0.69, cuda graph: True, gen throughput (token/s): 900.00, #queue-req: 2\x1b[0m
[2026-11-01 08:00:07 DP0 TP0] The server is fired up and ready to roll!
"""


def test_batch_lines_of_all_eras_are_samples_read_by_name(tmp_path: Path) -> None:
    store = read(tmp_path, server=BATCHES)
    rows = store.rows(
        """SELECT (time_ns - ?) // 1000000, metric, value, interval_ns FROM samples
           WHERE labels ->> 'dp_rank' = '0' AND metric IN ('log:num_running_reqs', 'log:prefill_batch_tokens',
             'log:generation_throughput_toks_per_s', 'log:prompt_throughput_toks_per_s') ORDER BY 2, 1""", [T],
    )  # fmt: skip
    assert rows == [
        # the first Decode line's window has no beginning; the second holds 10,000 prompt tokens in 4 s
        (2000, "log:generation_throughput_toks_per_s", 1875.32, None),
        (6000, "log:generation_throughput_toks_per_s", 900.0, 4_000 * MS),
        (1000, "log:num_running_reqs", 7.0, None), (2000, "log:num_running_reqs", 33.0, None),
        (4000, "log:num_running_reqs", 33.0, None), (4500, "log:num_running_reqs", 33.0, None), (6000, "log:num_running_reqs", 34.0, None),
        (1000, "log:prefill_batch_tokens", 2048.0, None), (4000, "log:prefill_batch_tokens", 8192.0, None), (4500, "log:prefill_batch_tokens", 1808.0, None),
        (6000, "log:prompt_throughput_toks_per_s", 2500.0, 4_000 * MS),
    ]  # fmt: skip
    named = {row[0] for row in store.rows("SELECT DISTINCT metric FROM samples")}
    assert {"log:kv_full_token_usage", "log:kv_swa_token_usage", "log:mamba_usage_ratio", "log:spec_accept_length", "log:spec_acceptance_rate"} <= named  # fmt: skip
    assert store.rows("SELECT DISTINCT labels ->> 'dp_rank' FROM samples ORDER BY 1") == [("0",), ("1",)]  # fmt: skip
    assert (
        store.count("steps") == 0
    )  # a Decode line is every 40th iteration, and none states a duration
    facts = dict(store.rows("SELECT key, value FROM facts"))
    assert (facts["kv_cache_tokens"], facts["tensor_parallel_size"], facts["dp_attention"]) == ("123456", "4", "True")  # fmt: skip
    assert facts["arg_api_key"] == "set"
    assert store.rows("SELECT role, role_basis, engine FROM workers") == [("aggregated", "config", "SGLang")]  # fmt: skip


UNIFIED = """\
[2026-11-01 08:00:05] Receive: obj=GenerateReqInput(text="SECRET rid='fake' bootstrap_room=9", rid='u1', stream=True)
[2026-11-01 08:00:06 TP0] ReqTimeStats(rid=u1, input_len=512, cached_input_len=64, output_len=11, attempts=1, type=unified): queue_duration=20.00ms, forward_duration=500.00ms, entry_time=1793520005.100
[2026-11-01 08:00:06] Finish: obj=GenerateReqInput(text="SECRET 'meta_info': {'id': 'fake'}", rid='u1', stream=True), out={'text': "SECRET 'meta_info': {'id': 'fake', 'e2e_latency': 9}", 'meta_info': {'id': 'u1', 'finish_reason': {'type': 'stop', 'matched': 2}, 'prompt_tokens': 512, 'completion_tokens': 11, 'cached_tokens': 64, 'e2e_latency': 0.53, 'queue_time': 0.02, 'request_received_ts': 1793520005.09, 'forward_entry_time': 1793520005.12, 'prefill_finished_time': 1793520005.22, 'first_token_latency': 0.135, 'request_finished_ts': 1793520005.62}}
[2026-11-01 08:00:07] Finish: obj=GenerateReqInput(text=None, input_ids=[1, 2], rid='HEALTH_CHECK_1'), out={'meta_info': {'id': 'HEALTH_CHECK_1', 'e2e_latency': 0.01}}
[2026-11-01 08:00:08] {"timestamp": "2026-11-01T08:00:08.1", "event": "request.received", "rid": "u2", "obj": {"text": "SECRET", "stream": false}}
[2026-11-01 08:00:09] {"timestamp": "2026-11-01T08:00:09.1", "event": "request.finished", "rid": "u2", "obj": {"text": "SECRET", "stream": false}, "out": {"text": "SECRET", "meta_info": {"id": "u2", "finish_reason": {"type": "abort", "message": "SECRET", "status_code": 503}, "prompt_tokens": 7, "completion_tokens": 0, "e2e_latency": 0.5}}}
[2026-11-01 08:00:10] Receive: obj=GenerateReqInput(text='SECRET', rid='u3')
[2026-11-01 08:00:10] INFO:     127.0.0.1:51234 - "POST /v1/chat/completions HTTP/1.1" 200 OK
[2026-11-01 08:00:11] INFO:     127.0.0.1:51235 - "POST /generate HTTP/1.1" 503 Service Unavailable
"""


def test_the_lines_of_one_request_are_one_leg_and_its_text_stays_out(tmp_path: Path) -> None:
    store = read(tmp_path, server=UNIFIED)
    legs = store.sql("FROM legs ORDER BY request_id").rows(named=True)
    assert [(leg["request_id"], leg["status"], leg["error"]) for leg in legs] == [
        ("u1", "completed", None), ("u2", "failed", "HTTP 503"), ("u3", "unknown", None),
    ]  # fmt: skip
    one = legs[0]
    assert (one["start_ns"] - T, one["end_ns"] - T) == (5_090 * MS, 5_620 * MS)
    assert (one["ttft_ms"], one["e2e_ms"], one["tpot_ms"]) == pytest.approx((135, 530, 39.5))
    assert (one["prompt_tokens"], one["cached_tokens"], one["output_tokens"]) == (512, 64, 11)
    assert (one["bootstrap_room"], one["streaming"], one["finish_reason"]) == (None, True, "stop")
    rows = dict(
        store.rows(
            """SELECT detail, round(sum(p.end_ns - p.start_ns) / 1e6, 3) FROM phases p
               JOIN requests r USING (request) WHERE r.e2e_ms = 530 GROUP BY detail"""
        )
    )
    # 10 ms before the scheduler's queue and 5 ms from the prompt's end to the token seen: nobody tells what that was
    assert rows == {"prefill_queue": 20, "prefill_wall": 100, "decode_wall": 395, "unattributed": 15}  # fmt: skip
    kinds = store.rows("SELECT kind, request_id, detail FROM events ORDER BY ALL")
    assert kinds == [("failure", "u2", "HTTP 503"), ("http_error", None, "503 POST /generate")]
    said = dict(store.rows("SELECT quantity, value FROM reported WHERE leg LIKE '%/u1'"))
    assert (said["queue_duration"], said["forward_duration"], said["e2e_latency"]) == (20, 500, 0.53)  # fmt: skip
    for table in ("legs", "events", "facts", "reported", "samples", "skipped"):
        assert not any("SECRET" in str(row) for row in store.rows(f"FROM {table}")), table


def stats(at: str, rid: str, kind: str, body: str, room: int = 771122, *, old: bool = False) -> str:
    if old:
        return f"[2026-11-01 {at} TP0] Req Time Stats(rid={rid}, bootstrap_room={room}, input len=512, output len=8, type={kind}): {body}\n"  # fmt: skip
    return f"[2026-11-01 {at} TP0] ReqTimeStats(rid={rid}, bootstrap_room={room}, input_len=512, cached_input_len=64, output_len=8, attempts=1, type={kind}): {body}\n"  # fmt: skip


def phases(store: Store) -> dict[str, float]:
    return dict(store.rows("SELECT detail, round(sum(end_ns - start_ns) / 1e6, 3) FROM phases GROUP BY detail"))  # fmt: skip


def test_time_stats_of_both_sides_meet_in_their_room_and_carry_their_own_epoch(
    tmp_path: Path,
) -> None:
    # The decode host's clock shows Seoul's time of day: entry_time beside the stamps tells.
    store = read(
        tmp_path,
        prefill=stats("08:00:04", "p1", "prefill", "bootstrap_duration=6.00ms, queue_duration=12.00ms, forward_duration=140.00ms, entry_time=1793520003.581, transfer_speed=11.50 GB/s, transfer_total=352.00 MB"),
        decode=stats("17:00:04", "d1", "decode", "bootstrap_duration=5.00ms, alloc_wait_duration=4.00ms, transfer_duration=156.00ms, queue_duration=5.00ms, forward_duration=175.00ms, entry_time=1793520003.581"),
    )  # fmt: skip
    assert store.rows("SELECT mode, ttft_ms, e2e_ms FROM requests") == [("disaggregated", 170, 345)]
    # The prefill worker's forward holds the transfer: an upper bound. What is beyond it until the KV was there: wait.
    assert phases(store) == {
        "kv_space_wait": 9, "prefill_queue": 9, "prefill_wall": 140, "kv_wait_upper_bound": 7, "decode_queue": 5,
        "decode_wall": 175,
    }  # fmt: skip
    assert store.rows("SELECT DISTINCT basis FROM phases WHERE detail = 'prefill_wall'") == [("upper_bound",)]  # fmt: skip
    assert store.rows("SELECT bytes, duration_ms, direction FROM transfers") == [(352 * 2**20, None, "prefill_to_decode")]  # fmt: skip
    # Of the transfer itself only the prefill's end tells: 16 ms of waits, and up to 140 ms more of it in the prefill.
    (row,) = store.query("kv_transfer").to_dicts()
    seen = {k: row[k] for k in ("value", "interval_high", "prefill_bound_s")}
    assert seen == {"value": 0.016, "interval_high": pytest.approx(0.156), "prefill_bound_s": 0.14}
    said = wording.finding("kv_transfer", row)
    assert said.title.endswith("beside the prefill, which may hold the transfer")
    assert "Transfer not told apart" in said.detail
    zones = store.rows("SELECT value FROM facts WHERE key = 'log_time_zone' ORDER BY value")
    assert [zone[0][:9] for zone in zones] == ["UTC", "UTC+09:00"]


def test_stamps_of_whole_seconds_place_no_prefill_against_the_decode_side(tmp_path: Path) -> None:
    store = read(
        tmp_path,
        prefill=stats("08:00:04", "p1", "prefill", "bootstrap_queue_duration(9.00ms) = alloc_wait(2.00ms) + bootstrap(6.50ms) + other(0.50ms); queue_duration=12.50ms, forward_duration=140.10ms, start=4821.125, transfer_speed=11.40GB/s, transfer_total=352.00MB, #retries=0", old=True),
        decode=stats("08:00:04", "d1", "decode", "prealloc_queue_duration(9.00ms) = bootstrap(5.00ms) + alloc_wait(4.00ms); transfer_duration=156.00ms; queue_duration=5.00ms, forward_duration=1750.00ms, start=1.125", old=True),
    )  # fmt: skip
    assert store.rows("SELECT count(*) FROM requests") == [(1,)]
    assert phases(store) == {
        "kv_space_wait": 9, "kv_wait_upper_bound": 156, "decode_queue": 5, "decode_wall": 1750,
    }  # fmt: skip
    durations = dict(store.rows("SELECT detail, duration_ns FROM intervals WHERE start_ns IS NULL"))
    assert durations == {"kv_space_wait": 9 * MS, "prefill_queue": 12.5 * MS, "prefill_wall": 140.1 * MS}  # fmt: skip


def test_garbage_durations_of_0_4_are_no_times(tmp_path: Path) -> None:
    store = read(tmp_path, server="[2025-07-24 10:00:00 TP0] Req Time Stats(rid=a, input len=5, output len=6, type=unified): queue_duration=0.00ms, forward_duration=1753355419058.00ms, start_time=0.0\n")  # fmt: skip
    assert store.rows("SELECT start_ns, e2e_ms, output_tokens FROM legs") == [(None, None, 6)]
    assert store.count("phases") == 0


TROUBLE = "".join(
    f"[2026-11-01 08:00:05 TP{rank}] Prefill transfer failed for request rank={rank} req.rid='aa' req.bootstrap_room=771123 with exception KVTransferError(bootstrap_room=771123): Request 771123 timed out after 300.0s in KVPoll.WaitingForInput\n"
    for rank in range(4)
) + (
    "[2026-11-01 08:00:06 TP0] Decode transfer failed for request rank=0 decode_req.req.rid='bb' decode_req.req.bootstrap_room=771123 with exception KVTransferError(bootstrap_room=771123): Aborted by AbortReq.\n"
    "[2026-11-01 08:00:07 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 5000, #new_token_ratio: 0.5 -> 0.7\n"
    "[2026-11-01 08:00:08 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "scheduler.py", line 1, in run\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    "[2026-11-01 08:00:09] Received sigquit from a child process. It usually means the child failed.\n"
)


def test_failures_are_told_once_whatever_ranks_repeat(tmp_path: Path) -> None:
    store = read(tmp_path, server=TROUBLE)
    rows = store.rows(
        "SELECT kind, severity, request_id, count, detail FROM events ORDER BY record"
    )
    assert rows == [
        ("failure", "warning", "aa", 1, "prefill transfer failed: timed out after 300.0 s in WaitingForInput"),
        ("abort", "warning", "bb", 1, "decode transfer failed: aborted by the other side or the client"),
        ("preemption", "warning", None, 3, "retracted: KV cache full"),
        ("failure", "critical", None, 1, "engine died"),
        ("oom", "critical", None, 1, "out of memory"),
    ]  # fmt: skip
    assert store.rows("SELECT request_id, outcome FROM transfers") == [("bootstrap_room=771123", "failed")]  # fmt: skip
    found = {finding.id for told in diagnose(store).deployments for finding in told.findings}
    assert {"transfer_failures", "engine_failure", "preemption"} <= found
    assert "kv_alarm" not in found  # such a request ends with an error, never with a wrong answer


def test_servers_in_one_file_and_a_restart_are_workers_of_their_own(tmp_path: Path) -> None:
    args = "[2026-11-01 08:00:{s:02d}] server_args=ServerArgs(model_path='m', disaggregation_mode='{role}')"
    batch = "[2026-11-01 08:00:{s:02d} TP0] Decode batch, #running-req: 5, #token: 900, token usage: 0.01, gen throughput (token/s): 100.00, #queue-req: 0"
    lines = []
    for n in range(12):
        lines.append(f"decode-0  | {args.format(s=n, role='decode') if n in (0, 6) else batch.format(s=n)}")  # fmt: skip
        lines.append(f"prefill-0 | {args.format(s=n, role='prefill') if n == 0 else batch.format(s=n).replace('Decode', 'Prefill')}")  # fmt: skip
    store = read(tmp_path, compose="\n".join(lines) + "\n")
    assert store.rows("SELECT role, count(*) FROM workers GROUP BY role ORDER BY role") == [("decode", 2), ("prefill", 1)]  # fmt: skip


def test_absurd_figures_are_unknown_and_break_nothing(tmp_path: Path) -> None:
    big = "9" * 40
    store = read(
        tmp_path,
        server=f"[2026-11-01 08:00:01 TP0] Prefill batch, #new-seq: {big}, #new-token: x, token usage: nan, #running-req: 1, weird: {big}\n"
        f"[2026-11-01 08:00:02] KV cache pool is full. Retract requests. #retracted_reqs: {big}, #new_tokens_gained: 1\n"
        f"[2026-11-01 08:00:03] Finish: obj=GenerateReqInput(rid='a'), out={{'meta_info': {{'id': 'a', 'prompt_tokens': {big}, 'completion_tokens': 1e300, 'e2e_latency': {big}, 'request_received_ts': {big}, 'dp_rank': {big}}}}}\n"
        f"[2026-11-01 08:00:04 TP0] ReqTimeStats(rid=b, bootstrap_room={big}, input_len={big}, output_len=3, type=prefill): queue_duration={big}.00ms, forward_duration=5.00ms, entry_time=1793520003.581, transfer_speed={big} GB/s, transfer_total={big} MB\n"
        f"[2026-99-99 99:99:99] Decode batch, #running-req: 3, gen throughput (token/s): 5.00\n",
    )  # fmt: skip
    rows = store.rows("SELECT request_id, prompt_tokens, rank FROM legs ORDER BY 1")
    assert rows == [("a", None, None), ("b", None, None)]
    assert not any("collector" in str(row) for row in store.rows("SELECT why FROM sources WHERE why LIKE '%failed%'"))  # fmt: skip


def test_lines_without_a_stamp_are_sglangs_too() -> None:
    line = "ReqTimeStats(rid=a, bootstrap_room=None, input_len=5, output_len=6, type=unified): queue_duration=1.00ms\n"
    for text in (line, "Decode batch, #running-req: 5, #token: 9\n"):
        assert sglang_log.sniff(Head("x", "x", text.encode(), complete=True)) is not None
    quoted = '{"prompt": "what is Decode batch, #running-req: 5?", "output_tokens": 5}\n'
    assert sglang_log.sniff(Head("x", "x", quoted.encode(), complete=True)) is None
