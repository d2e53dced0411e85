"""vLLM logs of a split without the lines of its start: nobody says who did which half."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtrace.api import Trace


def log(pid: int, prefix: str, further: str = "") -> str:
    added = "".join(
        f"(APIServer pid={pid}) INFO 11-29 23:10:{10 + n} [async_llm.py:578] Added request cmpl-{prefix}-{n}-0-9f7b3b2{n}.\n"
        for n in range(4)
    )
    return added + further


def moved(successful: int) -> str:
    return (
        "(APIServer pid=7004) INFO 11-29 23:10:47 [metrics.py:103] KV Transfer metrics: "
        f"Num successful transfers={successful}, Avg xfer time (ms)=5.74, Num failed transfers=0\n"
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "roles"),
    [
        ("pd", log(7004, "pd", moved(4)), [None, None]),  # one counts, the other shares its requests
        ("alone", log(7004, "pd", moved(4)), ["aggregated", None]),
        ("alone", log(7004, "pd", moved(0)), ["aggregated", "aggregated"]),
    ],
)  # fmt: skip
def test_a_server_that_counts_kv_movements_is_not_taken_for_aggregated(
    tmp_path: Path, prefill: str, decode: str, roles: list[str | None]
) -> None:
    (tmp_path / "prefill.log").write_text(log(7003, prefill))
    (tmp_path / "decode.log").write_text(decode)
    workers = Trace.read([tmp_path]).sql("SELECT role FROM workers ORDER BY worker")
    assert workers["role"].to_list() == roles
