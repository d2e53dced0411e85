"""Access lines of vLLM server logs: calls counted, answers with an error, which have no stamp of their own."""

from __future__ import annotations

import re
from typing import Any

import polars as pl

from pdtrace.model import Sink

from . import _vllm_log_requests as requests
from ._loglines import is_probe
from ._vllm_log_kinds import ACCESS as ACCESS_LINE
from ._vllm_log_kinds import between
from ._vllm_log_runs import Runs

ACCESS = "access line"


class Access:
    """What is carried from batch to batch of the access lines of one log."""

    def __init__(self, runs: Runs, out: Sink) -> None:
        self.runs, self.out = runs, out
        self.answers: list[requests.Answer] = []  # generation calls with an error
        self.last_ns: dict[str, int] = {}  # stream -> its last stamp
        self.calls: dict[int, list[int]] = {}  # run -> generation calls answered, with an error
        self.errors: list[dict[str, Any]] = []

    def take(self, frame: pl.DataFrame) -> None:
        """Count the access lines of a batch of all lines, and keep the errors."""
        before = dict(self.last_ns)
        for stream, last in frame.group_by("stream").agg(pl.col("time_ns").max()).iter_rows():
            if last is not None:
                self.last_ns[stream] = last
        lines = frame.with_columns(between()).filter(pl.col("kind") == "access")
        if not lines.height:
            return
        groups = lines["text"].str.extract_groups(ACCESS_LINE).struct.unnest()
        lines = pl.concat(
            [lines.select("record", "run", "stream", "after_ns", "gap_ns"), groups],
            how="horizontal",
        )
        failed = pl.col("status").cast(pl.Int64, strict=False) >= 400
        self._count_calls(lines, failed)
        errors = lines.filter(failed)
        fine = lines.filter(~pl.col("record").is_in(errors["record"].implode()))
        if fine.height:
            self.out.skip_many(fine.height, ACCESS, int(fine["record"][0]))
        found = []
        for record, index, stream, after, gap, method, path, status in errors.iter_rows():
            path = path.partition("?")[0]
            time_ns = after if after is not None else before.get(stream)
            run = self.runs.all[index]
            found.append(
                {
                    "record": record,
                    "worker": self.runs.worker(run),
                    "time_ns": time_ns,
                    "resolution_ns": gap,
                    "kind": "warning" if is_probe(method, path) else "http_error",
                    "severity": "info" if is_probe(method, path) else "warning",
                    "count": 1,
                    "detail": f"{status} {method} {path}"[:200],
                }
            )
            if method == "POST" and re.search(requests.GENERATION_PATH, path):
                self.answers.append((record, index, time_ns, int(status)))
        self.errors += found

    def _count_calls(self, lines: pl.DataFrame, failed: pl.Expr) -> None:
        path = pl.col("path").str.replace(r"\?.*$", "")
        asked = (pl.col("method") == "POST") & path.str.contains(requests.GENERATION_PATH)
        counted = lines.filter(asked).group_by("run").agg(pl.len(), failed.sum().alias("failed"))
        for run, answered, wrong in counted.iter_rows():
            calls = self.calls.setdefault(run, [0, 0])
            calls[0], calls[1] = calls[0] + answered, calls[1] + wrong

    def state_calls(self) -> None:
        """What access lines count; a log without request lines tells of single calls only where they failed."""
        for run, counts in self.calls.items():
            worker = self.runs.worker(self.runs.all[run])
            for key, value in zip(("http_calls", "http_calls_failed"), counts, strict=True):
                self.out.fact(worker, key, value)

    def tell(self, taken: dict[int, requests.Answer], legs: pl.DataFrame) -> None:
        """The HTTP errors, those that answered a request that the log tells of with its id."""
        if not self.errors:
            return
        names = dict(legs.select("record", "request_id").iter_rows())
        answered = {answer[0]: names.get(leg) for leg, answer in taken.items()}
        self.out.add(
            "events",
            [row | {"request_id": answered.get(row["record"])} for row in self.errors],
        )
