"""A time per token that a source states, beside one that its instants give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdtrace.api import Trace

STATED = "mean time per token as the source states it (its formula is not known)"
COMPUTED = "time after the first token / (output tokens - 1); mean over requests"
INVERSE = "inverse of the tokens per second that the source states (the wait for the first token may be in it)"


@pytest.mark.parametrize(
    ("table", "basis", "level", "definition"),
    [
        # instants of start and end do not give it: no first token
        ("id,start,end,output_tokens,mean_itl_ms\na,2026-01-01T00:00:00Z,2026-01-01T00:00:02Z,20,12.5\n", "reported", "C", STATED),
        ("id,output_tokens,mean_itl_ms\na,20,12.5\n", "reported", "C", STATED),
        ("id,ttft_ms,e2e_ms,output_tokens\na,50,300,21\n", "reported", "C", COMPUTED),
        ("id,start,ttft_ms,e2e_ms,output_tokens\na,2026-01-01T00:00:00Z,50,300,21\n", "measured", "B", COMPUTED),
        ("id,output_tokens,tokens_per_second\na,21,80\n", "reported", "C", INVERSE),
    ],
)  # fmt: skip
def test_what_the_time_per_token_is(
    tmp_path: Path, table: str, basis: str, level: str, definition: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(table)
    (row,) = _tpot(path)
    assert row["p50"] == 12.5
    assert (row["basis"], row["level"], row["definition"]) == (basis, level, definition)


def _tpot(path: Path) -> list[dict[str, Any]]:
    (deployment,) = Trace.read([path]).diagnose().deployments
    return [dict(row) for row in deployment.latency if row["metric"] == "tpot_ms"]
