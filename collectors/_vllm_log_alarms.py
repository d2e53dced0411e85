"""Alarms of vLLM server logs: each told once, with what it may come of; preemptions as V0's counter too."""

from __future__ import annotations

from typing import Any

import polars as pl

from pdtrace.model import Sink

from . import _vllm_log_events as events
from ._vllm_log_runs import Runs

NO_MEASUREMENT = "line without a measurement"
REPEATED = "repeats the alarm before"
STOPPED = "the server was told to stop, and ended"
REPEAT_NS = 5_000_000_000


class Alarms:
    """What is carried from batch to batch of the alarms of one log."""

    def __init__(self, runs: Runs, out: Sink) -> None:
        self.runs, self.out = runs, out
        self.last: tuple[int, str, str] | None = None
        self.last_at_ns: int | None = None
        self.preempted: dict[int, int] = {}  # run -> V0's counter
        self.stopped: set[int] = set()  # runs told to stop
        self.causes = events.Causes()

    def take(self, lines: pl.DataFrame) -> None:
        """Tell the alarms among lines of one batch."""
        found = []
        for record, index, time_ns, resolution_ns, message in lines.select(
            "record", "run", "time_ns", "resolution_ns", "message"
        ).iter_rows():
            if events.is_stop(message):
                self.stopped.add(index)
            if events.is_stop(message) or (index in self.stopped and events.only_ended(message)):
                self.out.skip(record, STOPPED)
                continue
            row = events.read_line(message)
            self.causes.see(index, record, time_ns, message)
            if row is None:
                self.out.skip(record, NO_MEASUREMENT)
                continue
            if self._repeats(index, row, time_ns):
                self.out.skip(record, REPEATED)
                continue
            worker = self.runs.worker(self.runs.all[index])
            row |= {
                "record": record,
                "worker": worker,
                "time_ns": time_ns,
                "resolution_ns": row.pop("width_ns", resolution_ns),
            }
            total = events.preemptions(message)
            if total is not None:
                row["count"] = max(total - self.preempted.get(index, 0), 1)
                self.preempted[index] = total
                self.out.add("samples", [_counter(row, total)])
            self.causes.name(index, time_ns, row)
            found.append(row)
        if found:
            self.out.add("events", found)

    def _repeats(self, index: int, row: dict[str, Any], time_ns: int | None) -> bool:
        """Tracebacks and every rank of a worker say the same again."""
        alarm = (index, row["kind"], f"{row['detail']} {row['request_id']}")
        last, self.last = self.last, alarm
        before, self.last_at_ns = self.last_at_ns, time_ns or self.last_at_ns
        if last != alarm or row["kind"] == "preemption":
            return False
        return time_ns is None or before is None or time_ns - before <= REPEAT_NS


def _counter(row: dict[str, Any], total: int) -> dict[str, Any]:
    return {key: row[key] for key in ("record", "worker", "time_ns", "resolution_ns")} | {
        "metric": "vllm:num_preemptions_total",
        "labels": "{}",
        "value": float(total),
        "kind": "counter",
    }
