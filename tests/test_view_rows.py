"""What the pictures of load, KV, routing, caches and sessions say of hand-made rows with known answers."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from pdtrace import drawing, goodput, pictures
from pdtrace.cli import cli
from pdtrace.errors import BadOption, PdtraceError
from pdtrace.slo import policy
from pdtrace.store import Store

T0 = 1_790_000_000_000_000_000
MS, S = 10**6, 10**9


def workers(store: Store, **roles: str) -> None:
    store.append("deployments", [{"deployment": "d", "name": "d"}])
    store.append("workers", [{"worker": w, "deployment": "d", "name": w, "role": role} for w, role in roles.items()])  # fmt: skip


def said(store: Store, name: str, deployment: str | None = "d") -> str:
    return str(pictures.picture(store, name, deployment).sentence)


def rows(store: Store, name: str) -> pl.DataFrame:
    return pictures.picture(store, name, "d").rows


def test_load_is_the_mean_over_the_time_that_a_value_held(store: Store) -> None:
    workers(store, w="aggregated")
    store.append("steps", [
        {"worker": "w", "seq": 1, "start_ns": T0, "elapsed_ns": S, "waiting": 0, "running": 4, "kv_usage_ratio": 0.5},
        {"worker": "w", "seq": 2, "start_ns": T0 + S, "elapsed_ns": 3 * S, "waiting": 0, "running": 8, "kv_usage_ratio": 0.9},
    ])  # fmt: skip
    found = store.query("load_over_time", bins=1).sort("quantity")
    assert found.select("quantity", "mean", "low", "high", "level").rows() == [
        ("kv_usage", 0.8, 0.5, 0.9, "A"), ("running", 7.0, 4.0, 8.0, "A"), ("waiting", 0.0, 0.0, 0.0, "A"),
    ]  # fmt: skip
    text = said(store, "load_over_time")
    assert "requests waiting: none, all the time" in text
    assert "KV cache in use: at most 90 %" in text
    spec = pictures.picture(store, "load_over_time", "d").spec
    assert spec is not None
    assert len(spec["vconcat"]) == 2  # what never moves is said, not drawn


def test_nothing_is_held_over_a_gap_without_steps_or_samples(store: Store) -> None:
    workers(store, w="aggregated", m="aggregated")
    store.append("steps", [
        {"worker": "w", "seq": n, "start_ns": T0 + 60 * S * n, "elapsed_ns": S, "running": 3} for n in range(2)
    ])  # fmt: skip
    store.append("samples", [
        {"worker": "m", "time_ns": T0 + 300 * S * n, "metric": "x:num_requests_running", "value": 2.0, "kind": "gauge"} for n in range(2)
    ])  # fmt: skip
    points = store.query("load_points").filter(pl.col("quantity") == "running")
    held = points.sort("worker", "time_ns").select("worker", (pl.col("time_ns") - T0) // S, "value")  # fmt: skip
    assert held.rows() == [
        ("m", 0, 2.0), ("m", 60, None), ("m", 300, 2.0), ("w", 0, 3.0), ("w", 1, None), ("w", 60, 3.0), ("w", 61, None),
    ]  # fmt: skip
    unknown = store.query("load_over_time", bins=30).filter(pl.col("worker") == "w")["mean"].null_count()  # fmt: skip
    assert unknown > 0


def test_nobody_runs_through_a_pause_behind_which_nobody_decodes(store: Store) -> None:
    workers(store, w="aggregated")
    step = {"worker": "w", "elapsed_ns": 10 * MS, "running": 2, "capture": "full", "prefill_requests": 1}  # fmt: skip
    store.append("steps", [
        {**step, "seq": 0, "start_ns": T0, "decode_requests": 1},
        {**step, "seq": 1, "start_ns": T0 + S, "decode_requests": 0},  # a new prompt: the engine was idle
        {**step, "seq": 2, "start_ns": T0 + 2 * S, "decode_requests": 2},  # they decode on: the engine stood still
    ])  # fmt: skip
    points = store.query("load_points").sort("time_ns")
    held = points.select("quantity", (pl.col("time_ns") - T0) // MS, "value")
    assert held.filter(pl.col("quantity") == "running").drop("quantity").rows() == [
        (0, 2.0), (10, 0.0), (1000, 2.0), (2000, 2.0), (2010, None),
    ]  # fmt: skip
    assert held.filter(pl.col("quantity") == "batch").drop("quantity").rows() == [
        (0, 2.0), (10, 0.0), (1000, 1.0), (1010, 0.0), (2000, 3.0), (2010, 0.0),
    ]  # fmt: skip


def test_without_steps_and_metrics_the_requests_are_counted(store: Store) -> None:
    workers(store, w="aggregated")
    for n in range(3):
        store.append("requests", [{"request": f"r{n}", "deployment": "d", "start_ns": T0, "end_ns": T0 + 9 * S}])  # fmt: skip
        store.append("phases", [
            {"request": f"r{n}", "phase": "queue", "start_ns": T0, "end_ns": T0 + n * S, "worker": "w"},
            {"request": f"r{n}", "phase": "decode", "start_ns": T0 + n * S, "end_ns": T0 + 9 * S, "worker": "w"},
        ])  # fmt: skip
    points = store.query("load_points").filter(pl.col("quantity") == "waiting").sort("time_ns")
    assert points.select((pl.col("time_ns") - T0) // S, "value", "level").rows() == [(0, 2.0, "B"), (1, 1.0, "B"), (2, 0.0, "B")]  # fmt: skip
    assert "From the requests' own times" in said(store, "load_over_time")


def test_only_the_busiest_workers_are_shown_and_that_is_said(store: Store) -> None:
    workers(store, **{f"w{n:02}": "decode" for n in range(12)})
    store.append("steps", [
        {"worker": f"w{n:02}", "seq": k, "start_ns": T0 + k * S, "elapsed_ns": S, "running": n + k} for n in range(12) for k in range(3)
    ])  # fmt: skip
    found = rows(store, "load_over_time")
    assert set(found["worker"]) == {f"w{n:02}" for n in range(4, 12)}
    assert "the 8 busiest of 12 workers" in said(store, "load_over_time")


def test_labels_are_unique_and_say_the_role_where_names_are_ids(store: Store) -> None:
    store.append("workers", [
        {"worker": "a", "deployment": "d", "name": "0123456789abcdef", "role": "decode"},
        {"worker": "b", "deployment": "d", "name": None, "role": "decode"},
        {"worker": "c", "deployment": "d", "name": "front", "role": "frontend"},
        {"worker": "e", "deployment": "d", "name": "same", "role": None},
        {"worker": "f", "deployment": "d", "name": "same", "role": None},
    ])  # fmt: skip
    labels = dict(store.query("worker_labels").select("worker", "label").iter_rows())
    assert labels == {"a": "decode-2", "b": "decode-1", "c": "front", "e": "worker-1", "f": "worker-2"}  # fmt: skip


def test_movements_are_drawn_with_size_and_time_and_the_failed_ones_too(store: Store) -> None:
    workers(store, p="prefill", q="decode")
    store.append("transfers", [
        {"source_worker": "p", "destination_worker": "q", "start_ns": T0 + n * S, "end_ns": T0 + n * S + 10 * MS,
         "bytes": 1_000_000, "request_id": f"<b>{n}", "outcome": "failed" if n == 2 else "completed"} for n in range(3)
    ])  # fmt: skip
    text = said(store, "kv_transfers")
    assert text.startswith(
        "3 movements over 1 link, in the middle 1.00 MB in 10.0 ms, at most 10.0 ms"
    )
    assert "p → q gave 100 MB/s to one movement" in said(store, "kv_links")


def test_a_sample_of_movements_says_how_many_there_are(store: Store) -> None:
    workers(store, p="prefill", q="decode")
    store.append("transfers", [
        {"source_worker": "p", "destination_worker": "q", "start_ns": T0 + n, "end_ns": T0 + n + MS, "bytes": n + 1} for n in range(50)
    ])  # fmt: skip
    picture = pictures.picture(store, "kv_transfers", "d", most=20)
    assert picture.rows.height == 20
    assert "50 movements" in str(picture.sentence)
    assert "20 of them shown, an even sample" in str(picture.sentence)
    again = pictures.picture(store, "kv_transfers", "d", most=20)
    assert again.rows.equals(picture.rows)


def test_hidden_and_exposed_transfer_are_told_apart_and_unknown_is_said(store: Store) -> None:
    workers(store, p="prefill")
    for n in range(10):
        store.append("requests", [{"request": f"r{n}", "deployment": "d", "prompt_tokens": 100 * (n + 1)}])  # fmt: skip
        store.append("transfer_requests", [{"deployment": "d", "request": f"r{n}", "moved_ms": 30.0, "hidden_ms": 20.0, "exposed_ms": 10.0}])  # fmt: skip
    assert said(store, "kv_hidden") == (
        "waited for (exposed): 0.10 s of 10 requests, 10.0 ms each; hidden behind prefill: 0.20 s of 10 requests, 20.0 ms each."
    )
    assert rows(store, "kv_hidden")["prompts"].unique().len() == 5
    store.execute("UPDATE transfer_requests SET hidden_ms = NULL")
    assert "how much was hidden is unknown" in said(store, "kv_hidden")


@pytest.fixture
def two_workers(store: Store) -> Store:
    """a got three of four requests; turns of one session change the worker."""
    workers(store, a="aggregated", b="aggregated")
    for n in range(40):
        worker = "b" if n % 4 == 3 else "a"
        store.append("requests", [{
            "request": f"r{n}", "deployment": "d", "prefill_worker": worker, "decode_worker": worker, "mode": "aggregated", "outcome": "completed",
            "prompt_tokens": 100, "cached_tokens": 50 if n >= 20 else 0, "output_tokens": 10, "session": f"s{n % 20}", "turn": n // 20 + 1,
            "start_ns": T0 + n * S, "end_ns": T0 + n * S + 100 * MS, "ttft_ms": 10.0 * (n // 20 + 1), "e2e_ms": 100.0, "tpot_ms": 10.0,
        }])  # fmt: skip
    return store


def test_an_uneven_spread_is_named_with_its_worker(two_workers: Store) -> None:
    text = said(two_workers, "load_spread")
    assert "a got so many times its even share: 1.50 of requests" in text
    shares = rows(two_workers, "load_spread").filter(pl.col("measure") == "requests")
    assert shares.select("label", "share_ratio", "even_ratio").rows() == [("a", 0.75, 0.5), ("b", 0.25, 0.5)]  # fmt: skip


def test_reuse_and_sessions_go_from_the_first_turn_to_the_last(two_workers: Store) -> None:
    assert said(two_workers, "cache_reuse") == (
        "25 % of 4,000 prompt tokens were found in a cache; from 25 % on a to 25 % on b; 0.0 % in first turns, 50 % in turn 2."
    )
    text = said(two_workers, "sessions")
    assert text.startswith("20 sessions; median prompt 100 tokens in turn 1, 100 tokens in turn 2; median TTFT 10.0 ms in turn 1, 20.0 ms in turn 2")  # fmt: skip
    assert "0.0 % of later turns went to another worker" in text


def test_where_nothing_was_reused_words_say_it_without_a_picture(two_workers: Store) -> None:
    two_workers.execute("UPDATE requests SET cached_tokens = 0")
    picture = pictures.picture(two_workers, "cache_reuse", "d")
    assert (
        picture.sentence == "none of the 4,000 prompt tokens of 40 requests was found in a cache."
    )
    assert picture.spec is None


def test_belief_against_truth_counts_choices_with_fewer_found(two_workers: Store) -> None:
    two_workers.append("legs", [
        {"leg": f"l{n}", "request": f"r{n}", "deployment": "d", "worker": "a", "observer": "engine", "role": "aggregated",
         "cached_tokens": 0 if n == 0 else 64, "prompt_tokens": 100} for n in range(4)
    ])  # fmt: skip
    two_workers.append("decisions", [{"leg": f"l{n}", "router": "x", "worker": "a", "overlap_tokens": 64} for n in range(4)])  # fmt: skip
    text = said(two_workers, "router_belief")
    assert text == "the router took 256 prompt tokens for cached, 192 were; fewer than believed in 25 % of 4 choices."  # fmt: skip


def test_the_limits_given_are_marked_and_what_each_holds_back_is_said(two_workers: Store) -> None:
    assert not pictures.picture(two_workers, "goodput", "d").there
    goodput.give(two_workers, policy("ttft=15ms,tpot=20ms"))
    text = said(two_workers, "goodput")
    assert text.startswith("50 % of 40 requests meet TTFT ≤ 15.0 ms and TPOT ≤ 20.0 ms")
    assert "(100 % without the TTFT limit, 50 % without the TPOT limit)" in text
    assert rows(two_workers, "goodput").filter("given").height == 1


def test_coverage_lists_what_is_missing(two_workers: Store) -> None:
    text = said(two_workers, "coverage")
    assert "missing: " in text
    assert "token times" in text.split("missing: ")[1]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "requests.csv"
    lines = [f"r{n},2026-01-01T00:00:{n:02}Z,10,100,5,10" for n in range(20)]
    path.write_text("request_id,start,ttft_ms,e2e_ms,prompt_tokens,output_tokens\n" + "\n".join(lines))  # fmt: skip
    return path


def test_one_picture_becomes_a_file(table: Path, tmp_path: Path) -> None:
    runner, out = CliRunner(), tmp_path / "c.svg"
    result = runner.invoke(cli, ["export", str(table), "--picture", "coverage", "--theme", "dark", "-o", str(out)])  # fmt: skip
    assert result.exit_code == 0, result.output
    svg = out.read_text("utf-8")
    assert svg.startswith("<svg")
    assert "What the data hold: which information is there" in svg
    png = tmp_path / "c"
    result = runner.invoke(cli, ["export", str(table), "--picture", "coverage", "--format", "png", "-o", str(png)])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert png.read_bytes().startswith(b"\x89PNG")
    listed = runner.invoke(cli, ["export", str(table), "--list"])
    assert "no data for it" in listed.output
    assert "coverage" in listed.output


def test_a_file_tells_its_instants_in_utc() -> None:
    axis = {"field": "t", "type": "temporal", "title": "time"}
    spec = {"layer": [{"encoding": {"x": axis, "y": {"type": "quantitative"}}}], "datasets": {"d": [{"type": "temporal"}]}}  # fmt: skip
    found = drawing._utc(spec)
    assert found["layer"][0]["encoding"]["x"] == {**axis, "title": "time (UTC)", "scale": {"type": "utc"}}  # fmt: skip
    assert found["datasets"] == spec["datasets"]


def test_pictures_without_data_or_of_several_deployments_are_refused(
    two_workers: Store, tmp_path: Path
) -> None:
    with pytest.raises(PdtraceError, match="no data for it"):
        drawing.draw(two_workers, "kv_transfers", str(tmp_path / "a.png"))
    with pytest.raises(BadOption, match="png or svg"):
        drawing.draw(two_workers, "cache_reuse", str(tmp_path / "a.gif"))
    two_workers.append("deployments", [{"deployment": "e", "name": "other"}])
    two_workers.append("requests", [{"request": "z", "deployment": "e", "outcome": "completed", "prompt_tokens": 10, "cached_tokens": 5}])  # fmt: skip
    with pytest.raises(BadOption, match="never pooled"):
        drawing.draw(two_workers, "cache_reuse", str(tmp_path / "a.svg"))
    drawn = drawing.draw(two_workers, "cache_reuse", str(tmp_path / "a.svg"), deployment="other")
    assert "50 % of 10 prompt tokens" in str(drawn.sentence)


def test_text_from_outside_stays_text(store: Store, tmp_path: Path) -> None:
    store.append("deployments", [{"deployment": "d", "name": "d"}])
    nasty = "</text><script>alert(1)</script>"
    store.append("workers", [{"worker": "p", "deployment": "d", "name": nasty[:28], "role": "prefill"}])  # fmt: skip
    store.append("transfers", [{"source_worker": "p", "destination_worker": nasty, "start_ns": T0 + n, "end_ns": T0 + n + MS, "bytes": n + 1} for n in range(3)])  # fmt: skip
    drawing.draw(store, "kv_transfers", str(tmp_path / "a.svg"), deployment="d")
    svg = (tmp_path / "a.svg").read_text("utf-8")
    assert "<script" not in svg
    assert "&lt;script&gt;" in svg


def test_sentences_do_not_begin_with_names_of_others(two_workers: Store) -> None:
    """Whoever shows a sentence puts a capital in front, and names are not to be changed."""
    from pdtrace.dashboards import goodput as surface
    from pdtrace.dashboards import kv_links

    link = {
        "link": "p → q", "transfers": 3, "bytes": 3, "bytes_basis": "formula", "busy_s": 1.0, "gave_bytes_per_second": 100e6, "median_bytes_per_second": 100e6,
        "fitted_bytes_per_second": None, "fitted_low": None, "fitted_high": None, "contention_ratio": 0.4, "contention_low_ratio": -0.1, "contention_high_ratio": 0.9,
        "most_at_once": 2, "links": 1,
    }  # fmt: skip
    text = str(kv_links.sentence(pl.DataFrame([link], infer_schema_length=None)))
    assert text.startswith("the link p → q gave 100 MB/s while busy")
    assert "do not surely slow each other (each adds at most 90 %)" in text
    assert text.endswith("bytes from prompt lengths and the KV size of a token, not measured.")
    assert said(two_workers, "load_spread").startswith("the worker a got so many times its even")
    cell = {
        "position": 1, "class": "chat", "ttft_limit_ms": 100.0, "tpot_limit_ms": None, "given": True, "arrivals": 4, "good": 2, "unknown": 1,
        "attainment": 0.5, "good_per_s": None,
    }  # fmt: skip
    two = pl.DataFrame([cell, {**cell, "position": 2, "class": "batch", "unknown": 0}])
    assert str(surface.sentence(two)).startswith(
        "class chat: at least 50 % of 4 requests meet TTFT ≤ 100 ms, of 1 it is unknown; "
        "class batch: 50 % of 4 requests meet"
    )


def test_what_is_said_of_a_sample_of_movements_is_of_all(store: Store) -> None:
    workers(store, p="prefill", q="decode")
    store.append("transfers", [
        {"source_worker": "p", "destination_worker": "q", "start_ns": T0 + n * S, "end_ns": T0 + n * S + (900 if n == 7 else 10) * MS, "bytes": 1000}
        for n in range(50)
    ])  # fmt: skip
    for most in (1, 2, 3):
        text = str(pictures.picture(store, "kv_transfers", "d", most=most).sentence)
        assert "in the middle 1.00 kB in 10.0 ms, at most 900 ms" in text


def test_choices_that_are_not_drawn_count_in_the_share(two_workers: Store) -> None:
    two_workers.append("legs", [
        {"leg": f"l{n}", "request": f"r{n}", "deployment": "d", "worker": "a", "observer": "engine", "role": "aggregated",
         "cached_tokens": n if n > 1 else 64, "prompt_tokens": 100} for n in range(4)
    ])  # fmt: skip
    two_workers.append("decisions", [{"leg": f"l{n}", "router": "x", "worker": "a", "overlap_tokens": 64} for n in range(4)])  # fmt: skip
    text = str(pictures.picture(two_workers, "router_belief", "d", most=1).sentence)
    assert "fewer than believed in 50 % of 4 choices; 2 choices shown" in text


def test_moves_are_shares_of_the_turns_of_which_they_are_known() -> None:
    from pdtrace.dashboards import sessions

    turn = {"prompt_p50_tokens": None, "ttft_p50_ms": None, "reuse_ratio": None, "sessions": 10, "requests": 10}  # fmt: skip
    turns = pl.DataFrame([
        {**turn, "place": 1, "turn": "1", "moved_ratio": None, "moves_known": 0},
        {**turn, "place": 2, "turn": "2", "moved_ratio": 1.0, "moves_known": 1},
        {**turn, "place": 3, "turn": "3", "moved_ratio": 0.0, "moves_known": 9},
    ], infer_schema_length=None)  # fmt: skip
    assert "10 % of later turns went to another worker" in str(sessions.sentence(turns))


def test_requests_of_which_transfer_is_unknown_are_told_whatever_their_length(store: Store) -> None:
    workers(store, p="prefill")
    for n in range(10):
        store.append("requests", [{"request": f"r{n}", "deployment": "d", "prompt_tokens": 100 * (n + 1)}])  # fmt: skip
        known = 10.0 if n < 6 else None
        store.append("transfer_requests", [{"deployment": "d", "request": f"r{n}", "moved_ms": 30.0, "exposed_ms": known}])  # fmt: skip
    assert "0.06 s of 6 of 10 requests of which it is known" in said(store, "kv_hidden")


def test_load_that_is_known_in_part_is_not_said_of_all_the_time() -> None:
    from pdtrace.dashboards import load_over_time

    row = {"worker": "w", "label": "w", "quantity": "waiting", "start_ns": T0, "mean": 0.0, "low": 0.0, "high": 0.0, "resolution_ns": 1, "level": "A", "workers": 1}  # fmt: skip
    rows = [row, {**row, "start_ns": T0 + S, "mean": None, "low": None, "high": None}]
    rows += [{**row, "quantity": "running", "mean": 123.0, "low": 100.0, "high": 150.0}]
    text = str(load_over_time.sentence(pl.DataFrame(rows, infer_schema_length=None)))
    assert "requests waiting: none, as far as it is known" in text
    assert "requests running: at most 150 (mean 123)" in text
