"""Hand-made rows that tests of several findings share, and what a finding says of them."""

from __future__ import annotations

from typing import Any

from pdtrace.store import Store

MS = 1_000_000
Row = dict[str, Any]


def request(n: int, **more: Any) -> Row:
    """A completed request of deployment d: TTFT 100 ms, 101 tokens at 10 ms, prompt of 1000."""
    row: Row = {
        "request": f"r{n}", "deployment": "d", "outcome": "completed", "ttft_ms": 100.0 + n % 5,
        "tpot_ms": 10.0 + 0.1 * (n % 5), "prompt_tokens": 1000 + n % 7, "output_tokens": 101,
        "start_ns": n * 1000 * MS,
    } | more  # fmt: skip
    if row["ttft_ms"] is not None and row["start_ns"] is not None:
        row.setdefault("first_token_ns", row["start_ns"] + round(row["ttft_ms"] * MS))
    if row["ttft_ms"] is not None and row["output_tokens"] is not None:
        row.setdefault("e2e_ms", row["ttft_ms"] + (row["output_tokens"] - 1) * row["tpot_ms"])
    if row.get("e2e_ms") is not None and row["start_ns"] is not None:
        row.setdefault("end_ns", row["start_ns"] + round(row["e2e_ms"] * MS))
    return row


def phase(
    n: int, detail: str, start_ms: float, end_ms: float, phase: str, basis: str = "measured"
) -> Row:
    """A phase of request n; times from its start."""
    start = n * 1000 * MS
    return {
        "request": f"r{n}", "phase": phase, "detail": detail, "basis": basis,
        "start_ns": start + round(start_ms * MS), "end_ns": start + round(end_ms * MS),
    }  # fmt: skip


def one(con: Store, name: str, **params: Any) -> Row:
    rows = con.query(name, **params).to_dicts()
    assert len(rows) == 1, rows
    return rows[0]


def none(con: Store, name: str, **params: Any) -> None:
    assert con.query(name, **params).to_dicts() == []


def worker(name: str, role: str = "aggregated", deployment: str = "d") -> Row:
    return {"worker": name, "deployment": deployment, "role": role}


def queued(con: Store, detail: str, name: str, wait_ms: float, basis: str = "measured") -> None:
    """20 requests that wait, then prefill until 100 ms, then decode."""
    for n in range(20):
        con.append(
            "requests",
            [request(n, ttft_ms=100.0, tpot_ms=10.0, prefill_worker="p", decode_worker="q")],
        )
        con.append("phases", [
            phase(n, detail, 0, wait_ms, name, basis), phase(n, "prefill_exec", wait_ms, 100, "prefill"),
            phase(n, "decode_exec", 100, 1100, "decode"),
        ])  # fmt: skip
