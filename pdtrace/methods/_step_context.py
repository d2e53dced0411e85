"""What the context of a batch costs a step, where the records do not say it: read off the steps around."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pdtrace.methods.statistics import Floats

NEAR = 21  # decode-only steps on either side of a step that tell what its batch takes
ARRIVAL = 5  # steps beside a prompt that its arrival slows too (vllm/agg of the captures: 2 ms falling to 0.3)


def beyond_fit(
    elapsed: Floats, decodes: Floats, decode_only: NDArray[np.bool_], baseline: Floats
) -> tuple[Floats, Floats]:
    """What a batch takes beyond the fit, ns: its context, which nobody states; and the most that it may be.

    A batch changes little from a step to the next, so the decode-only steps around tell it: those
    before, and those behind as far as the prompts between them have joined the batch already; as far
    as such steps tell one another here.
    """
    rows = _calm(decode_only)
    beyond, count = (elapsed - baseline)[rows], len(rows)
    around = sliding_window_view(np.pad(beyond, NEAR - 1, mode="edge"), NEAR)
    # At the place of a step: of those that end with it. NEAR - 1 places later: of those behind it.
    median = np.median(around, axis=1)
    median *= _kept(median)
    behind = np.searchsorted(rows, np.arange(len(elapsed)), side="right")
    before = np.maximum(behind - 1, 0)
    then, later = median[before], median[np.minimum(behind, count - 1) + NEAR - 1]
    batch = decodes[rows]
    first, last = batch[before], batch[np.minimum(behind, count - 1)]
    joined = (decodes - first) / np.where(last > first, last - first, np.inf)
    told: Floats = then + np.clip(joined, 0.0, 1.0) * (later - then)
    return told, np.maximum(later - told, 0.0)


def _kept(median: Floats) -> float:
    """How much of what some steps take beyond the fit those behind take too: 1 where it is the batch, 0 for noise."""
    before, later = median[: -2 * NEAR + 1], median[NEAR : 1 - NEAR]
    if len(before) < NEAR:
        return 1.0
    low, high = np.quantile(median, (0.02, 0.98))  # pauses would say anything
    before, later = np.clip(before, low, high), np.clip(later, low, high)
    spread = float(before.var())
    if not spread:
        return 1.0
    return min(1.0, max(0.0, float(np.cov(before, later, bias=True)[0, 1]) / spread))


def _calm(decode_only: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Decode-only steps away from prompts: to take a request in, and to send its first token, slows the host
    for some steps, which is no property of the batch. All of them where prompts leave no half of them calm.
    """
    rows, busy = np.flatnonzero(decode_only), np.flatnonzero(~decode_only)
    if not len(busy):
        return rows
    at = np.searchsorted(busy, rows)
    since = rows - busy[np.maximum(at - 1, 0)]
    until = busy[np.minimum(at, len(busy) - 1)] - rows
    calm = ((since > ARRIVAL) | (since < 0)) & ((until > ARRIVAL) | (until < 0))
    return rows[calm] if 2 * calm.sum() >= len(rows) else rows
