"""Prefill interference from token times: hand-made workers with known losses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pytest

from pdtrace import _aside, library, methods
from pdtrace.methods import _gap_inputs, interference_gaps
from pdtrace.methods._gap_prefills import Prefills, cut_to_cost
from pdtrace.methods._gap_series import Gaps, silent
from pdtrace.methods.interference_gaps import Judgement, interference

MS, ORIGIN = 1_000_000, 1_780_000_000_000_000_000
STEP = 20  # ms of a step without prefill
RESIDENTS = 8


def worker(
    *,
    prefill_ms: float = 100,
    alone: bool = True,
    every: int = 60,
    seconds: int = 60,
    pauses: tuple[int, ...] = (),
    pause_ms: float = 0,
    shown: bool = True,
    jitter_ms: float = 0.5,
) -> tuple[dict[str, list[int]], list[dict[str, Any]], float]:
    """(token instants of each request, prefill intervals, decode seconds lost).

    Eight streams always run; each makes one token a step. Every so many steps a prompt is computed:
    in a step of its own, or in the next three steps, each longer by a third of it. The requests
    whose prompts are computed get one token only.
    """  # fmt: skip
    random = np.random.default_rng(7)
    tokens: dict[str, list[int]] = {f"v{i}": [] for i in range(RESIDENTS)}
    prefills, now, lost = [], 0.0, 0.0
    for step in range(int(seconds * 1000 / STEP)):
        culprit = step // every
        phase = step % every
        if phase == 0 and step and alone and shown:
            prefills.append((f"c{culprit}", now, now + prefill_ms))
            now += prefill_ms
            lost += RESIDENTS * prefill_ms / 1e3
        length = STEP + random.normal(0, jitter_ms)
        if not alone and step >= every and phase < 3 and shown:
            if phase == 0:
                begin = now
            length += prefill_ms / 3
            lost += RESIDENTS * prefill_ms / 3e3
            if phase == 2:
                prefills.append((f"c{culprit}", begin, now + length))
        now += length + (pause_ms if step in pauses else 0)
        for request in tokens:
            tokens[request].append(ORIGIN + int(now * MS))
    rows = [
        {"request": r, "start_ns": ORIGIN + int(a * MS), "end_ns": ORIGIN + int(b * MS), "tokens": 1000}
        for r, a, b in prefills
    ]  # fmt: skip
    return tokens, rows, lost


def streams(tokens: dict[str, list[int]], **more: Any) -> pl.DataFrame:
    """Rows as `interference` takes them."""
    rows = []
    for request, times in tokens.items():
        us = np.asarray(times) // 1000
        rows.append(
            {
                "request": request, "stream": 0, "first_ns": times[0], "last_ns": times[-1],
                "emissions": len(times), "prompt_tokens": 100, "observer": "engine",
                "gaps_us": np.diff(us).tolist(), "emission_tokens": [1] * len(times), **more,
            }
        )  # fmt: skip
    return pl.DataFrame(rows, schema_overrides={"gaps_us": pl.List(pl.Int32)})


def prefill_frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame(
        rows,
        schema={"request": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64, "tokens": pl.Float64},
    )  # fmt: skip


def judge(tokens: dict[str, list[int]], rows: list[dict[str, Any]], **more: Any) -> Judgement:
    return interference(streams(tokens), prefill_frame(rows), "w", "d", **more)


def test_a_prompt_in_a_step_of_its_own_costs_each_resident_all_of_it() -> None:
    tokens, rows, lost = worker()
    judged = judge(tokens, rows)
    row = judged.row
    assert row["flagged"] is True
    assert row["lost_s"] == pytest.approx(lost, rel=0.01)
    assert row["lost_low_s"] < lost < row["lost_high_s"]
    assert row["baseline_ms"] == pytest.approx(STEP, rel=0.01)
    assert row["p_value"] <= 0.01
    assert row["contrast_ratio"] == pytest.approx(1, abs=0.05)
    assert row["tail_explained_ratio"] == pytest.approx(1, abs=0.02)
    assert row["best_shift_ms"] == 0
    assert row["events"] == judged.events.height == len(rows) * RESIDENTS
    named = judged.losses.drop_nulls("culprit")
    by_culprit = named.group_by("culprit").agg(pl.col("lost_s").sum())
    assert set(by_culprit["culprit"]) == {r["request"] for r in rows}
    assert by_culprit["lost_s"].to_list() == pytest.approx([RESIDENTS * 0.1] * len(rows), rel=0.05)
    assert judged.losses["lost_s"].sum() == pytest.approx(row["lost_s"])
    assert set(named["victim"]) == set(tokens)
    assert judged.events["stream"].unique().to_list() == [0]
    assert set(judged.events["culprit"]) == set(by_culprit["culprit"])


def test_a_prompt_in_steps_that_also_decode_costs_their_excess() -> None:
    tokens, rows, lost = worker(alone=False, prefill_ms=90)
    row = judge(tokens, rows).row
    assert row["flagged"] is True
    assert row["lost_s"] == pytest.approx(lost, rel=0.01)
    # three steps of 20 + 30 ms: three fifths of the shared time were lost
    assert row["contrast_ratio"] == pytest.approx(0.6, abs=0.02)


def test_prefills_that_ran_elsewhere_are_no_cause() -> None:
    tokens, _, _ = worker(shown=False, prefill_ms=0)
    rows = [
        {"request": f"c{i}", "start_ns": ORIGIN + i * 1_200 * MS, "end_ns": ORIGIN + (i * 1_200 + 100) * MS,
         "tokens": 1000}
        for i in range(1, 45)
    ]  # fmt: skip
    judged = judge(tokens, rows)
    assert judged.row["flagged"] is False
    assert judged.row["lost_s"] == pytest.approx(0, abs=0.3)
    assert judged.row["event_ms"] is None
    assert judged.events.height == 0


def test_pauses_of_the_host_are_not_blamed_on_prompts_that_meet_them_by_chance() -> None:
    tokens, _, _ = worker(
        shown=False, prefill_ms=0, pauses=tuple(range(40, 3000, 97)), pause_ms=150
    )
    rows = [
        {"request": f"c{i}", "start_ns": ORIGIN + i * 613 * MS, "end_ns": ORIGIN + (i * 613 + 130) * MS,
         "tokens": 1000}
        for i in range(1, 100)
    ]  # fmt: skip
    row = judge(tokens, rows).row
    assert row["credit_s"] > 1
    assert row["chance_s"] == pytest.approx(row["credit_s"], rel=0.5)
    assert row["flagged"] is False


def test_a_pause_inside_a_prefill_is_not_its_cost() -> None:
    tokens, rows, lost = worker(pauses=(600,), pause_ms=400)
    # the prefill before step 600 is shown as lasting until the pause is over
    long = next(i for i, r in enumerate(rows) if r["request"] == "c10")
    rows[long]["end_ns"] += 400 * MS
    row = judge(tokens, rows).row
    assert row["lost_s"] == pytest.approx(lost, rel=0.03)
    assert row["cut_s"] == pytest.approx(0.38, abs=0.05)


def test_a_long_prefill_whose_cached_tokens_are_unknown_may_be_a_pause_or_its_cost() -> None:
    tokens, rows, lost = worker(pauses=(600,), pause_ms=400)
    long = next(i for i, r in enumerate(rows) if r["request"] == "c10")
    rows[long]["end_ns"] += 400 * MS
    for sure, high in ((True, lost + 2), (False, lost + 0.4 * RESIDENTS)):
        told = prefill_frame(rows).with_columns(sure=pl.lit(sure))
        row = interference(streams(tokens), told, "w", "d").row
        assert row["lost_s"] == pytest.approx(lost, rel=0.03)
        assert row["lost_low_s"] < lost
        assert (row["lost_high_s"] >= 0.99 * high) is not sure
        assert ("cached tokens are unknown" in (row["note"] or "")) is not sure


def test_a_few_long_prompts_are_not_cut_to_what_short_ones_cost() -> None:
    """Nothing tells what is usual for them: their whole time counts."""
    short = [(i * 0.5, i * 0.5 + 0.03, 200.0) for i in range(100)]
    long = [(60.0, 61.2, 6000.0), (70.0, 71.5, 7000.0)]
    start, end, tokens = (np.array(column) for column in zip(*short, *long, strict=True))
    work = Prefills(np.arange(102), start, end, tokens)
    assert cut_to_cost(work)[1] == pytest.approx(0)
    slow = np.where(np.arange(102) == 50, end + 0.3, end)
    cut, seconds, _ = cut_to_cost(Prefills(np.arange(102), start, slow, tokens))
    assert seconds == pytest.approx(0.3 - 0.02, abs=0.01)
    assert cut.end[50] == slow[50]


def test_a_decode_worker_is_never_judged_by_prefills() -> None:
    tokens, rows, _ = worker()
    for about in ({"role": "decode"}, {"kv_consumer": True}):
        row = judge(tokens, rows, **about).row
        assert (row["flagged"], row["lost_s"]) == (None, None)
        assert "decode worker" in row["note"]


def test_token_times_seen_late_are_put_back() -> None:
    """First tokens are made when their prefill ends: what is seen later is the way and the clock."""
    tokens, rows, lost = worker()
    late = {r: [t + 60 * MS for t in times] for r, times in tokens.items()}
    for row in rows:  # each culprit decodes two tokens
        late[row["request"]] = [row["end_ns"] + 60 * MS, row["end_ns"] + (60 + STEP) * MS]
    judged = judge(late, rows)
    assert judged.row["offset_ms"] == pytest.approx(60, abs=0.1)
    assert judged.row["lost_s"] == pytest.approx(lost, rel=0.02)
    assert "60.0 ms" in judged.row["note"]


def test_without_first_tokens_the_best_shift_tells_of_the_clock() -> None:
    tokens, rows, _ = worker()
    late = {r: [t + 200 * MS for t in times] for r, times in tokens.items()}
    row = judge(late, rows).row
    assert row["offset_ms"] == 0
    assert row["best_shift_ms"] == pytest.approx(200, abs=STEP + 10)


def test_bundled_tokens_are_one_delivery() -> None:
    tokens, rows, lost = worker()
    for times in tokens.values():  # every second token waits for the next one
        times[1:-1:2] = [t - 100_000 for t in times[2::2]][: len(times[1:-1:2])]
    row = judge(tokens, rows).row
    assert row["merged_ratio"] == pytest.approx(0.5, abs=0.02)
    assert row["counted_by"] in {"emissions", "tokens"}
    assert row["lost_s"] == pytest.approx(lost, rel=0.12)
    assert "bundles" in row["note"]


def test_speculative_steps_take_as_long_whatever_they_make() -> None:
    tokens, rows, lost = worker()
    random = np.random.default_rng(1)
    frame = streams(tokens).with_columns(
        emission_tokens=pl.Series(
            [random.integers(1, 5, len(t)).tolist() for t in tokens.values()], dtype=pl.List(pl.Int64)
        )
    )  # fmt: skip
    row = interference(frame, prefill_frame(rows), "w").row
    assert row["counted_by"] in {"emissions", "deliveries"}
    assert row["lost_s"] == pytest.approx(lost, rel=0.01)


def test_the_same_result_in_stretches_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, rows, _ = worker(seconds=120)
    short = {}  # streams that follow each other, so that stretches differ in time
    for name, times in tokens.items():
        short |= {f"{name}-{i}": times[i : i + 500] for i in range(0, len(times), 500)}
    whole = judge(short, rows)
    monkeypatch.setattr(interference_gaps, "WINDOW_EMISSIONS", 10_000)
    parts = judge(short, rows)
    assert parts.row["lost_s"] == pytest.approx(whole.row["lost_s"], rel=0.01)
    assert parts.row["gaps"] == whole.row["gaps"]
    assert parts.row["flagged"] is True
    assert parts.losses["lost_s"].sum() == pytest.approx(parts.row["lost_s"])


def test_little_or_odd_data_cannot_tell() -> None:
    tokens, rows, _ = worker()
    nothing = interference(streams(tokens).clear(), prefill_frame(rows), "w")
    assert (nothing.row["flagged"], nothing.losses.height) == (None, 0)
    assert interference(streams(tokens), prefill_frame([]), "w").row["flagged"] is None
    few = judge({"v0": tokens["v0"][:50]}, rows).row
    assert (few["flagged"], few["note"].split(":")[1].strip()) == (None, "weak baseline")
    one = judge({"v0": [ORIGIN, ORIGIN + MS]}, rows).row
    assert one["flagged"] is None
    same = {"v0": [ORIGIN] * 2000, "v1": [ORIGIN] * 2000}
    assert judge(same, rows).row["flagged"] is None


def test_a_source_without_noise_and_unknown_tokens() -> None:
    tokens, rows, lost = worker(jitter_ms=0)
    frame = streams(tokens).with_columns(
        emission_tokens=pl.lit(None, pl.List(pl.Int32)), prompt_tokens=pl.lit(None, pl.Int64)
    )
    bare = prefill_frame(rows).with_columns(tokens=pl.lit(None, pl.Float64))
    row = interference(frame, bare, "w").row
    assert row["lost_s"] == pytest.approx(lost, rel=0.01)
    assert row["cut_s"] is None
    assert "too few prefills with known tokens" in row["note"]


# -- from the tables -------------------------------------------------------------------------------


def test_result_columns_are_those_of_the_tables() -> None:
    for table, schema in (
        ("interference_gaps", interference_gaps.RESULT_SCHEMA),
        ("interference_gap_losses", interference_gaps.LOSSES_SCHEMA),
        ("interference_events", interference_gaps.EVENTS_SCHEMA),
    ):
        assert [c.name for c in library.tables()[table].columns] == list(schema)


def filled(store: Any, *, role: str = "aggregated", front: bool = False) -> float:
    """A store with one worker's requests, as an engine or as a front end saw the prefills."""
    tokens, rows, lost = worker()
    observer, seen_by = ("frontend", "front") if front else ("engine", "w")
    everyone = [*tokens, *(r["request"] for r in rows)]
    elsewhere = role == "decode"
    store.append("workers", [{"worker": "w", "deployment": "d", "role": role}])
    store.append(
        "requests",
        [
            {"request": r, "deployment": "d", "decode_worker": "w", "output_tokens": 9,
             "prefill_worker": "p" if elsewhere else "w", "prompt_tokens": 100}
            for r in everyone
        ],
    )  # fmt: skip
    store.append(
        "legs",
        [
            {"leg": f"l-{r}", "request": r, "observer": observer, "worker": seen_by,
             "role": "prefill" if elsewhere and front else None, "prompt_tokens": 1100, "cached_tokens": 100}
            for r in everyone
        ],
    )  # fmt: skip
    store.append(
        "streams",
        [
            {"leg": f"l-{r}", "first_ns": t[0], "gaps_us": np.diff(np.asarray(t) // 1000).tolist(),
             "emission": "token", "observer": observer}
            for r, t in tokens.items()
        ],
    )  # fmt: skip
    store.append(
        "intervals",
        [
            {"leg": f"l-{r['request']}", "detail": "prefill_wall", "start_ns": r["start_ns"],
             "end_ns": r["end_ns"], "basis": "measured"}
            for r in rows
        ],
    )  # fmt: skip
    return lost


@pytest.mark.parametrize(("front", "least"), [(False, 20_000), (True, 20_000), (False, 1)])
def test_tables_in_tables_out(
    store: Any, front: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where legs and intervals stay Arrow (batches of at least `least` rows): those have no rowid."""
    monkeypatch.setattr(_aside, "LEAST_ROWS", least)
    lost = filled(store, front=front)
    methods.run(store, methods.making(["interference_gaps"]))
    row = store.sql("FROM interference_gaps").row(0, named=True)
    assert (row["worker"], row["deployment"], row["flagged"]) == ("w", "d", True)
    assert row["lost_s"] == pytest.approx(lost, rel=0.01)
    assert "only 8 of" in row["note"]
    assert store.sql("SELECT sum(lost_s) FROM interference_gap_losses").item() == pytest.approx(
        row["lost_s"]
    )
    assert store.count("interference_events") == row["events"] > 0


def test_each_stream_of_a_request_is_a_prompt_to_its_engine(store: Any) -> None:
    """n > 1: the first stream's leg computes the prompt, the others find it in the cache."""
    lost = filled(store)
    store.execute(
        """INSERT INTO legs BY NAME SELECT leg || '-1' AS leg, request, observer, worker, 1 AS stream,
             1100 AS prompt_tokens, 1090 AS cached_tokens FROM legs WHERE request LIKE 'c%'"""
    )
    store.execute(
        """INSERT INTO intervals BY NAME SELECT leg || '-1' AS leg, detail, end_ns - 5000000 AS start_ns, end_ns, basis
           FROM intervals"""
    )
    methods.run(store, methods.making(["interference_gaps"]))
    row = store.sql("FROM interference_gaps").row(0, named=True)
    assert (row["flagged"], row["lost_s"]) == (True, pytest.approx(lost, rel=0.01))


def test_the_order_of_rows_in_tables_changes_nothing(store: Any) -> None:
    """Streams and prompts that begin at the same instants stand in the same order, wherever their requests do."""
    filled(store)
    store.execute("UPDATE streams SET first_ns = first_ns // 10**9 * 10**9")
    store.execute("UPDATE intervals SET start_ns = start_ns // 10**9 * 10**9")

    def told() -> list[tuple[Any, ...]]:
        (given,) = _gap_inputs.workers(store)
        names = dict(store.sql("SELECT rowid AS number, request FROM requests").iter_rows())
        return [
            (names[row["request"]], row.get("last_ns"), row.get("end_ns"))
            for part in ("streams", "prefills")
            for row in given[part].iter_rows(named=True)
        ]

    first = told()
    for table in ("requests", "legs", "streams", "intervals"):
        rows = store.sql(f"FROM {table}").reverse()
        store.execute(f"DELETE FROM {table}")
        store.append(table, rows)
    assert told() == first


@pytest.mark.parametrize("front", [False, True])
def test_remote_prefills_are_not_the_decode_workers_own(store: Any, front: bool) -> None:
    filled(store, role="decode", front=front)
    methods.run(store, methods.making(["interference_gaps"]))
    assert store.sql("SELECT flagged, lost_s FROM interference_gaps").rows() == [(None, None)]
    assert store.count("interference_gap_losses") == 0


def test_nothing_in_nothing_out(store: Any) -> None:
    methods.run(store, methods.making(["interference_gaps"]))
    assert store.count("interference_gaps") == 0


def gaps(*streams: list[float]) -> Gaps:
    """Streams by the instants of their tokens."""
    rows = [
        (n, a, b, k) for n, at in enumerate(streams) for k, (a, b) in enumerate(pairwise(at), 1)
    ]
    stream, start, end, made = (np.array(column) for column in zip(*rows, strict=True))
    ones = np.ones(len(rows))
    return Gaps(
        stream.astype(np.int64),
        start.astype(float),
        end.astype(float),
        ones,
        ones,
        made.astype(float),
    )


def fell_silent(found: Gaps, open_at_end: float | None = None) -> list[tuple[float, float]]:
    middle = (found.start + found.end) / 2
    first = {s: found.start[found.stream == s].min() for s in set(found.stream.tolist())}
    last = {s: found.end[found.stream == s].max() for s in first}

    def opened(at: np.ndarray) -> np.ndarray:
        return np.array([sum(first[s] <= t <= last[s] for s in first) for t in at], dtype=float)

    rows = silent(found, opened(middle), opened)
    return list(zip(found.start[rows].tolist(), found.end[rows].tolist(), strict=True))


def test_a_request_that_is_silent_alone_was_preempted() -> None:
    steady = [list(np.arange(0, 1.0001, 0.02)) for _ in range(5)]
    assert fell_silent(gaps([0.0, 1.0], *steady)) == [(0.0, 1.0)]


def test_streams_that_begin_during_a_stall_do_not_make_it_a_preemption() -> None:
    """Four streams stand still for five seconds, while twelve prompts are computed one after the other."""
    old = [[-0.04, -0.02, 0.0, 5.0, 5.02] for _ in range(4)]
    new = [[0.4 * n, 5.0, 5.02] for n in range(1, 13)]
    assert fell_silent(gaps(*old, *new)) == []


def test_streams_that_stand_still_together_were_held_up() -> None:
    """Half of the streams are on another engine under the same name, which goes on."""
    steady = [list(np.arange(0, 1.0001, 0.02)) for _ in range(5)]
    assert fell_silent(gaps(*[[0.0, 1.0]] * 3, *steady)) == []
    assert len(fell_silent(gaps(*[[0.0, 1.0]] * 2, *steady))) == 2


def test_an_interval_of_what_is_not_shown_holds_nothing() -> None:
    """Pauses of a third of a second that no prefill made, and jitter: whatever is credited may be chance."""
    tokens, prefills, _ = worker(
        shown=False, pauses=tuple(range(30, 3000, 97)), pause_ms=350, jitter_ms=4
    )
    shown = [
        {
            "request": f"c{n}",
            "start_ns": ORIGIN + n * 700 * MS,
            "end_ns": ORIGIN + (n * 700 + 300) * MS,
            "tokens": 1000,
        }
        for n in range(80)
    ]
    assert not prefills
    row = judge(tokens, shown).row
    assert row["flagged"] is False
    assert row["lost_low_s"] <= 0
