"""Prompts that begin alike: who had computed the beginning, what was computed again; answers known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pdtrace import methods, wording
from pdtrace.collectors import _table_blocks as table_blocks
from pdtrace.collectors import dynamo_request_trace, table
from pdtrace.ingest import ingest
from pdtrace.methods import prefix_reuse
from pdtrace.store import Store
from tests.conftest import FIXTURES, SHARED

Collect = Callable[[Any, Path | str], Any]
Row = dict[str, Any]
MS = 1_000_000
MOONCAKE = SHARED / "data/public/mooncake"


def ask(*prompts: tuple[str | None, list[int]], **more: Any) -> pl.DataFrame:
    """Requests r0, r1, ... in the order of arrival: worker, block hashes; blocks of 16 tokens, all whole."""
    rows: list[Row] = [
        {"request": f"r{n}", "worker": worker, "model": None, "block_tokens": 16,
         "prompt_tokens": 16 * len(hashes), "hashes": hashes} | more
        for n, (worker, hashes) in enumerate(prompts)
    ]  # fmt: skip
    schema = {"worker": pl.String, "model": pl.String, "hashes": pl.List(pl.UInt64)}
    return pl.DataFrame(rows, schema_overrides=schema)


def test_what_an_earlier_prompt_began_with_is_told_by_worker() -> None:
    told, _ = prefix_reuse.prefixes(
        ask(
            ("a", [1, 2, 3]),  # new
            ("b", [1, 2, 4, 5]),  # a had two blocks of it
            ("b", [1, 2, 4, 6]),  # b had three, a two
            ("a", [1, 2, 4, 5]),  # all four were seen, here two
            ("a", [9]),  # new
        ),
        "d",
    )
    columns = ["seen_tokens", "here_tokens", "holders", "holders_ratio"]
    assert told.select(columns).rows() == [
        (0, 0, 0, None), (32, 0, 1, 0.6), (48, 48, 1, 0.4), (64, 32, 1, 0.4), (0, 0, 0, None),
    ]  # fmt: skip


def test_a_hash_counts_only_where_it_stands_and_what_stands_before_it() -> None:
    told, _ = prefix_reuse.prefixes(
        ask(("a", [1, 2]), ("a", [2, 1]), ("a", [3, 2]), ("a", [1, 3, 2])), "d"
    )
    assert told["seen_steps"].to_list() == [0, 0, 0, 1]


def test_models_share_no_cache() -> None:
    rows = ask(("a", [1, 2]), ("a", [1, 2])).with_columns(model=pl.Series(["m", "n"]))
    assert prefix_reuse.prefixes(rows, "d")[0]["seen_steps"].to_list() == [0, 0]


def test_a_partial_last_block_is_no_cached_token() -> None:
    told, _ = prefix_reuse.prefixes(
        ask(("a", [1, 2]), ("a", [1, 2]), prompt_tokens=20, block_tokens=16), "d"
    )
    assert told.select("seen_steps", "seen_tokens").row(1) == (2, 16)


def test_what_nobody_says_stays_unknown() -> None:
    told, shared = prefix_reuse.prefixes(
        ask((None, [1, 2]), (None, [1, 2]), block_tokens=None).cast({"block_tokens": pl.Int64}),
        "d",
    )
    assert told.select("seen_steps", "here_steps", "seen_tokens", "holders").row(1) == (
        2, None, None, 0,
    )  # fmt: skip
    assert shared.select("requests", "step_tokens", "workers").rows() == [(2, None, [])]
    assert prefix_reuse.prefixes(told.head(0).with_columns(hashes=pl.lit([])), "d")[0].is_empty()


def test_shared_beginnings_are_the_edges_of_their_tree() -> None:
    _, shared = prefix_reuse.prefixes(
        ask(
            *[("ab"[n % 2], [1, 2, 3, 100 + n]) for n in range(6)],  # three blocks by six
            *[
                ("a", [1, 2, 7, 8, 9, 200 + n]) for n in range(3)
            ],  # two of them by nine, five by three
            ("b", [50, 51]),
        ),
        "d",
    )
    columns = ["from_step", "until_step", "requests", "workers", "worker_requests"]
    assert shared.select(columns).rows() == [
        (0, 2, 9, ["a", "b"], [6, 3]), (2, 5, 3, ["a"], [3]), (2, 3, 6, ["a", "b"], [3, 3]),
    ]  # fmt: skip


def test_long_runs_compare_every_other_block() -> None:
    assert [prefix_reuse.stride(n, most=100) for n in (0, 100, 101, 200, 201, 1000)] == [
        1, 1, 2, 2, 4, 16,
    ]  # fmt: skip
    told, _ = prefix_reuse.prefixes(ask(("a", [2, 4]), ("a", [2, 9]), prompt_tokens=64), "d", 2)
    assert told.select("step_tokens", "seen_tokens").row(1) == (32, 32)


def shop(con: Store, hashes: dict[int, list[int]], **more: Any) -> None:
    """Requests a tenth of a second apart, on a and b in turn, with known blocks of 10 tokens."""
    con.append("workers", [{"worker": w, "deployment": "d", "role": "aggregated"} for w in "ab"])
    for n, blocks in hashes.items():
        worker = "ab"[n % 2]
        con.append("requests", [
            {"request": f"r{n:03d}", "deployment": "d", "outcome": "completed", "mode": "aggregated",
             "start_ns": n * 100 * MS, "end_ns": (n + 5) * 100 * MS, "prefill_worker": worker,
             "decode_worker": worker, "prompt_tokens": 10 * len(blocks), "cached_tokens": 0} | more
        ])  # fmt: skip
        con.append("legs", [{"leg": f"l{n}", "deployment": "d", "request": f"r{n:03d}"}])
        con.append("prefix_blocks", [{"leg": f"l{n}", "block_tokens": 10, "hashes": blocks}])
    methods.run(con, methods.making(["prefix_requests"]))


def test_prompts_that_alternate_between_workers_bound_what_placement_could_save(con: Store) -> None:
    # Pairs (r0, r1), (r2, r3), ...: the second begins with four of the first's five blocks, elsewhere.
    shop(con, {n: [*range(10 * (n // 2), 10 * (n // 2) + 4), 1000 + n] for n in range(60)})
    rows = con.query("prefix_reuse").sort("request")
    assert rows["seen_tokens"].to_list() == [0, 40] * 30
    assert rows["elsewhere_tokens"].to_list() == [0, 40] * 30
    assert rows["kept"].to_list() == [None, False] * 30
    row = con.query("routing").to_dicts()[0]
    assert (row["prefix_requests"], row["repeated_requests"], row["prefix_kept_ratio"]) == (
        60,
        30,
        0,
    )
    assert row["prefix_chance_ratio"] == pytest.approx(0.5)
    assert (row["value"], row["interval_low"], row["share"]) == (1200, 0, 0.4)
    assert (row["severity"], row["level"]) == ("warning", "C")
    said = wording.finding("routing", row)
    assert said.title.startswith("at most 40 % of the prompt tokens")
    assert "30 of 60 prompts begin as an earlier one did; 0.0 %" in said.detail
    assert any("a bound" in a for a in said.assumptions)
    low = con.query("low_cache_reuse").to_dicts()[0]
    assert (low["basis"], low["value"], low["elsewhere_tokens"], low["moved_turns"]) == (
        "prefix", 1200, 1200, 30,
    )  # fmt: skip
    assert (
        "At most 1,200 of them are due to placement"
        in wording.finding("low_cache_reuse", low).detail
    )
    hot = con.query("hot_prefixes").row(0, named=True)
    assert (hot["prefix_tokens"], hot["requests"], hot["shared_tokens"], hot["first_ratio"]) == (
        40, 2, 40, 0.5,
    )  # fmt: skip


def test_what_the_same_worker_had_and_lost_is_no_matter_of_placement(con: Store) -> None:
    shop(con, {2 * n: [1, 2, 3, 4, 1000 + n] for n in range(30)})  # all on a, nothing cached
    rows = con.query("prefix_reuse")
    assert (rows["elsewhere_tokens"].sum(), rows["gone_tokens"].sum()) == (0, 29 * 40)
    low = con.query("low_cache_reuse").to_dicts()[0]
    assert (low["share"], low["elsewhere_tokens"]) == (1, 0)
    said = wording.finding("low_cache_reuse", low)
    assert "placement is not the reason" in said.detail
    assert said.suggestions == ("whether prefix caching is on; cache size and eviction",)


def test_a_cache_that_found_all_of_it_leaves_nothing_to_say(con: Store) -> None:
    shop(con, {2 * n: [1, 2, 3, 4] for n in range(30)}, cached_tokens=40)
    assert con.query("low_cache_reuse").is_empty()
    assert con.query("prefix_reuse").sort("request")["found_tokens"].to_list() == [0] + [40] * 29


def test_without_hashes_there_are_no_rows(con: Store) -> None:
    con.append("requests", [{"request": "r", "deployment": "d", "outcome": "completed"}])
    methods.run(con, methods.making(["prefix_requests"]))
    assert con.query("prefix_reuse").is_empty()
    assert con.query("hot_prefixes").is_empty()


# -- where hashes come from ------------------------------------------------------------------------


def test_a_request_trace_tells_the_blocks_of_its_prompts(collect: Collect) -> None:
    found = collect(dynamo_request_trace, FIXTURES / "dynamo_request_trace/agg.jsonl")
    blocks = found["prefix_blocks"].sort("record")
    assert set(blocks["block_tokens"]) == {16}
    assert blocks["hashes"][0].to_list() == [
        10413292528329347563,
        3524578693836829334,
    ]  # two were left in


def test_a_record_whose_blocks_are_no_blocks_is_a_request_all_the_same(
    collect: Collect, tmp_path: Path
) -> None:
    odd = ["x", [1], None, {"input_sequence_hashes": "no"}, {"input_sequence_hashes": [1, -1]},
           {"input_sequence_hashes": [1, "x"], "trace_block_size": "y"}, {"input_sequence_hashes": [7]}]  # fmt: skip
    lines = [
        json.dumps({"timestamp": 1, "event": {
            "schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1_795_993_230_968,
            "agent_context": "z", "request": {"request_id": f"r{n}", "input_tokens": 16, "output_tokens": 2,
            "request_received_ms": 1_795_993_230_614, "total_time_ms": 300.0, "replay": replay}}})
        for n, replay in enumerate(odd)
    ]  # fmt: skip
    path = tmp_path / "request_trace.jsonl"
    path.write_text("\n".join(lines))
    found = collect(dynamo_request_trace, path)
    assert found["legs"]["request_id"].n_unique() == len(odd)
    assert found["prefix_blocks"].select("block_tokens", "hashes").rows() == [(None, [7])]


def test_the_size_of_a_block_is_what_all_lengths_agree_with() -> None:
    tokens = pl.Series([n * 37 + 5 for n in range(60)])
    for size in (16, 64, 512):
        assert table_blocks.block_size(tokens, (tokens + size - 1) // size) == size
    assert table_blocks.block_size(tokens, tokens // 16) == 16
    assert table_blocks.block_size(tokens, tokens // 17) is None
    assert table_blocks.block_size(tokens.head(5), tokens.head(5) // 16) is None


def test_lists_that_hold_anything_but_hashes_are_left_out(collect: Collect, tmp_path: Path) -> None:
    lines = ['{"timestamp": 0, "input_length": 33, "output_length": 2, "hash_ids": [1, 2, 18446744073709551615]}',
             '{"timestamp": 1, "input_length": 33, "output_length": 2, "hash_ids": [1, -2, 3]}',
             '{"timestamp": 2, "input_length": 33, "output_length": 2, "hash_ids": [1, "x", null]}',
             '{"timestamp": 3, "input_length": 33, "output_length": 2, "hash_ids": []}',
             '{"timestamp": 4, "input_length": 33, "output_length": 2}']  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    found = collect(table, path)
    assert found["prefix_blocks"]["hashes"].to_list() == [[1, 2, 2**64 - 1]]
    assert found["legs"].height == 5


@pytest.mark.skipif(not MOONCAKE.is_dir(), reason="the public traces are not beside the checkout")
def test_the_public_traces_repeat_what_was_counted_of_them() -> None:
    # Infinite-cache share of blocks, counted by hand from the file: 64.0 % (synthetic).
    store = Store()
    ingest([str(MOONCAKE / "synthetic_trace.jsonl.gz")], store)
    found = store.rows(
        "SELECT sum(seen_steps) / sum(steps), min(step_tokens), count(here_steps) FROM prefix_requests"
    )
    assert found == [(pytest.approx(0.640, abs=5e-4), 512, 0)]
