"""Runs in which things go wrong, from their dumps to the findings: what is said is what happened."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
import pytest

from pdtrace import wording
from pdtrace.ingest import ingest
from pdtrace.simulator import Run, simulate, write
from pdtrace.simulator.engine import server_of
from pdtrace.store import Store

SHAPES = ("pdtrace", "vllm", "dynamo")


@cache
def seen(name: str, shape: str) -> tuple[Run, Store]:
    """A run of 40 s, and what pdtrace makes of its dumps."""
    run, store = played(name), Store()
    with TemporaryDirectory() as folder:
        write(run, Path(folder), shape)
        ingest([folder], store)
    return run, store


@cache
def played(name: str) -> Run:
    return simulate(name, seed=1, duration_s=40)


def outcomes(run: Run) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = run.requests.group_by("outcome").len().sort("outcome").rows()
    return found


@pytest.fixture(params=[(n, s) for n in ("troubled", "pd_left") for s in SHAPES], ids="-".join)
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Run, Store, str]]:
    name, shape = request.param
    yield (*seen(name, shape), shape)


def test_the_scenarios_hold_what_they_promise() -> None:
    run = played("troubled")
    errors = set(run.requests["error"].drop_nulls())
    assert errors == {"service_unavailable", "engine_error", "engine_dead"}
    assert {o for o, _ in outcomes(run)} == {"aborted", "completed", "failed"}
    assert run.tries.height > 3
    waited = run.requests.filter(
        pl.col("outcome") == "aborted", pl.col("prefill_start_ns").is_null()
    )
    assert waited.height > 3  # their clients left while they were queued
    left = played("pd_left").requests.filter(pl.col("outcome") == "aborted")
    for stage in ("transfer_start_ns", "first_token_ns"):  # clients leave before and after it
        reached = (left[stage] < left["end_ns"]).fill_null(value=False)
        assert 0 < reached.sum() < left.height, stage


def test_who_went_away_leaves_the_batch_before_the_next_step() -> None:
    for name in ("troubled", "pd_left"):
        run = played(name)
        ended = run.requests.filter(pl.col("outcome") != "unfinished").select(
            "request", over=pl.coalesce("left_ns", "end_ns")
        )
        inside = run.members.join(
            run.steps.select("worker", "seq", "start_ns"), on=["worker", "seq"]
        ).join(ended, on="request")
        assert (inside["start_ns"] < inside["over"]).all()


def test_every_request_counts_once_as_it_ended(both: tuple[Run, Store, str]) -> None:
    run, store, _ = both
    found = store.rows("SELECT outcome, count(*) FROM requests GROUP BY outcome ORDER BY outcome")
    assert found == outcomes(run)


def test_the_finding_tells_failed_aborted_and_retried(both: tuple[Run, Store, str]) -> None:
    run, store, shape = both
    (row,) = store.query("failed_requests").to_dicts()
    true = dict(outcomes(run))
    assert (row["failed"], row["aborted"]) == (true["failed"], true["aborted"])
    tried = run.tries.join(run.requests.select("request", "outcome"), on="request")
    # vLLM's log does not count attempts: those that another one completed are seen
    if shape == "vllm":
        tried = tried.filter(pl.col("outcome") == "completed")
    assert row["retried"] == tried["request"].n_unique()
    assert row["http_errors"] == 0  # each belongs to a request or to an attempt of one


def test_a_client_that_left_has_no_error_of_an_attempt_before(both: tuple[Run, Store, str]) -> None:
    _, store, _ = both
    errors = store.rows("SELECT DISTINCT error FROM requests WHERE outcome = 'aborted'")
    assert {error for (error,) in errors} <= {None, "cancelled"}


def test_no_phase_is_made_up_behind_an_end(both: tuple[Run, Store, str]) -> None:
    _, store, _ = both
    late = store.rows(
        """SELECT count(*) FROM phases AS p JOIN requests AS r ON r.request = p.request
           WHERE r.outcome != 'completed' AND p.end_ns > r.end_ns"""
    )
    assert late == [(0,)]


@pytest.mark.parametrize("name", ["troubled", "pd_left"])
def test_the_stages_of_requests_that_did_not_complete_are_those_that_ran(name: str) -> None:
    run, store = seen(name, "pdtrace")
    known = run.requests.filter(pl.col("error").fill_null("") != "engine_dead")
    for outcome in ("aborted", "failed"):
        mine = known.filter(pl.col("outcome") == outcome)
        for detail, begin, end in (
            ("prefill_wall", "prefill_start_ns", "prefill_end_ns"),
            ("kv_transfer", "transfer_start_ns", "transfer_end_ns"),
            ("decode_wall", "first_token_ns", "end_ns"),
        ):
            stop = pl.min_horizontal(pl.coalesce(end, "end_ns"), "end_ns")
            true = mine.select((stop - pl.col(begin)).clip(0).sum() / 1e9).item()
            if run.scenario.mode != "pd" and detail == "kv_transfer":
                true = 0.0
            found = store.rows(
                """SELECT coalesce(sum(p.end_ns - p.start_ns), 0) / 1e9
                   FROM phases AS p JOIN requests AS r ON r.request = p.request
                   LEFT JOIN legs AS l ON l.request = p.request AND l.error = 'engine_dead'
                   WHERE p.detail = ? AND r.outcome = ? AND l.leg IS NULL""",
                [detail, outcome],
            )[0][0]
            assert found == pytest.approx(true, abs=0.002 * mine.height, rel=0.01), (
                outcome,
                detail,
            )


def test_a_worker_that_died_is_told_by_its_log() -> None:
    run, store = seen("troubled", "vllm")
    (row,) = store.query("engine_failure").to_dicts()
    assert row["value"] == 1
    dead = run.workers["died_ns"].drop_nulls().item()
    assert abs(row["first_ns"] - dead) <= 1_000_000_000
    assert store.query("engine_failure").height == 1
    assert seen("pd_left", "vllm")[1].query("engine_failure").is_empty()


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_are_judged_one_by_one(shape: str) -> None:
    run, store = seen("ranks", shape)
    assert store.rows("SELECT count(*) FROM workers WHERE role = 'aggregated'") == [(1,)]
    truth = {server_of(w)[1]: lost for w, lost, _ in run.truth_workers.iter_rows()}
    found = store.rows("SELECT rank, lost_s, lost_low_s, lost_high_s FROM interference_steps")
    assert {rank for rank, *_ in found} == set(truth)
    for rank, lost, low, high in found:
        assert lost == pytest.approx(truth[rank], rel=0.03)
        assert low <= truth[rank] <= high
    by_tokens = dict(store.rows("SELECT rank, coalesce(lost_s, 0) FROM interference_gaps"))
    if shape == "vllm":  # its logs and spans do not say which rank served a request
        assert set(by_tokens) == {None}
    else:
        assert by_tokens == pytest.approx(truth, rel=0.04)
        pairs, together = store.rows(
            """SELECT count(*), count(*) FILTER (c.rank = v.rank)
               FROM interference_gap_losses AS l
               JOIN request_ranks AS c ON c.request = l.culprit
               JOIN request_ranks AS v ON v.request = l.victim"""
        )[0]
        assert pairs == together > 20  # a prompt holds up only those on its own rank
    (row,) = store.query("prefill_interference").to_dicts()
    assert (row["ranks"], row["mixed_ranks"]) == (2, 2 if shape == "vllm" else None)
    told = " ".join(wording.finding("prefill_interference", row).assumptions)
    assert ("which of 2 data-parallel ranks" in told) == (shape == "vllm")
