"""What a step costs: the shape of DistServe's profiler around OPT-13B on an A100-80G.

Coefficients: LLMServe/DistServe (Apache-2.0), profiler-a100-80g.distserve.json, facebook/opt-13b,
one GPU; milliseconds. Prefill: a + b sum(n) + c sum(n^2). Decode: a + b context + c batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdtrace.simulator.scenario import Scenario

PREFILL = (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06)
DECODE_SMALL = (19.934702624895458, 0.0006269356524350583, 0.03850697740828398)
DECODE_LARGE = (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046)
LARGE_BATCH = 95  # from this batch on the second fit holds
SCALE = (0.5, 1.3)  # another model or GPU: all of a kind times one draw

Part = tuple[int, int, int]  # request, prompt tokens computed now, its tokens computed before


class Cost:
    """Milliseconds of a step, with and without its prompt tokens."""

    def __init__(self, scenario: Scenario, random: np.random.Generator) -> None:
        prefill = float(random.uniform(*SCALE)) * scenario.prefill_scale
        decode = float(random.uniform(*SCALE))
        self.prefill = tuple(prefill * value for value in PREFILL)
        self.small = tuple(decode * value for value in DECODE_SMALL)
        self.large = tuple(decode * value for value in DECODE_LARGE)
        self.steep = float(random.uniform(0.2, 0.5)) * decode if scenario.batch_steep else 0.0
        self.knee = scenario.misspecified

    def decode(self, batch: int, context: float) -> float:
        """A step that only decodes."""
        if not batch:
            return 0.0
        shown = -(-batch // 8) * 8 if self.knee else batch  # batches padded to captured sizes
        fixed, per_context, per_request = self.large if batch >= LARGE_BATCH else self.small
        steep = self.steep * batch * (1 + batch / 40)
        return fixed + per_context * context + per_request * shown + steep

    def alone(self, parts: Sequence[Part]) -> float:
        """A step that only computes prompts."""
        return self.prefill[0] + self._tokens(parts)

    def mixed(self, batch: int, context: float, parts: Sequence[Part]) -> tuple[float, float]:
        """(a step that decodes and computes prompts, the same step without the prompts)."""
        base = self.decode(batch, context)
        if not parts:
            return base, base
        if not batch:
            return self.alone(parts), 0.0
        if not self.knee:
            return base + self._tokens(parts), base
        # Roofline: memory bound until the arithmetic takes longer.
        compute = 0.6 * self.prefill[0] + self.prefill[1] * batch + self._tokens(parts)
        return max(base, compute), base

    def _tokens(self, parts: Sequence[Part]) -> float:
        _, linear, square = self.prefill
        return sum(linear * new + square * new * (new + 2 * before) for _, new, before in parts)
