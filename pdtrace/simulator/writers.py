"""Dumps of a run as a real system would leave them, with the truth beside them."""

from __future__ import annotations

import json
from pathlib import Path

from pdtrace.errors import BadOption
from pdtrace.simulator import shape_dynamo, shape_pdtrace, shape_vllm
from pdtrace.simulator.run import Run

SHAPES = {
    "pdtrace": shape_pdtrace.write,
    "vllm": shape_vllm.write,
    "dynamo": shape_dynamo.write,
}


def write(run: Run, folder: str | Path, shape: str = "pdtrace") -> Path:
    """Write the run's dumps into a folder (made when absent); returns the folder."""
    if shape not in SHAPES:
        raise BadOption(f"no shape is called {shape!r}", f"there are {', '.join(SHAPES)}")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    SHAPES[shape](run, path)
    with (path / "truth.json").open("w", encoding="utf-8") as stream:
        json.dump(_truth(run), stream)
    return path


def _truth(run: Run) -> dict[str, object]:
    return {
        "pdtrace_simulator": {
            "scenario": run.scenario.name,
            "title": run.scenario.title,
            "seed": run.seed,
            "duration_s": run.duration_s,
        },
        "requests": run.requests.height,
        "workers": run.truth_workers.to_dicts(),
        "clocks": run.workers.to_dicts(),
        "lost": {"columns": run.lost.columns, "rows": run.lost.rows()},
    }
