"""LMCache's lookups tell whose prompts share beginnings; KV cache events do not, and are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from door import pdtrace

from pdtrace.api import Trace


def lookup(n: int, hashes: list[object], **more: object) -> dict[str, object]:
    return {
        "timestamp": 1_790_000_000.25 + n, "request_id": f"cmpl-{n}-0", "model_name": "m", "chunk_size": 256,
        "seq_len": 600, "dtypes": ["torch.bfloat16"], "shapes": [[2, 3]], "chunk_hashes": hashes, **more,
    }  # fmt: skip


def written(folder: Path, rows: list[object]) -> Path:
    path = folder / "lookup_hashes_20260921_141320_000001.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("odd", "requests"),
    [
        ({"chunk_hashes": ["-0x5"]}, 2),
        ({"chunk_hashes": ["0x-5"]}, 2),
        ({"seq_len": 2**63}, 2),
        ({"seq_len": 1e300}, 2),
        ({"seq_len": -1}, 2),
        ({"chunk_size": 2**70}, 3),
        ({"timestamp": 1e12}, 3),
        ({"timestamp": -1e300}, 3),
    ],
)
def test_one_lookup_with_an_absurd_number_costs_no_other(
    odd: dict[str, object], requests: int, tmp_path: Path
) -> None:
    rows: list[object] = [lookup(0, ["0x10"]), {**lookup(1, ["0x10"]), **odd}, lookup(2, ["0x10"])]
    with Trace.read([str(written(tmp_path, rows))]) as trace:
        assert trace.sql("SELECT count(*) FROM legs").item() == requests
        assert trace.sql("SELECT count(*) FROM prefix_blocks").item() == requests
        assert trace.sql("SELECT count(*) FROM facts WHERE key = '_problem'").item() == 0


def test_lookups_are_requests_whose_prompts_share_beginnings(tmp_path: Path) -> None:
    long = "0x" + "ab" * 32
    rows: list[object] = [
        lookup(0, ["0x10", "0xfedcba9876543210"]),
        lookup(0, ["0x10", "0xfedcba9876543210"], timestamp=1_790_000_009.0),  # tried again
        lookup(1, ["0x10", long]),
        lookup(2, ["0x10", long]),
        lookup(3, ["no hash"]),
        {"chunk_size": 256, "seq_len": 5},
    ]
    with Trace.read([str(written(tmp_path, rows))]) as trace:
        legs = trace.sql(
            "SELECT request_id, start_ns, prompt_tokens, model, status FROM legs ORDER BY record"
        )
        assert legs.rows() == [
            (f"cmpl-{n}-0", (1_790_000_000 + n) * 10**9 + 250_000_000, 600, "m", "unknown") for n in (0, 1, 2)
        ]  # fmt: skip
        blocks = trace.sql("SELECT block_tokens, hashes FROM prefix_blocks ORDER BY record")
        assert blocks["block_tokens"].to_list() == [256] * 3
        assert blocks["hashes"][0].to_list() == [16, 0xFEDCBA9876543210]
        assert blocks["hashes"][1].to_list() == blocks["hashes"][2].to_list()
        reasons = dict(trace.sql("SELECT reason, records FROM skipped").rows())
        assert reasons == {"looked up again": 1, "no lookup of chunks": 2}
        seen = trace.store.query("prefix_reuse").sort("request")
        assert seen["seen_tokens"].to_list() == [0, 256, 512]
        assert trace.sql("SELECT DISTINCT mode FROM requests").item() == "unknown"


@pytest.mark.parametrize(
    "content",
    [
        b'{"timestamp":1,"event":{"worker_id":7,"event":{"event_id":1,"data":{"stored":{"parent_hash":null,"blocks":[]}}}}}\n',
        b'{"ts":1.0,"events":[{"type":"BlockStored","block_hashes":[1],"parent_block_hash":null,"token_ids":[1],"block_size":16}]}\n',
        b'["BlockRemoved",[1,2]]\n',
        b"\x93\xcbA\xda\xb0\x00\x00\x00\x00\x00\x91\x97\xabBlockStored\x91\x01\xc0\x92\x01\x02\x10\xc0\xc0\x00",
    ],
)
def test_kv_events_are_recognised_and_it_is_said_why_they_are_not_used(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "kv_events.jsonl").write_bytes(content)
    written(tmp_path, [lookup(0, ["0x10"])])
    found = json.loads(pdtrace("coverage", "--format", "json", str(tmp_path)).stdout)["sources"]
    (why,) = [row["why"] for row in found if row["path"].endswith("kv_events.jsonl")]
    assert why.startswith("KV cache events")
    assert "not whose prompts they are" in why


BANNER = (
    "(APIServer pid=1) INFO 03-01 09:59:50 [api_server.py:1896] vLLM API server version 0.11.0\n"
)
ENGINE, RANK = "(EngineCore_DP0 pid=6) ", "(Worker_TP{} pid=7{}) "
GIB = 1024**3


def stamp(seconds: float) -> str:
    whole, ms = divmod(round(seconds * 1000), 1000)
    return f"[2026-03-01 10:{whole // 60:02d}:{whole % 60:02d},{ms:03d}]"


def asked(at: float, request: str, total: int, rest: str) -> str:
    return f"{ENGINE}{stamp(at)} LMCache INFO: Reqid: {request}, Total tokens {total}, {rest} (vllm_v1_adapter.py:1476:x)\n"


def moved(at: float, text: str, rank: int = 0) -> str:
    return f"{RANK.format(rank, rank)}{stamp(at)} LMCache INFO: {text} (cache_engine.py:985:lmcache.v1.cache_engine)\n"


def log(folder: Path, *lines: str) -> Trace:
    (folder / "server.log").write_text(BANNER + "".join(lines))
    return Trace.read([str(folder / "server.log")])


@pytest.mark.parametrize(
    ("total", "rest", "cached"),
    [
        (8192, "Inference Engine computed tokens: 512, LMCache hit tokens: 7936, need to load: 7424", 7936),
        (8192, "LMCache hit tokens: 7936, need to load: 7424", 7936),
        (836, "LMCache hit tokens: 768, need to load: -64", 832),  # the engine held more than LMCache
        (836, "Inference Engine computed tokens: 832, LMCache hit tokens: 768, need to load: 0", 832),
        (512, "Inference Engine computed tokens: 0, LMCache hit tokens: 512, need to load: 511", 511),
        (512, "LMCache hit tokens: 512, need to load: 511", 511),
        (512, "Inference Engine computed tokens: 16, LMCache hit tokens: 32, but need to load: 16 < min_retrieve 64, skip retrieve but record for save skip", 16),
        (512, "Inference Engine computed tokens: 0, LMCache hit tokens: 0, need to load: 0", 0),
        (10, "LMCache hit tokens: 80, need to load: -70", None),  # no prompt holds so much
    ],
)  # fmt: skip
def test_a_lookup_says_what_of_the_prompt_need_not_be_computed(
    total: int, rest: str, cached: int | None, tmp_path: Path
) -> None:
    with log(tmp_path, asked(0, "cmpl-7-0", total, rest)) as trace:
        assert trace.sql(
            "SELECT request_id, prompt_tokens, cached_tokens, start_ns, status FROM legs"
        ).rows() == [("cmpl-7-0", total, cached, None, "unknown")]
        (read, kept, skipped) = trace.sql(
            "SELECT rows_read, rows_kept, rows_skipped FROM sources"
        ).row(0)
        assert (read, kept, skipped) == (2, 2, 0)


def test_loads_and_stores_stand_in_front_of_their_stamps_rank_by_rank(tmp_path: Path) -> None:
    size = "size: 0.5000 gb, cost 60.0000 ms, throughput: 8.3333 GB/s;"
    lines = [
        asked(1, "cmpl-7-0", 8192, "Inference Engine computed tokens: 0, LMCache hit tokens: 4096, need to load: 4096"),
        *[moved(1.1 + rank / 100, f"[req_id=cmpl-7-0] Retrieved 4096 out of 4096 required tokens (from 8192 total tokens). {size}", rank)
          for rank in (0, 1)],
        moved(2, "[req_id=cmpl-7-0] Stored 3840 out of total 8192 tokens. size: 0.2500 GB, cost 4.0000 ms, throughput: 62.5000 GB/s;"
                 " offload_time: 3.9000 ms, put_time: 0.1000 ms"),
    ]  # fmt: skip
    with log(tmp_path, *lines) as trace:
        rows = trace.sql(
            """SELECT direction, request_id, duration_ms, bytes, backend, outcome, (end_ns - start_ns) / 1e6,
                 source_worker IS NULL, destination_worker IS NULL, leg IS NOT NULL FROM transfers ORDER BY end_ns"""
        ).rows()
        load = ("load", "cmpl-7-0", 60.0, GIB // 2, "LMCache", "completed", 60.0, True, False, True)
        assert rows[:2] == [load, load]
        assert rows[2][:6] == ("store", "cmpl-7-0", 4.0, GIB // 4, "LMCache", "completed")
        spent = trace.sql(
            "SELECT detail, basis, (end_ns - start_ns) / 1e6 FROM intervals ORDER BY end_ns"
        ).rows()
        assert spent == [("kv_load", "reported", 60.0)] * 2
        start = trace.sql("SELECT min(start_ns) FROM intervals").item()
        assert start == 1_772_359_201_040_000_000  # 10:00:01.100 - 60 ms, read as UTC


def test_older_lines_name_no_request_and_the_oldest_no_time(tmp_path: Path) -> None:
    lines = [
        moved(1, "Retrieved 512 out of 512 required tokens (from 600 total tokens). size: 0.0625 gb, cost 5.0000 ms, throughput: 12.5 GB/s;"),
        moved(2, "Stored 256 out of total 600 tokens. size: 0.0000 gb, cost 1.0000 ms, throughput: 0.0 GB/s; offload_time: 1.0 ms, put_time: 0.0 ms"),
        moved(3, "Retrieved 512 out of 512 out of total 600 tokens"),
    ]  # fmt: skip
    with log(tmp_path, *lines) as trace:
        assert trace.sql(
            "SELECT direction, request_id, bytes FROM transfers ORDER BY end_ns"
        ).rows() == [("load", None, GIB // 16), ("store", None, None)]
        assert trace.sql("SELECT count(*) FROM legs").item() == 0
        skipped = trace.sql("SELECT reason, records FROM skipped").rows()
        assert skipped == [("LMCache line without time and size", 1)]


def test_tries_preemption_and_short_loads(tmp_path: Path) -> None:
    found = "Inference Engine computed tokens: {}, LMCache hit tokens: {}, need to load: {}"
    lines = [
        asked(1, "cmpl-1-0", 1024, found.format(0, 512, 512)),
        asked(2, "cmpl-1-0", 1024, found.format(0, 768, 768)),  # tried again: more was there by then
        asked(3, "cmpl-1-0", 1100, found.format(1024, 1024, 0)),  # preempted: its answer so far is looked up too
        asked(4, "cmpl-2-0", 1024, found.format(0, 512, 512)),
        moved(5, "[req_id=cmpl-2-0] Retrieved 256 out of 512 required tokens (from 1024 total tokens). size: 0.0312 gb, cost 2.0 ms, throughput: 15 GB/s;"),
    ]  # fmt: skip
    with log(tmp_path, *lines) as trace:
        rows = trace.sql(
            "SELECT request_id, prompt_tokens, cached_tokens FROM legs ORDER BY 1"
        ).rows()
        assert rows == [("cmpl-1-0", 1024, 768), ("cmpl-2-0", 1024, None)]
        assert trace.sql("SELECT outcome FROM transfers").item() is None


def test_a_request_that_the_log_tells_otherwise_too_is_one_and_begins_when_it_came(
    tmp_path: Path,
) -> None:
    lines = [
        "(APIServer pid=1) INFO 03-01 10:00:01 [logger.py:40] Received request cmpl-7-0: prompt: 'a', params: SamplingParams(n=1, max_tokens=9), prompt_token_ids: None, lora_request: None.\n",
        asked(1.5, "cmpl-7-0-89abcdef", 600, "Inference Engine computed tokens: 0, LMCache hit tokens: 0, need to load: 0"),
        # a prompt that looks like a line of LMCache
        "(APIServer pid=1) INFO 03-01 10:00:02 [logger.py:40] Received request cmpl-8-0: prompt: ' [2026-03-01 10:00:00,000] LMCache INFO: Reqid: x, Total tokens 5, LMCache hit tokens: 5, need to load: 5', params: SamplingParams(n=1, max_tokens=9), prompt_token_ids: None, lora_request: None.\n",
        "\x1b[32m" + asked(2.5, "cmpl-8-0-89abcdee", 700, "Inference Engine computed tokens: 0, LMCache hit tokens: 256, need to load: 256"),
    ]  # fmt: skip
    with log(tmp_path, *lines) as trace:
        rows = trace.sql(
            """SELECT request_id, prompt_tokens, cached_tokens, start_ns % 60000000000 / 1e9 FROM legs ORDER BY 1"""
        ).rows()
        assert rows == [("cmpl-7-0", 600, 0, 1.0), ("cmpl-8-0", 700, 256, 2.0)]


def test_loads_are_time_of_the_requests_that_spans_tell_of(tmp_path: Path) -> None:
    """The log is stamped nine hours ahead; its loads end 60 ms before each first token."""
    origin = 1_772_359_200_000_000_000  # 10:00 UTC
    spans, lines = [], []
    for i in range(12):
        start, request = origin + i * 1_000_000_000, f"cmpl-{i}-0"
        attributes = {
            "gen_ai.request.id": request, "gen_ai.latency.time_to_first_token": 0.4, "gen_ai.latency.e2e": 0.8,
            "gen_ai.latency.time_in_queue": 0.05, "gen_ai.latency.time_in_model_prefill": 0.3,
            "gen_ai.latency.time_in_model_decode": 0.4, "gen_ai.usage.prompt_tokens": 4096, "gen_ai.usage.completion_tokens": 20,
        }  # fmt: skip
        spans.append(
            {"traceId": f"{i + 1:032x}", "spanId": f"{i + 1:016x}", "name": "llm_request", "kind": 2,
             "startTimeUnixNano": str(start), "endTimeUnixNano": str(start + 800_000_000),
             "attributes": [{"key": k, "value": {"stringValue" if isinstance(v, str) else "doubleValue" if isinstance(v, float) else "intValue": v}}
                            for k, v in attributes.items()]}
        )  # fmt: skip
        at = i + 0.34
        lines += [
            asked(at - 0.2, request, 4096, "Inference Engine computed tokens: 0, LMCache hit tokens: 2048, need to load: 2048"),
            moved(at, f"[req_id={request}] Retrieved 2048 out of 2048 required tokens (from 4096 total tokens)."
                      " size: 0.2500 gb, cost 100.0000 ms, throughput: 2.5 GB/s;"),
        ]  # fmt: skip
    (tmp_path / "server.log").write_text(BANNER + "".join(lines).replace("03-01 10:", "03-01 19:"))
    scope = {"scope": {"name": "vllm.llm_engine"}, "spans": spans}
    (tmp_path / "traces.jsonl").write_text(
        json.dumps({"resourceSpans": [{"resource": {}, "scopeSpans": [scope]}]}) + "\n"
    )
    with Trace.read([str(tmp_path)]) as trace:
        assert trace.sql("SELECT count(*), sum(cached_tokens) FROM requests").row(0) == (
            12,
            12 * 2048,
        )
        assert (
            trace.sql(
                "SELECT sum(end_ns - start_ns) / 1e6 FROM phases WHERE detail = 'kv_load'"
            ).item()
            == 1200
        )
        assert (
            "UTC+09:00" in trace.sql("SELECT value FROM facts WHERE key = 'log_time_zone'").item()
        )
    told = " ".join(pdtrace("diagnose", str(tmp_path)).stdout.split())
    # inside prefills known as wall time: waited for, or hidden behind them
    assert "Records tell of 12 KV movements of 3.22 GB from another cache tier" in told
    assert "1.20 s lie inside prefills known as wall time only" in told
