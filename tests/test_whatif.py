"""What if: the self-check decides whether there is an answer; answers are near the truth of the simulator."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import polars as pl
import pytest
from door import pdtrace

from pdtrace._whatif_inputs import inputs, link
from pdtrace._whatif_model import Answer, Asked
from pdtrace.api import Trace
from pdtrace.errors import BadOption
from pdtrace.model import Slo
from pdtrace.options import parse_range, parse_ratio
from pdtrace.whatif import _other_caches, report, whatif

simulator = pytest.importorskip("pdtrace.simulator")

KV_BYTES = 819_200
FULL = Asked(
    pd=(1, 1), bandwidth_gbps=(96.0, 96.0), latency_ms=1.0, kv_tokens=56_000, kv_bytes_per_token=KV_BYTES,
    transfer="bulk", chunk_tokens=0,
)  # fmt: skip


@pytest.fixture(scope="module", params=["exclusive", "chunked_2048"])
def dump(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A run of two aggregated workers, as spans with token times."""
    scenario = replace(simulator.SCENARIOS[request.param], workers=2)
    folder = tmp_path_factory.mktemp(request.param)
    simulator.write(simulator.simulate(scenario, seed=3), folder, "pdtrace")
    return scenario, folder


@pytest.fixture(scope="module")
def exclusive(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("one")
    run = simulator.simulate(simulator.SCENARIOS["exclusive"], seed=5, duration_s=60.0)
    simulator.write(run, folder, "pdtrace")
    with Trace.read([folder]) as trace:
        yield trace.store


def valid(found: Any) -> Any:
    schema = json.loads((files("pdtrace.schemas") / "whatif.schema.json").read_text())
    jsonschema.validate(json.loads(json.dumps(found.to_dict())), schema)
    assert report(found)
    return found


def test_two_workers_split_are_predicted(dump: tuple[Any, Path]) -> None:
    """The goal: TPOT p90 within 5 %, attainment within 2 points of the same load run on the split."""
    scenario, folder = dump
    split = replace(
        scenario, mode="pd", workers=1, prefill_workers=1, link_gbytes_per_s=(12.0, 12.0)
    )
    truth = simulator.simulate(split, seed=3).requests.filter(pl.col("end_ns").is_not_null())
    ttft = (truth["first_token_ns"] - truth["arrival_ns"]).to_numpy() / 1e6
    steps = truth["output_tokens"].to_numpy() - 1
    tpot = (truth["end_ns"] - truth["first_token_ns"]).to_numpy() / 1e6 / np.maximum(steps, 1)
    slo = Slo(ttft_ms=3 * float(np.median(ttft)), tpot_ms=float(np.quantile(tpot, 0.6)))
    with Trace.read([folder]) as trace:
        found = valid(whatif(trace.store, str(folder), FULL, slo))
    assert found.refusal is None, found.refusal
    assert all(abs(c.error) < 0.1 for c in found.self_check if c.figure in {"ttft_p50", "tpot_p50"})
    answers = {a.figure: a for a in found.answers if a.first_token == "decode"}
    assert answers["tpot_p90"].central == pytest.approx(np.quantile(tpot[steps > 0], 0.9), rel=0.05)
    good = ((ttft <= slo.ttft_ms) & ((tpot <= slo.tpot_ms) | (steps == 0))).mean()
    assert answers["attainment_all"].central == pytest.approx(good, abs=0.02)
    for a in found.answers:
        assert a.low <= a.central <= a.high
    assert {a.first_token for a in found.answers} == {"prefill", "decode"}
    assert any("near saturation" in text for text in found.not_supported)


@pytest.mark.parametrize(
    ("without", "named"),
    [
        ({"kv_tokens": None}, "--kv-tokens"),
        ({"bandwidth_gbps": None}, "--bandwidth-gbps"),
        (dict.fromkeys(("pd", "bandwidth_gbps", "latency_ms", "transfer", "chunk_tokens")), "--pd"),
    ],
)  # fmt: skip
def test_what_is_neither_known_nor_given_refuses(
    exclusive: Any, without: dict[str, None], named: str
) -> None:
    found = valid(whatif(exclusive, "x", replace(FULL, **without)))
    assert found.refusal is not None
    assert named in found.refusal
    assert found.verdict.startswith("These data cannot say: ")
    assert found.answers == ()
    assert found.self_check  # the self-check is told all the same


def test_the_model_tells_the_kv_bytes_of_a_token_or_the_user_does(exclusive: Any) -> None:
    """The simulator's model is OPT-13B, whose shape is published: 2 x 40 layers x 40 heads x 128 x 2 bytes."""
    asked = replace(FULL, kv_bytes_per_token=None)
    known, given = whatif(exclusive, "x", asked), whatif(exclusive, "x", FULL)
    assert known.refusal is None
    assert known.answers == given.answers
    exclusive.execute("UPDATE kv_sizes SET bytes_per_token = NULL")
    found = valid(whatif(exclusive, "x", asked))
    assert found.refusal is not None
    assert "--kv-bytes-per-token" in found.refusal


def test_a_replay_that_misses_what_was_recorded_refuses(exclusive: Any) -> None:
    exclusive.execute("CREATE TEMP TABLE kept AS FROM requests")
    exclusive.execute("UPDATE requests SET ttft_ms = 1.3 * ttft_ms")
    try:
        found = valid(whatif(exclusive, "x", FULL))
    finally:
        exclusive.execute("DELETE FROM requests")
        exclusive.execute("INSERT INTO requests FROM kept")
        exclusive.execute("DROP TABLE kept")
    assert found.refusal is not None
    assert "misses TTFT p50 by −2" in found.refusal
    assert found.answers == ()


def test_a_set_up_that_does_not_carry_the_load_refuses(exclusive: Any) -> None:
    slow = replace(FULL, bandwidth_gbps=(0.5, 0.5))
    found = valid(whatif(exclusive, "x", slow))
    assert found.refusal is not None
    assert "more than the set-up asked for carries" in found.refusal


def test_bands_are_wider_for_what_is_not_known(exclusive: Any) -> None:
    def width(asked: Asked) -> float:
        found = whatif(exclusive, "x", asked)
        (a,) = (a for a in found.answers if a.figure == "ttft_p50" and a.first_token == "decode")
        return a.high / a.low

    narrow = width(replace(FULL, bandwidth_gbps=(95.9, 96.0)))
    assert width(FULL) > narrow  # one value is tried down to its half
    assert width(replace(FULL, bandwidth_gbps=(20.0, 96.0))) > width(FULL)
    assert width(replace(FULL, transfer=None)) >= width(FULL)


def test_what_was_never_seen_is_said(exclusive: Any) -> None:
    found = valid(whatif(exclusive, "x", replace(FULL, chunk_tokens=512)))
    said = " ".join(found.assumptions)
    assert "1 worker ran, 2 are asked for" in said
    assert "were never seen" in said


def test_a_band_on_both_sides_cannot_tell() -> None:
    assert Answer("ttft_p50", "ms", None, 90, 100, 110, 105).change == "cannot tell"
    assert Answer("ttft_p50", "ms", None, 90, 100, 104, 105).change == "lower"
    assert Answer("ttft_p50", "ms", None, 90, 100, 104, 80).change == "higher"
    assert Answer("ttft_p50", "ms", None, 90, 100, 104, None).change == "cannot tell"


def test_several_tokens_at_once_refuse(tmp_path: Path) -> None:
    run = simulator.simulate("null_speculative", seed=1, duration_s=40.0)
    simulator.write(run, tmp_path, "pdtrace")
    with Trace.read([tmp_path]) as trace:
        found = valid(whatif(trace.store, "x", FULL))
    assert found.refusal is not None
    assert "several tokens at once" in found.refusal


def test_a_table_of_requests_refuses_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    rows = [f"r{n},{100 + n},50,{300 + n},{2000 + n}" for n in range(40)]
    path.write_text("\n".join(["request,input_tokens,output_tokens,ttft_ms,total_ms", *rows]))
    done = pdtrace("whatif", str(path), "--pd", "1:1")
    assert done.returncode == 0, done.stderr
    assert "These data cannot say: " in done.stdout
    as_json = pdtrace("whatif", str(path), "--pd", "1:1", "--format", "json")
    value = json.loads(as_json.stdout)
    assert value["refused"] is True
    assert value["answers"] == []


def test_what_people_type() -> None:
    assert parse_ratio("2:3") == (2, 3)
    assert parse_range("100") == (100.0, 100.0)
    assert parse_range("50-200") == (50.0, 200.0)
    for text, parse in (
        ("0:1", parse_ratio),
        ("two", parse_ratio),
        ("0", parse_range),
        ("9-3", parse_range),
    ):
        with pytest.raises(BadOption):
            parse(text)


@pytest.mark.shared
def test_real_captures_are_refused_or_checked(shared: Path) -> None:
    """Whatever the answer is, it is one, and it rests on a self-check within 10 %."""
    for folder in ("vllm/agg", "dynamo/agg"):
        done = pdtrace("whatif", str(shared / "data" / folder), "--pd", "1:1", "--bandwidth-gbps", "10",
                       "--kv-bytes-per-token", "8192", "--format", "json")  # fmt: skip
        assert done.returncode == 0, done.stderr
        value = json.loads(done.stdout)
        errors = {c["figure"]: c["error"] for c in value["self_check"]}
        good = errors and all(abs(errors[f]) <= 0.1 for f in ("ttft_p50", "tpot_p50"))
        # a good check is answered, but where fewer caches would be asked than were recorded
        other_caches = "prefix caches of 2 workers; what 1 would find" in (value["refusal"] or "")
        assert value["refused"] is (not good or other_caches), value["refusal"]


def test_set_ups_that_cannot_be_played_refuse_in_one_sentence(exclusive: Any) -> None:
    """Each change of the recorded data is taken back."""
    cases = [
        ("UPDATE requests SET mode = 'disaggregated' WHERE hash(request) % 10 < 4", "two set-ups in one deployment"),
        ("UPDATE requests SET streams = 2 WHERE hash(request) % 10 = 0", "several answers (n > 1)"),
        ("UPDATE requests SET prompt_tokens = NULL WHERE hash(request) % 20 = 0", "lack arrival or lengths"),
        ("DELETE FROM requests WHERE request <> (SELECT min(request) FROM requests)", "only 1 requests have"),
        ("UPDATE steps SET rank = CAST(seq % 2 AS VARCHAR)", "2 data-parallel ranks stand under one worker's name"),
    ]  # fmt: skip
    for change, words in cases:
        exclusive.execute("BEGIN")
        try:
            if "rank" in change:
                exclusive.execute("DELETE FROM step_members")
            exclusive.execute(change)
            found = valid(whatif(exclusive, "x", FULL))
        finally:
            exclusive.execute("ROLLBACK")
        assert words in found.refusal, change


def test_hits_of_more_caches_are_not_those_of_fewer(exclusive: Any) -> None:
    exclusive.execute("BEGIN")
    try:
        exclusive.execute(
            "UPDATE requests SET decode_worker = decode_worker || CAST(hash(request) % 2 AS VARCHAR), prefill_worker = NULL"
        )
        exclusive.execute("UPDATE requests SET cached_tokens = prompt_tokens // 2")
        few = _other_caches(
            FULL, inputs(exclusive, exclusive.sql("SELECT deployment FROM deployments").item())
        )
    finally:
        exclusive.execute("ROLLBACK")
    assert few == (
        "50% of the prompt tokens were found in prefix caches of 2 workers; what 1 would find is not in these data, and"
        " prefill depends on it"
    )  # fmt: skip


def test_a_transfer_from_a_cache_tier_is_no_link_between_workers(exclusive: Any) -> None:
    legs = exclusive.rows("SELECT leg, deployment FROM legs WHERE deployment IS NOT NULL LIMIT 40")
    moved = [
        {"leg": leg, "bytes": 1_000_000 * (i + 1), "duration_ms": 1.0 + i, "outcome": "completed"}
        for i, (leg, _) in enumerate(legs)
    ]
    for direction, known in (("load", False), ("prefill_to_decode", True)):
        exclusive.execute("BEGIN")
        try:
            exclusive.append("transfers", [row | {"direction": direction} for row in moved])
            assert (link(exclusive, legs[0][1]) is not None) is known
        finally:
            exclusive.execute("ROLLBACK")
