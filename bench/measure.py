"""Runs whole processes and reads their wall time, CPU time and peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Run:
    """One process: seconds by the clock, seconds of CPU, peak resident MB, its output."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    output: str


@dataclass(frozen=True)
class Figure:
    """What was measured, what it gave, and the goal it has (empty: none)."""

    what: str
    measured: str
    goal: str = ""


def run(command: Sequence[str], *, check: bool = True) -> Run:
    """Run a command to its end and measure it."""
    start = time.perf_counter()
    # Modules are compiled once, as in any installation: not in every run.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if check and process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}:\n{output}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, output)


def interleaved(
    commands: dict[str, Sequence[str]], times: int, before: Callable[[], None] = lambda: None
) -> dict[str, Run]:
    """Run each command several times in turn, so that a noisy minute hits all; medians per command."""
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(times):
        for name, command in commands.items():
            before()
            runs[name].append(run(command))
    return {
        name: Run(
            *(median(getattr(r, key) for r in all_runs) for key in ("wall_s", "cpu_s", "peak_mb")),
            all_runs[-1].output,
        )
        for name, all_runs in runs.items()
    }


def table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first row is its header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print(f"\n{title}")
    for row in rows:
        print(
            "  "
            + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    sys.stdout.flush()
