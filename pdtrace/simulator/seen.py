"""What an observer is shown: token times through network and proxy, prefill intervals, clocks."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pdtrace.simulator.engine import Ints
from pdtrace.simulator.fleet import Fleet
from pdtrace.simulator.log import emission_frame, names
from pdtrace.simulator.scenario import Scenario

NETWORK_NS = 120_000  # from the engine to the client, undisturbed
HELD = 0.5  # share of a bundled stream's emissions that wait for the next one
BUNDLE_NS = 150_000  # between the parts of one bundle, at most
SPIKES, SPIKE_MS = 0.004, 25.0  # of a jittery network


def emissions(fleet: Fleet) -> pl.DataFrame:
    """Tokens as the engine made them and as the client saw them."""
    frame = emission_frame(fleet.workers)
    if gone := [request.index for request in fleet.requests if request.gone is not None]:
        frame = frame.filter(pl.col("index").is_in(gone).not_())
    request = frame["index"].to_numpy()
    seen = frame["time_ns"].to_numpy() + NETWORK_NS
    random = fleet.streams.of("network")
    if len(request):
        seen = _bundled(request, seen, fleet.scenario.coalesced_ratio, random)
        seen = _jittered(request, seen, fleet.scenario.jitter_ms, random)
    return frame.with_columns(request=names("index"), seen_ns=pl.Series(seen, dtype=pl.Int64))


def prefills(requests: pl.DataFrame, scenario: Scenario) -> pl.DataFrame:
    """Prefill intervals under the worker that the observer believes them to be on."""
    shown, true = pl.col("decode_worker"), pl.coalesce("prefill_worker", "decode_worker")
    offset = int(scenario.prefill_clock_offset_ms * 1e6)
    return (
        requests.filter(pl.col("prefill_end_ns").is_not_null())
        .select(
            (shown if scenario.mislabelled else true).alias("worker"),
            "request",
            (pl.col("prefill_start_ns") + offset).alias("start_ns"),
            (pl.col("prefill_end_ns") + offset).alias("end_ns"),
            (pl.col("prompt_tokens") - pl.col("cached_tokens")).alias("tokens"),
        )
        .sort("worker", "start_ns", "request")
    )


def clocks(fleet: Fleet) -> pl.DataFrame:
    """Workers and the clock of the host that each runs on; router and clients share one host."""
    random, scenario = fleet.streams.of("clocks"), fleet.scenario
    rows: list[tuple[object, ...]] = [("router", "router", "gateway", 0, 0.0, None)]
    hosts: dict[str, tuple[str, int, float]] = {}
    for worker in fleet.workers:
        if worker.server not in hosts:
            offset = int(random.normal(0, scenario.host_offset_ms) * 1e6)
            drift = float(random.uniform(-1, 1)) * scenario.host_drift_ppm
            hosts[worker.server] = (f"node{len(hosts)}", offset, drift)
        rows.append((worker.name, worker.role, *hosts[worker.server], worker.died))
    schema = {"worker": pl.String, "role": pl.String, "host": pl.String,
              "offset_ns": pl.Int64, "drift_ppm": pl.Float64, "died_ns": pl.Int64}  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row")


def _bundled(request: Ints, seen: Ints, ratio: float, random: np.random.Generator) -> Ints:
    """A proxy holds some emissions of its streams until the next one comes."""
    if not ratio:
        return seen
    streams = random.random(int(request.max()) + 1) < ratio
    last = np.append(request[1:] != request[:-1], True)
    held = streams[request] & (random.random(len(request)) < HELD) & ~last
    # each held one is seen with the next that is not held
    where = np.where(held, len(request), np.arange(len(request)))
    release = np.minimum.accumulate(where[::-1])[::-1]
    before = release - np.arange(len(request))
    shown: Ints = seen[release] - np.where(held, before * random.integers(1, BUNDLE_NS), 0)
    return _in_order(request, shown)


def _jittered(request: Ints, seen: Ints, jitter_ms: float, random: np.random.Generator) -> Ints:
    """The network delays each emission by its own amount, never past the next of its stream."""
    if not jitter_ms:
        return seen
    late = random.exponential(jitter_ms, len(seen))
    spike: NDArray[np.bool_] = random.random(len(seen)) < SPIKES
    late += spike * random.exponential(SPIKE_MS, len(seen))
    return _in_order(request, seen + (late * 1e6).astype(np.int64))


def _in_order(request: Ints, seen: Ints) -> Ints:
    """Within a stream nothing is seen before what was sent earlier."""
    # The requests are numbered without holes in blocks: lift each block above the one before it.
    lift = request * (int(seen.max() - seen.min()) + 1)
    ordered: Ints = np.maximum.accumulate(seen - seen.min() + lift) - lift + seen.min()
    return ordered
