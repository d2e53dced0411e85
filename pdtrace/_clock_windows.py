"""The offset between two clocks from messages both ways: drift, then bounds per stretch of a minute.

For every message theta = clock of the receiver - clock of the sender obeys theta <= received - sent
on the way there and theta >= answered - back on the way home (Cristian 1989). A linear drift is
taken out first, by a line through the middles of the bounds (Moon, Skelly & Towsley 1999 solve the
same by linear programming); what is left is bounded stretch by stretch. Bounds that cross mean that
a clock stepped or that messages were paired wrongly: the stretch is marked, nothing is clamped.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdtrace.records import dataclass

WINDOW_NS = 60 * 10**9
LEAST_PAIRS = 5  # messages each way; fewer say nothing of a stretch
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Offsets:
    """Offset by stretch; `low` > `high` where bounds cross. Instants are ns since `origin`."""

    origin: int
    edges: Floats  # starts of the stretches
    middles: Floats  # where the offset of a stretch holds exactly
    low: Floats
    high: Floats
    drift: float

    @property
    def feasible(self) -> Bools:
        return np.isfinite(self.low) & (self.low <= self.high)

    @property
    def offsets(self) -> Floats:
        """Offset in the middle of each stretch; of a marked one what its neighbours say."""
        good = self.feasible
        level = (self.low + self.high) / 2 - self.drift * self.middles
        if good.any():
            level = np.interp(self.middles, self.middles[good], level[good])
        return level + self.drift * self.middles


def offsets(
    sent: npt.NDArray[np.int64],
    received: npt.NDArray[np.int64],
    answered: npt.NDArray[np.int64],
    back: npt.NDArray[np.int64],
) -> Offsets:
    """Bounds from messages there (sent, received) and home (answered, back)."""
    origin = int(min(sent.min(), back.min() if back.size else sent.min()))
    there, upper = (sent - origin).astype(np.float64), (received - sent).astype(np.float64)
    home, lower = (back - origin).astype(np.float64), (answered - back).astype(np.float64)
    drift = 0.0
    for _ in range(3):  # the middle of a stretch is exact only once little drift is left in it
        drift += _slope(there, upper - drift * there, home, lower - drift * home)
    upper, lower = upper - drift * there, lower - drift * home
    edges = _edges(there, home)
    ups, lows = (
        _extremes(edges, there, upper, np.minimum),
        _extremes(edges, home, lower, np.maximum),
    )
    end = max(there.max(), home.max() if home.size else 0.0)
    middles = (edges + np.append(edges[1:], max(end, edges[-1]))) / 2
    return Offsets(origin, edges, middles, lows + drift * middles, ups + drift * middles, drift)


def _edges(there: Floats, home: Floats) -> Floats:
    """Starts of stretches of a minute; those with too few messages go with the one before."""
    count = int(max(there.max(), home.max() if home.size else 0.0) // WINDOW_NS) + 1
    if count > 200_000 or not home.size:
        return np.zeros(1)
    ups = np.bincount((there // WINDOW_NS).astype(np.int64), minlength=count)
    lows = np.bincount((home // WINDOW_NS).astype(np.int64), minlength=count)
    kept = [0]
    have = np.zeros(2, np.int64)
    left = np.array([ups.sum(), lows.sum()])
    for window in range(count):  # minutes of a run: few
        if (have >= LEAST_PAIRS).all() and (left >= LEAST_PAIRS).all():
            kept.append(window)
            have[:] = 0
        have += (ups[window], lows[window])
        left -= (ups[window], lows[window])
    return np.asarray(kept, np.float64) * WINDOW_NS


def _extremes(edges: Floats, at: Floats, values: Floats, of: np.ufunc) -> Floats:
    """Smallest (largest) value of each stretch; not finite without any."""
    found = np.full(len(edges), np.inf if of is np.minimum else -np.inf)
    of.at(found, np.maximum(np.searchsorted(edges, at, "right") - 1, 0), values)
    return found


def _slope(there: Floats, upper: Floats, home: Floats, lower: Floats) -> float:
    """Slope of the middles of the bounds; 0 with fewer than three stretches to tell it."""
    span = max(there.max(), home.max() if home.size else 0.0)
    few = min(len(there), len(home))  # few messages need longer stretches to hold enough of them
    length = max(min(float(WINDOW_NS), span / 4 + 1), 1.5 * LEAST_PAIRS * span / max(few, 1))
    edges = np.arange(0.0, span + 1, length) if span / length < 200_000 else np.zeros(1)
    place = [np.maximum(np.searchsorted(edges, at, "right") - 1, 0) for at in (there, home)]
    counts = [np.bincount(p, minlength=len(edges)) for p in place]
    good = (counts[0] >= 3) & (counts[1] >= 3)
    if good.sum() < 3:
        return 0.0
    sums = [
        np.bincount(p, at, minlength=len(edges)) for p, at in zip(place, (there, home), strict=True)
    ]
    times = (sums[0] / np.maximum(counts[0], 1) + sums[1] / np.maximum(counts[1], 1))[good] / 2
    ups = _extremes(edges, there, upper, np.minimum)[good]
    lows = _extremes(edges, home, lower, np.maximum)[good]
    x, y = times - times.mean(), (ups + lows) / 2
    return float((x * (y - y.mean())).sum() / (x * x).sum())
