"""Small tables of requests as people have them, each written out as text: the smallest case of pdtrace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

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
        rows.append({"input": prompt, "output": answer, "ttft": ttft, "total": ttft + pace * (answer - 1)})
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


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        managed_api, excel_german, korean, chinese, rates_only, no_ttft, no_tokens, not_streamed, errors,
        one_outlier, all_slow, queueing, slow_on_long_answers, slow_at_random, two_models, cached, three_rows,
        one_row, zoneless,
    )
}  # fmt: skip
