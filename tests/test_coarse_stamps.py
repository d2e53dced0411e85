"""Latencies from stamps of whole seconds say that they are no finer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdtrace import phrases
from pdtrace.api import Trace
from pdtrace.diagnosis import Deployment

WHOLE = "".join(
    f"{n},2026-01-01 00:00:0{n},2026-01-01 00:00:1{n},20\n" for n in range(3)
)  # fmt: skip
FINE = "".join(f"{n},2026-01-01 00:00:00.{n}01,2026-01-01 00:00:09.{n}11,20\n" for n in range(3))


def diagnosed(path: Path, text: str) -> Deployment:
    path.write_text(text)
    (deployment,) = Trace.read([path]).diagnose().deployments
    return deployment


def resolution(deployment: Deployment, metric: str) -> Any:
    return next(r["resolution_ms"] for r in deployment.latency if r["metric"] == metric)


def test_whole_seconds_are_said(tmp_path: Path) -> None:
    deployment = diagnosed(tmp_path / "t.csv", "id,start,end,output_tokens\n" + WHOLE)
    assert resolution(deployment, "e2e_ms") == 1000
    assert phrases.definitions(deployment) == [
        "E2E: start to end of the request as that observer saw it; from stamps no finer than 1 s: each value is known to within 1 s"
    ]
    assert "at most 10.0 s (each to within 1 s)" in deployment.verdict


@pytest.mark.parametrize(
    "text",
    [
        "id,start,end,output_tokens\n" + FINE,
        "id,start,total_s,output_tokens\n0,2026-01-01 00:00:00,8.731,20\n1,2026-01-01 00:00:01,9.2,20\n",
    ],
)
def test_finer_stamps_and_durations_beside_coarse_ones_are_not_called_coarse(
    tmp_path: Path, text: str
) -> None:
    deployment = diagnosed(tmp_path / "t.csv", text)
    assert resolution(deployment, "e2e_ms") is None
    assert "within" not in deployment.verdict


@pytest.mark.parametrize(("stated", "shown"), [(8.731, 8731), (3.0, 9000)])
def test_a_stated_duration_is_finer_than_coarse_stamps_that_do_not_contradict_it(
    tmp_path: Path, stated: float, shown: float
) -> None:
    text = f"id,start,end,total_s,output_tokens\n0,2026-01-01 00:00:00,2026-01-01 00:00:09,{stated},20\n"
    deployment = diagnosed(tmp_path / "t.csv", text)
    (row,) = [r for r in deployment.latency if r["metric"] == "e2e_ms"]
    assert row["max"] == shown
