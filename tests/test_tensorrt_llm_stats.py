"""TensorRT-LLM's iteration statistics say how full and how busy a server is, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdtrace import diagnose
from pdtrace.api import Trace


def record(i: int, waiting: int, used: int) -> dict[str, Any]:
    return {
        "iter": i, "iterLatencyMS": 25.0, "numActiveRequests": 40, "numQueuedRequests": waiting,
        "timestamp": f"08-19-2026 14:{i // 60:02}:{i % 60:02}.000000",
        "inflightBatchingStats": {"numScheduledRequests": 40, "numContextRequests": 0, "numGenRequests": 40, "numCtxTokens": 0},
        "kvCacheStats": {"maxNumBlocks": 1000, "usedNumBlocks": used},
    }  # fmt: skip


def test_polls_become_samples_and_no_steps(tmp_path: Path) -> None:
    polls = [[record(i, 0 if i < 60 else 12, 500 if i < 60 else 990)] for i in range(120)]
    (tmp_path / "metrics.json").write_text("\n".join(map(json.dumps, polls)))
    trace = Trace.read([tmp_path])
    assert trace.store.sql("SELECT count(*) FROM steps").item() == 0
    usage = trace.store.sql("SELECT min(usage_ratio), max(usage_ratio), count(*) FROM kv_usage_samples").row(0)  # fmt: skip
    assert usage == (0.5, 0.99, 120)
    (mine,) = diagnose.diagnose(trace.store).deployments
    assert "kv_pressure" in {finding.id for finding in mine.findings}
