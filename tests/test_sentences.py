"""Sentences of findings: singular and plural, punctuation, nothing claimed that is not known."""

from __future__ import annotations

import pytest

from pdtrace import numbers
from pdtrace._words_health import engine_failure, preemption


@pytest.mark.parametrize(
    ("events", "counters", "said"),
    [
        (51, 51.0, "51 events tell of them; counters say 51 in this period. What"),
        (1, None, "1 event tells of them. What"),
        (0, 3.0, "Counters say 3 in this period. What"),
    ],
)
def test_who_tells_of_preemptions_is_a_sentence(
    events: int, counters: float | None, said: str
) -> None:
    row = {
        "value": 51.0,
        "counter_total": False,
        "from_events": events,
        "from_counters": counters,
        "cost_s": None,
    }
    words = preemption(row)
    assert words.title == "51 preemptions" and words.detail.startswith(said)
    assert preemption(row | {"value": 1.0}).title == "1 preemption"


def test_of_requests_in_flight_when_an_engine_died_no_success_is_known() -> None:
    row = {
        "kinds": [{"detail": None, "events": 1}],
        "workers": ["a"],
        "first_ns": None,
        "requests": 1,
        "restarts": 0,
    }
    words = engine_failure(row)
    assert words.title == "an engine failed: no more is said (1 x)"
    assert words.detail == (
        "1 worker logged it. Of 1 request in flight then no success is known; that this was why is not in the data."
    )


def test_a_loss_that_rounds_to_nothing_has_no_sign() -> None:
    assert numbers.seconds(-0.001) == "0.00 s"
    assert numbers.seconds(-0.01) == "-0.01 s"
    assert numbers.seconds(12.345) == "12.3 s"
