"""Two runs side by side: conditions, differences, and a winner only where conditions allow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import numpy as np
import pytest
from door import pdtrace

from pdtrace._compare_side import sides
from pdtrace._compare_words import blocks
from pdtrace.compare import compare, compared_sides, report
from pdtrace.compare_report import _phase_rows
from pdtrace.diagnose import diagnose
from pdtrace.errors import BadOption
from pdtrace.model import Slo
from pdtrace.store import Store

S = 1_000_000_000
Row = dict[str, Any]
SETTINGS = {
    "model": "m", "dtype": "bfloat16", "tensor_parallel_size": "1", "arg_max_num_seqs": "64",
    "max_num_batched_tokens": "2048", "prefix_caching": "False",
}  # fmt: skip


def made(
    seed: int,
    n: int = 300,
    slower: float = 1.0,
    prompt: float = 1000.0,
    every_s: float = 0.5,
    settings: Row | None = None,
    name: str = "d",
    origin: str | None = None,
    failed: int = 0,
    host: str | None = "h1",
) -> Store:
    """A run whose figures are drawn anew with each seed; `slower` stretches TTFT and the pace."""
    random = np.random.default_rng(seed)
    store = Store()
    starts = (np.cumsum(random.exponential(every_s, n)) * S).astype(int)
    mode = "aggregated" if origin is None else "disaggregated"
    rows, seen, legs = [], [], []
    for i, start in enumerate(starts.tolist()):
        ttft = slower * random.lognormal(4.6, 0.4)
        tpot = slower * random.lognormal(2.3, 0.2)
        output = int(random.integers(50, 150))
        e2e = ttft + (output - 1) * tpot
        lost = i < failed
        request = f"{name}{i}"
        rows.append(
            {"request": request, "deployment": name, "outcome": "failed" if lost else "completed", "mode": mode,
             "start_ns": start, "end_ns": start + int(e2e * 1e6), "first_token_ns": start + int(ttft * 1e6),
             "ttft_ms": None if lost else ttft, "tpot_ms": tpot, "e2e_ms": e2e, "output_tokens": output,
             "prompt_tokens": int(random.normal(prompt, 100)), "cached_tokens": 0, "first_token_origin": origin,
             "window_observer": "client"}
        )  # fmt: skip
        seen.append({"request": request, "deployment": name, "observer": "client", "leg": request, "ttft_ms": ttft,
                     "tpot_ms": tpot, "e2e_ms": e2e, "definition": "send to first chunk", "basis": "measured", "level": "B"})  # fmt: skip
        legs.append({"leg": request, "request": request, "deployment": name, "observer": "client", "streaming": True,
                     "source": 0})  # fmt: skip
    store.append("requests", rows)
    store.append("observations", seen)
    store.append("legs", legs)
    store.append("deployments", [{"deployment": name, "name": name, "mode": mode, "headline_observer": "client"}])  # fmt: skip
    roles = ["aggregated"] if origin is None else ["prefill", "decode"]
    for role in roles:
        store.append("workers", [{"worker": f"{name}-{role}", "deployment": name, "name": role, "role": role,
                                  "engine": "E", "version": "1.0", "host": host}])  # fmt: skip
        for key, value in (SETTINGS | (settings or {})).items():
            store.append("facts", [{"worker": f"{name}-{role}", "key": key, "value": value}])
    store.install()
    return store


_RUNS: dict[str, Store] = {}


def run(seed: int, **more: Any) -> Store:
    """A run that others look at too: nothing is written to it, and no limits are given."""
    key = repr((seed, sorted(more.items())))
    if key not in _RUNS:
        _RUNS[key] = made(seed, **more)
    return _RUNS[key]


@pytest.fixture(scope="module", autouse=True)
def diagnosed_once() -> Iterator[None]:
    """A run that is compared with several others is diagnosed once."""
    with patch("pdtrace.compare.diagnose", cache(diagnose)):
        yield
    _RUNS.clear()


def compared(a: Store, b: Store, **more: Any) -> Any:
    found = compare(a, b, ("a", "b"), **more)
    schema = json.loads((files("pdtrace.schemas") / "comparison.schema.json").read_text())
    jsonschema.validate(json.loads(json.dumps(found.to_dict())), schema)
    assert report(found)
    (pair,) = found.pairs
    return pair


def statuses(pair: Any) -> dict[str, str]:
    return {c.id: c.status for c in pair.conditions}


def ranked(pair: Any) -> dict[str, str]:
    return {r.metric: r.result for r in pair.rankings}


def delta(pair: Any, metric: str, statistic: str) -> Any:
    return next(d for d in pair.deltas if (d.metric, d.statistic) == (metric, statistic))


def test_a_slower_run_under_the_same_conditions_loses() -> None:
    pair = compared(made(1), made(2, slower=1.5), slo=Slo(ttft_ms=120, tpot_ms=14))
    assert set(statuses(pair).values()) == {"same"}, statuses(pair)
    assert pair.winner == "A"
    assert ranked(pair) == {"ttft": "A", "tpot": "A", "itl": "unknown", "e2e": "A", "goodput": "A"}
    mean = delta(pair, "ttft_ms", "mean").found
    assert mean.ratio == pytest.approx(1.5, rel=0.1)
    assert mean.interval[0] > 0
    assert pair.verdict.startswith("A is better")


def test_over_66_pairs_of_runs_of_one_set_up_hardly_any_has_a_winner() -> None:
    """The stated rate: the judged figures together are wrong in at most one of 20 pairs."""
    stores = [run(seed, n=120) for seed in range(12)]
    known = [sides(store, diagnose(store), "x")[0] for store in stores]
    pairs = [(i, j) for i in range(12) for j in range(i)]
    winners = ranked_pairs = 0
    for i, j in pairs:
        pair = compared_sides(known[i], known[j])
        ranked_pairs += all(
            r.result != "not_comparable" for r in pair.rankings if r.metric == "e2e"
        )
        winners += any(r.result in {"A", "B", "mixed"} for r in pair.rankings)
    assert ranked_pairs >= 53
    assert winners <= 3


def test_the_same_data_differ_by_nothing() -> None:
    pair = compared(run(1), run(1))
    assert pair.winner is None
    for d in pair.deltas:
        assert d.found.difference in (0, None)
        if d.found.interval is not None:
            assert d.found.interval[0] <= 0 <= d.found.interval[1]
    assert set(ranked(pair).values()) <= {"no_difference", "unknown", "not_comparable"}


def test_one_changed_flag_may_be_blamed() -> None:
    pair = compared(run(1), run(2, slower=1.5, settings={"max_num_batched_tokens": "8192"}))
    assert pair.one_setting_changed is True
    assert pair.changed == (("max_num_batched_tokens", "2048", "8192"),)
    assert "may be put down to it" in pair.attribution
    assert pair.winner == "A"


def test_two_changed_settings_share_the_blame() -> None:
    more = {"max_num_batched_tokens": "8192", "arg_max_num_seqs": "128"}
    pair = compared(run(1), run(2, settings=more))
    assert pair.one_setting_changed is False
    assert len(pair.changed) == 2


def test_what_is_counted_is_no_setting() -> None:
    more = {"max_num_batched_tokens": "8192", "http_calls": "252", "http_calls_failed": "3"}
    pair = compared(run(1, settings={"http_calls": "214"}), run(2, settings=more))
    assert pair.changed == (("max_num_batched_tokens", "2048", "8192"),)


def test_an_unknown_setting_leaves_it_open() -> None:
    pair = compared(run(1), run(2, settings={"dtype": None}))
    assert statuses(pair)["precision"] == "unknown"
    assert pair.one_setting_changed is None
    assert "unknown" in pair.attribution


@pytest.mark.parametrize(
    ("other", "condition"),
    [
        ({"prompt": 1500.0}, "prompt_tokens"),
        ({"every_s": 0.25}, "load"),
        ({"settings": {"model": "other"}}, "model"),
        ({"host": None}, "hardware"),
        ({"failed": 40}, "failed"),
        ({"n": 700}, "duration"),
    ],
)
def test_other_conditions_forbid_a_winner(other: Row, condition: str) -> None:
    pair = compared(run(1), run(2, slower=2.0, **other))
    assert statuses(pair)[condition] in {"different", "unknown"}
    assert pair.winner is None
    assert ranked(pair)["ttft"] == "not_comparable"
    named = next(c.name for c in pair.conditions if c.id == condition)
    assert pair.verdict.startswith("not comparable: ")
    assert named in pair.verdict
    assert delta(pair, "ttft_ms", "p50").found.interval is not None  # told all the same


def test_failures_far_apart_in_few_requests_are_not_called_alike() -> None:
    few, lossy = run(1, n=3), run(2, n=400, failed=160)
    assert statuses(compared(few, lossy))["failed"] == "unknown"
    assert statuses(compared(run(1), run(2)))["failed"] == "same"


def test_what_the_data_do_not_say_may_be_stated_but_not_what_they_say() -> None:
    a, b = run(1, host=None), run(2, slower=1.5, host=None)
    assert compared(a, b).winner is None
    pair = compared(a, b, same=["hardware"])
    assert pair.winner == "A"
    assert any("hardware" in text for text in pair.assumptions)
    other = compared(run(1), run(2, prompt=1500.0), same=["prompt_tokens", "unknown"])
    assert statuses(other)["prompt_tokens"] == "different"
    with pytest.raises(BadOption, match="no such condition"):
        compared(a, b, same=["weather"])


def test_where_kv_cost_is_counted_decides_what_can_be_ranked() -> None:
    pair = compared(run(1), run(2, origin="decode"))
    assert statuses(pair)["kv_cost"] == "different"
    assert (
        "where KV cost is counted (different)" not in pair.verdict
    )  # all that the user waited, on both sides
    assert "devices used" in pair.verdict
    other = compared(run(1, origin="prefill"), run(2, origin="decode", slower=1.5))
    assert "different: where KV cost is counted" in other.verdict
    assert ranked(other) | {"e2e": "A"} == ranked(other)  # the whole duration has it on both sides
    assert ranked(other)["ttft"] == "not_comparable"


def test_deployments_are_matched_by_name_never_pooled() -> None:
    a, b = made(1, name="x"), made(2, name="x")
    for store, other in ((a, run(3, name="y")), (b, run(4, name="z", origin="decode"))):
        for table in ("requests", "observations", "legs", "deployments", "workers", "facts"):
            store.append(table, other.query(table))
    found = compare(a, b, ("a", "b"))
    assert [(p.a["name"], p.b["name"], p.matched_by) for p in found.pairs] == [("x", "x", "name")]
    assert (found.unmatched_a, found.unmatched_b) == (("y",), ("z",))
    asked = compare(a, b, ("a", "b"), deployments=["y=z"])
    assert [(p.a["name"], p.b["name"]) for p in asked.pairs] == [("y", "z")]
    with pytest.raises(BadOption, match="no deployment named q"):
        compare(a, b, ("a", "b"), deployments=["q"])


def test_a_side_without_requests_is_an_error_with_a_way_out() -> None:
    empty = Store()
    empty.install()
    with pytest.raises(BadOption, match="b: no requests to compare"):
        compare(made(1, n=20), empty, ("a", "b"))


def test_few_requests_and_missing_columns_are_told_not_guessed() -> None:
    a, b = made(1, n=3), made(2, n=1)
    b.execute(
        "UPDATE requests SET ttft_ms = NULL, tpot_ms = NULL, start_ns = NULL, prompt_tokens = NULL"
    )
    b.execute("UPDATE observations SET ttft_ms = NULL, tpot_ms = NULL")
    pair = compared(a, b, slo=Slo(ttft_ms=100))
    assert pair.winner is None
    assert delta(pair, "ttft_ms", "p50").found.b is None
    assert statuses(pair)["prompt_tokens"] == "unknown"


# -- real captures ---------------------------------------------------------------------------------


@pytest.mark.shared
def test_a_capture_against_itself(shared: Path) -> None:
    folder = str(shared / "data" / "vllm" / "agg")
    done = pdtrace("compare", folder, folder, "--format", "json", "--slo", "ttft=500ms,tpot=50ms")
    assert done.returncode == 0, done.stderr
    (pair,) = json.loads(done.stdout)["pairs"]
    assert pair["same_data"] is True
    assert pair["winner"] is None
    assert {c["status"] for c in pair["conditions"]} == {"same"}
    for d in pair["deltas"]:
        assert d["difference"] in (0, None), d
        assert d["interval"] is None or d["interval"][0] <= 0 <= d["interval"][1], d
    assert {f["change"] for f in pair["findings"]} <= {"on both"}


@pytest.mark.shared
def test_aggregated_against_split_is_not_comparable_and_says_why(shared: Path) -> None:
    data = shared / "data" / "vllm"
    done = pdtrace("compare", str(data / "agg"), str(data / "pd_nixl"))
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "not comparable: " in text
    said = text.partition("not comparable: ")[2].partition(" settings changed")[0]
    different, _, unknown = said.partition("; unknown: ")
    assert different.startswith("different: ")
    for name in (
        "load (rate or concurrency)",
        "devices used (workers x parallel ranks)",
        "cached-token accounting",
    ):
        assert name in different, name
    assert "hardware and host" in unknown
    assert "prefill_interference vanishes" in text


@pytest.mark.shared
def test_two_bench_results(shared: Path) -> None:
    data = shared / "data" / "vllm"
    names = [str(data / side / "bench_mixed.json.gz") for side in ("agg", "pd_nixl")]
    done = pdtrace("compare", *names, "--format", "json", "--same", "unknown")
    assert done.returncode == 0, done.stderr
    (pair,) = json.loads(done.stdout)["pairs"]
    status = {c["id"]: c["status"] for c in pair["conditions"]}
    assert status["load"] == "different"
    assert status["prompt_tokens"] == status["output_tokens"] == "same"
    assert pair["winner"] is None
    p50 = next(d for d in pair["deltas"] if (d["metric"], d["statistic"]) == ("ttft_ms", "p50"))
    assert (p50["a"], p50["b"]) == (pytest.approx(194.0, abs=0.1), pytest.approx(767, abs=1))
    assert p50["interval"][0] > 0


def in_transfer(store: Store, ms: float, basis: str) -> Store:
    """The run with this much KV transfer, and as much prefill, on each request."""
    requests = store.rows("SELECT request, deployment, mode, counted FROM request_values")
    store.append("phase_sums", [
        {"request": r, "deployment": deployment, "mode": mode, "counted": counted, "phase": phase, "detail": detail, "duration_ns": int(ms * 1e6), "ttft_part_ns": int(ms * 1e6),
         "basis": told, "placed_ns": 0, "bound_ns": int(ms * 1e6) if told == "upper_bound" else 0}
        for r, deployment, mode, counted in requests for phase, detail, told in (("kv_transfer", "kv_transfer", basis), ("prefill", "prefill_exec", "measured"))
    ])  # fmt: skip
    return store


@pytest.mark.parametrize(
    ("bases", "a", "b", "change"),
    [
        (("measured", "measured"), "20.0 ms", "50.0 ms", "+30.0 ms"),
        (("upper_bound", "measured"), "≤ 20.0 ms", "50.0 ms", "≥ +30.0 ms"),
        (("measured", "upper_bound"), "20.0 ms", "≤ 50.0 ms", "≤ +30.0 ms"),
        (("upper_bound", "upper_bound"), "≤ 20.0 ms", "≤ 50.0 ms", "+30.0 ms of the bounds"),
    ],
)
def test_a_phase_that_is_an_upper_bound_says_so(
    bases: tuple[str, str], a: str, b: str, change: str
) -> None:
    first = in_transfer(made(1, n=20), 20, bases[0])
    second = in_transfer(made(2, n=20), 50, bases[1])
    found = compare(first, second, ("a", "b"))
    (pair,) = found.pairs
    (phases,) = [block for block in blocks(found) if "by phase" in block.title]
    rows = {row[0]: row[1:] for row in phases.rows}
    assert rows["kv_transfer/kv_transfer"][:3] == (a, b, change)
    assert rows["prefill/prefill_exec"][:3] == ("20.0 ms", "50.0 ms", "+30.0 ms")
    told = delta(pair, "kv_transfer/kv_transfer", "mean").to_dict()
    assert (told["upper_bound_a"], told["upper_bound_b"]) == tuple(
        basis == "upper_bound" for basis in bases
    )
    bounded = "upper_bound" in bases
    assert (told["interval"] is None) == bounded
    assert ("upper bound" in told["note"]) == bounded == bool(phases.lines)
    drawn = _phase_rows(pair).filter(phase="kv_transfer")
    assert drawn["text"].to_list() == [a, b]
