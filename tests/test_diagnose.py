"""The smallest case: small tables of requests as people have them, and what the diagnosis says of each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from pdtrace.api import Trace
from pdtrace.diagnosis import Deployment, Diagnosis, evaluate
from pdtrace.model import Slo
from pdtrace.options import parse_check

Rows = list[dict[str, float]]
SHORT, LONG = (200, 700), (5_000, 12_000)


def requests(
    n: int = 20,
    *,
    seed: int = 1,
    long_prompts: int = 0,
    long_answers: int = 0,
    base_s: float = 0.2,
    per_1000_s: float = 0.05,
    gap_s: float = 0.02,
    gap: Callable[[int, float], float] | None = None,
    first: Callable[[int, float], float] | None = None,
) -> Rows:
    """Rows with input, output, ttft and total in seconds; `first` and `gap` change row i's value."""
    rng = random.Random(seed)
    rows: Rows = []
    for i in range(n):
        prompt = rng.randint(*(LONG if i % 3 == 2 and i // 3 < long_prompts else SHORT))
        answer = rng.randint(*((900, 1_500) if i % 4 == 1 and i // 4 < long_answers else (80, 300)))
        ttft = base_s + per_1000_s * prompt / 1000 + rng.uniform(0, 0.04)
        pace = gap_s * rng.uniform(0.95, 1.05)
        ttft = first(i, ttft) if first else ttft
        pace = gap(i, pace) if gap else pace
        if gap and answer >= 900:
            pace = gap(-1, pace)
        rows.append(
            {"input": prompt, "output": answer, "ttft": ttft, "total": ttft + pace * (answer - 1)}
        )
    return rows


def text(header: str, rows: Iterable[Iterable[object]], separator: str = ",") -> str:
    """A delimited table."""
    return "\n".join([header, *(separator.join(map(str, row)) for row in rows)]) + "\n"


def plain(rows: Rows) -> str:
    """As in the mission: seconds, no units in the header."""
    return text(
        "request,input_tokens,output_tokens,TTFT,total_latency,tokens/sec,note",
        (
            (f"r{i:02}", r["input"], r["output"], f"{r['ttft']:.3f}", f"{r['total']:.3f}",
             f"{(r['output'] - 1) / (r['total'] - r['ttft']):.1f}", "")
            for i, r in enumerate(rows, 1)
        ),
    )  # fmt: skip


def managed_api() -> str:
    """A managed API's usage export: arrival, model, ms, status, cached tokens; long prompts come late."""
    return text(
        "Timestamp,Request ID,Model,Prompt Tokens,Cached Tokens,Completion Tokens,Time to First Token (ms),Latency (ms),Status",
        (
            (f"2026-11-03T09:{i:02}:12.250Z", f"req_{i * 7919:08x}", "gpt-large", r["input"], 0, r["output"],
             round(r["ttft"] * 1e3), round(r["total"] * 1e3), 200)
            for i, r in enumerate(requests(long_prompts=6, per_1000_s=0.4))
        ),
    )  # fmt: skip


def excel_german() -> str:
    """Excel in German: semicolons, decimal commas, thousands points; streams of long answers slow down."""

    def comma(value: float, digits: int = 2) -> str:
        return f"{value:,.{digits}f}".replace(",", "_").replace(".", ",").replace("_", ".")

    rows = requests(long_answers=5, gap=lambda i, pace: pace * (4 if i == -1 else 1))
    return text(
        "Anfrage;Eingabe-Tokens;Ausgabe-Tokens;Zeit bis erstes Token (s);Gesamtzeit (s);Bemerkung",
        (
            (i, comma(r["input"], 0), comma(r["output"], 0), comma(r["ttft"], 3), comma(r["total"], 3), "Vertrag")
            for i, r in enumerate(rows, 1)
        ),
        ";",
    )  # fmt: skip


def korean() -> str:
    """Korean headers, milliseconds; long prompts come late."""
    return text(
        "요청,입력 토큰,출력 토큰,첫 토큰 지연(ms),총 지연(ms),비고",
        (
            (f"문서-{i:02}", r["input"], r["output"], round(r["ttft"] * 1e3), round(r["total"] * 1e3),
             "긴 문서" if r["input"] > 2000 else "짧은 대화")
            for i, r in enumerate(requests(long_prompts=6, per_1000_s=0.4), 1)
        ),
    )  # fmt: skip


def chinese() -> str:
    """Chinese headers, seconds; even."""
    return text(
        "请求编号\t输入tokens\t输出tokens\t首token延迟(秒)\t总耗时(秒)\t备注",
        (
            (f"会话{i:02}", r["input"], r["output"], f"{r['ttft']:.2f}", f"{r['total']:.2f}", "")
            for i, r in enumerate(requests(), 1)
        ),
        "\t",
    )


def rates_only() -> str:
    """Tokens and tokens per second, no time at all."""
    return text(
        "id,prompt_tokens,completion_tokens,tokens_per_second",
        (
            (i, r["input"], r["output"], f"{(r['output'] - 1) / (r['total'] - r['ttft']):.1f}")
            for i, r in enumerate(requests(gap=lambda i, p: p * (5 if i in (4, 9, 13) else 1)), 1)
        ),
    )


def no_ttft() -> str:
    """Whole durations only."""
    return text(
        "request,input_tokens,output_tokens,latency_s",
        (
            (i, r["input"], r["output"], f"{r['total']:.2f}")
            for i, r in enumerate(requests(long_answers=4), 1)
        ),
    )


def no_tokens() -> str:
    """Latencies without token counts; six first tokens are late and nobody can say why."""
    rows = requests(first=lambda i, t: t * (9 if i % 3 == 2 else 1))
    return text(
        "id,ttft_ms,total_ms",
        ((i, round(r["ttft"] * 1e3), round(r["total"] * 1e3)) for i, r in enumerate(rows, 1)),
    )


def not_streamed() -> str:
    """TTFT equals the total: answers that were not streamed."""
    return text(
        "id,input_tokens,output_tokens,ttft_ms,total_ms",
        (
            (i, r["input"], r["output"], round(r["total"] * 1e3), round(r["total"] * 1e3))
            for i, r in enumerate(requests(), 1)
        ),
    )


def errors() -> str:
    """Four requests failed with a TTFT of zero."""
    return text(
        "id,status,input_tokens,output_tokens,ttft_ms,total_ms,error",
        (
            (i, 503, r["input"], 0, 0, 12, "overloaded") if i % 5 == 0
            else (i, 200, r["input"], r["output"], round(r["ttft"] * 1e3), round(r["total"] * 1e3), "")
            for i, r in enumerate(requests(), 1)
        ),
    )  # fmt: skip


def one_outlier() -> str:
    """One request alone waited long, with a prompt like the others'."""
    return plain(requests(first=lambda i, t: 6.4 if i == 11 else t))


def all_slow() -> str:
    """Everything takes equally long: nothing in the table stands out."""
    return plain(requests(base_s=8.0, gap_s=0.15))


def queueing() -> str:
    """First tokens late in a burst, whatever the prompt."""
    return plain(requests(first=lambda i, t: t + (1.5 + 0.4 * (i - 7) if 7 <= i < 14 else 0)))


def slow_on_long_answers() -> str:
    """Streams of long answers slow down."""
    return plain(requests(long_answers=5, gap=lambda i, pace: pace * (4 if i == -1 else 1)))


def slow_at_random() -> str:
    """Some streams are slow, whatever their length."""
    return plain(requests(gap=lambda i, pace: pace * (5 if i in (3, 8, 12, 16) else 1)))


def two_models() -> str:
    """Two models in one table: a small one and one five times slower."""
    small, large = requests(10, seed=2), requests(10, seed=3, base_s=1.2, gap_s=0.1)
    rows = [row for pair in zip(small, large, strict=True) for row in pair]
    return text(
        "request,model,input_tokens,output_tokens,ttft_s,latency_s",
        (
            (i, "small-8b" if i % 2 else "large-405b", r["input"], r["output"], f"{r['ttft']:.3f}", f"{r['total']:.3f}")
            for i, r in enumerate(rows, 1)
        ),
    )  # fmt: skip


def cached() -> str:
    """Long prompts that were found in the cache are quick, the others are late."""
    rows = requests(long_prompts=6, per_1000_s=0.4)
    for i, row in enumerate(rows):
        row["cached"] = row["input"] - 300 if row["input"] > 2000 and i % 2 else 0
        if row["cached"]:
            row["total"] -= row["ttft"] - 0.3
            row["ttft"] = 0.3
    return text(
        "id,input_tokens,cached_tokens,output_tokens,ttft_ms,e2e_ms",
        (
            (i, r["input"], int(r["cached"]), r["output"], round(r["ttft"] * 1e3), round(r["total"] * 1e3))
            for i, r in enumerate(rows, 1)
        ),
    )  # fmt: skip


def three_rows() -> str:
    """Three rows: too few for anything."""
    return plain(requests(3, first=lambda i, t: 5.0 if i == 2 else t))


def one_row() -> str:
    """One row."""
    return plain(requests(1))


def zoneless() -> str:
    """Instants without a zone, and columns that nobody knows."""
    return text(
        "started,finished,prompt tokens,completion tokens,TTFT,gpu_temp,region",
        (
            (f"2026-11-03 09:{i:02}:12.250", f"2026-11-03 09:{i:02}:{12 + r['total']:06.3f}", r["input"], r["output"],
             round(r["ttft"] * 1e3), 61, "eu-1")
            for i, r in enumerate(requests(), 1)
        ),
    )  # fmt: skip


def diagnosed(
    tmp_path: Path, content: str, slo: Slo | None = None, name: str = "requests.csv"
) -> Diagnosis:
    path = tmp_path / name
    path.write_text(content, "utf-8")
    diagnosis = Trace.read([path]).diagnose(slo)
    schema = json.loads((files("pdtrace.schemas") / "diagnosis.schema.json").read_text("utf-8"))
    jsonschema.validate(json.loads(json.dumps(diagnosis.to_dict())), schema)
    return diagnosis


def only(diagnosis: Diagnosis) -> Deployment:
    (deployment,) = diagnosis.deployments
    return deployment


def marked(deployment: Deployment, key: str) -> int:
    return sum(1 for row in deployment.marks if row[key])


PROMPTS = "First-token time on long prompts is the problem: try prefix caching or shorter contexts"
ON_LONG = "First tokens are fine; the gaps between tokens grow on long answers"
EVEN = "No first token or stream stands out"


@pytest.mark.parametrize(
    ("table", "says", "slow_first", "slow_streams"),
    [
        (managed_api, PROMPTS, 6, 0),
        (excel_german, ON_LONG, 0, 5),
        (korean, PROMPTS, 6, 0),
        (chinese, EVEN, 0, 0),
        (rates_only, "3 of 20 streams are slow", 0, 3),
        (no_ttft, "to tell late first tokens from slow streams, stream the answers", 0, 0),
        (no_tokens, "prompt lengths are not in these data: add input tokens", 6, 0),
        (not_streamed, "stream the answers and log when the first chunk arrives", 0, 0),
        (errors, "See to the failures first", 0, 0),
        (one_outlier, "One request (r12) waited 6.40 s for its first token", 1, 0),
        (all_slow, EVEN, 0, 0),
        (queueing, "without a clear link to prompt length", 7, 0),
        (slow_on_long_answers, ON_LONG, 0, 5),
        (slow_at_random, "4 of 20 streams are slow, whatever the length of the answer", 0, 4),
        (two_models, EVEN, 0, 0),
        (cached, "long prompts that were not in the cache is the problem", 3, 0),
        (three_rows, "3 requests: too few to call anything slow", 0, 0),
        (one_row, "1 request: too few to call anything slow", 0, 0),
        (zoneless, EVEN, 0, 0),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_small_table_ends_with_what_to_do_next(
    tmp_path: Path, table: Callable[[], str], says: str, slow_first: int, slow_streams: int
) -> None:
    deployment = only(diagnosed(tmp_path, table()))
    closing = deployment.verdict.rpartition(". ")[2]
    assert says in deployment.verdict and closing.endswith(".")
    assert (marked(deployment, "slow_first_token"), marked(deployment, "slow_stream")) == (
        slow_first,
        slow_streams,
    )
    assert len(deployment.marks) == deployment.requests["count"]
    assert "faster" not in deployment.verdict and deployment.name == "requests.csv"


def test_whether_lengths_drive_is_said_with_its_evidence(tmp_path: Path) -> None:
    rows = {row["measure"]: row for row in only(diagnosed(tmp_path, managed_api())).dependence}
    assert (rows["ttft"]["tokens"], rows["ttft"]["follows"], rows["ttft"]["pairs"]) == (
        "input",
        True,
        20,
    )
    assert rows["ttft"]["slope_ms"] == pytest.approx(400, rel=0.02)
    answers = {row["measure"]: row for row in only(diagnosed(tmp_path, no_ttft())).dependence}
    assert answers["e2e"]["follows"] is True and "ttft" not in answers


def test_nine_rows_show_no_correlation(tmp_path: Path) -> None:
    deployment = only(diagnosed(tmp_path, plain(requests(9, long_prompts=3, per_1000_s=0.4))))
    assert deployment.dependence == () and marked(deployment, "slow_first_token") == 3
    assert "9 requests with known prompt lengths are too few to say" in deployment.verdict


def test_how_a_table_was_read_is_said(tmp_path: Path) -> None:
    notes = "\n".join(only(diagnosed(tmp_path, zoneless())).notes)
    assert "TTFT taken as milliseconds, because" in notes
    assert "the instants name no zone" in notes and "columns not used: gpu_temp, region" in notes
    assert "a row with an answer counts as completed" in notes
    assert "first-token time equals the total" in "\n".join(
        only(diagnosed(tmp_path, not_streamed())).notes
    )
    assert "4 rows with a first-token time of 0" in "\n".join(
        only(diagnosed(tmp_path, errors())).notes
    )
    assert "state only tokens per second" in "\n".join(
        only(diagnosed(tmp_path, rates_only())).notes
    )


def test_two_models_are_judged_each_by_itself(tmp_path: Path) -> None:
    deployment = only(diagnosed(tmp_path, two_models()))
    assert any("2 models, each judged by itself" in note for note in deployment.notes)
    assert not [f.id for f in deployment.findings if f.id in {"slow_first_token", "slow_stream"}]


def test_failed_rows_are_marked_and_not_in_the_figures(tmp_path: Path) -> None:
    deployment = only(diagnosed(tmp_path, errors()))
    assert [row["mark"] for row in deployment.marks].count("failed (overloaded)") == 4
    assert {row["count"] for row in deployment.latency} == {16}


def test_rows_without_ids_are_named_by_their_number(tmp_path: Path) -> None:
    assert only(diagnosed(tmp_path, zoneless())).marks[0]["label"] == "row 1"


def test_of_a_long_table_the_slow_ones_stand_first(tmp_path: Path) -> None:
    rows = requests(2_000, first=lambda i, t: t + i if i in (700, 1_500, 1_999) else t)
    deployment = only(diagnosed(tmp_path, plain(rows)))
    assert len(deployment.marks) == 3 and deployment.requests["count"] == 2_000
    assert [row["label"] for row in deployment.marks[:3]] == ["r2000", "r1501", "r701"]
    assert marked(deployment, "slow_first_token") == 3


def test_limits_take_the_place_of_the_typical_value(tmp_path: Path) -> None:
    deployment = only(diagnosed(tmp_path, three_rows(), Slo(ttft_ms=500, tpot_ms=50)))
    assert marked(deployment, "slow_first_token") == 1 and "too few" not in deployment.verdict
    kept = only(diagnosed(tmp_path, one_row(), Slo(ttft_ms=500)))
    assert (
        "1 of 1 request are known" not in kept.verdict and "meet the limits given" in kept.verdict
    )


def test_attainment_has_both_denominators_and_its_interval(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, errors(), Slo(ttft_ms=500))
    row = next(row for row in only(diagnosis).slo if row["metric"] == "all")
    assert (row["good"], row["arrivals"], row["completed"]) == (16, 20, 16)
    assert (row["attainment"], row["attainment_of_completed"]) == (0.8, 1.0)
    low, high = row["interval"]
    assert low == pytest.approx(0.584, abs=0.01) and high == pytest.approx(
        0.919, abs=0.01
    )  # Wilson
    ((_, value, holds),) = evaluate(diagnosis, parse_check("attainment>=90%"))
    assert (value, holds) == (0.8, False)


def test_one_token_answers_meet_any_pace(tmp_path: Path) -> None:
    table = text("id,input_tokens,output_tokens,ttft_ms,total_ms",
                 [(i, 100, 1 if i < 3 else 50, 200, 200 if i < 3 else 1_200) for i in range(6)])  # fmt: skip
    row = next(
        r for r in only(diagnosed(tmp_path, table, Slo(tpot_ms=50))).slo if r["metric"] == "tpot_ms"
    )
    assert (row["good"], row["single"], row["unknown"]) == (6, 3, 0)


METRICS = """# HELP x_time_to_first_token_seconds t
# TYPE x_time_to_first_token_seconds histogram
x_time_to_first_token_seconds_bucket{le="0.5"} 10
x_time_to_first_token_seconds_bucket{le="+Inf"} 20
x_time_to_first_token_seconds_sum 8.0
x_time_to_first_token_seconds_count 20
# TYPE x_num_requests_running gauge
x_num_requests_running 3
"""


def test_metrics_alone_give_means_and_no_percentiles(tmp_path: Path) -> None:
    deployment = only(diagnosed(tmp_path, METRICS, name="metrics.prom"))
    means = {row["name"]: row for row in deployment.figures if row["kind"] == "mean"}
    first = means["x_time_to_first_token_seconds"]
    assert (first["mean"], first["count"], first["unit"], first["since_start"]) == (
        0.4,
        20,
        "s",
        True,
    )
    assert first["level"] == "D" and first["p50"] is None and deployment.latency == ()
    assert (
        "No requests in these data" in deployment.verdict and "no percentile" in deployment.verdict
    )


def test_a_ttft_of_those_who_stayed_says_who_is_missing(tmp_path: Path) -> None:
    """Clients left after 3 and 5 s: their waits are in no TTFT, and the figure says so, in text and JSON."""
    rows = [f"r{n},100,1000,completed" for n in range(8)]
    rows += ["a,,3000,aborted", "b,,5000,aborted", "c,90,500,aborted", "d,,10,failed"]
    path = tmp_path / "requests.csv"
    path.write_text("\n".join(["request_id,ttft_ms,e2e_ms,status", *rows]), "utf-8")
    with Trace.read([path]) as trace:
        found = {
            row["metric"]: row for row in trace.diagnose().to_dict()["deployments"][0]["latency"]
        }
    assert found["ttft_ms"]["count"] == 8
    assert found["ttft_ms"]["definition"].endswith(
        "; completed requests only, without the 1 failed and 3 aborted: of 3 of these no first token is on record"
        " (the aborted ones ended after a median of 4.00 s), so waits that were not sat out are missing here"
    )
    assert "completed requests only" not in found["e2e_ms"]["definition"]
    path.write_text("\n".join(["request_id,ttft_ms,e2e_ms,status", *rows[:8]]), "utf-8")
    with Trace.read([path]) as trace:
        assert "completed requests only" not in str(trace.diagnose().to_dict())
