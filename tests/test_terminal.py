"""What people see stays readable: any width, any encoding, long names, nothing broken inside numbers."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from typing import Any

import polars as pl
import pytest
from rich.cells import cell_len
from rich.console import Console

from pdtrace import _query_rows, terminal
from pdtrace._grid import Column, grid, wrapped
from pdtrace._paper import Plain, encodable, put, rule
from pdtrace.diagnosis import Deployment, Diagnosis
from pdtrace.markdown import diagnosis_markdown
from pdtrace.model import Finding
from pdtrace.phrases import shorten, slo_line, worker_names

LONG_NAME = (
    "a-very-long-deployment-name-of-some-cluster-in-some-region-with-a-date-2026-11-29T22-57-56"
)


def latency(**values: Any) -> dict[str, Any]:
    row = {
        "metric": "ttft_ms", "observer": "client", "headline": True, "definition": "request sent -> first token received",
        "basis": "measured", "level": "B", "count": 362, "mean": 120.0, "p50": 100.0, "p90": 410.0, "p95": 500.0,
        "p99": 1100.0, "max": 1400.0,
    }  # fmt: skip
    return row | values


def phase(**values: Any) -> dict[str, Any]:
    row = {
        "phase": "prefill", "detail": "prefill_wall", "count": 362, "p50_ms": 57.3, "p90_ms": 227.0, "p99_ms": 909.0,
        "share_of_ttft": 0.6, "share_of_e2e": 0.16, "basis": "placed", "level": "B",
    }  # fmt: skip
    return row | values


def diagnosis(**values: Any) -> Diagnosis:
    finding = Finding(
        id="slow_first_token", deployment="d", severity="warning", title="first token slow on 64 of 358 requests",
        detail="Above what is ordinary in this run (300 ms; typical 100 ms). TTFT p50 100 ms, p95 578 ms, p99 1.10 s.",
        level="B", value=578.0, unit="ms", interval=(472.0, 892.0), share=0.3, requests=64, cost_s=28.6,
        workers=(), culprits=(), sources=("/data/run/server.log", "/data/run/bench.json"),
        assumptions=("cached tokens are unknown: whole prompts stand for what had to be computed",),
        suggestions=("prefix caching or shorter contexts before splitting prefill and decode",),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "id": "d", "name": LONG_NAME, "mode": "disaggregated",
        "window": ("2026-11-29T22:57:56.000Z", "2026-11-29T23:01:43.428Z"),
        "workers": ({"worker": "instance:24456d7e-aaaa-bbbb-cccc-ddddeeeeffff", "role": "prefill", "name": None},),
        "verdict": "TTFT as the client saw it: p50 100 ms, p99 1.10 s; prefill took 60 % of it.",
        "requests": {"count": 362, "completed": 358, "failed": 0, "aborted": 0, "unknown": 4},
        "latency": (latency(), latency(metric="e2e_ms", definition="start to end of the request as the client saw it")),
        "phases": (phase(), phase(phase="kv_wait", detail="kv_wait_upper_bound", basis="upper_bound")),
        "findings": (finding,),
    }  # fmt: skip
    source = {
        "path": "/data/run/server.log", "collector": "vllm_log", "used": True, "why": "", "rows_read": 15_273,
        "rows_kept": 14_226, "rows_skipped": 1_047, "skipped_reasons": {},
    }  # fmt: skip
    return Diagnosis(
        "Read 1 source.", (source,), (Deployment(**fields | values),), ("a claim",), ("an unknown",)
    )


def shown(what: Diagnosis, width: int) -> list[str]:
    stream = io.StringIO()
    terminal.write_diagnosis(what, Console(file=stream, width=width, highlight=False, emoji=False))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 110, 160])
def test_no_line_is_wider_than_the_screen_and_none_ends_in_blanks(width: int) -> None:
    lines = shown(diagnosis(), width)
    assert max(map(cell_len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("width", [20, 30])
def test_on_a_very_narrow_screen_numbers_stand_below_each_other_uncut(width: int) -> None:
    columns = [Column("what"), *(Column(f"p{n}", right=True) for n in (50, 90, 99))]
    out = io.StringIO()
    rows = [[f"request {n}", f"{n}.111 ms", f"{n}.222 ms", f"{n}.333 ms"] for n in (1, 2)]
    grid(Plain(out, width), columns, rows)
    lines = out.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    assert "…" not in out.getvalue()
    for n in (1, 2):
        told = " ".join(line for line in lines if line.startswith(f"request {n}"))
        assert all(f"{n}.{part} ms" in told for part in (111, 222, 333))


@pytest.mark.parametrize("width", [60, 80, 110])
def test_a_number_and_its_unit_stay_on_one_line(width: int) -> None:
    for line in shown(diagnosis(), width):
        assert not re.search(r"\d$", line) or "requests" not in line
        assert not re.match(r"^\s*(ms|s|%)\b", line)


def test_narrow_screens_drop_bars_and_columns_but_no_names_of_phases() -> None:
    narrow, wide = ("\n".join(shown(diagnosis(), width)) for width in (70, 120))
    assert "█" in wide and "█" not in narrow
    assert "kv_wait_upper_bound" in narrow and "up to (B)" in wide
    assert "≤ 57.3 ms" in narrow and "≤: up to so much" in narrow


def test_a_definition_is_told_once() -> None:
    text = "\n".join(shown(diagnosis(), 110))
    assert text.count("request sent -> first token received") == 1


def test_few_values_have_no_99th_percentile() -> None:
    few = diagnosis(latency=(latency(count=20),), phases=(phase(count=20),))
    text = "\n".join(shown(few, 110))
    assert "p99" not in text.partition("Findings")[0].partition("Latency")[2]


def test_old_encodings_get_plain_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict", write_through=True)
    monkeypatch.setattr("sys.stdout", stream)
    terminal.show_diagnosis(diagnosis(), "text")
    terminal.show_diagnosis(diagnosis(), "md")
    text = raw.getvalue().decode("ascii")
    assert "<= 57.3 ms" in text or "< 57.3 ms" in text
    assert encodable("긴 문서 …", "cp1252") == "? ?? …"


def test_a_row_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        grid(Console(file=io.StringIO()), [Column("a")], [["1", "2"]])


def test_words_wrap_and_long_words_fold() -> None:
    assert wrapped("it took 49.4 s in all", 12) == ["it took", "49.4 s in", "all"]
    assert wrapped("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]


def wide_rows(n: int) -> pl.DataFrame:
    return pl.DataFrame({f"column_{c}": [f"value {c} {'y' * 30}"] * n for c in range(8)})


def test_few_wide_rows_stand_upright(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _query_rows.show_rows(wide_rows(2), "text", 50)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["column", "row", "1", "row", "2"] and any(
        line.startswith("column_7") for line in lines
    )


def test_many_wide_rows_lose_columns_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _query_rows.show_rows(wide_rows(5), "text", 50)
    out = capsys.readouterr().out
    assert max(map(cell_len, out.splitlines())) <= 80 and "columns not shown: column_" in out


def test_workers_get_short_names() -> None:
    rows = [
        {"worker": "instance:24456d7e-aaaa-bbbb-cccc-ddddeeeeffff", "name": None, "role": "decode"},
        {"worker": "worker_id:9155000000000000001", "name": None, "role": "decode"},
        {"worker": "pod:vllm-p-0", "name": "vllm-p-0", "role": "prefill"},
    ]
    assert worker_names(rows) == {
        rows[0]["worker"]: "decode-1", rows[1]["worker"]: "decode-2", rows[2]["worker"]: "vllm-p-0",
    }  # fmt: skip
    assert shorten("instance:24456d7e-aaaa-bbbb-cccc-ddddeeeeffff") == "instance:24456d7e…"


def test_a_limit_is_told_with_both_denominators() -> None:
    row = {
        "metric": "ttft_ms", "limit_ms": 500.0, "good": 16, "arrivals": 20, "completed": 16, "unknown": 0, "single": 0,
        "attainment": 0.8, "interval": [0.58, 0.92], "attainment_of_completed": 1.0,
    }  # fmt: skip
    line = slo_line(row)
    assert "met by 16 of 20 arrivals = 80 % (95 % interval 58 % – 92 %)" in line
    assert "100 % of the 16 completed" in line


def test_markdown_tables_cannot_be_broken_by_names() -> None:
    text = diagnosis_markdown(diagnosis(name="a|b <script>\nc"))
    assert "## a\\|b &lt;script> c" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {
        line.count("|") - line.count("\\|") for line in rows if "TTFT" in line and "client" in line
    } == {9}


LINES = [
    "", "plain", "trailing  ", "  indented", "ends … here – “quoted” ≤ 3 µs", "█" * 12 + "·" * 3, "漢字 wide", "a" * 41,
    "tab\there", "two\nlines", "\x1b[31mred\x07", "\u202eback", "no\xa0break", "wide words " * 9, "[bold]markup[/]",
    ":smile: 漢字" * 6, "surrogate \ud800", "combining e\u0301",
]  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1", "cp437"])
@pytest.mark.parametrize("width", [40, 12])
def test_a_pipe_gets_what_a_console_without_colour_prints(encoding: str, width: int) -> None:
    def printed(*, plain: bool) -> bytes:
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding, errors="replace")
        paper = Plain(stream, width)
        out = paper if plain else paper.console()
        for line in LINES:
            put(out, line, "bold", mark="red", cells=3)
            put(out, line, whole=True)
            rule(out, line)
        stream.flush()
        return raw.getvalue()

    assert printed(plain=True) == printed(plain=False)


def test_rich_is_not_loaded_for_lines_that_it_would_not_change() -> None:
    code = """
import sys
from pdtrace import terminal
terminal.show_notes(["a line", "another – with signs"])
terminal.show_table([{"name": "a", "what": "b " * 80}])
terminal.console()
assert "rich.console" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("a line\nanother – with signs\n")
