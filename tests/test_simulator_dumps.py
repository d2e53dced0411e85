"""Simulated dumps go through the whole pipeline, and the diagnosis finds what is true."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

import pdtrace
from pdtrace.api import Trace
from pdtrace.cli import cli, main
from pdtrace.errors import BadOption
from pdtrace.simulator import SCENARIOS, Run, simulate, write

SHAPES = ("pdtrace", "vllm", "dynamo")
CASES = [
    (name, shape)
    for name in ("chunked_2048", "exclusive_dirty", "chunked_two", "null_plain")
    for shape in SHAPES
]


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def read(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Run, str, Trace]]:
    """A run, the shape it was written in, and what pdtrace reads from it."""
    name, shape = request.param
    run = simulate(name, seed=3, duration_s=20)
    folder = write(run, tmp_path_factory.mktemp(name) / shape, shape)
    with pdtrace.open(folder) as trace:
        yield run, shape, trace


def rows(trace: Trace, sql: str) -> pl.DataFrame:
    return trace.sql(sql)


def test_every_file_is_read_but_the_truth(read: tuple[Run, str, Trace]) -> None:
    _, shape, trace = read
    sources = rows(trace, "SELECT * FROM sources")
    unused = sources.filter(pl.col("rows_kept").fill_null(0) == 0)
    told_by_spans = ["frontend.log.jsonl"] if shape == "dynamo" else []
    assert sorted(Path(path).name for path in unused["path"]) == [*told_by_spans, "truth.json"]
    assert "truth of a simulated run" in str(unused.to_dicts())


def test_requests_and_tokens_are_counted_right(read: tuple[Run, str, Trace]) -> None:
    run, _, trace = read
    found = rows(
        trace, "SELECT prompt_tokens, output_tokens FROM requests WHERE outcome = 'completed'"
    )
    assert found.height == run.requests.height
    for column in ("prompt_tokens", "output_tokens"):
        assert sorted(found[column]) == sorted(run.requests[column])


def test_it_is_one_deployment_with_the_workers_that_ran(read: tuple[Run, str, Trace]) -> None:
    run, _, trace = read
    assert rows(trace, "SELECT count(*) FROM deployments").item() == 1
    roles = rows(
        trace,
        "SELECT role FROM workers WHERE role IN ('prefill', 'decode', 'aggregated') ORDER BY role",
    )
    engines = run.workers.filter(pl.col("role") != "router")["role"]
    assert roles["role"].to_list() == sorted(engines)


def test_time_to_the_first_token_is_what_the_client_saw(read: tuple[Run, str, Trace]) -> None:
    run, _, trace = read
    first = run.emissions.group_by("request").agg(pl.col("seen_ns").min())
    joined = run.requests.join(first, on="request")
    true = (joined["seen_ns"] - joined["arrival_ns"]).sort() / 1e6
    found = rows(trace, "SELECT ttft_ms FROM requests ORDER BY ttft_ms")["ttft_ms"]
    assert (found - true).abs().max() < 1.0  # type: ignore[operator]


def test_the_prefill_phase_is_the_time_of_the_prefills(read: tuple[Run, str, Trace]) -> None:
    run, shape, trace = read
    if shape == "dynamo":
        pytest.skip("Dynamo's prefill time holds the engine's queue")
    true = (run.requests["prefill_end_ns"] - run.requests["prefill_start_ns"]).sum() / 1e9
    found = rows(trace, "SELECT sum(end_ns - start_ns) / 1e9 FROM phases WHERE phase = 'prefill'")
    assert found.item() == pytest.approx(true, rel=0.02)


def test_the_steps_are_those_that_ran(read: tuple[Run, str, Trace]) -> None:
    run, _, trace = read
    found = rows(trace, "SELECT count(*) AS n, sum(elapsed_ns) / 1e9 AS s FROM steps").row(0)
    assert found[0] == run.steps.height
    assert found[1] == pytest.approx(run.steps["elapsed_ns"].sum() / 1e9, rel=1e-3)


def test_seconds_lost_are_those_of_the_truth(read: tuple[Run, str, Trace]) -> None:
    run, _, trace = read
    found = rows(
        trace, "SELECT lost_s, decode_s, flagged FROM interference_steps WHERE decode_s > 0"
    )
    true = run.truth_workers["lost_s"].sum()
    assert found["lost_s"].sum() == pytest.approx(true, rel=0.05, abs=1e-9)
    assert found["decode_s"].sum() == pytest.approx(run.truth_workers["decode_s"].sum(), rel=0.02)
    assert found["flagged"].any() == (true > 0)


def test_members_of_the_steps_are_those_that_ran(tmp_path: Path) -> None:
    run = simulate("chunked_two", seed=0, duration_s=10)
    with pdtrace.open(write(run, tmp_path / "d", "pdtrace")) as trace:
        columns = "seq, request_id AS request, prefill_tokens, decode_tokens, context_tokens"
        found = rows(trace, f"SELECT {columns} FROM step_members")
    same = run.members.select(found.columns)
    assert found.sort(found.columns).rows() == same.sort(same.columns).rows()


def test_transfers_carry_their_bytes(tmp_path: Path) -> None:
    run = simulate("transfer_bound", seed=0, duration_s=15)
    with pdtrace.open(write(run, tmp_path / "d", "pdtrace")) as trace:
        moved = rows(trace, "SELECT bytes, duration_ms FROM transfers")
    assert moved["bytes"].sum() == run.requests["transfer_bytes"].sum()
    true = (run.requests["transfer_end_ns"] - run.requests["transfer_start_ns"]).sum() / 1e6
    assert moved["duration_ms"].sum() == pytest.approx(true)


def test_the_router_says_whom_it_chose_and_what_it_believed(tmp_path: Path) -> None:
    run = simulate("router_affinity", seed=0, duration_s=15)
    chosen = run.requests["decode_worker"].value_counts(sort=True)["count"].to_list()
    for shape in ("pdtrace", "dynamo"):
        with pdtrace.open(write(run, tmp_path / shape, shape)) as trace:
            found = rows(
                trace, "SELECT worker, count(*) AS n FROM decisions GROUP BY 1 ORDER BY 2 DESC"
            )
        assert found["n"].to_list() == chosen


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_seed_writes_the_same_bytes(shape: str, tmp_path: Path) -> None:
    folders = [write(simulate("null_everything", 5, 10), tmp_path / turn, shape) for turn in "ab"]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    for name in names[0]:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_a_wrong_shape_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="no shape is called 'sglang'"):
        write(simulate("exclusive", 0, 2), tmp_path / "x", "sglang")


def test_demo_lists_the_scenarios() -> None:
    shown = CliRunner().invoke(cli, ["demo", "--list"], catch_exceptions=False).output
    assert "chunked_2048" in shown and "null_everything" in shown


def test_demo_writes_and_diagnoses_a_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pdtrace.simulator.run.DURATION_S", 12.0)
    folder = tmp_path / "made"
    with pytest.raises(SystemExit) as end:
        main(["demo", "--scenario", "exclusive", "--shape", "vllm", "-o", str(folder)])
    assert end.value.code == 0
    assert "held decodes up" in capsys.readouterr().out
    assert (folder / "truth.json").is_file()


def test_demo_says_that_a_seed_needs_a_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["demo", "--seed", "3"])
    assert end.value.code == 2
    assert "error: --shape and --seed are about simulated runs" in capsys.readouterr().err


def test_demo_with_an_unknown_scenario_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["demo", "--scenario", "nope"])
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: no scenario is called 'nope'",
        "hint: `pdtrace demo --list` names all scenarios",
    ]


def test_clocks_are_bound_by_the_hop_around_an_engine_that_names_none(tmp_path: Path) -> None:
    """vLLM's span behind a router that hands on no trace context; the hosts' clocks are half a second apart."""
    scenario = replace(SCENARIOS["chunked_two"], host_offset_ms=500.0, host_drift_ppm=50.0)
    run = simulate(scenario, seed=3, duration_s=20)
    with pdtrace.open(write(run, tmp_path / "vllm", "vllm")) as trace:
        found = rows(trace, "FROM ttft_phase_summary")
        clocks = rows(
            trace,
            "SELECT domain, offset_ns, half_width_ns FROM clocks WHERE method LIKE '%shifted by%'",
        )
    true = run.workers.filter(pl.col("offset_ns") != 0)["offset_ns"].sort()
    assert clocks.height == true.len()
    off = (clocks["offset_ns"].sort() - true).abs()
    assert (off <= clocks["half_width_ns"].max() + 3_000_000).all()  # the drift over 20 s
    lost = found.filter(pl.col("phase") == "unattributed")["share_of_ttft"].sum()
    assert lost < 0.05


@pytest.mark.parametrize("shape", SHAPES)
def test_hosts_whose_clocks_differ_give_the_phases_of_one_clock(shape: str, tmp_path: Path) -> None:
    """Clocks up to 200 ms and 40 ppm apart: prefill's part of the TTFT is what the simulator knows."""
    run = simulate("pd", seed=3, duration_s=40)
    done = run.requests.filter(pl.col("first_token_ns").is_not_null())
    prefill = (done["prefill_end_ns"] - done["prefill_start_ns"]).sum()
    ttft = (done["first_token_ns"] - done["arrival_ns"]).sum()
    with pdtrace.open(write(run, tmp_path / shape, shape)) as trace:
        found = rows(trace, "FROM ttft_phase_summary")
        clocks = rows(
            trace, "SELECT method, half_width_ns FROM clocks WHERE domain NOT LIKE 'perf:%'"
        )
    assert clocks["method"].str.contains("shifted by the midpoint").all()
    assert clocks["half_width_ns"].max() < 2_000_000
    share = found.filter(pl.col("phase") == "prefill")["share_of_ttft"].sum()
    # a wall time, and with Dynamo the engine's queue is in it
    assert share == pytest.approx(prefill / ttft, abs=0.06)
    lost = found.filter(pl.col("phase").is_in(["unattributed", "router"]))
    assert (
        lost["share_of_ttft"].sum() < 0.3
    )  # the first decode step is in it where only tokens are told
