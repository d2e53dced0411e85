"""Charts in text: bars from 0, gaps where nothing is known, readable at 40 columns, in ASCII and without colour."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from test_terminal import diagnosis, phase

from pdtrace import _sparks, terminal
from pdtrace._console import SafeConsole
from pdtrace.over_time import over_time
from pdtrace.store import Store

T0 = 1_790_000_000_000_000_000
S = 10**9


def stretch(n: int, **values: Any) -> dict[str, Any]:
    return {
        "bin": n, "start_ns": T0 + n * S, "end_ns": T0 + (n + 1) * S,
        "arrival_rate": 2.0, "ttft_p50_ms": 100.0, "tpot_p50_ms": None, "failed": 0,
    } | values  # fmt: skip


def test_bars_begin_at_zero_and_unknown_is_a_gap() -> None:
    assert _sparks.spark([0, 1, 2, None, 7]) == "▁▂▃ █"
    assert _sparks.spark([None, None]) == "  "
    assert _sparks.spark([0, 0]) == "▁▁"
    assert _sparks.spark([]) == ""


def test_only_what_moves_is_drawn_with_its_least_and_greatest() -> None:
    rows = [stretch(n, arrival_rate=1.0 + n, ttft_p50_ms=100.0 + n) for n in range(8)]
    assert _sparks.time_lines(rows, 80) == [
        "load     ▂▃▄▅▅▆▇█  1/s – 8/s",
        "8 stretches of 1.00 s, bars from 0; requests by their start",
    ]
    assert _sparks.time_lines([stretch(n) for n in range(8)], 80) == []


def test_stretches_without_requests_are_no_load_and_no_known_latency() -> None:
    rows = [stretch(0, ttft_p50_ms=50.0), stretch(3)]
    load, ttft, axis = _sparks.time_lines(rows, 80)
    assert load == "load     █▁▁█  0/s – 2/s"
    assert ttft == "TTFT p50 ▅  █  50.0 ms – 100 ms"
    assert axis.startswith("4 stretches")


def test_a_narrow_line_puts_its_numbers_below() -> None:
    rows = [stretch(n, ttft_p50_ms=10.0 * (n + 1)) for n in range(20)]
    lines = _sparks.time_lines(rows, 38)
    assert lines[:2] == [f"TTFT p50 {_sparks.spark([10.0 * (n + 1) for n in range(20)])}", "         10.0 ms – 200 ms"]  # fmt: skip
    assert max(map(len, lines[:-1])) <= 38


def test_phases_as_letters_fill_the_bar_and_are_explained() -> None:
    parts = [phase(phase="queue", share_of_ttft=0.25), phase(phase="prefill", share_of_ttft=0.5), phase(phase="decode", share_of_ttft=0.0)]  # fmt: skip
    assert _sparks.stacked([*parts, phase(phase="queue", share_of_ttft=0.25)], 20) == [
        "qqqqqqqqqqpppppppppp",
        "q queue 50 %, p prefill 50 %",
    ]
    assert _sparks.stacked(parts[:1], 20) == []
    assert _sparks.stacked([phase(share_of_ttft=None)], 20) == []


def page(width: int, series: Any, *, tty: bool, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    out = SafeConsole(file=stream, width=width, highlight=False, emoji=False, force_terminal=tty, no_color=True)  # fmt: skip
    phases = (phase(phase="queue", share_of_ttft=0.25), phase(phase="prefill", share_of_ttft=0.75))
    terminal.write_diagnosis(diagnosis(phases=phases), out, series)
    stream.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_charts_fit_forty_columns_in_any_encoding_without_colour(encoding: str) -> None:
    series = {"d": [stretch(n, arrival_rate=float(n)) for n in range(20)]}
    text = page(40, series, tty=True, encoding=encoding)
    assert "\x1b[3" not in text  # no colour
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = text.split("Over time")[1].split("Where the time went")[0].splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert any(("▁" if encoding == "utf-8" else "_") in line for line in lines)
    assert "?" not in "".join(lines)
    assert "qqqqqqqqqp" in text


def test_piped_text_has_no_charts() -> None:
    text = page(60, {}, tty=False)
    assert "Over time" not in text
    assert "qqqq" not in text
    assert terminal.chart_cells("text") == 0  # the tests' stdout is no terminal
    assert Console(file=io.StringIO()).is_terminal is False


def test_too_few_requests_for_a_chart_are_none(store: Store) -> None:
    store.append("requests", [{"request": f"r{n}", "deployment": "d", "start_ns": T0 + n * S, "outcome": "completed"} for n in range(41)])  # fmt: skip
    assert over_time(store, 0) == {}
    assert over_time(store, 40) == {}
    found = over_time(store, 20)
    assert list(found) == ["d"]
    assert sum(row["arrivals"] for row in found["d"]) == 41
    store.execute(f"UPDATE requests SET start_ns = {T0}")
    assert _sparks.time_lines(over_time(store, 20).get("d", [stretch(0), stretch(1)]), 80) == []
