"""Wording rules: a claim is no stronger than its row, numbers carry units, steadier is never called faster."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pdtrace import _words_interference, coverage, wording
from pdtrace._words_latency import slow_first_token, slow_stream
from pdtrace._words_table import dependence
from pdtrace.diagnosis import Deployment
from pdtrace.library import queries
from pdtrace.numbers import count, duration, plural, quantity, seconds, share


def first(**values: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "requests": 6, "measured": 20, "limit_given": False, "limit_ms": 470.0, "typical_ms": 235.0, "models": 1,
        "value": 3740.0, "ttft_p50_ms": 235.0, "ttft_p99_ms": 4040.0, "top_phase": None, "top_phase_ratio": None,
        "grown_phase": None, "grown_ratio": None, "prompt_rho": 0.9, "prompt_rho_low": 0.7, "prompt_rho_high": 0.97,
        "prompt_pairs": 20, "prompt_slope_ms": 494.0, "prompt_driven": True, "cached_known": False, "prompts_known": 20,
        "slow_long_input": 6, "other_long_input": 0, "culprits": [{"request": "r3", "value": 4110.0}],
        "split": False,
    }  # fmt: skip
    return row | values


def stream(**values: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "requests": 5, "measured": 20, "limit_given": False, "limit_ms": 31.0, "typical_ms": 20.6, "models": 1,
        "value": 79.8, "tpot_p50_ms": 20.6, "tpot_p99_ms": 82.0, "gaps": None, "workers": [], "stall_ratio": None,
        "output_rho": 0.1, "output_rho_low": -0.35, "output_rho_high": 0.51, "output_pairs": 20, "output_driven": None,
        "slow_long_output": 1, "other_long_output": 4, "culprits": [{"request": "r3", "value": 82.8}],
        "slow_worker": None,
    }  # fmt: skip
    return row | values


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (first(), "It follows the prompt: rank correlation 0.90 (0.70 to 0.97, n = 20), 494 ms for each 1,000"),
        (first(prompt_rho=0.3, prompt_rho_low=0.1), "6 of 6 slow ones have a long prompt, 0 of the 14 others"),
        (first(prompt_driven=False, prompt_rho=0.39, prompt_rho_low=0.29), "follows the prompt length only weakly"),
        (first(prompt_driven=False, prompt_rho=0.0, prompt_rho_low=-0.4), "does not follow the prompt length"),
        (first(prompt_driven=None, prompt_rho=0.3, prompt_rho_low=-0.2), "No clear link to the prompt length"),
        (first(prompt_driven=None, prompt_rho=None, prompts_known=0), "Prompt lengths are not known"),
        (first(prompt_driven=None, prompt_rho=None, prompts_known=7), "Too few prompt lengths are known (7)"),
    ],
)  # fmt: skip
def test_a_link_to_the_prompt_is_claimed_only_as_far_as_it_is_shown(
    row: dict[str, Any], said: str
) -> None:
    assert said in slow_first_token(row).detail


@pytest.mark.parametrize(("apart", "said"), [(True, False), (False, True), (None, False)])
def test_a_prefill_that_may_hold_the_queue_is_told_as_such(apart: bool | None, said: bool) -> None:
    row = first(top_phase="prefill", top_phase_ratio=0.98, queue_apart=apart)
    assert ("or the wait for the engine" in slow_first_token(row).detail) is said


def test_nobody_who_has_split_is_told_to_wait_with_splitting() -> None:
    assert "before splitting" in slow_first_token(first()).suggestions[0]
    assert slow_first_token(first(split=True)).suggestions == (
        "prefix caching or shorter contexts",
    )


def test_prefix_caching_is_advised_only_where_prompts_drive() -> None:
    assert any("prefix caching" in text for text in slow_first_token(first()).suggestions)
    for driven in (False, None):
        assert not any(
            "prefix caching" in text
            for text in slow_first_token(first(prompt_driven=driven)).suggestions
        )


def test_nothing_slow_is_not_called_slow_on_0_requests() -> None:
    assert slow_first_token(first(requests=0)).title == "first-token time grows with the prompt"


def test_fewer_than_100_values_have_a_slowest_and_no_99th_percentile() -> None:
    assert (
        "slowest 4.11 s" in slow_first_token(first()).detail
        and "p99" not in slow_first_token(first()).detail
    )
    assert "p99 4.04 s" in slow_first_token(first(measured=358)).detail


def test_three_requests_have_no_ordinary() -> None:
    detail = slow_stream(stream(limit_ms=None, typical_ms=None, measured=3)).detail
    assert detail.startswith("Too few requests to say what is ordinary in this run.")


def test_models_that_are_judged_apart_have_no_common_limit() -> None:
    detail = slow_first_token(first(models=2, limit_ms=None, typical_ms=None)).detail
    assert "2 models, each by itself" in detail and "–" not in detail.partition("TTFT")[0]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (stream(), "No clear link to the length of the answer"),
        (stream(output_driven=True, slow_long_output=5, other_long_output=0), "5 of 5 slow ones have a long answer"),
        (stream(output_driven=False, output_rho=-0.3, output_rho_low=-0.5), "does not grow with the length"),
    ],
)  # fmt: skip
def test_a_link_to_the_answer_likewise(row: dict[str, Any], said: str) -> None:
    assert said in slow_stream(row).detail


def test_dependence_says_what_drives_what() -> None:
    row = {
        "measure": "e2e",
        "pairs": 20,
        "rho": 0.99,
        "rho_low": 0.97,
        "rho_high": 1.0,
        "slope_ms": 19_800.0,
        "follows": True,
    }
    assert dependence([row]) == [
        "total time follows the length of the answer (rank correlation 0.99, 0.97 to 1.00, n = 20; about 19.8 s for each 1,000 tokens)"
    ]
    assert "has no clear link to" in dependence([row | {"follows": None}])[0]


def test_every_finding_has_words_of_its_own() -> None:
    rooms = wording._ROOMS
    for name, query in queries().items():
        if query.kind == "findings":
            assert any(hasattr(room, name) for room in rooms), f"{name} has no words"


def test_faster_is_never_said_for_steadier() -> None:
    from pathlib import Path

    import pdtrace

    for file in Path(pdtrace.__file__).parent.glob("*.py"):
        for line in file.read_text("utf-8").splitlines():
            if re.search(r"\bfaster\b", line):
                assert (
                    re.search(r"not the same as faster|would be faster: nothing", line)
                    or '"""' in line
                    or "#" in line
                ), line


def test_every_item_of_the_coverage_has_words_and_a_way_to_add_it() -> None:
    assert set(coverage.GENERAL_SWITCHES) <= set(coverage.ITEM_WORDS)


def test_numbers_have_one_way_to_be_written() -> None:
    assert [duration(v) for v in (0.42, 92.5, 1150.0, 12_000.0, 720_000.0, None)] == [
        "0.42 ms", "92.5 ms", "1.15 s", "12.0 s", "12.0 min", "–",
    ]  # fmt: skip
    assert (seconds(49.93), share(0.334), share(0.011), count(15_273), plural(1, "request")) == (
        "49.9 s", "33 %", "1.1 %", "15,273", "1 request",
    )  # fmt: skip
    assert quantity(1.0, "tokens") == "1 token" and quantity(0.5, "1") == "50 %"


def test_prefill_interference_says_where_it_was_judged_and_where_it_cannot_be() -> None:
    quiet = {
        "worker": "instance:6f1", "label": "w1", "role": "aggregated", "level": "B", "flagged": False, "lost_s": 0.3,
        "lost_low_s": -0.1, "lost_high_s": 0.7, "decode_s": 40.0, "lost_ratio_low": -0.002, "notes": [],
    }  # fmt: skip
    blind = {**quiet, "worker": "w2", "level": None, "flagged": None, "notes": ["weak baseline"]}
    away = {**blind, "worker": "w3", "role": "decode"}
    line, elsewhere = _words_interference.judged([quiet, blind, away])
    assert elsewhere == "prefill interference on 1 decode worker: weak baseline"
    many = _words_interference.judged([{**quiet, "worker": f"w{n}"} for n in range(9)])
    assert len(many) == 6
    assert "4 more workers" in many[-1]
    assert line == (
        "prefill interference on w1, judged by token times and prefill intervals (level B):"
        " 0.30 s (interval -0.10 s to 0.70 s) of 40.0 s of decode time; it may as well be nothing"
    )
    little = {**quiet, "lost_low_s": 0.2, "lost_ratio_low": 0.005}
    assert _words_interference.judged([little])[0].endswith("; sure of it is only 0.5 % of that time")  # fmt: skip
    few = {**little, "lost_ratio_low": 0.3, "notes": ["only 4 steps held somebody up"]}
    assert _words_interference.judged([few])[0].endswith("; only 4 steps held somebody up")
    unjudged = _words_interference.unjudged([quiet, blind, away])
    assert unjudged is not None
    assert unjudged.endswith("on 1 of 2 workers: weak baseline")
    assert _words_interference.unjudged([quiet, away]) is None
    assert _words_interference.unjudged([away]) is None
    assert _words_interference.unjudged([]) == (
        "whether prompts of some requests held up the streams of others: "
        "neither engine steps nor token times are there"
    )


@pytest.mark.parametrize(
    ("again", "title", "advice"),
    [
        (None, "prompts of others held", "a lower token budget"),
        (0.1, "prompts of others held", "a lower token budget"),
        (1.0, "prompts of others and preempted requests, computed again, held", "a lower token budget"),
        (3.0, "preempted requests, computed again, and prompts of others held", "fewer requests admitted"),
        (4.0, "preempted requests, computed again, held", "fewer requests admitted"),
    ],
)  # fmt: skip
def test_what_preempted_requests_took_is_not_said_of_the_prompts_of_others(
    again: float | None, title: str, advice: str
) -> None:
    assert (
        _words_interference._cause({"value": 4.0, "again_lost_s": again}) == title[: -len(" held")]
    )
    tried = _words_interference._suggestions({"value": 4.0, "again_lost_s": again})
    assert tried[0].startswith(advice)


def test_periodic_counters_are_consistent_with_interference_and_never_more() -> None:
    row = {"worker": "w", "name": "w", "stretches": 40, "stretch_s": 5.0, "measure": "gap",
           "few_ms": 8.0, "many_ms": 15.0, "correlation": 0.7, "correlation_p": 1e-5}  # fmt: skip

    def said(**more: object) -> str:
        return _words_interference.unjudged([], [row | more]) or ""

    assert "are consistent with it (mean gap between tokens 15.0 ms in the third" in said()
    assert "and with larger batches" in said()
    assert "do not point to it" in said(correlation_p=0.2)
    assert "do not point to it" in said(correlation=-0.7)
    assert "too few or too even" in said(stretches=5)
    assert "too few or too even" in said(correlation=None)
    judged = {"worker": "w", "role": None, "flagged": True, "notes": []}
    blind = {"worker": "v", "role": None, "flagged": None, "notes": ["no steps"]}
    assert "periodic" not in (_words_interference.unjudged([judged, blind], [row]) or "")


@pytest.mark.parametrize(("bounded", "said"), [(["kv_wait"], True), ([], False), (None, False)])
def test_a_phase_that_is_an_upper_bound_is_told_as_one(bounded: Any, said: bool) -> None:
    from pdtrace import _words_latency

    words = _words_latency._so_far({"bounded_phases": bounded}, "kv_wait")
    assert ("upper bound" in words) is said


@pytest.mark.parametrize(
    ("completed", "unknown", "said"),
    [(20, 0, "saw it: p50"), (20, 280, "saw it on 20 of 300 requests: p50"), (0, 22, "saw it: p50")],
)  # fmt: skip
def test_the_verdict_says_of_how_many_requests_it_speaks(
    completed: int, unknown: int, said: str
) -> None:
    """Requests whose outcome nobody tells (a log's, beside a few spans) may have been answered too."""
    requests = {"count": completed + unknown, "completed": completed, "failed": 0, "aborted": 0, "unknown": unknown}  # fmt: skip
    latency = {"metric": "ttft_ms", "observer": "engine", "headline": True, "count": 20, "p50": 30.0, "p90": 90.0, "p99": 99.0, "max": 99.0}  # fmt: skip
    found = Deployment(
        id="d", name="d", mode="aggregated", window=(None, None), workers=(), verdict="",
        requests=requests, latency=(latency,), phases=(), findings=(),
    )  # fmt: skip
    assert said in wording.verdict(found, {})
