"""The partition: exact on any input, and by the rules of precedence on requests drawn by hand."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdtrace import phases
from pdtrace.errors import SchemaMismatch
from pdtrace.model import PHASE_DETAILS
from pdtrace.store import Store

WINDOW = {"number": pl.Int64, "request": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64,
          "first_token_ns": pl.Int64, "negative_ns": pl.Int64, "deployment": pl.String, "mode": pl.String,
          "counted": pl.Boolean}  # fmt: skip
INTERVAL = {"number": pl.Int64, "detail": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64,
            "worker": pl.String, "basis": pl.String, "semantics": pl.String}  # fmt: skip
EPOCH = 1_790_000_000_000_000_000


def windows(*rows: tuple[int, int, int | None]) -> pl.DataFrame:
    """Windows (start, end, first token), numbered 0, 1, ... and named r0, r1, ..."""
    return pl.DataFrame(
        [
            (n, f"r{n}", start, end, first, None, "d", "aggregated", True)
            for n, (start, end, first) in enumerate(rows)
        ],
        schema=WINDOW,
        orient="row",
    )


def intervals(*rows: tuple[Any, ...]) -> pl.DataFrame:
    """Intervals (detail, start, end[, number[, worker]])."""
    full = [
        (row[3] if len(row) > 3 else 0, *row[:3], row[4] if len(row) > 4 else "w", "measured", None)
        for row in rows
    ]
    return pl.DataFrame(full, schema=INTERVAL, orient="row")


def pieces(found: pl.DataFrame, request: str = "r0") -> list[tuple[str, int, int]]:
    return found.filter(pl.col("request") == request).select("detail", "start_ns", "end_ns").rows()


instant = st.integers(-60, 160)
some_interval = st.tuples(
    st.sampled_from([d for d in PHASE_DETAILS if d != "unattributed"]),
    st.none() | instant,
    st.none() | instant,
    st.integers(0, 5),
    st.sampled_from(["a", "b", None]),
)
some_window = st.tuples(instant, instant, st.none() | instant)


def by_hand(window: tuple[int, int, int | None], mine: list[tuple[Any, ...]]) -> list[str]:
    """The detail of each nanosecond, the slow way."""
    order = list(PHASE_DETAILS)
    start, end, first = window
    answer = []
    for now in range(start, end):
        open_details = [
            "stream_out_first"
            if detail == "stream_out" and first is not None and now < first
            else detail
            for detail, left, right, *_ in mine
            if left is not None and right is not None and left <= now < right
        ]
        best = min(open_details, key=order.index, default="unattributed")
        answer.append("stream_out" if best == "stream_out_first" else best.removesuffix("_at_most"))
    return answer


def frame(rows: pa.Table) -> pl.DataFrame:
    """An Arrow table with its texts written out."""
    return pl.DataFrame(pl.from_arrow(rows)).with_columns(pl.col(pl.Categorical).cast(pl.String))


def parted(*given: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    found = phases.cut(*given)
    return frame(found.phases), frame(found.sums), found.checks


@settings(max_examples=60, deadline=None)
@given(st.lists(some_window, max_size=5), st.lists(some_interval, max_size=25))
def test_phases_are_exactly_the_window_and_each_instant_has_its_strongest_owner(
    spans: list[tuple[int, int, int | None]], mine: list[tuple[Any, ...]]
) -> None:
    found, _, checks = parted(windows(*spans), intervals(*mine))
    assert (found["end_ns"] > found["start_ns"]).all()
    assert checks.height == len(spans)
    for number, window in enumerate(spans):
        own = found.filter(pl.col("request") == f"r{number}")
        spelled = [
            row[0]
            for row in own.select("detail", "start_ns", "end_ns").rows()
            for _ in range(row[2] - row[1])
        ]
        assert spelled == by_hand(window, [row for row in mine if row[3] == number])
        assert own["start_ns"].to_list()[1:] == own["end_ns"].to_list()[:-1]
    whole = found.group_by("request").agg(
        (pl.col("end_ns") - pl.col("start_ns")).sum().alias("sum")
    )
    positive = checks.filter(pl.col("window_ns") > 0).join(whole, on="request")
    assert positive.height == sum(end > start for start, end, _ in spans)
    assert (positive["sum"] == positive["window_ns"]).all()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(some_window, min_size=1, max_size=4),
    st.lists(some_interval, max_size=12),
    st.randoms(),
)
def test_the_order_of_rows_does_not_matter(spans: list[Any], mine: list[Any], random: Any) -> None:
    shuffled = list(mine)
    random.shuffle(shuffled)
    first = parted(windows(*spans), intervals(*mine))
    second = parted(windows(*spans), intervals(*shuffled))
    assert first[0].equals(second[0])
    assert first[1].equals(second[1])


@settings(max_examples=40, deadline=None)
@given(st.lists(some_window, min_size=1, max_size=4), st.lists(some_interval, max_size=12))
def test_checks_count_what_was_cut_and_covered_twice(spans: list[Any], mine: list[Any]) -> None:
    _, _, checks = parted(windows(*spans), intervals(*mine))
    for number, (start, end, _) in enumerate(spans):
        own = [
            (a, b)
            for _, a, b, n, _ in mine
            if n == number and a is not None and b is not None and end > start
        ]
        inside = sum(max(min(b, end) - max(a, start), 0) for a, b in own if b > a)
        twice = sum(sum(a <= now < b for a, b in own) > 1 for now in range(start, end))
        row = checks.row(number, named=True)
        assert row["window_ns"] == end - start
        assert row["clip_ns"] == sum(b - a for a, b in own if b > a) - inside
        assert row["overlap_ns"] == twice
        assert row["negative_ns"] == sum(a - b for a, b in own if b < a) + max(start - end, 0)


def test_absurd_windows_do_not_overflow() -> None:
    garbage = windows(*[(0, EPOCH + n, EPOCH) for n in range(8)])
    found, _, checks = parted(garbage, intervals(("prefill_exec", 10, 2 * EPOCH, 7)))
    assert checks["window_ns"].to_list() == [EPOCH + n for n in range(8)]
    assert pieces(found, "r7") == [("unattributed", 0, 10), ("prefill_exec", 10, EPOCH + 7)]


def test_neighbours_of_one_kind_are_one_row_and_workers_stay_apart() -> None:
    found, *_ = parted(
        windows((0, 100, None)),
        intervals(
            ("decode_exec", 0, 10, 0, "d"), ("decode_exec", 10, 20, 0, "d"), ("decode_exec", 20, 30, 0, "e"),
            ("decode_exec", 25, 40, 0, "d"),
        ),
    )  # fmt: skip
    assert found.select("start_ns", "end_ns", "worker").rows() == [
        (0, 20, "d"), (20, 30, "e"), (30, 40, "d"), (40, 100, None),
    ]  # fmt: skip
    assert found["basis"].to_list() == ["measured", "measured", "measured", "inferred"]


def test_the_way_out_outranks_decode_only_before_the_first_token() -> None:
    found, *_ = parted(
        windows((0, 100, 50)), intervals(("decode_exec", 30, 90), ("stream_out", 30, 95))
    )
    assert pieces(found) == [
        ("unattributed", 0, 30), ("stream_out", 30, 50), ("decode_exec", 50, 90),
        ("stream_out", 90, 95), ("unattributed", 95, 100),
    ]  # fmt: skip
    assert found["phase"].to_list()[1] == "stream_out"


def test_an_unknown_detail_is_refused_by_name() -> None:
    with pytest.raises(SchemaMismatch, match="'thinking'"):
        parted(windows((0, 1, None)), intervals(("thinking", 0, 1)))


@settings(max_examples=40, deadline=None)
@given(st.lists(some_window, min_size=1, max_size=4), st.lists(some_interval, max_size=12))
def test_sums_are_those_of_the_phases(phase_sums: str, spans: list[Any], mine: list[Any]) -> None:
    found = phases.cut(windows(*spans), intervals(*mine))
    store = Store()
    store.install()
    store.append("requests", windows(*spans).select("request", "first_token_ns"))
    store.append("phases", found.phases)
    columns = ["request", "phase", "detail", "duration_ns", "ttft_part_ns", "basis", "placed_ns", "bound_ns"]  # fmt: skip
    wanted = sorted(store.sql(phase_sums).select(columns).rows())
    assert sorted(frame(found.sums).select(columns).rows()) == wanted


# From the store: the rules that need legs.


def request(
    store: Store, start: int = 0, end: int = 1000, first: int | None = None, **more: Any
) -> None:
    store.append("requests", [{"request": "r", "deployment": "d", "start_ns": start, "end_ns": end,
                               "first_token_ns": first, "outcome": "completed", **more}])  # fmt: skip


def leg(store: Store, name: str, **more: Any) -> None:
    defaults = {"request": "r", "deployment": "d", "observer": "engine", "status": "completed"}
    store.append("legs", [{"leg": name, **defaults, **more}])


def interval(
    store: Store, name: str, detail: str, start: int | None, end: int | None, **more: Any
) -> None:
    store.append("intervals", [{"leg": name, "detail": detail, "start_ns": start, "end_ns": end,
                                "basis": "measured", **more}])  # fmt: skip


def cut(store: Store, **options: Any) -> list[tuple[str, int, int]]:
    phases.partition(store, **options)
    return store.sql(
        "SELECT detail, start_ns, end_ns FROM phases ORDER BY request, start_ns"
    ).rows()


def test_kv_that_moves_inside_a_prefill_known_as_wall_time_is_an_upper_bound(store: Store) -> None:
    request(store, 0, 100)
    leg(store, "p", role="prefill", worker="P")
    leg(store, "d", role="decode", worker="D")
    interval(store, "p", "prefill_wall", 0, 40)
    interval(store, "p", "prefill_exec", 10, 20)
    interval(store, "d", "kv_transfer", 5, 60)
    assert cut(store) == [
        ("prefill_wall", 0, 5), ("kv_transfer", 5, 10), ("prefill_exec", 10, 20), ("kv_transfer", 20, 40),
        ("kv_transfer", 40, 60), ("unattributed", 60, 100),
    ]  # fmt: skip
    kv = store.rows(
        "SELECT basis, worker FROM phases WHERE phase = 'kv_transfer' ORDER BY start_ns"
    )
    assert kv == [("upper_bound", "D"), ("upper_bound", "D"), ("measured", "D")]
    assert store.rows(
        "SELECT duration_ns, bound_ns FROM phase_sums WHERE detail = 'kv_transfer'"
    ) == [(45, 25)]


def test_the_queue_of_a_pairs_decode_leg_is_a_wait_for_kv(store: Store) -> None:
    request(store, 0, 100)
    leg(store, "p", role="prefill", worker="P")
    leg(store, "d", role="decode", worker="D")
    interval(store, "p", "prefill_wall", 0, 40)
    interval(store, "d", "prefill_queue", 30, 60, decode_detail="kv_wait_upper_bound")
    assert cut(store) == [
        ("prefill_wall", 0, 40),
        ("kv_wait_upper_bound", 40, 60),
        ("unattributed", 60, 100),
    ]
    assert store.rows("SELECT worker, basis FROM phases ORDER BY start_ns") == [
        ("P", "measured"), ("D", "upper_bound"), (None, "inferred"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prefill", "decode", "paired"),
    [("W", "W", False), ("P", "D", True), (None, "D", True), (None, None, True)],
)
def test_one_worker_alone_is_no_pair(
    store: Store, prefill: str | None, decode: str | None, paired: bool
) -> None:
    request(store, 0, 100)
    leg(store, "p", role="prefill", worker=prefill)
    leg(store, "d", role="decode", worker=decode)
    interval(store, "d", "prefill_queue", 0, 100, decode_detail="kv_wait_upper_bound")
    assert cut(store)[0][0] == ("kv_wait_upper_bound" if paired else "prefill_queue")


def test_a_decode_worker_that_prefills_itself_keeps_its_queue(store: Store) -> None:
    request(store, 0, 100)
    leg(store, "d", role="decode", worker="D")
    interval(store, "d", "prefill_queue", 0, 100, decode_detail="kv_wait_upper_bound")
    assert cut(store) == [("prefill_queue", 0, 100)]


def test_decode_begins_at_its_legs_first_token_but_the_first_step_makes_it(store: Store) -> None:
    request(store, 0, 100, mode="disaggregated")
    leg(store, "d", role="decode", worker="D", first_token_ns=40)
    interval(store, "d", "decode_wall", 0, 90)
    interval(store, "d", "prefill_wall", 20, 40, decode_detail="decode_exec")
    assert cut(store) == [
        ("unattributed", 0, 20), ("decode_exec", 20, 40), ("decode_wall", 40, 90), ("unattributed", 90, 100),
    ]  # fmt: skip


def test_durations_without_instants_are_no_phases_and_no_window_gives_no_rows(store: Store) -> None:
    request(store, 0, 10)
    leg(store, "e")
    interval(store, "e", "prefill_queue", None, None, duration_ns=5)
    interval(store, "e", "prefill_wall", 2, None, duration_ns=3)
    interval(store, "e", "decode_wall", 7, None, censored=True)
    store.append("requests", [{"request": "csv", "ttft_ms": 3.0}])
    assert cut(store) == [("unattributed", 0, 2), ("prefill_wall", 2, 5), ("unattributed", 5, 10)]
    assert store.rows("SELECT request FROM partition_checks") == [("r",)]


def test_a_failed_attempt_lasts_until_the_next_ones_first_own_interval(store: Store) -> None:
    request(store, 0, 1000)
    leg(store, "a", attempt=0, status="failed", worker="A", start_ns=100, end_ns=300)
    leg(store, "b", attempt=1, worker="B", start_ns=350, end_ns=1000)
    interval(store, "a", "prefill_queue", 100, 250)
    interval(store, "b", "prefill_queue", 400, 500)
    interval(store, "b", "prefill_wall", 500, 1000)
    assert cut(store) == [
        ("unattributed", 0, 100), ("failed_attempt", 100, 400), ("prefill_queue", 400, 500), ("prefill_wall", 500, 1000),
    ]  # fmt: skip
    assert store.rows("SELECT phase, worker FROM phases WHERE detail = 'failed_attempt'") == [
        ("retry", "A")
    ]


def test_a_measured_backoff_keeps_its_name(store: Store) -> None:
    request(store, 0, 1000)
    leg(store, "a", attempt=0, status="failed", start_ns=0, end_ns=300)
    leg(store, "b", attempt=1, start_ns=400, end_ns=1000)
    interval(store, "b", "retry_backoff", 300, 400)
    interval(store, "b", "prefill_wall", 420, 1000)
    assert cut(store)[:2] == [("failed_attempt", 0, 300), ("retry_backoff", 300, 400)]


def test_a_last_failed_attempt_keeps_its_inner_phases(store: Store) -> None:
    request(store, 0, 100, outcome="failed")
    leg(store, "a", attempt=0, status="failed", start_ns=0, end_ns=100)
    interval(store, "a", "prefill_queue", 0, 100)
    assert cut(store) == [("prefill_queue", 0, 100)]


def test_an_engine_leg_belongs_to_the_attempt_of_its_hop(store: Store) -> None:
    request(store, 0, 1000)
    hop = {"observer": "router", "container": True, "trace_id": "t"}
    leg(
        store, "router", observer="router", status="failed", start_ns=0, end_ns=1000
    )  # not an attempt
    leg(store, "hop0", span_id="h0", attempt=0, status="failed", start_ns=100, end_ns=300, **hop)
    leg(store, "hop1", span_id="h1", attempt=1, start_ns=310, end_ns=1000, **hop)
    leg(store, "engine", trace_id="t", parent_span_id="h1", start_ns=350, end_ns=990)
    interval(store, "engine", "prefill_wall", 360, 990)
    assert cut(store)[1:3] == [("failed_attempt", 100, 360), ("prefill_wall", 360, 990)]


def test_failed_engine_legs_that_nobody_counted_are_attempts(store: Store) -> None:
    request(store, 0, 1000)
    leg(store, "a", status="failed", role="decode", start_ns=0, end_ns=200)
    leg(store, "b", role="decode", start_ns=250, end_ns=1000)
    interval(store, "b", "prefill_wall", 260, 1000)
    assert cut(store) == [("failed_attempt", 0, 260), ("prefill_wall", 260, 1000)]


def test_tokens_delivered_before_a_migration_stay_decode(store: Store) -> None:
    request(store, 0, 1000, first=100)
    leg(
        store,
        "a",
        attempt=0,
        status="failed",
        start_ns=0,
        first_token_ns=100,
        last_token_ns=300,
        end_ns=320,
    )
    leg(store, "b", attempt=1, start_ns=350, first_token_ns=600, end_ns=1000)
    interval(store, "a", "prefill_wall", 0, 100)
    interval(store, "a", "decode_wall", 100, 300)
    interval(store, "b", "prefill_wall", 400, 600)
    interval(store, "b", "decode_wall", 600, 1000)
    assert cut(store) == [
        ("prefill_wall", 0, 100), ("decode_wall", 100, 300), ("migration", 300, 600), ("decode_wall", 600, 1000),
    ]  # fmt: skip


def test_negative_remainders_are_kept_as_a_magnitude(store: Store) -> None:
    request(store, 0, 1000)
    leg(store, "e")
    store.append(
        "reported", [{"leg": "e", "quantity": "negative_remainder_ms", "value": -1.5, "unit": "ms"}]
    )
    cut(store)
    assert store.rows("SELECT negative_ns FROM partition_checks") == [(1_500_000,)]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_batches_do_not_change_the_answer_and_a_rerun_replaces_it(store: Store, size: int) -> None:
    rows = range(50)
    store.append(
        "requests",
        [
            {"request": f"q{n}", "start_ns": n, "end_ns": n + 10, "outcome": "completed"}
            for n in rows
        ],
    )
    store.append(
        "legs", [{"leg": f"l{n}", "request": f"q{n}", "worker": f"w{n % 3}"} for n in rows]
    )
    store.append(
        "intervals",
        [
            {"leg": f"l{n}", "detail": "prefill_exec", "start_ns": n + 2, "end_ns": n + 5}
            for n in rows
        ],
    )
    phases.partition(store, batch_requests=size)
    phases.partition(store, batch_requests=size)
    assert store.count("phases") == 150
    assert store.count("partition_checks") == 50
    assert store.rows("SELECT DISTINCT detail, end_ns - start_ns FROM phases ORDER BY ALL") == [
        ("prefill_exec", 3), ("unattributed", 2), ("unattributed", 5),
    ]  # fmt: skip


def test_intervals_kept_aside_and_those_in_the_table_are_cut_alike(store: Store) -> None:
    many = range(20_000)
    store.append(
        "requests", [{"request": f"q{n}", "start_ns": 0, "end_ns": 10} for n in (*many, "x")]
    )
    store.append("legs", [{"leg": f"l{n}", "request": f"q{n}"} for n in (*many, "x")])
    store.append("intervals", pl.DataFrame(
        {"leg": [f"l{n}" for n in many], "detail": "prefill_exec", "start_ns": 2, "duration_ns": 3}
    ))  # fmt: skip
    interval(store, "lx", "decode_exec", 4, 10)
    interval(store, "another", "decode_exec", 4, 10)
    for _ in range(2):
        phases.partition(store)
    assert store.rows(
        "SELECT detail, count(*), min(start_ns), max(end_ns) FROM phases GROUP BY ALL ORDER BY ALL"
    ) == [("decode_exec", 1, 4, 10), ("prefill_exec", 20_000, 2, 5), ("unattributed", 40_001, 0, 10)]  # fmt: skip


def test_sums_stand_with_the_requests_that_they_count_among(store: Store) -> None:
    for name, deployment, mode, outcome in (
        ("done", "d", "aggregated", "completed"), ("lost", "d", None, "failed"), ("open", "d", "unknown", None),
        ("seen", "e", "disaggregated", "unknown"), ("left", "e", "aggregated", "aborted"), ("alone", None, None, None),
    ):  # fmt: skip
        request(store, request=name, deployment=deployment, mode=mode, outcome=outcome)
    phases.partition(store)
    columns = "request, deployment, mode, counted"
    found = store.rows(f"SELECT {columns} FROM phase_sums ORDER BY request")
    assert found == store.rows(f"SELECT {columns} FROM request_values ORDER BY request")
    assert {row[0] for row in found if row[3]} == {"done", "seen", "alone"}
