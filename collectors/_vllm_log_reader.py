"""vLLM server logs, batch by batch: what is carried from line to line, and the rows that come of it."""

from __future__ import annotations

from typing import Any

import polars as pl

from pdtrace.model import Sink, Source

from . import _vllm_log_config as config
from . import _vllm_log_lmcache as lmcache
from . import _vllm_log_periodic as periodic
from . import _vllm_log_requests as requests
from . import _vllm_log_steps as steps
from ._common import CUT_OFF
from ._log_wrappers import SPLIT_LINE
from ._vllm_log_access import Access
from ._vllm_log_alarms import NO_MEASUREMENT, Alarms
from ._vllm_log_frame import with_fields
from ._vllm_log_kinds import with_kind
from ._vllm_log_runs import Runs
from ._vllm_log_time import LogClock

SETTINGS = "configuration, kept as facts"
UNREADABLE = "periodic line that could not be read"


class Reader:
    """What is carried from batch to batch of one log."""

    def __init__(self, source: Source, out: Sink) -> None:
        self.path = source.path
        self.out = out
        self.clock = LogClock.of(source)
        self.runs = Runs(source, out)
        self.carried = False  # some lines have a carrier's stamp
        self.requests: list[pl.DataFrame] = []
        self.cache: list[pl.DataFrame] = []  # LMCache's lines
        self.access = Access(self.runs, out)
        self.alarms = Alarms(self.runs, out)
        self.banners: set[int] = set()

    def batch(self, lines: pl.DataFrame) -> None:
        """Take one batch of lines apart by kind."""
        lines = lines.filter(pl.col("text").str.strip_chars() != "")
        if not lines.height:
            return
        total = int(lines["parts"].sum())
        self.out.read(total)
        self.out.skip_many(total - lines.height, SPLIT_LINE)
        frame = lmcache.stamped(self.clock.stamp(with_kind(with_fields(lines))))
        self.carried = self.carried or frame["prefix_time_ns"].null_count() < frame.height
        parsed = steps.parse(frame.filter(pl.col("kind") == "step"))
        frame = self.runs.assign(frame, parsed)
        self._seen(frame)
        self._steps(frame, parsed)
        self._periodic(frame.filter(pl.col("kind") == "periodic"))
        self._requests(frame.filter(pl.col("kind") == "request"))
        self._cache(frame.filter(pl.col("kind") == "lmcache"))
        self.alarms.take(frame.filter(pl.col("kind") == "alarm"))
        self.access.take(frame)
        self._settings(frame.filter(pl.col("kind") == "config"))
        self._skip(frame.filter(pl.col("kind") == "prompt"), requests.CONTENT)
        self._skip(frame.filter(pl.col("kind") == "other"), NO_MEASUREMENT)

    def close(self) -> None:
        """Write the legs and what is known of the servers."""
        self._legs()
        self.access.state_calls()
        self.runs.close()
        for run in self.runs.all:
            if run.worker:
                for key, value in self.clock.facts(self.carried):
                    self.out.fact(run.worker, key, value)
                if run.last_stats_ns.get("shortest"):
                    self.out.fact(
                        run.worker, "log_stats_interval_s", run.last_stats_ns["shortest"] / 1e9
                    )

    def _skip(self, frame: pl.DataFrame, reason: str) -> None:
        if frame.height:
            self.out.skip_many(frame.height, reason, int(frame["record"][0]))

    def _seen(self, frame: pl.DataFrame) -> None:
        spans = frame.group_by("run").agg(
            pl.col("time_ns").min().alias("a"), pl.col("time_ns").max().alias("b")
        )
        for run, first, last in spans.iter_rows():
            self.runs.all[run].seen(first, last)

    def _steps(self, frame: pl.DataFrame, parsed: pl.DataFrame) -> None:
        lines = frame.filter(pl.col("kind") == "step")
        if not lines.height:
            return
        parsed = parsed.join(
            lines.select("record", "run"), on="record", how="left", maintain_order="left"
        )
        known = []
        for index in parsed["run"].unique().to_list():
            run = self.runs.all[index]
            run.iterations = True
            known.append(
                {"run": index, "worker": self.runs.worker(run), "transfer_role": run.transfer_role}
            )
        info = pl.DataFrame(
            known, schema={"run": pl.Int32, "worker": pl.String, "transfer_role": pl.String}
        )
        rows = steps.rows(parsed.join(info, on="run", how="left", maintain_order="left"))
        self.out.add("steps", rows)
        self._skip(parsed.filter(pl.col("dummy").is_not_null()), steps.DUMMY)
        self._skip(
            lines.filter(~pl.col("record").is_in(parsed["record"].implode())), NO_MEASUREMENT
        )

    def _periodic(self, lines: pl.DataFrame) -> None:
        found: list[dict[str, Any]] = []
        for record, index, time_ns, resolution_ns, message, whole in lines.select(
            "record", "run", "time_ns", "resolution_ns", "message", "whole"
        ).iter_rows():
            if not whole and not periodic.is_finished(message):
                self.out.skip(record, CUT_OFF)
                continue
            run = self.runs.all[index]
            rows = periodic.samples(message, record, time_ns, resolution_ns, run)
            if not rows:
                self.out.skip(record, UNREADABLE)
                continue
            worker = self.runs.worker(run)
            found += [row | {"worker": worker} for row in rows]
            for row in rows:
                key = row["metric"].removeprefix("log:kv_")
                if (key in periodic.ALARMS or f"num_{key}" in periodic.ALARMS) and (
                    row["value"] or 0
                ) > 0:
                    self._transfer_alarm(row, key, worker)
        if found:
            self.out.add("samples", found)

    def _transfer_alarm(self, row: dict[str, Any], key: str, worker: str) -> None:
        kind, severity = periodic.ALARMS.get(key) or periodic.ALARMS[f"num_{key}"]
        self.out.add(
            "events",
            [
                {
                    "record": row["record"],
                    "worker": worker,
                    "time_ns": row["time_ns"],
                    "resolution_ns": row["interval_ns"],
                    "kind": kind,
                    "severity": severity,
                    "count": int(row["value"]),
                    "detail": f"KV Transfer metrics: {key.replace('_', ' ')}",
                }
            ],
        )

    def _requests(self, lines: pl.DataFrame) -> None:
        if not lines.height:
            return
        parsed = requests.parse(lines)
        self._skip(
            lines.filter(~pl.col("record").is_in(parsed["record"].implode())), NO_MEASUREMENT
        )
        real = parsed.filter(requests.is_request())
        self._skip(parsed.filter(~requests.is_request()).unique("record"), requests.NO_REQUEST)
        for index in real["run"].unique().to_list():
            self.runs.worker(self.runs.all[index])
        self.requests.append(real)

    def _cache(self, lines: pl.DataFrame) -> None:
        if not lines.height:
            return
        for index in lines["run"].unique().to_list():
            self.runs.worker(self.runs.all[index])
        self.cache.append(lmcache.parse(lines))
        self.requests.append(lmcache.events(self.cache[-1]))

    def _settings(self, lines: pl.DataFrame) -> None:
        found: list[dict[str, Any]] = []
        settings = 0
        for record, index, time_ns, resolution_ns, message in lines.select(
            "record", "run", "time_ns", "resolution_ns", "message"
        ).iter_rows():
            if index in self.banners or not config.is_banner(message):
                if config.read_line(message):
                    settings += 1
                else:
                    self.out.skip(record, NO_MEASUREMENT)
                continue
            self.banners.add(index)
            run = self.runs.all[index]
            version = config.read_line(message).get("version", "")
            found.append(
                {
                    "record": record,
                    "worker": self.runs.worker(run),
                    "time_ns": time_ns,
                    "resolution_ns": resolution_ns,
                    "kind": "started",
                    "severity": "info",
                    "count": 1,
                    "detail": f"vLLM {version} started".replace("  ", " "),
                }
            )
        if found:
            self.out.add("events", found)
        self.out.skip_many(settings, SETTINGS)

    def _legs(self) -> None:
        frame = requests.with_request_ids(pl.concat(self.requests)) if self.requests else None
        refused = self.access.answers
        answered: dict[int, requests.Answer] = {}
        legs = pl.DataFrame(schema={"record": pl.Int64, "request_id": pl.String})
        if frame is not None and frame.height:
            legs = requests.legs(frame, self.path, self.runs.all)
            cache = requests.with_legs(self._cache_lines(), frame, legs)
            legs = legs.join(lmcache.found(cache), on="leg", how="left", maintain_order="left")
            answered, refused = requests.pair_answers(legs, self.access.answers)
            legs = requests.answered(legs, answered)
            self.out.add("legs", legs.select(requests.LEG_COLUMNS))
            moved = requests.transfers(frame, self.runs.all)
            if moved.height:
                self.out.add("transfers", moved)
            kept = pl.concat(
                [legs["record"], self._aborts(legs), moved["record"], self._loads_and_stores(cache)]
            )
            self._skip(
                frame.unique("record").filter(~pl.col("record").is_in(kept.implode())),
                requests.FOLDED,
            )
        elif self.cache:
            text = pl.lit(None, pl.String)
            self._loads_and_stores(self._cache_lines().with_columns(request_id=text, leg=text))
        self.access.tell(answered, legs)
        if refused:
            self.out.add("legs", [self._refused(*answer) for answer in refused])

    def _cache_lines(self) -> pl.DataFrame:
        return pl.concat(self.cache) if self.cache else lmcache.parse(lmcache.NOTHING)

    def _loads_and_stores(self, cache: pl.DataFrame) -> pl.Series:
        """LMCache's movements, and loads as time of their requests; returns the records that made them."""
        moved = lmcache.timed(cache)
        if moved.height:
            self.out.add("transfers", lmcache.transfers(moved, self.runs.all))
            loads = lmcache.loads(moved)
            if loads.height:
                self.out.add("intervals", loads)
        nameless = cache.filter(pl.col("id").is_null())
        self._skip(
            nameless.filter(~pl.col("record").is_in(moved["record"].implode())), lmcache.UNTIMED
        )
        return moved["record"]

    def _aborts(self, legs: pl.DataFrame) -> pl.Series:
        """One event per aborted and per failed request; returns the records that made them."""
        frames = []
        for status, kind in (("aborted", "abort"), ("failed", "failure")):
            frames.append(
                legs.filter((pl.col("status") == status) & pl.col(status).is_not_null()).select(
                    pl.col(status).alias("record"),
                    "worker",
                    pl.col("end_ns").alias("time_ns"),
                    "resolution_ns",
                    pl.lit(kind).alias("kind"),
                    pl.lit("warning").alias("severity"),
                    "request_id",
                    pl.lit(1, dtype=pl.Int64).alias("count"),
                    pl.coalesce("error", pl.lit("aborted (as a rule the client went away)")).alias(
                        "detail"
                    ),
                )
            )
        events = pl.concat(frames)
        if events.height:
            self.out.add("events", events)
        return events["record"]

    def _refused(self, record: int, index: int, time_ns: int | None, status: int) -> dict[str, Any]:
        """The leg of a request that was refused before it was logged: only its answer is known."""
        run = self.runs.all[index]
        place = f"/{run.stream}" if run.stream else ""
        return {
            "record": record,
            "leg": f"{self.path}#{record}{place}",
            "worker": self.runs.worker(run),
            "observer": "engine",
            "role": run.role,
            "role_basis": "config" if run.role else None,
            "clock": "wall",
            "start_ns": time_ns,
            "resolution_ns": 1_000_000_000,
            "status": "failed",
            "error": f"HTTP {status}",
            "model": run.model,
        }
