"""What a replay is given and what it answers: costs of steps, load, plan; first tokens and ends."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pdtrace.methods.statistics import Floats
from pdtrace.records import dataclass

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: prefill a + b n + c n (n + 2 before), decode a + b batch + c context.

    A step with both pays the decode, `mixed`, and the prompt tokens.
    """

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    mixed: float = 0.0

    def step(self, batch: int, context: float, new: int, squares: float) -> float:
        """A step of so many decodes and prompt tokens."""
        fixed = self.decode[0] + self.decode[1] * batch + self.decode[2] * context
        if not new:
            return fixed
        tokens = self.prefill[1] * new + self.prefill[2] * squares
        return (fixed + self.mixed if batch else self.prefill[0]) + tokens


@dataclass(frozen=True)
class Noise:
    """How steps scatter around their cost: ratios to draw from, of steps with decodes and of prompt-only ones."""

    decode: Floats
    prefill: Floats
    seed: int = 0


@dataclass(frozen=True)
class Load:
    """Requests in order of arrival at the engines; `worker` numbers the one that had it, -1 unknown."""

    arrival_s: Floats
    prompt: Ints
    cached: Ints
    output: Ints
    worker: Ints
    decoder: Ints  # likewise of a split: the worker that decoded


@dataclass(frozen=True)
class Plan:
    """A deployment to play: workers, batching, memory, link."""

    workers: int = 1  # aggregated workers, or decode workers of a split
    prefill_workers: int = 0  # 0: not split
    chunk_tokens: int | None = (
        None  # token budget of a mixed step; None: prompts are computed in steps of their own
    )
    prefill_batch_tokens: int = 0  # prompt tokens in such a step; at least one prompt is taken
    kv_tokens: float = float("inf")  # KV memory of each worker
    block_tokens: int = 16  # KV is kept in blocks of as many tokens
    max_running: int = 1 << 30
    as_recorded: bool = False  # requests go to the worker that had them
    bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    transfer: Literal["bulk", "layerwise"] = "bulk"
    kv_bytes_per_token: float = 0.0
    origin: Literal["prefill", "decode"] = "decode"  # who delivers the first token in a split


@dataclass(frozen=True)
class Played:
    """Instants in seconds on the clock of the arrivals; NaN where a request never got there."""

    first_s: Floats
    end_s: Floats
    transfer_s: Floats  # exposed transfer, waiting for the link included
    memory_wait_s: Floats  # wait for KV room on D
    prefill_busy_ratio: float  # of the busiest prefill worker of a split, until the last arrival
    finished: bool
