"""What if it ran another way: the recorded load replayed on another set-up, after a replay of how it did run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from pdtrace import _whatif_words as words
from pdtrace import coverage
from pdtrace._whatif_figures import answers, check, figures
from pdtrace._whatif_inputs import Inputs, Link, inputs, link, model_bytes
from pdtrace._whatif_model import Answer, Asked, Check, Transfer, WhatIf
from pdtrace.blocks import Block
from pdtrace.errors import BadOption
from pdtrace.methods import step_cost, step_cost_steps
from pdtrace.methods.replay import Cost, Noise, Plan, replay
from pdtrace.methods.step_cost import Fitted
from pdtrace.model import Slo, SloPolicy
from pdtrace.records import dataclass
from pdtrace.store import Store

MOST_ERROR = 0.10  # of the self-check at the median, above which nothing is answered
Origin = Literal["prefill", "decode"]
Fitter = Callable[[np.random.Generator | None], Fitted | str]
CACHED = 0.05  # of the prompt tokens, from which on cache hits matter to prefill
DRAWS = 6  # fits of stretches drawn anew
RUNS = 6  # runs with steps that scatter as they did
SLOWEST = (
    0.5  # share of the given bandwidth that a transfer may be down to, where one value is given
)
FIGURES_GATED = ("ttft_p50", "tpot_p50")


@dataclass(frozen=True)
class _Known:
    """What was said of the deployment."""

    kv_tokens: float | None
    block_tokens: int
    budget: int | None
    chunked: bool | None
    max_running: int
    closed_loop: bool
    link: Link | None
    model_bytes: float | None  # KV bytes of a token by the model's shape or configuration


def whatif(
    store: Store,
    path: str,
    asked: Asked,
    slo: Slo | SloPolicy | None = None,
    deployment: str | None = None,
) -> WhatIf:
    """Replay a deployment's load on the set-up that is asked for; refuses where the data do not carry it."""
    limits = _limits(slo)
    chosen = _deployment(store, deployment)
    told = {"id": chosen["deployment"], "name": chosen["name"], "mode": chosen["mode"]}
    said = {k: v for k, v in asdict(asked).items() if v is not None}

    def refused(why: str, **more: Any) -> WhatIf:
        return WhatIf(
            path, told, said, words.refused(why), why, not_supported=words.NOT_SUPPORTED, **more
        )

    found = inputs(store, chosen["deployment"])
    if isinstance(found, str):
        return refused(found)
    known = _known(store, chosen["deployment"], asked)
    fitters = _fitters(store, chosen["deployment"], found, known)
    best = _checked(found, fitters, known, asked, limits)
    if isinstance(best, tuple):
        return refused(best[0], **({"fit": _told(best[1], found)} if best[1] else {}))
    fitted, ran, base, checks = best.fitted, best.ran, best.base, best.checks
    more: dict[str, Any] = {"self_check": tuple(checks), "fit": _told(fitted, found)}
    if best.why:
        return refused(best.why + words.why_it_misses(fitted, checks), **more)
    if why := _other_caches(asked, found):
        return refused(why, **more)
    if missing := _missing(asked, found, known):
        return refused(words.missing(missing), missing=tuple(missing), **more)
    given, waits = _answers(found, best.fitter, fitted, ran, asked, known, base, checks, limits)
    if not given:
        return refused(
            "the load is more than the set-up asked for carries: its queue grows to the end", **more
        )
    return WhatIf(
        path, told, said, words.verdict(given, checks), None, answers=tuple(given), waits=waits,
        assumptions=words.assumptions(found, fitted, asked, known.link, known.closed_loop),
        not_supported=words.NOT_SUPPORTED, **more,
    )  # fmt: skip


def report(found: WhatIf) -> list[Block]:
    """The answer as blocks of text and tables."""
    return words.blocks(found)


def _limits(given: Slo | SloPolicy | None) -> Slo:
    """Limits for all requests alike; a replay knows no single gaps between tokens."""
    limits = given.single() if isinstance(given, SloPolicy) else given or Slo()
    if limits.itl_ms is not None or (given is not None and not limits.limits()):
        raise BadOption(
            "--slo: a replay is judged by TTFT, TPOT and E2E of all requests alike",
            "write it like ttft=500ms,tpot=50ms,e2e=10s",
        )
    return limits


def _deployment(store: Store, name: str | None) -> dict[str, Any]:
    rows_ = store.sql(
        """SELECT d.deployment, d.name, d.mode FROM deployments AS d
           WHERE d.deployment IN (SELECT deployment FROM requests) ORDER BY d.name, d.deployment"""
    ).to_dicts()
    found = [r for r in rows_ if name is None or name in {r["name"], r["deployment"]}]
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(r["name"]) for r in rows_) or "none with requests"
    raise BadOption(
        f"--deployment: {'no deployment named ' + name if name else 'there are several deployments' if rows_ else 'no requests to replay'}",
        f"name one of: {names}",
    )


def _known(store: Store, deployment: str, asked: Asked) -> _Known:
    said: dict[str, set[str]] = {}
    for fact in coverage.deployment_facts(store):
        if fact["deployment"] == deployment and fact["value"] is not None:
            said.setdefault(str(fact["key"]), set()).add(str(fact["value"]))
    block = _number(said, "block_size") or 16
    blocks = _number(said, "kv_cache_blocks") or _number(said, "kv_blocks")
    kv = asked.kv_tokens or _number(said, "kv_cache_tokens") or (blocks * block if blocks else None)
    chunked = said.get("chunked_prefill") or said.get("enable_chunked_prefill")
    return _Known(
        kv, block, _number(said, "max_num_batched_tokens"),
        None if not chunked else "True" in chunked or "true" in chunked,
        _number(said, "max_num_seqs") or 1 << 30, "max_concurrency" in said, link(store, deployment),
        model_bytes(store, deployment),
    )  # fmt: skip


def _number(said: Mapping[str, set[str]], key: str) -> int | None:
    """The smallest value that was said."""
    values = [int(float(v)) for v in said.get(key, ()) if v.replace(".", "", 1).isdecimal()]
    return min(values) if values else None


def _as_it_ran(found: Inputs, fitted: Fitted, known: _Known, asked: Asked) -> Plan | str:
    plan = Plan(
        workers=found.decoders if found.split else found.entries, prefill_workers=found.entries if found.split else 0,
        chunk_tokens=fitted.chunk_tokens, prefill_batch_tokens=fitted.prefill_batch_tokens,
        kv_tokens=known.kv_tokens or float("inf"), block_tokens=known.block_tokens, max_running=known.max_running,
        as_recorded=True,
    )  # fmt: skip
    if not found.split:
        return plan
    if known.link is None:
        if asked.bandwidth_gbps is None or asked.kv_bytes_per_token is None:
            return (
                "the recorded split has no transfers with bytes and times: it cannot be replayed as it ran without"
                " --bandwidth-gbps and --kv-bytes-per-token"
            )
        return replace(
            plan, bytes_per_s=asked.bandwidth_gbps[1] / 8 * 1e9, latency_s=(asked.latency_ms or 0.0) / 1e3,
            kv_bytes_per_token=asked.kv_bytes_per_token,
        )  # fmt: skip
    return replace(
        plan, bytes_per_s=known.link.bytes_per_s, latency_s=known.link.latency_s,
        kv_bytes_per_token=known.link.bytes_per_token,
    )  # fmt: skip


def _gate(checks: list[Check], finished: bool) -> str | None:
    """Why the replay is not to be trusted; None where it is."""
    if not finished:
        return "replayed as it ran, the load does not come to an end: the fitted costs are wrong, or something else served it"
    gated = {c.figure: c.error for c in checks if c.figure in FIGURES_GATED}
    unknown = [f for f in FIGURES_GATED if gated.get(f) is None]
    if unknown:
        return f"{words.figure_name(unknown[0])} is not recorded: the replay cannot be checked"
    early = [c.figure for c in checks if c.figure in FIGURES_GATED and (c.replayed or 0.0) < 0]
    if early:
        return (
            "first tokens were seen before the engines are said to have made them: the stamps of two observers do not fit"
            " together, and the replay cannot be checked"
        )
    wrong = {f: e for f, e in gated.items() if e is not None and abs(e) > MOST_ERROR}
    if not wrong:
        return None
    parts = [f"{words.figure_name(f)} by {e:+.0%}".replace("-", "−") for f, e in wrong.items()]
    return f"replayed as it ran, it misses {' and '.join(parts)}; more than {MOST_ERROR:.0%} is not good enough to ask what if"


def _other_caches(asked: Asked, found: Inputs) -> str | None:
    """Why recorded cache hits do not carry over: fewer workers share other prefixes."""
    if found.cached_ratio < CACHED or _entries(asked, found) >= found.entries:
        return None
    return (
        f"{found.cached_ratio:.0%} of the prompt tokens were found in prefix caches of {found.entries} workers; what"
        f" {_entries(asked, found)} would find is not in these data, and prefill depends on it"
    )


def _entries(asked: Asked, found: Inputs) -> int:
    """The workers that compute prompts on the set-up asked for."""
    if asked.pd:
        return asked.pd[0]
    return found.entries if asked.workers is None else asked.workers


def _missing(asked: Asked, found: Inputs, known: _Known) -> list[str]:
    """What would have to be known or given for an answer."""
    missing = []
    if not asked.anything:
        missing.append("P:D or another set-up (--pd, --workers, --chunk-tokens, --bandwidth-gbps)")
    if known.kv_tokens is None:
        missing.append("the KV memory of a worker in tokens (--kv-tokens)")
    if asked.pd or (found.split and asked.workers is None):
        if asked.bandwidth_gbps is None and known.link is None:
            missing.append("the bandwidth between the workers (--bandwidth-gbps)")
        if not _kv_bytes(asked, known):
            missing.append("the KV bytes of a token (--kv-bytes-per-token)")
    elif asked.moves_kv:
        missing.append("the split between whose workers KV moves (--pd)")
    return missing


def _plan(ran: Plan, asked: Asked, known: _Known) -> Plan:
    """The set-up asked for, at the central bandwidth."""
    plan = replace(ran, kv_tokens=known.kv_tokens or float("inf"))
    if asked.pd:
        plan = replace(plan, prefill_workers=asked.pd[0], workers=asked.pd[1], as_recorded=False)
    if asked.workers is not None:
        plan = replace(plan, prefill_workers=0, workers=asked.workers, as_recorded=False)
    if asked.chunk_tokens is not None:
        plan = replace(plan, chunk_tokens=asked.chunk_tokens or None,
                       prefill_batch_tokens=asked.chunk_tokens or plan.prefill_batch_tokens)  # fmt: skip
    if known.link is not None:
        plan = replace(plan, bytes_per_s=known.link.bytes_per_s, latency_s=known.link.latency_s,
                       kv_bytes_per_token=known.link.bytes_per_token)  # fmt: skip
    if asked.bandwidth_gbps is not None:
        plan = replace(plan, bytes_per_s=asked.bandwidth_gbps[1] / 8 * 1e9)
    if asked.latency_ms is not None:
        plan = replace(plan, latency_s=asked.latency_ms / 1e3)
    plan = replace(plan, kv_bytes_per_token=_kv_bytes(asked, known) or 0.0)
    return plan if asked.transfer is None else replace(plan, transfer=asked.transfer)


def _answers(
    found: Inputs, fitter: Fitter, fitted: Fitted, ran: Plan, asked: Asked, known: _Known,
    base: Mapping[str, float], checks: list[Check], slo: Slo | None,
) -> tuple[list[Answer], dict[str, Any]]:  # fmt: skip
    """Bands over bandwidth, transfer mode and what the fit leaves open, per first-token convention."""
    plan = _plan(ran, asked, known)
    split = plan.prefill_workers > 0
    costs = _costs(fitter, fitted)
    chance: list[Noise | None] = [None]
    chance += [replace(fitted.noise, seed=seed) for seed in range(1, RUNS + 1)]
    given: list[Answer] = []
    waits: dict[str, Any] = {}
    origins: tuple[Origin | None, ...] = ("prefill", "decode") if split else (None,)
    for origin in origins:
        central = replace(plan, origin=origin or "decode")
        variants = [(central, c) for c in costs[1:]]
        if split:
            variants += [(p, costs[0]) for p in _links(central, asked)]
        uncached = replace(found.load, cached=np.zeros_like(found.load.cached))
        spread = found.cached_ratio >= CACHED and _entries(asked, found) > found.entries
        runs = [replay(found.load, costs[0], central, noise) for noise in chance]
        played = [runs[0], *(replay(found.load, cost, p) for p, cost in variants)]
        if not played[0].finished:
            return [], {}
        if spread:  # more caches, each with less: from the recorded hits to none
            played.append(replay(uncached, costs[0], central))
            if not played[-1].finished:
                return [], {}
        tables = [figures(found, p, slo) for p in played if p.finished]
        scattered = [figures(found, p, slo) for p in runs[1:] if p.finished]
        given += answers(tables, scattered, base, checks, origin)
        if split:
            waits[str(origin)] = {
                "transfer_p50_ms": 1e3 * float(np.median(played[0].transfer_s)),
                "transfer_p99_ms": 1e3 * float(np.quantile(played[0].transfer_s, 0.99)),
                "kv_memory_wait_p99_ms": 1e3 * float(np.quantile(played[0].memory_wait_s, 0.99)),
                "prefill_busy_ratio": played[0].prefill_busy_ratio,
                "variants": len(played), "unfinished_variants": sum(not p.finished for p in played),
            }  # fmt: skip
    return given, waits


def _kv_bytes(asked: Asked, known: _Known) -> float | None:
    """KV bytes of a token: as given, as measured on transfers, or by the model's shape."""
    measured = known.link.bytes_per_token if known.link else float("nan")
    return asked.kv_bytes_per_token or (measured if np.isfinite(measured) else known.model_bytes)


def _fitters(store: Store, deployment: str, found: Inputs, known: _Known) -> list[Fitter]:
    """Fits of what a step costs, the best evidence first: the engine's own steps where all are there, then instants."""
    table = step_cost.rows(
        found.prefills, found.streams, known.budget, known.chunked, split=found.split
    )
    instants: Fitter = (
        (lambda _: table) if isinstance(table, str) else partial(step_cost.fit, table)
    )
    ((workers, told),) = store.rows(step_cost_steps.COMPLETE, [deployment])
    if not workers or told != workers:
        return [instants]
    steps = store.sql(step_cost_steps.STEPS, deployment=deployment)
    gaps = np.empty((0, 4)) if isinstance(table, str) else table.gap
    given = partial(step_cost_steps.fit, steps, gaps, known.budget, split=found.split)
    return [lambda random: given(random=random), instants]


@dataclass(frozen=True)
class _Checked:
    """A fit, the deployment replayed with it as it ran, and how far that is from the record."""

    fitter: Fitter
    fitted: Fitted
    ran: Plan
    base: Mapping[str, float]
    checks: list[Check]
    why: str | None  # it is not to be trusted

    @property
    def error(self) -> float:
        """The largest of the gated errors; without end where one is unknown."""
        errors = {c.figure: c.error for c in self.checks}
        gated = [errors.get(f) for f in FIGURES_GATED]
        return max(float("inf") if e is None else abs(e) for e in gated)


def _checked(
    found: Inputs, fitters: list[Fitter], known: _Known, asked: Asked, limits: Slo | None
) -> _Checked | tuple[str, Fitted | None]:
    """The first fit whose replay as it ran passes, else the nearest; a sentence where there is none."""
    tried: list[_Checked] = []
    failed: tuple[str, Fitted | None] = ("", None)
    for fitter in fitters:
        fitted = fitter(None)
        if isinstance(fitted, str):
            failed = (fitted, None)
            continue
        ran = _as_it_ran(found, fitted, known, asked)
        if isinstance(ran, str):
            return ran, fitted
        played = replay(found.load, fitted.cost, ran)
        base = figures(found, played, limits)
        checks = check(found, base, limits)
        why = _gate(checks, played.finished)
        tried.append(_Checked(fitter, fitted, ran, base, checks, why))
        if why is None:
            return tried[-1]
    return min(tried, key=lambda t: t.error) if tried else failed


def _costs(fitter: Fitter, fitted: Fitted) -> list[Cost]:
    """The fitted cost, and others that the data do not rule out."""
    random = np.random.default_rng(1)
    drawn = [fitter(random) for _ in range(DRAWS)]
    costs = [fitted.cost, *(d.cost for d in drawn if not isinstance(d, str))]
    _, slope, square = fitted.cost.prefill
    fixed_parts = fitted.fixed_range or ()
    return costs + [replace(fitted.cost, prefill=(fixed, slope, square)) for fixed in fixed_parts]


def _links(plan: Plan, asked: Asked) -> list[Plan]:
    """The slowest link and the other transfer mode, alone and together."""
    low = plan.bytes_per_s * SLOWEST
    if asked.bandwidth_gbps is not None and asked.bandwidth_gbps[0] < asked.bandwidth_gbps[1]:
        low = asked.bandwidth_gbps[0] / 8 * 1e9
    modes: tuple[Transfer, ...] = (asked.transfer,) if asked.transfer else ("bulk", "layerwise")
    return [
        replace(plan, bytes_per_s=speed, transfer=mode)
        for speed in (plan.bytes_per_s, low)
        for mode in modes
        if (speed, mode) != (plan.bytes_per_s, plan.transfer)
    ]


def _told(fitted: Fitted, found: Inputs) -> dict[str, Any]:
    (a, b, c), (d, per_request, per_token) = fitted.cost.prefill, fitted.cost.decode
    return {
        "level": fitted.level, "requests": len(found.load.arrival_s),
        "prefill_fixed_ms": 1e3 * a, "prefill_per_token_us": 1e6 * b, "prefill_per_token_squared_ns": 1e9 * c,
        "mixed_extra_ms": 1e3 * fitted.cost.mixed,
        "decode_fixed_ms": 1e3 * d, "decode_per_request_us": 1e6 * per_request, "decode_per_context_token_ns": 1e9 * per_token,
        "prefill_rows": fitted.prefill_rows, "decode_rows": fitted.decode_rows, "prompt_only_rows": fitted.alone_rows,
        "prefill_residual_ratio": fitted.prefill_error, "decode_residual_ratio": fitted.decode_error,
        "chunk_tokens": fitted.chunk_tokens, "batching": fitted.budget_basis,
    }  # fmt: skip
