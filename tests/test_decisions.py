"""One choice, told by a span and by a log line, is one row that knows what either knows."""

from __future__ import annotations

from pdtrace import decisions, spans
from pdtrace.model import MADE_SPAN_ID
from pdtrace.store import Store

S = 1_000_000_000


def told(store: Store, **row: object) -> None:
    base = {"request_id": "r", "worker": "w", "source": 0, "record": 1}
    store.append("decisions", [{**base, **row}])


def test_the_logs_cost_goes_to_the_spans_choice(store: Store) -> None:
    told(store, leg="t/1", time_ns=10 * S, phase="prefill", record=None, overlap_tokens=16)
    told(store, time_ns=10 * S + 5, phase="prefill", cost=2.5, record=7)
    removed = decisions.unite(store)
    assert store.sql("SELECT leg, cost, overlap_tokens FROM decisions").rows() == [("t/1", 2.5, 16)]
    assert removed.select("reason", "records", "positions").rows() == [
        (decisions.TOLD_TWICE, 1, [7])
    ]


def test_choices_of_other_workers_phases_or_times_stay(store: Store) -> None:
    told(store, leg="t/1", time_ns=10 * S, phase="prefill", record=None)
    told(store, time_ns=10 * S, phase="decode", cost=1.0)
    told(store, time_ns=10 * S, phase="prefill", worker="v", cost=1.0)
    told(store, time_ns=13 * S, phase="prefill", cost=1.0)
    assert decisions.unite(store).height == 0
    assert store.count("decisions") == 4


def test_a_choice_of_the_only_worker_may_be_called_decode(store: Store) -> None:
    told(store, leg="t/1", time_ns=10 * S, phase="aggregated", record=None)
    told(store, time_ns=10 * S, phase="decode", cost=1.0)
    decisions.unite(store)
    assert store.sql("SELECT phase, cost FROM decisions").rows() == [("aggregated", 1.0)]


def test_a_span_with_a_made_up_id_gives_way_to_the_exported_one(store: Store) -> None:
    row = {"trace_id": "t", "name": "response.streaming", "source": 0}
    store.append(
        "spans",
        [
            {**row, "span_id": "a", "start_ns": 10 * S, "end_ns": 11 * S, "resolution_ns": 1, "record": 0},
            {**row, "span_id": "made", "start_ns": 10 * S + 2_000_000, "end_ns": 11 * S, "resolution_ns": 10_000_000,
             "extra": MADE_SPAN_ID, "record": 1},
            {**row, "span_id": "other", "start_ns": 20 * S, "end_ns": 21 * S, "resolution_ns": 10_000_000,
             "extra": MADE_SPAN_ID, "record": 2},
        ],
    )  # fmt: skip
    removed = spans.deduplicate(store.connection)
    assert set(store.sql("SELECT span_id FROM spans")["span_id"]) == {"a", "other"}
    assert removed.select("reason", "records").rows() == [(spans.LOG_COPY, 1)]
