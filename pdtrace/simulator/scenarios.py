"""The scenarios by name: positives, nulls, adversaries, and some to look at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdtrace.simulator.scenario import Scenario

# What makes token times hard to read: garbage collection, a bundling proxy, a jittery network, and
# memory so short that requests are preempted.
_DIRTY: dict[str, Any] = {
    "pauses": "independent",
    "coalesced_ratio": 0.4,
    "jitter_ms": 1.5,
    "kv_peak_ratio": 0.85,
}
# Most of each prompt is cached: little is computed.
_WEAK: dict[str, Any] = {
    "session_ratio": 0.8,
    "system_tokens": 512,
    "cache_tokens": 60_000,
    "short_tokens": 60.0,
    "long_per_s": (0.01, 0.03),
    "long_tokens": (1500.0, 3000.0),
}

_EXCLUSIVE = Scenario(
    "exclusive", "prompts are computed in steps of their own", "positive", mode="exclusive"
)
_CHUNKED = Scenario("chunked_2048", "chunked prefill, 2048 tokens a step", "positive")
_PD = Scenario(
    "null_plain",
    "P/D; prefills of P are shown as D's own",
    "null",
    mode="pd",
    mislabelled=True,
    preemption="swap",  # nothing is ever computed again on D: the true loss is exactly 0
)


def _like(base: Scenario, name: str, title: str, kind: str = "", **changes: Any) -> Scenario:
    return replace(base, name=name, title=title, kind=kind or base.kind, **changes)


def _exclusive(name: str, title: str, **changes: Any) -> Scenario:
    return _like(_EXCLUSIVE, name, title, **changes)


def _chunked(name: str, title: str, **changes: Any) -> Scenario:
    return _like(_CHUNKED, name, title, **changes)


def _null(name: str, title: str, **changes: Any) -> Scenario:
    return _like(_PD, name, title, **changes)


_POSITIVE = (
    _EXCLUSIVE,
    _exclusive("exclusive_two", "the same on two workers, round robin", workers=2),
    _exclusive("exclusive_rare", "hardly any long prompt", long_per_s=(0.01, 0.03)),
    _exclusive("exclusive_weak", "most of each prompt is cached", **_WEAK),
    _exclusive("exclusive_bursty", "the load swings by 80 %", burst=0.8),
    _exclusive("exclusive_dirty", "pauses, bundling, jitter, preemption", **_DIRTY),
    _chunked("chunked_512", "chunked prefill, 512 tokens a step", chunk_tokens=512),
    _CHUNKED,
    _chunked("chunked_8192", "chunked prefill, 8192 tokens a step", chunk_tokens=8192),
    _chunked(
        "chunked_two",
        "two workers, least loaded first, 2048 tokens a step",
        workers=2,
        router="least_loaded",
    ),
    _chunked("chunked_weak", "most of each prompt is cached", **_WEAK),
    _chunked("chunked_dirty", "pauses, bundling, jitter, preemption, 2048 tokens", **_DIRTY),
    _chunked("chunked_512_dirty", "the same with 512 tokens a step", chunk_tokens=512, **_DIRTY),
)
_SHORT_OF_MEMORY = {"kv_blocks": 620}
_NULL = (
    _PD,
    _null("null_pauses", "P/D with garbage collection", pauses="independent"),
    _null("null_preemption", "P/D whose decode worker swaps requests out", **_SHORT_OF_MEMORY),
    _null("null_coalesced", "P/D behind a proxy that bundles all streams", coalesced_ratio=1.0),
    _null("null_steep", "P/D with steps that grow steeply with the batch", batch_steep=True),
    _null("null_bursty", "P/D, bursts, more pauses under load", burst=0.8, pauses="load"),
    _null("null_speculative", "P/D with speculative decoding", speculative_tokens=3),
    _null(
        "null_everything",
        "P/D with all of these at once",
        pauses="load",
        burst=0.6,
        batch_steep=True,
        coalesced_ratio=1.0,
        jitter_ms=1.5,
        speculative_tokens=3,
        **_SHORT_OF_MEMORY,
    ),
)
_ADVERSARIAL = (
    _like(
        _PD,
        "adversarial_locked",
        "P/D; pauses begin on D where a long prefill ends on P",
        "adversarial",
        pauses="locked",
    ),
)
_SKEWED: dict[str, Any] = {"host_offset_ms": 200.0, "host_drift_ppm": 50.0}
_WRONG: dict[str, Any] = {"kind": "other", "misspecified": True}
_OTHER = (
    _exclusive("misspecified_exclusive", "roofline knee, padded batches, 10 % noise", **_WRONG),
    _chunked("misspecified_chunked", "the same with 2048 tokens a step", **_WRONG),
    _chunked("misspecified_512", "the same with 512 tokens a step", chunk_tokens=512, **_WRONG),
    _null("misspecified_null", "the same on P/D: nothing is lost", **_WRONG),
    _exclusive(
        "late_prefills", "prefill instants 5 ms late", kind="other", prefill_clock_offset_ms=5.0
    ),
    _exclusive(
        "early_prefills", "prefill instants 5 ms early", kind="other", prefill_clock_offset_ms=-5.0
    ),
    _null(
        "pd",
        "P/D, two prefill and two decode workers, clocks differ",
        kind="other",
        mislabelled=False,
        prefill_workers=2,
        workers=2,
        router="least_loaded",
        **_SKEWED,
    ),
    _chunked(
        "router_blind",
        "four workers, round robin, conversations lose their cache",
        kind="other",
        workers=4,
        session_ratio=0.9,
        short_per_s=(9.0, 11.0),
        system_tokens=256,
        cache_tokens=20_000,
        chunk_tokens=8192,
    ),
    _chunked(
        "router_affinity",
        "the same, each conversation goes where its prefix is",
        kind="other",
        workers=4,
        router="prefix_affinity",
        session_ratio=0.9,
        short_per_s=(9.0, 11.0),
        system_tokens=256,
        cache_tokens=20_000,
        chunk_tokens=8192,
    ),
    _chunked("preemption", "one worker short of KV memory", kind="other", kv_blocks=600),
    _null(
        "transfer_bound",
        "P/D over a slow link",
        kind="other",
        mislabelled=False,
        link_gbytes_per_s=(0.9, 1.1),
        kv_blocks=8000,
    ),
    _null(
        "transfer_layerwise",
        "P/D whose KV leaves layer by layer while prompts are computed",
        kind="other",
        mislabelled=False,
        transfer="layerwise",
        link_gbytes_per_s=(4.0, 6.0),
    ),
    _chunked(
        "troubled",
        "two workers; requests refused, failed, tried again; clients that leave; one worker dies",
        kind="other",
        workers=2,
        router="least_loaded",
        refused_ratio=0.04,
        failed_ratio=0.10,
        left_ratio=0.08,
        patience_s=2.5,
        max_running=8,
        dies_s=30.0,
        retries=1,
    ),
    _null(
        "pd_left",
        "P/D over a slow link; clients that leave in every stage, requests that fail on either side",
        kind="other",
        mislabelled=False,
        link_gbytes_per_s=(1.6, 1.8),
        failed_ratio=0.08,
        left_ratio=0.08,
        patience_s=2.5,
    ),
    _chunked(
        "ranks",
        "one server of two data-parallel ranks; long prompts all go to the first",
        kind="other",
        ranks=2,
        router="long_apart",
    ),
    _null(
        "decode_memory_bound",
        "P/D whose decode worker has no room for more KV",
        kind="other",
        mislabelled=False,
        kv_blocks=620,
        link_gbytes_per_s=(20.0, 25.0),
    ),
)

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario for scenario in (*_POSITIVE, *_NULL, *_ADVERSARIAL, *_OTHER)
}
