"""Data-parallel ranks under one worker's name: judged one by one where the requests name them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pdtrace import methods
from pdtrace.ingest import ingest
from pdtrace.methods import _gap_ranks, interference_gaps
from pdtrace.simulator import SCENARIOS, simulate
from pdtrace.store import Store

MS, ORIGIN, STEP = 1_000_000, 1_780_000_000_000_000_000, 20


def rank(
    names: str, every: float = 0, after: float = 1.0, seconds: int = 60
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(four streams of each name, a token each 20 ms; prompts that take 100 ms of a step each so many seconds).

    With two names: two ranks that wait for each other, whose prompts alternate.
    """
    random = np.random.default_rng(len(names) + int(100 * after))
    now, times, prompts = 0.0, [], []
    while now < seconds * 1000:
        if every and now >= 1000 * (after + every * len(prompts)):
            start, name = ORIGIN + int(now * MS), names[len(prompts) % len(names)]
            prompts.append((f"{name}p{len(prompts)}", start, start + 100 * MS, 1000.0))
            now += 100
        now += STEP + random.normal(0, 0.4)
        times.append(ORIGIN + int(now * MS))
    streams = pl.DataFrame(
        [
            {"request": f"{name}{i}", "stream": 0, "first_ns": times[0], "last_ns": times[-1],
             "emissions": len(times), "prompt_tokens": 100, "observer": "engine",
             "gaps_us": np.diff(np.asarray(times) // 1000).tolist(), "emission_tokens": [1] * len(times)}
            for name in names for i in range(4)
        ],
        schema_overrides={"gaps_us": pl.List(pl.Int32)},
    )  # fmt: skip
    schema = {"request": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64, "tokens": pl.Float64}
    return streams, pl.DataFrame(prompts, schema=schema, orient="row")


def parted(*frames: pl.DataFrame, missing: int = 0) -> pl.DataFrame:
    requests = pl.concat([f.select("request") for f in frames])
    found = requests.with_columns(rank=pl.col("request").str.slice(0, 1), decoded=True)
    return found.slice(missing)


def test_a_prompt_is_laid_over_the_tokens_of_its_own_rank_only() -> None:
    (a, pa), (b, pb) = rank("a", 1.3), rank("b", 1.3, after=1.6)
    one, two = _gap_ranks.judged(
        pl.concat([a, b]), pl.concat([pa, pb]), parted(a, b, pa, pb), worker="w", deployment="d"
    )
    for found, name, own in ((one, "a", pa), (two, "b", pb)):
        assert (found.row["rank"], found.row["flagged"]) == (name, True)
        assert found.row["lost_s"] == pytest.approx(own.height * 4 * 0.1, rel=0.03)
        named = found.losses.drop_nulls("culprit")["culprit"]
        assert set(named.str.slice(0, 2)) == {name + "p"}
        assert "judged for itself" in found.row["note"]
    # taken together, half of what each prompt meets are streams that it does not touch
    mixed = interference_gaps.interference(pl.concat([a, b]), pl.concat([pa, pb]), "w", "d")
    victims = mixed.losses.filter(pl.col("culprit").str.starts_with("a"))["victim"]
    assert "b" in set(victims.str.slice(0, 1))


def test_a_rank_that_computes_nothing_is_not_blamed_for_its_neighbour() -> None:
    (a, pa), (b, _) = rank("a", 1.3), rank("b")
    one, two = _gap_ranks.judged(pl.concat([a, b]), pa, parted(a, b, pa), worker="w")
    assert (one.row["flagged"], two.row["flagged"]) == (True, None)
    assert "no prompt is known to have been computed here" in two.row["note"]


def test_ranks_that_wait_for_each_other_are_judged_together() -> None:
    both, prompts = rank("ab", 0.7)
    (found,) = _gap_ranks.judged(both, prompts, parted(both, prompts), worker="w")
    assert (found.row["rank"], found.row["flagged"]) == (None, True)
    assert found.row["lost_s"] == pytest.approx(prompts.height * 8 * 0.1, rel=0.03)
    assert "its ranks wait for each other" in found.row["note"]


def test_streams_whose_rank_is_not_known_are_counted_as_left_out() -> None:
    (a, pa), (b, pb) = rank("a", 1.3), rank("b", 1.3, after=1.6)
    one, _ = _gap_ranks.judged(
        pl.concat([a, b]), pl.concat([pa, pb]), parted(a, b, pa, pb, missing=1), worker="w"
    )
    assert one.row["lost_s"] == pytest.approx(pa.height * 3 * 0.1, rel=0.03)
    assert "the rank of 1 of 8 token streams is not known" in one.row["note"]


def test_ranks_known_of_too_few_requests_part_nothing() -> None:
    store = Store()
    store.install()
    store.append("requests", [
        {"request": f"r{i}", "deployment": "d", "decode_worker": "w", "output_tokens": 9} for i in range(20)
    ])  # fmt: skip
    legs = [
        {"leg": f"l{i}", "request": f"r{i}", "worker": "w", "rank": str(i % 2)} for i in range(17)
    ]
    store.append("legs", legs)
    assert store.sql("FROM request_ranks").is_empty()
    store.append("legs", [{"leg": "l17", "request": "r17", "worker": "w", "rank": "0"}])
    assert store.sql("FROM request_ranks").height == 18
    # a request that two ranks served belongs to neither
    store.append("legs", [{"leg": "again", "request": "r17", "worker": "w", "rank": "1"}])
    assert store.sql("FROM request_ranks").is_empty()


def test_a_table_that_names_ranks_is_judged_by_rank_from_durations(tmp_path: Path) -> None:
    run = simulate(replace(SCENARIOS["ranks"], ranks=2), seed=1, duration_s=60)
    first = run.emissions.group_by("request").agg(
        first=pl.col("seen_ns").min(), last=pl.col("seen_ns").max()
    )
    rows = run.requests.join(first, on="request").select(
        request_id="request", start_time=pl.col("arrival_ns") / 1e9,
        ttft_ms=(pl.col("first") - pl.col("arrival_ns")) / 1e6,
        e2e_ms=(pl.col("last") - pl.col("arrival_ns")) / 1e6,
        input_tokens="prompt_tokens", output_tokens="output_tokens",
        worker=pl.col("decode_worker").str.split(".").list.first(),
        dp_rank=pl.col("decode_worker").str.split(".").list.last().cast(pl.Int64),
    )  # fmt: skip
    rows.write_csv(tmp_path / "requests.csv")
    store = Store()
    ingest([str(tmp_path / "requests.csv")], store)
    methods.run(store, methods.making(["interference_requests"]))
    found = store.rows("SELECT rank, requests, flagged FROM interference_requests ORDER BY rank")
    counts = rows.group_by("dp_rank").len().sort("dp_rank").rows()
    assert [(r, n) for r, n, _ in found] == [(str(r), n) for r, n in counts]
    assert any(flagged for *_, flagged in found)
