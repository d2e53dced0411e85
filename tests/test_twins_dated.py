"""Request metrics on a clock without a date, beside spans of the same requests: one record, with a date."""

from __future__ import annotations

from typing import Any

import pytest

from pdtrace import twins
from pdtrace.store import Store

MS = 10**6
DATE = 1_796_000_000_000 * MS  # of 0 on the undated clock
LASTED = (500, 730, 1_210, 640)  # ms from the executor's arrival to the last token
FIRST = (40, 75, 310, 62)


def metrics(
    store: Store,
    name: str,
    source: int,
    *,
    numbers: range = range(4),
    shift: int = 0,
    longer: int = 0,
    **more: Any,
) -> None:
    """A server's own file: arrival at the server, 2 ms later at the executor."""
    clock, worker = f"steady:{name}.jsonl", f"file:{name}.jsonl"
    starts = {n: (1_000 * n + shift) * MS for n in numbers}
    store.append(
        "sources",
        [
            {
                "source": source,
                "path": f"{name}.jsonl",
                "clock": clock,
                "start_ns": min(starts.values()),
            }
        ],
    )
    store.append("legs", [
        {"leg": f"{name}/{n}", "source": source, "record": n, "worker": worker, "observer": "engine", "clock": clock, "status": "completed",
         "request_id": f"{n}@{name}", "start_ns": t, "first_token_ns": t + (2 + FIRST[n]) * MS, "last_token_ns": t + (2 + LASTED[n] + longer) * MS,
         "end_ns": t + (2 + LASTED[n] + longer) * MS, **more, "external_id": f"x{n}" if "external_id" in more else None}
        for n, t in starts.items()])  # fmt: skip
    store.append("intervals", [{"leg": f"{name}/{n}", "source": source, "detail": "frontend", "clock": clock, "start_ns": t, "end_ns": t + 2 * MS}
                               for n, t in starts.items()])  # fmt: skip
    store.append("workers", [{"worker": worker, "engine": "TensorRT-LLM"}])


def spans(
    store: Store,
    name: str,
    *,
    numbers: range = range(4),
    shift: int = 0,
    longer: int = 0,
    late: int = 0,
) -> None:
    """Its spans, from the executor's arrival on; seconds as doubles round by less than a microsecond."""
    legs = []
    for n in numbers:
        t = DATE + (1_000 * n + 2 + shift + late * n) * MS
        legs.append(
            {"leg": f"span-{name}/{n}", "source": 9, "worker": f"instance:{name}", "observer": "engine", "clock": "wall", "status": "completed",
             "trace_id": f"{name}{n}", "span_id": "1", "prompt_tokens": 100 + n, "output_tokens": 7, "start_ns": t,
             "first_token_ns": t + FIRST[n] * MS + 300, "last_token_ns": t + (LASTED[n] + longer) * MS - 300, "end_ns": t + LASTED[n] * MS})  # fmt: skip
    store.append("legs", legs)
    store.append("intervals", [{"leg": x["leg"], "source": 9, "detail": "prefill_wall", "clock": "wall", "start_ns": x["start_ns"], "end_ns": x["end_ns"]}
                               for x in legs])  # fmt: skip
    store.append("workers", [{"worker": f"instance:{name}", "engine": "TensorRT-LLM"}])


def test_metrics_get_the_date_of_the_spans_and_each_request_counts_once() -> None:
    store = Store()
    metrics(store, "w", 0)
    spans(store, "w")
    twins.unite(store)
    rows = store.rows("SELECT leg, clock, start_ns, trace_id, prompt_tokens FROM legs ORDER BY leg")
    assert rows == [(f"w/{n}", "wall", DATE + 1_000 * n * MS, f"w{n}", 100 + n) for n in range(4)]
    assert store.rows("SELECT DISTINCT detail, clock FROM intervals") == [("frontend", "wall")]
    assert store.rows("SELECT min(start_ns) FROM intervals") == [(DATE,)]
    assert store.rows("SELECT clock, start_ns FROM sources WHERE source = 0") == [("wall", DATE)]
    assert store.rows("SELECT count(*) FROM workers") == [(1,)]


def test_metrics_whose_spans_were_sampled_are_dated_whole() -> None:
    store = Store()
    metrics(store, "w", 0)
    spans(store, "w", numbers=range(1, 2))
    twins.unite(store)
    assert store.rows("SELECT count(*), count(*) FILTER (clock = 'wall') FROM legs") == [(4, 4)]
    assert store.rows("SELECT min(start_ns) FROM legs") == [(DATE,)]


@pytest.mark.parametrize("other", [{"longer": 1}, {"late": 60_000}])
def test_other_requests_of_that_software_stay_apart(other: dict[str, int]) -> None:
    """They last another millisecond; or as long, but at no common offset (the same load against another server)."""
    store = Store()
    metrics(store, "w", 0)
    spans(store, "w", **other)
    twins.unite(store)
    assert store.rows("SELECT count(*) FROM legs") == [(8,)]
    assert store.rows("SELECT count(*) FROM legs WHERE clock = 'wall'") == [(4,)]


def test_two_servers_that_fit_alike_tell_no_date() -> None:
    """The same load against two servers, each request as long: one file of metrics, and no word of whose it is."""
    store = Store()
    metrics(store, "w", 0)
    spans(store, "a")
    spans(store, "b", shift=300)
    twins.unite(store)
    assert store.rows("SELECT count(*), count(*) FILTER (clock = 'wall') FROM legs") == [(12, 8)]


def test_clocks_that_were_aligned_stay_aligned_where_the_spans_are_not() -> None:
    """Both servers of a pair write one clock; the host of the generation server's spans is 1.3 s ahead."""
    store = Store()
    metrics(store, "ctx", 0, external_id="")
    metrics(store, "gen", 1, external_id="", shift=600, longer=100, numbers=range(3))
    spans(store, "ctx")
    spans(store, "gen", shift=600 + 1_300, longer=100, numbers=range(3))
    twins.unite(store)
    assert store.rows("SELECT leg, start_ns FROM legs WHERE leg LIKE '%/1' ORDER BY 1") == [
        ("ctx/1", DATE + 1_000 * MS), ("gen/1", DATE + 1_600 * MS),
    ]  # fmt: skip
