"""What sets slow requests apart: planted causes are found, nulls are not, proxies and confounded ones are told."""

from __future__ import annotations

import json
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import polars as pl
import pytest
from door import pdtrace

from pdtrace import slow
from pdtrace.api import Trace
from pdtrace.errors import BadOption, PdtraceError
from pdtrace.methods.contrast import (
    Levels,
    by_value,
    chance,
    chance_within,
    contrast,
    cramers_v,
    holm,
    newcombe,
)
from pdtrace.store import Store


def levels(codes: np.ndarray, names: str | None = None) -> Levels:
    size = int(codes.max()) + 1
    return Levels(
        codes.astype(np.int64),
        tuple(names or [f"v{n}" for n in range(size)]),
        codes.astype(np.int64),
    )


def test_newcombes_own_example() -> None:
    # Newcombe 1998, table II, 56/70 against 48/80, method 10
    assert newcombe(56, 70, 48, 80) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert newcombe(10, 10, 0, 10) == pytest.approx((0.6075, 1.0), abs=5e-5)


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.9, 0.8]) == [1.0, 1.0]


def test_cramers_v_is_zero_without_and_one_with_full_association() -> None:
    assert cramers_v(np.array([50, 50]), np.array([10, 10])) == 0.0
    assert cramers_v(np.array([500, 500]), np.array([500, 0])) == pytest.approx(1.0, abs=0.01)
    assert cramers_v(np.array([10]), np.array([3])) == 0.0


def test_the_p_value_is_the_exact_one() -> None:
    # All 5 of 5 in one value of 10 requests: 2 of the C(10,5) = 252 draws are as extreme.
    random = np.random.default_rng(1)
    p = chance(np.array([5, 5]), np.array([5, 0]), random)
    assert p == pytest.approx(2 / 252, abs=0.003)
    assert chance(np.array([10]), np.array([5]), random) == 1.0


def test_two_hundred_nulls_name_something_in_five_per_cent_at_most() -> None:
    named = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        group = random.random(400) < 0.1
        tried = {
            "worker": levels(random.integers(0, 4, 400)),
            "tenant": levels(random.integers(0, 30, 400)),
            "rare": levels((random.random(400) < 0.02).astype(int)),
            "time": levels(np.arange(400) // 67),
            "prompt": levels(np.searchsorted([0.3, 0.9], random.random(400))),
        }
        named += any(a.stands_out for a in contrast(group, tried))
    assert named <= 17  # binomial(200, 0.05): more than 17 in one of 100 tries


def test_a_planted_worker_is_named_first_with_its_counts() -> None:
    random = np.random.default_rng(3)
    worker = random.integers(0, 4, 1000)
    group = random.random(1000) < np.where(worker == 2, 0.4, 0.05)
    tried = {"noise": levels(random.integers(0, 5, 1000)), "worker": levels(worker)}
    first, second = contrast(group, tried)
    assert first.name == "worker" and first.stands_out and not second.stands_out
    value = max(first.values, key=lambda v: v.difference or 0)
    assert (value.value, value.requests, value.selected) == ("v2", int((worker == 2).sum()), int(group[worker == 2].sum()))  # fmt: skip
    assert value.low is not None and value.low < 0.35 < value.high  # type: ignore[operator]


def test_a_worker_that_only_got_the_long_prompts_is_a_proxy() -> None:
    random = np.random.default_rng(4)
    long = random.random(3000) < 0.2
    worker = np.where(random.random(3000) < 0.85, long, ~long).astype(
        int
    )  # long prompts mostly go to worker 1
    group = random.random(3000) < np.where(long, 0.4, 0.04)
    prompt, worker_ = contrast(
        group, {"worker": levels(worker), "prompt": levels(long.astype(int))}
    )
    assert (prompt.name, prompt.proxy_of, prompt.not_told_from) == ("prompt", None, ())
    assert (worker_.name, worker_.stands_out, worker_.proxy_of) == ("worker", True, "prompt")


def test_all_long_prompts_on_one_worker_cannot_be_told_apart() -> None:
    random = np.random.default_rng(5)
    long = (random.random(1000) < 0.2).astype(int)
    group = random.random(1000) < np.where(long, 0.4, 0.04)
    first, second = contrast(group, {"worker": levels(long), "prompt": levels(long)})
    assert first.not_told_from == (second.name,) and second.not_told_from == (first.name,)
    assert first.proxy_of is None and second.proxy_of is None


def test_simpsons_reversal_is_no_finding_within_strata() -> None:
    # Worker 1 is better for short and for long prompts, but gets nearly all the long ones.
    table = {(0, 0): (900, 90), (0, 1): (100, 50), (1, 0): (100, 5), (1, 1): (900, 360)}
    codes, strata, group = [], [], []
    for (worker, long), (n, hits) in table.items():
        codes += [worker] * n
        strata += [long] * n
        group += [True] * hits + [False] * (n - hits)
    arrays = np.array(codes), np.array(strata), np.array(group)
    shares = [arrays[2][arrays[0] == w].mean() for w in (0, 1)]
    assert shares[1] > 2 * shares[0]  # taken together worker 1 looks far worse
    found = {
        a.name: a
        for a in contrast(arrays[2], {"worker": levels(arrays[0]), "prompt": levels(arrays[1])})
    }
    assert found["prompt"].proxy_of is None
    p = chance_within(arrays[0], arrays[1], arrays[2], np.random.default_rng(1))
    assert p is not None and p < 0.2  # what is left of it points the other way or is nothing


def test_both_of_two_real_causes_stay() -> None:
    random = np.random.default_rng(6)
    a, b = random.random(4000) < 0.3, random.random(4000) < 0.3
    group = random.random(4000) < 0.03 + 0.2 * a + 0.2 * b
    found = contrast(group, {"a": levels(a.astype(int)), "b": levels(b.astype(int))})
    assert all(x.stands_out and x.proxy_of is None and not x.not_told_from for x in found)


def test_rare_values_go_together_and_unknown_ones_stay_out() -> None:
    found = by_value(pl.Series("v", ["a"] * 6 + ["b"] * 5 + ["c", "d"] + [None] * 3))
    assert found.names == ("a", "b", "2 others")
    assert found.codes.tolist() == [0] * 6 + [1] * 5 + [2, 2] + [-1] * 3


def table(tmp_path: Path, rows: pl.DataFrame) -> Path:
    path = tmp_path / "requests.csv"
    rows.write_csv(path)
    return path


def fleet(n: int, seed: int = 1) -> pl.DataFrame:
    """Requests of which those of worker w3 wait 3 s in a third of the cases."""
    random = np.random.default_rng(seed)
    worker = random.integers(0, 4, n)
    late = (worker == 3) & (random.random(n) < 0.35)
    ttft = np.round(200 + 100 * random.random(n) + 3000 * late, 3)
    output = random.integers(20, 200, n)
    return pl.DataFrame({
        "request_id": [f"req-{i}" for i in range(n)],
        "worker": [f"w{w}" for w in worker],
        "tenant": [f"team-{t}" for t in random.integers(0, 5, n)],
        "start": 1_790_000_000 + np.arange(n) * 0.5,
        "input_tokens": random.integers(50, 4000, n),
        "output_tokens": output,
        "ttft_ms": ttft,
        "total_ms": np.round(ttft + 20.0 * output, 3),
    })  # fmt: skip


def asked(answer: slow.Answer | str) -> dict[str, Any]:
    """The answer as JSON, which follows its schema."""
    text = answer if isinstance(answer, str) else json.dumps(answer.to_dict(), allow_nan=False)
    schema = json.loads((files("pdtrace.schemas") / "slow.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(text), schema)
    return json.loads(text)


@pytest.mark.parametrize("more", [(), ("--where", "ttft_ms > 2000"), ("--slo", "ttft=1s")])
@pytest.mark.parametrize("n", [600, 20])
def test_the_json_follows_its_schema(tmp_path: Path, more: tuple[str, ...], n: int) -> None:
    done = pdtrace("slow", str(table(tmp_path, fleet(n))), *more, "--format", "json")
    (answer,) = asked(done.stdout)["deployments"]
    assert answer["too_few"] is (n == 20)
    assert bool(answer["attributes"]) is (n == 600)


def test_the_schema_refuses_what_is_no_answer() -> None:
    empty = slow.Answer(())
    assert asked(empty) == {"schema": "pdtrace.slow/1", "deployments": []}
    with pytest.raises(jsonschema.ValidationError):
        asked('{"schema": "pdtrace.slow/2", "deployments": []}')
    with pytest.raises(jsonschema.ValidationError):
        asked('{"schema": "pdtrace.slow/1", "deployments": [{"id": "d"}]}')


def test_where_nobody_knows_a_duration_the_json_holds_too(con: Store) -> None:
    con.append("deployments", [{"deployment": "d", "name": "d"}])
    con.append("requests", [{"request": "r", "deployment": "d", "outcome": "unknown"}])
    (answer,) = asked(slow.slow(con))["deployments"]
    assert (answer["observer"], answer["too_few"]) == (None, True)
    assert answer["requests"]["selected"] == 0


def test_a_table_with_a_slow_worker(tmp_path: Path) -> None:
    path = str(table(tmp_path, fleet(600)))
    done = pdtrace("slow", path, "--where", "ttft_ms > 2000", "--format", "json")
    (answer,) = json.loads(done.stdout)["deployments"]
    named = [a for a in answer["attributes"] if a["stands_out"]]
    assert named[0]["title"] in {"worker", "decode worker"} and named[0]["proxy_of"] is None
    worst = max(named[0]["values"], key=lambda v: v["difference"])
    assert worst["value"].endswith("w3") and worst["selected"] == answer["requests"]["selected"]
    assert "tenant" in {a["name"] for a in answer["attributes"] if not a["stands_out"]}
    with Trace.read([path]) as trace:
        assert (
            trace.slow("ttft_ms > 2000").to_dict()["deployments"][0]["requests"]
            == answer["requests"]
        )
    text = " ".join(pdtrace("slow", path).stdout.split())
    assert (
        "No condition was given" in text
        and "slowest tenth by TTFT as the client saw it: 60 requests" in text
    )
    assert "w3" in pdtrace("slow", path, "--format", "md").stdout
    missed = " ".join(pdtrace("slow", path, "--slo", "ttft=1s").stdout.split())
    assert "known to miss a limit (all requests: ttft 1000 ms)" in missed


def test_where_no_duration_is_known_nobody_is_called_slow(tmp_path: Path) -> None:
    trace = {"resourceSpans": [{"scopeSpans": [{"spans": [_open_span(n) for n in range(30)]}]}]}
    path = tmp_path / "traces.json"
    path.write_text(json.dumps(trace), "utf-8")
    done = pdtrace("slow", str(path))
    assert done.returncode == 0
    assert "Of no request it is known whether it was slow" in done.stdout


def _open_span(n: int) -> dict[str, object]:
    """A request's span without an end."""
    return {
        "traceId": f"{n + 1:032x}", "spanId": f"{n + 1:016x}", "name": "llm_request", "kind": 2,
        "startTimeUnixNano": str(1_790_000_000_000_000_000 + n), "endTimeUnixNano": "0",
        "attributes": [{"key": "gen_ai.request.id", "value": {"stringValue": f"r{n}"}}],
    }  # fmt: skip


def test_nothing_stands_out_where_nothing_does(tmp_path: Path) -> None:
    rows = fleet(400).with_columns(ttft_ms=np.random.default_rng(2).random(400) * 100 + 50)
    done = pdtrace("slow", str(table(tmp_path, rows.drop("total_ms"))))
    assert "Nothing stands out" in done.stdout and "points" not in done.stdout


def test_twenty_rows_are_too_few(tmp_path: Path) -> None:
    done = pdtrace("slow", str(table(tmp_path, fleet(20))))
    assert done.returncode == 0
    assert "cannot be told from 2 selected requests" in " ".join(done.stdout.split())
    assert "points" not in done.stdout and "req-" in done.stdout


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("ttft_ms\n", None),
        ("id,ttft_ms\na,5\n", "0 requests"),
        ("id,ttft_ms,total_ms\n" + "".join(f"r{i},100,200\n" for i in range(50)), "0 requests"),
        (
            "id,input_tokens,total_ms\n" + "".join(f"r{i},{i},{i}\n" for i in range(1, 101)),
            "no first token is known",
        ),
        (
            "id,input_tokens,output_tokens\n" + "".join(f"r{i},{i},{i}\n" for i in range(1, 101)),
            "(no first token is known): none. Of 100 requests it is not known.",
        ),
    ],
)
def test_odd_tables_end_in_a_sentence(tmp_path: Path, rows: str, says: str | None) -> None:
    path = tmp_path / "t.csv"
    path.write_text(rows)
    done = pdtrace("slow", str(path))
    assert "Traceback" not in done.stderr and (
        says is None or says in " ".join(done.stdout.split())
    )


def test_what_made_the_groups_is_not_called_their_cause(tmp_path: Path) -> None:
    done = pdtrace("slow", str(table(tmp_path, fleet(300))), "--where", "input_tokens > 3000")
    assert "no column input_tokens" in done.stderr and "prompt_tokens" in done.stderr
    done = pdtrace("slow", str(table(tmp_path, fleet(300))), "--where", "prompt_tokens > 3000")
    assert "not tried, it is part of the condition: prompt tokens" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("ttft_ms >", "is not SQL"),
        ("", "names no column"),
        ("ttft_ms", "is a value, no condition"),
        ("1 = 1", "names no column"),
        ("nope > 1", "no column nope"),
        ("ttft_ms > (SELECT 1)", "a query of its own"),
        ("ttft_ms > 1), (true", "more than one condition"),
        ("true) FROM sources WHERE (true", "more than one condition"),
        ("true); DROP TABLE requests; SELECT (true", "is not SQL"),
        ("row_number() OVER () > 1 AND ttft_ms > 1", "a window"),
        ("ttft_ms > 1 -- ", None),
    ],
)
def test_a_condition_is_one_condition(con: Store, condition: str, says: str | None) -> None:
    if says is None:
        slow.slow(con, condition)
        return
    with pytest.raises(BadOption) as error:
        slow.slow(con, condition)
    assert says in error.value.message


def test_a_condition_reads_no_file(con: Store) -> None:
    with pytest.raises(PdtraceError):
        slow.slow(con, "ttft_ms > length(read_text('/etc/hostname'))")
    with pytest.raises(PdtraceError):
        slow.slow(con, "getenv('HOME') = note")


def test_failed_requests_are_asked_for_by_condition(tmp_path: Path) -> None:
    rows = fleet(300).with_columns(
        status=pl.when(pl.col("worker") == "w1").then(500).otherwise(200)
    )
    path = str(table(tmp_path, rows))
    found = Trace.read([path])
    (c,) = slow.slow(found.store).comparisons
    assert c.left_out == rows.filter(pl.col("worker") == "w1").height
    (c,) = slow.slow(found.store, "outcome = 'failed'").comparisons
    assert (
        c.attributes[0].name.endswith("worker")
        and c.selected == rows.filter(pl.col("worker") == "w1").height
    )
    assert all(a.association >= b.association or a.stands_out for a, b in pairwise(c.attributes))
    found.close()


def test_two_options_exclude_each_other() -> None:
    done = pdtrace("slow", "x", "--slo", "ttft=1s", "--where", "ttft_ms > 1")
    assert done.returncode == 2 and "exclude each other" in done.error
