"""OTLP logs and metrics: log records, data points, buckets, files that mix signals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from otlp_made import END, LOGS, ONE, SPAN, START, TRACE, attributes, framed, lines, message, read

from pdtrace.collectors import otlp
from pdtrace.model import Head


@pytest.mark.parametrize(
    "data", [lines(LOGS), framed(LOGS), message(LOGS), json.dumps(LOGS, indent=1).encode()]
)
def test_log_records_go_to_the_staging_table(data: bytes) -> None:
    out = read(data)
    assert out.units == ["log record"]
    assert out.count == 2
    first, second = out.logs
    assert first["time_ns"] == START
    assert (first["severity"], first["body"], first["event_name"], first["scope_name"]) == (
        "INFO",
        "hello",
        "seen",
        "lib",
    )
    assert (first["trace_id"], first["span_id"]) == (TRACE, SPAN)
    assert json.loads(first["attributes"]) == {"request_id": "r1", "n": 2}
    assert (second["time_ns"], second["severity"], second["body"], second["trace_id"]) == (
        END,
        "Error",
        '{"a":1}',
        None,
    )
    assert out.frame("resources")["resource"].to_list() == [first["resource"]]
    match = otlp.sniff(Head("x", "x", data, complete=True))
    assert match is not None


def _point(**fields: Any) -> dict[str, Any]:
    return {
        "startTimeUnixNano": str(START),
        "timeUnixNano": str(END),
        "attributes": attributes({"b": "2", "a": 1}),
        **fields,
    }


METRICS = {
    "resourceMetrics": [
        {
            "resource": {"attributes": attributes({"service.instance.id": "i-1"})},
            "scopeMetrics": [
                {
                    "metrics": [
                        {"name": "running", "gauge": {"dataPoints": [_point(asInt="3")]}},
                        {"name": "tokens", "sum": {"isMonotonic": True, "aggregationTemporality": 1, "dataPoints": [_point(asDouble=2.5)]}},
                        {
                            "name": "ttft",
                            "histogram": {
                                "aggregationTemporality": 2,
                                "dataPoints": [_point(count="6", sum=1.5, bucketCounts=["1", "2", "3"], explicitBounds=[0.1, 1.0])],
                            },
                        },
                        {"name": "empty", "gauge": {"dataPoints": [_point()]}},
                    ]
                }
            ],
        }
    ]
}  # fmt: skip


@pytest.mark.parametrize("data", [lines(METRICS), framed(METRICS), message(METRICS)])
def test_data_points_become_samples(data: bytes) -> None:
    out = read(data)
    assert out.units == ["data point"]
    assert out.count == 4
    assert out.skipped == [(3, "data point without a value")]
    rows = out.store.sql(
        "SELECT metric, labels, value, interval_ns, kind, worker, record, time_ns FROM samples ORDER BY record, metric, value"
    ).rows()
    shared = '{"a":"1","b":"2"'
    assert rows == [
        ("running", shared + "}", 3.0, None, "gauge", "instance:i-1", 0, END),
        ("tokens", shared + "}", 2.5, END - START, "counter", "instance:i-1", 1, END),
        ("ttft_bucket", shared + ',"le":"0.1"}', 1.0, None, "histogram", "instance:i-1", 2, END),
        ("ttft_bucket", shared + ',"le":"1.0"}', 3.0, None, "histogram", "instance:i-1", 2, END),
        ("ttft_bucket", shared + ',"le":"+Inf"}', 6.0, None, "histogram", "instance:i-1", 2, END),
        ("ttft_count", shared + "}", 6.0, None, "histogram", "instance:i-1", 2, END),
        ("ttft_sum", shared + "}", 1.5, None, "histogram", "instance:i-1", 2, END),
    ]


def test_buckets_of_exponential_histograms_become_cumulative_series() -> None:
    point = _point(
        count="10", sum=9.0, scale=-1, zeroCount="3", zeroThreshold=0.0,
        negative={"offset": 0, "bucketCounts": ["4"]}, positive={"offset": -1, "bucketCounts": ["1", "2"]},
    )  # fmt: skip
    metric = {"name": "size", "exponentialHistogram": {"dataPoints": [point]}}
    metrics = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]}
    for data in (lines(metrics), message(metrics)):
        rows = (
            read(data)
            .store.sql(
                """SELECT json_extract_string(labels, 'le') AS le, value FROM samples
               WHERE metric = 'size_bucket' ORDER BY value, TRY_CAST(le AS DOUBLE)"""
            )
            .rows()
        )
        # Scale -1: edges are powers of 4.
        assert rows == [
            ("-4.0", 0.0),
            ("-1.0", 4.0),
            ("0.0", 7.0),
            ("0.25", 7.0),
            ("1.0", 8.0),
            ("4.0", 10.0),
            ("+Inf", 10.0),
        ]


def test_a_file_that_mixes_signals_counts_records() -> None:
    out = read(framed(ONE, LOGS, METRICS))
    assert out.units == ["span", "record", "record"]
    assert out.count == 8
    records = (
        out.frame()["record"].to_list()
        + [row["record"] for row in out.logs]
        + out.frame("samples")["record"].to_list()
    )
    assert set(records) == {0, 1, 2, 3, 4, 5, 6}
    assert read(lines(ONE, LOGS, METRICS)).count == 8
