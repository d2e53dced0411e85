"""What each engine step did, and who was decoding meanwhile: decodes, prompts, both, or KV that was pulled.

vLLM counts a preempted request that is computed again as generation: more tokens decoded than
requests in it, where every request makes one, are prompt tokens. A step without decodes but with
prompt tokens holds up the requests that have begun to decode; they are counted only as far as they
are certain (see `residents_of`): a lower bound. A step that only takes over pulled KV on a decode
worker is not a prefill.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from pdtrace.methods.statistics import Bools, Floats
from pdtrace.records import dataclass

RECOMPUTED_STEPS = 0.1  # share of steps up to which several tokens a request mean recomputation
# Beyond that, short of half of the steps, only more tokens a request than anybody guesses ahead do.
GUESSED_STEPS, MOST_GUESSED = 0.5, 16


@dataclass(frozen=True)
class Steps:
    """One rank's steps as arrays, with each step's kind decided."""

    frame: pl.DataFrame
    elapsed: Floats  # ns
    decodes: Floats  # requests that decoded, pulled ones included
    prefills: Floats  # requests whose prompt was computed
    tokens: Floats  # prompt tokens computed; NaN unknown
    decode_only: Bools
    mixed: Bools
    prefill_only: Bools
    pulled: Bools
    again: Bools  # a preempted request was computed again
    again_tokens: Floats  # tokens computed again, of `tokens`; 0 none


def classify(frame: pl.DataFrame, consumer: bool) -> Steps:
    """Which steps decoded, computed prompts, did both, or only took over pulled KV."""
    elapsed = floats(frame, "elapsed_ns")
    decodes = floats(frame, "decode_requests", 0.0)
    tokens, requests = floats(frame, "prefill_tokens"), floats(frame, "prefill_requests")
    again = _computed_again(frame, decodes)
    if again.any():
        tokens = np.where(again > 0, np.nan_to_num(tokens) + again, tokens)
        requests = np.where(again > 0, np.nan_to_num(requests) + 1, requests)
        decodes = _decoded_before(frame, decodes, requests, again > 0)
    prefill = (np.nan_to_num(tokens) > 0) | (np.nan_to_num(requests) > 0)
    # One prompt token for each request is the first step after a pull: the last token is computed
    # again to get logits. Only on KV consumers; elsewhere it is a prompt found whole in the cache.
    one_each = prefill & (tokens == requests)
    mostly = one_each.sum() >= 0.9 * max(1, prefill.sum()) and one_each.sum() >= 20
    pulled = prefill & (floats(frame, "pulled_requests", 0.0) >= np.nan_to_num(requests, nan=1.0))
    if consumer or mostly:
        pulled |= one_each
    prefill &= ~pulled
    decodes = decodes + np.where(pulled, np.nan_to_num(requests), 0.0)
    return Steps(
        frame=frame, elapsed=elapsed, decodes=decodes,
        prefills=np.where(prefill, np.where(np.isnan(requests), 1.0, requests), 0.0),
        tokens=np.where(prefill, tokens, 0.0),
        decode_only=(decodes > 0) & ~prefill & (elapsed > 0), mixed=(decodes > 0) & prefill,
        prefill_only=(decodes == 0) & prefill, pulled=pulled, again=again > 0,
        again_tokens=again,
    )  # fmt: skip


def _computed_again(frame: pl.DataFrame, decodes: Floats) -> Floats:
    """Tokens of preempted requests that were computed again as "generation", by step.

    With one token per request in nearly all steps nobody guesses tokens ahead (speculative
    decoding), so what a step has beyond one per request belongs to a request computed again: one at
    least, which is the number that is taken. Under heavy preemption many steps have such; guesses
    that are made now and then are told from them by how few tokens they are.
    """
    extra = np.nan_to_num(floats(frame, "decode_tokens") - decodes)
    several = (extra > 0) & (decodes > 0)
    share = several.sum() / max(1, (decodes > 0).sum())
    if share > RECOMPUTED_STEPS:
        several &= extra > MOST_GUESSED * decodes
    if share > GUESSED_STEPS:
        several[:] = False
    return np.where(several, extra + 1, 0.0)


def _decoded_before(frame: pl.DataFrame, decodes: Floats, prefills: Floats, again: Bools) -> Floats:
    """Requests that decoded; where some were computed again, at most all that the step before held.

    Of those computed again only one is known for sure, and there may be many; but they had no part in the step
    before, and whoever decodes now had.
    """
    decodes = decodes - again
    rows = np.flatnonzero(again[1:]) + 1
    seq = floats(frame, "seq")
    held = decodes + np.nan_to_num(
        prefills
    )  # those that were computed again go on in the next step
    told = (seq[rows] - seq[rows - 1] == 1) & (decodes[rows - 1] > 0)
    bounded: Floats = decodes.copy()
    bounded[rows] = np.where(told, np.minimum(decodes[rows], held[rows - 1]), decodes[rows])
    return bounded


def residents_of(steps: Steps) -> tuple[Floats, bool]:
    """(requests that were decoding, per step; whether every prefill-only step's are known).

    In a step that decodes: those that decoded. In one that only computed prompts the source rarely
    says. Certain are those that decode in the next other step, less the prompts computed from this
    step on: only these can be new. A prompt of several steps counts in each, hence a lower bound.
    This needs an unbroken count.
    """
    residents = steps.decodes.copy()
    alone, others = np.flatnonzero(steps.prefill_only), np.flatnonzero(~steps.prefill_only)
    if not len(alone) or not len(others):
        return residents, not len(alone)
    seq, running = floats(steps.frame, "seq"), floats(steps.frame, "running")[alone]
    slot = np.searchsorted(others, alone)
    before, after = others[np.maximum(slot - 1, 0)], others[np.minimum(slot, len(others) - 1)]
    arrived = np.concatenate([[0.0], np.cumsum(steps.prefills)])
    unbroken = (slot < len(others)) & (seq[after] - seq[alone] == after - alone)
    fresh = arrived[after] - arrived[alone]
    certain = np.where(unbroken, np.maximum(steps.decodes[after] - fresh, 0.0), 0.0)
    # The engine's own count also holds requests that do not decode (prompts begun, KV to be sent):
    # never more than decoded before and had their prompts computed since.
    ready = steps.decodes[before] + arrived[alone] - arrived[before + 1]
    said = np.where(slot > 0, np.minimum(running - steps.prefills[alone], ready), np.nan)
    residents[alone] = np.fmax(certain, said)
    return residents, bool(np.all(unbroken | ~np.isnan(running)))


def surely_decoded(steps: Steps, residents: Floats) -> Floats:
    """The same; of steps that computed some again, no more than the steps around them that did not held."""
    plain, rows = np.flatnonzero(steps.decode_only), np.flatnonzero(steps.again)
    if not len(rows) or not len(plain):
        return residents
    slot = np.searchsorted(plain, rows)
    around = [plain[np.clip(slot + side, 0, len(plain) - 1)] for side in (-1, 0)]
    least = residents.copy()
    least[rows] = np.minimum(residents[rows], np.minimum(*(steps.decodes[at] for at in around)))
    return least


def floats(frame: pl.DataFrame, name: str, unknown: float = float("nan")) -> Floats:
    """A column as numbers, NaN (or `unknown`) where nothing is known."""
    values: Floats = frame[name].cast(pl.Float64).fill_null(unknown).to_numpy()
    return values
