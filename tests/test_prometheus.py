"""Prometheus text dumps: every sample of every scrape, on the worker that it describes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from pdtrace.collectors import prometheus
from pdtrace.ingest import ingest
from pdtrace.inputs import expand
from pdtrace.model import Head
from pdtrace.store import Store

FIXTURES = Path(__file__).parent / "fixtures" / "prometheus"
NS = 1_000_000_000


def balanced(found) -> bool:
    kept = set(found["samples"]["record"].to_list()) | set(found["events"]["record"].to_list())
    return found.account.read == len(kept) + sum(found.account.reasons.values())


@pytest.fixture
def dump(collect, tmp_path: Path) -> Callable:
    """Read a dump of this text."""

    def run(text: str, name: str = "metrics.prom"):
        (tmp_path / name).write_text(text, "utf-8")
        return collect(prometheus, tmp_path / name)

    return run


def test_scrapes_with_stamps(collect) -> None:
    found = collect(prometheus, FIXTURES / "vllm-scrapes.prom")
    assert balanced(found)
    running = (
        found["samples"].filter(pl.col("metric") == "vllm:num_requests_running").sort("time_ns")
    )
    assert running["time_ns"].to_list()[0] == 1795993232_023_000_000
    assert running["time_ns"].n_unique() == 3
    assert json.loads(running["labels"][0]) == {"engine": "0", "model_name": "tiny-llama"}
    kinds = dict(found["samples"].select("metric", "kind").iter_rows())
    assert kinds["vllm:time_to_first_token_seconds_bucket"] == "histogram"
    assert kinds["vllm:time_to_first_token_seconds_sum"] == "histogram"
    assert kinds["vllm:prefix_cache_queries_total"] == "counter"
    assert kinds["vllm:kv_cache_usage_perc"] == "gauge"
    facts = dict(found["facts"].select("key", "value").iter_rows())
    assert facts["process_start_time_s"] == "1795992984.350"
    assert facts["served_model_name"] == "tiny-llama"


def test_a_nixl_exporter_is_the_agent_it_names(collect) -> None:
    found = collect(prometheus, FIXTURES / "nixl-exporter.prom")
    assert found["samples"]["worker"].unique().to_list() == [
        "engine_id:b3baa78a-f800-47e2-b0cf-a913e618fef5"
    ]
    received = (
        found["samples"].filter(pl.col("metric") == "agent_rx_bytes_total").row(0, named=True)
    )
    assert (received["value"], received["kind"], received["time_ns"]) == (
        758906880.0,
        "counter",
        None,
    )
    assert (
        found["samples"].filter(pl.col("value").is_null()).height == 3
    )  # quantiles that are not a number
    bounds = found["samples"].filter(pl.col("metric") == "agent_xfer_time_us_bucket")["labels"]
    assert bounds.str.contains('"le": "+Inf"', literal=True).any()


def test_a_dynamo_frontend_speaks_of_itself_and_of_its_workers(collect) -> None:
    found = collect(prometheus, FIXTURES / "dynamo-frontend.prom")
    own = f"worker_id:{int('3052e2b56e00a96e', 16)}"
    by_metric = found["samples"].group_by("metric").agg(pl.col("worker").unique().sort())
    workers = dict(by_metric.iter_rows())
    assert workers["dynamo_frontend_requests_total"] == [own]
    assert workers["dynamo_component_router_kv_hit_rate_sum"] == [own]
    assert len(workers["dynamo_frontend_worker_active_decode_blocks"]) == 4
    roles = {w: r for w, r in found["workers"].select("worker", "role").iter_rows() if r}
    assert roles == {
        own: "frontend",
        "worker_id:2975962904877096645": "prefill",
        "worker_id:6590220891195383688": "prefill",
    }


def test_a_dynamo_workers_hexadecimal_id_is_decimal_elsewhere(collect) -> None:
    found = collect(prometheus, FIXTURES / "dynamo-worker.prom")
    assert found["samples"]["worker"].unique().to_list() == [
        f"worker_id:{int('cdfea42f4cb77a65', 16)}"
    ]
    assert int("cdfea42f4cb77a65", 16) > 2**63


def test_what_surrounds_and_decorates_a_scrape(collect) -> None:
    found = collect(prometheus, FIXTURES / "synthetic-curl.txt")
    assert balanced(found)
    assert dict(found.account.reasons) == {prometheus.NOT_A_SAMPLE: 1}
    samples = found["samples"].sort("record")
    preemptions = samples.filter(pl.col("metric") == "vllm:num_preemptions_total")
    # the third is of a scrape without a stamp of its own
    assert preemptions["time_ns"].to_list() == [1795993129 * NS, 1795993139_500_000_000, None]
    assert json.loads(preemptions["labels"][0])["model_name"] == 'a "b" {c}'
    assert samples.filter(pl.col("metric") == "own_stamp")["time_ns"].to_list() == [
        1795993140_123_000_000
    ]
    bucket = samples.filter((pl.col("metric") == "h_bucket") & pl.col("labels").str.contains("0.5"))
    assert bucket["value"].to_list() == [1.0, 0.0]
    assert samples.filter(pl.col("metric") == "lat")["value"].to_list() == [None]
    restart = found["events"].row(0, named=True)
    assert found["events"].height == 1
    assert (restart["kind"], restart["time_ns"]) == ("restart", 1795993139_500_000_000)


def test_counters_that_fall_are_a_restart_also_without_times(dump) -> None:
    found = dump(
        "# TYPE x_total counter\nx_total 5\nx_total 7\nx_total 2\n# TYPE g gauge\ng 5\ng 1\n"
    )
    assert found["samples"]["time_ns"].is_null().all()
    assert found["events"].select("kind", "count", "detail").rows() == [
        ("restart", 1, "counters fell (x_total)")
    ]


def test_open_metrics_stamps_are_seconds(dump) -> None:
    found = dump("# TYPE x gauge\nx 5 1795993140.25\n# EOF\n")
    assert found["samples"]["time_ns"].to_list() == [1795993140_250_000_000]


def test_a_federated_dump_describes_many_servers(dump) -> None:
    line = 'vllm:num_requests_running{{job="vllm",instance="10.0.0.{}:8000",pod="{}"}} 1 1795993140000\n'
    found = dump(
        "# TYPE vllm:num_requests_running untyped\n" + line.format(1, "p-0") + line.format(2, "")
    )
    assert sorted(found["samples"]["worker"]) == ["address:10.0.0.2:8000", "pod:p-0"]


@pytest.mark.parametrize("stamp", ["# scrape_ts=1795993129", "1795993129", "=== 2026-11-29T22:58:49Z ===", "Sun Nov 29 22:58:49 UTC 2026", "# 2026-11-29 22:58:49"])  # fmt: skip
def test_stamps_that_people_print_above_a_scrape(dump, stamp: str) -> None:
    found = dump(f"{stamp}\n# TYPE x gauge\nx 5\n")
    assert found["samples"]["time_ns"].to_list() == [1795993129 * NS]
    assert found.account.reasons == {}


def test_a_stamped_scrape_may_lie_across_batches(dump, monkeypatch) -> None:
    from pdtrace.collectors import _loglines

    original = _loglines._line_columns
    monkeypatch.setattr(_loglines, "_line_columns", lambda source, size: original(source, 40))
    found = dump("# scrape_ts 100000000\n".replace("100000000", "1795993129") + "a_seconds 1\nb_seconds 2\nc_seconds 3\nd_seconds 4\na_seconds 5\nb_seconds 6\nc_seconds 7\n")  # fmt: skip
    assert (
        found["samples"].sort("record")["time_ns"].to_list() == [1795993129 * NS] * 4 + [None] * 3
    )


@pytest.mark.parametrize(
    ("text", "recognised"),
    [
        ("# HELP x y\n# TYPE x gauge\nx 1\n", True),
        ('a_total{b="c"} 1\n' * 6, True),
        ("INFO 10-16 17:11:24 metrics.py:351] Avg prompt throughput: 1.0 tokens/s\n" * 9, False),
        ("ttft 1\n" * 9, False),
        ("# TYPE of request\nid,ttft\n1,2\n", False),
        ('{"a": 1}\n' * 9, False),
        ("", False),
    ],
)
def test_only_expositions_are_recognised(tmp_path: Path, text: str, recognised: bool) -> None:
    (tmp_path / "x.txt").write_text(text)
    assert (prometheus.sniff(expand([str(tmp_path / "x.txt")])[0].head()) is not None) is recognised


@pytest.mark.shared
def test_the_captures_are_read_whole(collect, shared: Path) -> None:
    found = collect(prometheus, shared / "data/vllm/agg/metrics_scrape_1s_mixed.prom.txt.gz")
    assert balanced(found)
    assert (found["samples"].height, found["samples"]["time_ns"].n_unique()) == (38_407, 82)
    assert found["events"].height == 0


def scrape(count: int, created: str | None, start: str = "1.79599358647e+09") -> str:
    """A dump of a server after `count` requests of half a second each."""
    made = f"request_latency_seconds_created {created}\n" if created else ""
    return (
        f"process_start_time_seconds {start}\n# TYPE request_latency_seconds histogram\n"
        f'request_latency_seconds_bucket{{le="+Inf"}} {count}\nrequest_latency_seconds_sum {count / 2}\nrequest_latency_seconds_count {count}\n{made}'
    )


@pytest.mark.parametrize(
    ("created", "processes"),
    [
        (("1.795993766020586e+09", "1.795993766020586e+09"), 1),  # two snapshots of one process
        (("1.795993766020586e+09", "1.7959937796422865e+09"), 2),  # two that one script started
        ((None, None), 2),  # nothing tells: the start is known to 10 ms only
    ],
)
def test_two_snapshots_of_one_process_are_one_worker(
    created: tuple[str | None, str | None], processes: int, tmp_path: Path
) -> None:
    for name, count, made in zip(("after.prom", "later.prom"), (10, 30), created, strict=True):
        (tmp_path / name).write_text(scrape(count, made), "utf-8")
    store = Store()
    ingest([str(tmp_path)], store)
    assert store.scalar("SELECT count(*) FROM workers") == processes
    row = store.sql("SELECT * FROM metric_summary WHERE kind = 'mean'").row(0, named=True)
    assert (row["count"], row["mean"]) == (30 if processes == 1 else 40, 0.5)
    assert store.rows("SELECT DISTINCT worker FROM samples ORDER BY 1")[0][0].startswith("file:")


@pytest.mark.parametrize(
    ("pulled", "made", "finished", "role"),
    [
        (16, 331, 16, "decode"),
        (0, 16, 16, "prefill"),
        (0, 331, 16, None),  # takes whole requests, or none of its KV was pulled
        (3, 16, 16, None),  # pulled KV for one token each
        (0, 0, 0, None),  # did nothing yet
        (None, 16, 16, None),  # no NIXL: answers of one token are no sign of a pair
    ],
)  # fmt: skip
def test_counters_of_a_nixl_pair_tell_prefill_from_decode(
    dump, pulled: int | None, made: int, finished: int, role: str | None
) -> None:
    lines = [
        f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {made}.0',
        f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="m"}} {finished}.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 0.0',
    ]
    if pulled is not None:
        lines.append(f'vllm:nixl_xfer_time_seconds_count{{engine="0",model_name="m"}} {pulled}.0')
    found = dump("\n".join(lines) + "\n")
    assert set(found["workers"]["role"].drop_nulls()) == ({role} if role else set())


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        ("decode_tokens_per_s", "tokens/s"), ("kv_transfer_throughput_mb_per_s", "MB/s"), ("request_queue_per_second", "1/s"),
        ("queue_time_seconds", "s"), ("agent_kv_transfer_time_us", "us"), ("prefill_ms", "ms"),
    ],
)  # fmt: skip
def test_the_end_of_a_name_tells_the_unit(metric: str, unit: str, tmp_path: Path) -> None:
    """A rate per second is no time."""
    (tmp_path / "metrics.prom").write_text(f"# TYPE {metric} gauge\n{metric} 120.5\n", "utf-8")
    store = Store()
    ingest([str(tmp_path)], store)
    assert store.rows("SELECT metric, unit, mean FROM metric_summary") == [(metric, unit, 120.5)]


AT = 1748779200  # 2025-06-01 12:00:00 UTC
SERIES = [
    ({"__name__": "vllm:num_requests_running", "instance": "10.0.0.1:8000", "job": 'a"b'}, [3, 5]),
    (
        {"__name__": "vllm:num_requests_running", "instance": "10.0.0.2:8000", "job": "b"},
        [1, "NaN"],
    ),
    ({"instance": "10.0.0.1:8000"}, [0.5, 0.7]),  # rate(...) has no name
]


def answer() -> str:
    result = [
        {"metric": m, "values": [[AT + 15 * n, str(v)] for n, v in enumerate(vs)]}
        for m, vs in SERIES
    ]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})


def export() -> str:
    rows = [
        {
            "metric": m,
            "values": [None if v == "NaN" else v for v in vs],
            "timestamps": [AT * 1000, AT * 1000 + 15_000],
        }
        for m, vs in SERIES
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def tsdb_dump() -> str:
    rows = [
        ("{" + ", ".join(f"{k}={json.dumps(x)}" for k, x in m.items()) + "}", n, v)
        for m, vs in SERIES[:2]
        for n, v in enumerate(vs)
    ]
    return "".join(f"{labels} {v} {(AT + 15 * n) * 1000}\n" for labels, n, v in rows)


@pytest.mark.parametrize("make", [answer, export, tsdb_dump])
def test_what_a_metrics_store_gives_out_are_the_same_samples(dump, make: Callable) -> None:
    text = make()
    assert prometheus.sniff(Head("x.json", "x.json", text.encode(), complete=True))
    found = dump(text, "x.json")
    assert balanced(found)
    read, unnamed = (4, 0) if make is tsdb_dump else (6, 2)
    assert (found.account.read, sum(found.account.reasons.values())) == (read, unnamed)
    rows = (
        found["samples"]
        .sort("worker", "time_ns")
        .select("worker", "time_ns", "value", "labels")
        .rows()
    )
    assert [(w, (t - AT * NS) // NS, v) for w, t, v, _ in rows] == [
        ("address:10.0.0.1:8000", 0, 3), ("address:10.0.0.1:8000", 15, 5),
        ("address:10.0.0.2:8000", 0, 1), ("address:10.0.0.2:8000", 15, None),
    ]  # fmt: skip
    assert json.loads(rows[0][3])["job"] == 'a"b'


@pytest.mark.parametrize(
    "date",
    [
        "Sun Jun  1 12:00:{:02} UTC 2025",
        "Sun Jun  1 12:00:{:02} PM UTC 2025",
        "2025-06-01T12:00:{:02}Z",
    ],
)
def test_a_loop_of_date_and_curl_is_scrapes_with_times(dump, date: str) -> None:
    metrics = 'vllm:num_requests_running{{model_name="m"}} {0}\nvllm:num_requests_waiting{{model_name="m"}} {0}\n'
    text = "".join(f"{date.format(15 * n)}\n{metrics.format(n)}" for n in range(4))
    assert prometheus.sniff(Head("x.txt", "x.txt", text.encode(), complete=True))
    found = dump(text, "x.txt")
    running = found["samples"].filter(pl.col("metric") == "vllm:num_requests_running")
    assert [(t - AT * NS) // NS for t in running["time_ns"]] == [0, 15, 30, 45]


def test_an_answer_that_breaks_off_gives_what_is_whole_and_counts_the_rest(dump) -> None:
    series = [
        {"metric": {"__name__": f"vllm:num_requests_{name}", "instance": "a:1"}, "values": [[1764410400 + n, "2"] for n in range(4)]}
        for name in ("running", "waiting")
    ]  # fmt: skip
    whole = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": series}})
    found = dump(whole[:-30])
    assert found["samples"].height == 4
    assert found.account.read == 5
    assert balanced(found)


@pytest.mark.parametrize("stamp", ["1" + "0" * 30, "1764410400000000", "1764410400000000000"])
def test_a_stamp_beyond_all_times_is_none_and_costs_no_other_sample(dump, stamp: str) -> None:
    found = dump(f"# TYPE a gauge\na 1 1764410400000\na 2 {stamp}\n")
    assert found["samples"].sort("value")["time_ns"].to_list() == [1764410400 * 10**9, None]


def test_values_without_stamps_of_their_own_are_counted(dump) -> None:
    series = {"metric": {"__name__": "vllm:num_requests_running", "instance": "a:1"}, "values": [1, 2, 3], "timestamps": [1764410400000]}  # fmt: skip
    found = dump(json.dumps(series))
    assert found["samples"].height == 1
    assert found.account.read == 3
    assert balanced(found)


def test_two_samples_of_a_known_namespace_are_enough() -> None:
    """What `curl .../metrics | grep` leaves."""
    text = 'vllm:request_prefill_time_seconds_sum{engine="1"} 3.0\nvllm:request_prefill_time_seconds_count{engine="1"} 2.0\n'
    assert prometheus.sniff(Head("a.txt", "a.txt", text.encode(), complete=True)) is not None
    other = 'user:request_sum{engine="1"} 3.0\nuser:request_count{engine="1"} 2.0\n'
    assert prometheus.sniff(Head("a.txt", "a.txt", other.encode(), complete=True)) is None
