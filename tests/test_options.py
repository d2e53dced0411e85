"""What people type after options."""

from __future__ import annotations

import pytest

from pdtrace.errors import PdtraceError
from pdtrace.model import Slo
from pdtrace.options import duration_ms, parse_check, parse_instant, parse_slo


@pytest.mark.parametrize(
    ("text", "ms"), [("500ms", 500), ("0.5s", 500), ("2m", 120_000), ("250", 250), ("1 s", 1000)]
)
def test_durations(text: str, ms: float) -> None:
    assert duration_ms(text) == ms


def test_slo_limits() -> None:
    assert parse_slo("ttft=500ms,tpot=50ms") == Slo(ttft_ms=500, tpot_ms=50)
    assert parse_slo("TTFT=1s, e2e=10s") == Slo(ttft_ms=1000, e2e_ms=10_000)


@pytest.mark.parametrize("text", ["ttft", "speed=4", "ttft=fast", "ttft=-1ms"])
def test_limits_that_make_no_sense_are_told(text: str) -> None:
    with pytest.raises(PdtraceError):
        parse_slo(text)


def test_checks_hold_or_fail_and_unknown_never_holds() -> None:
    check = parse_check("ttft_p95<500ms")
    assert (check.metric, check.statistic, check.limit) == ("ttft_ms", "p95", 500)
    assert check.holds(499.9)
    assert not check.holds(500)
    assert not check.holds(None)
    assert parse_check("failed<=1%").holds(0.01)
    assert parse_check("attainment>=0.95").holds(0.95)


@pytest.mark.parametrize("text", ["ttft<500ms", "ttft_p95", "ttft_p95=5", "p95<5", ""])
def test_checks_that_make_no_sense_are_told(text: str) -> None:
    with pytest.raises(PdtraceError, match="--check"):
        parse_check(text)


def test_instants_are_utc_unless_they_say_otherwise() -> None:
    assert parse_instant("1970-01-01T00:00:01") == 10**9
    assert parse_instant("1970-01-01T01:00:01+01:00") == 10**9
    assert parse_instant("1795993843.5") == 1_795_993_843_500_000_000
    with pytest.raises(PdtraceError, match="no instant"):
        parse_instant("yesterday")
