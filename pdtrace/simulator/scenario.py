"""What a scenario can set: engine, load, step cost and disturbances; the randomness of a run."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

EPOCH_NS = 1_780_000_000_000_000_000  # true time of the first instant of every run
BLOCK_TOKENS = 16  # tokens in a KV block
# OPT-13B at FP16: 2 (K and V) * 40 layers * 40 heads * 128 * 2 bytes
KV_BYTES_PER_TOKEN = 819_200
LOAD_WEIGHT = 200  # uncached prompt tokens that one waiting or running request is worth


@dataclass(frozen=True)
class Scenario:
    """One serving set-up with its load and its disturbances; pairs are drawn uniformly per run."""

    name: str
    title: str
    kind: str  # positive, null, adversarial or other
    # ---- engine
    mode: str = "chunked"  # exclusive, chunked or pd
    workers: int = 1  # aggregated workers, or decode workers
    prefill_workers: int = 1  # of pd
    chunk_tokens: int = 2048  # token budget of a chunked step
    prefill_batch_tokens: int = 4096  # budget of a step that only computes prompts
    max_running: int = 256
    kv_blocks: int = 3500  # of each worker
    kv_peak_ratio: float = 0.0  # else: memory is this share of the most that the run would use
    preemption: str = "recompute"  # or swap: no prompt tokens are computed again
    router: str = "round_robin"  # round_robin, least_loaded, prefix_affinity or long_apart
    ranks: int = 1  # data-parallel ranks of each aggregated worker, with a scheduler each
    cache_tokens: int = 0  # prefix cache of each worker; 0 is none
    link_gbytes_per_s: tuple[float, float] = (5.0, 25.0)
    link_latency_ms: float = 1.0
    transfer: str = "bulk"  # or layerwise: KV leaves layer by layer while the prompt is computed
    # ---- load
    short_per_s: tuple[float, float] = (3.4, 4.6)
    long_per_s: tuple[float, float] = (0.06, 0.12)
    short_tokens: float = 250.0  # median
    long_tokens: tuple[float, float] = (2000.0, 8000.0)
    output_tokens: float = 130.0  # median
    output_max: int = 900
    session_ratio: float = 0.0  # share of short requests that are turns of conversations
    system_tokens: int = 0  # length of prefixes that requests share
    system_prefixes: int = 4
    burst: float = 0.0  # 0 is Poisson; else the load swings between 1 - burst and 1 + burst
    # ---- step cost
    prefill_scale: float = 1.0
    batch_steep: bool = False
    misspecified: bool = False
    step_draw: int = 0  # another draw of how single steps scatter; load and costs stay
    # ---- disturbances
    pauses: str = "none"  # independent, load (more when more is running) or locked to long prefills
    pauses_per_min: float = 6.0
    pause_ms: tuple[float, float] = (60.0, 350.0)
    coalesced_ratio: float = 0.0  # share of streams that a proxy bundles
    jitter_ms: float = 0.0
    speculative_tokens: int = 0  # tokens guessed on top of each
    host_offset_ms: float = 0.0  # clocks of hosts differ by about as much
    host_drift_ppm: float = 0.0
    prefill_clock_offset_ms: float = 0.0  # prefill intervals are seen as much too late
    mislabelled: bool = False  # prefills of other workers are shown as the decode worker's own
    # ---- what goes wrong
    refused_ratio: float = 0.0  # requests that the router turns away
    failed_ratio: float = (
        0.0  # that the engine fails: half where their prompt is computed, half later
    )
    left_ratio: float = 0.0  # whose client goes away in the middle of the answer
    patience_s: float = 0.0  # clients go away when no token came for so long; 0: they wait
    dies_s: float = 0.0  # the first worker dies so long after the first instant; 0: never
    retries: int = 0  # further attempts of the router with what failed before its first token

    @property
    def troubled(self) -> bool:
        """Whether some request may not complete."""
        ratios = self.refused_ratio + self.failed_ratio + self.left_ratio
        return ratios + self.patience_s + self.dies_s > 0


class Streams:
    """Independent random streams of one run: what one draws does not move another."""

    def __init__(self, name: str, seed: int) -> None:
        self._key = (zlib.crc32(name.encode()), seed)

    def of(self, purpose: str) -> np.random.Generator:
        """The stream for one purpose; the same purpose starts again at its beginning."""
        return np.random.default_rng([*self._key, zlib.crc32(purpose.encode())])


def uniform(random: np.random.Generator, bounds: tuple[float, float]) -> float:
    """One draw between two bounds."""
    return float(random.uniform(*bounds))
