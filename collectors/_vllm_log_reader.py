"""vLLM server logs, batch by batch: what is carried from line to line, and the rows that come of it."""

from __future__ import annotations

import re
from typing import Any

import polars as pl

from pdtrace.model import Sink, Source

from . import _vllm_log_config as config
from . import _vllm_log_events as alarms
from . import _vllm_log_lmcache as lmcache
from . import _vllm_log_periodic as periodic
from . import _vllm_log_requests as requests
from . import _vllm_log_steps as steps
from ._common import CUT_OFF
from ._log_wrappers import SPLIT_LINE
from ._vllm_log_frame import with_fields
from ._vllm_log_kinds import ACCESS as ACCESS_LINE
from ._vllm_log_kinds import between, with_kind
from ._vllm_log_runs import Runs
from ._vllm_log_time import LogClock

NO_MEASUREMENT = "line without a measurement"
ACCESS = "access line"
SETTINGS = "configuration, kept as facts"
REPEATED = "repeats the alarm before"
STOPPED = "the server was told to stop, and ended"
UNREADABLE = "periodic line that could not be read"
REPEAT_NS = 5_000_000_000


class Reader:
    """What is carried from batch to batch of one log."""

    def __init__(self, source: Source, out: Sink) -> None:
        self.path = source.path
        self.out = out
        self.clock = LogClock.of(source)
        self.runs = Runs(source, out)
        self.carried = False  # some lines have a carrier's stamp
        self.last_ns: dict[str, int] = {}  # stream -> its last stamp
        self.requests: list[pl.DataFrame] = []
        self.cache: list[pl.DataFrame] = []  # LMCache's lines
        self.answers: list[requests.Answer] = []
        self.calls: dict[int, list[int]] = {}  # run -> generation calls answered, with an error
        self.http_errors: list[dict[str, Any]] = []
        self.last_alarm: tuple[int, str, str] | None = None
        self.last_alarm_ns: int | None = None
        self.preempted: dict[int, int] = {}  # run -> V0's counter
        self.banners: set[int] = set()
        self.stopped: set[int] = set()  # runs told to stop
        self.causes = alarms.Causes()

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
        self._alarms(frame.filter(pl.col("kind") == "alarm"))
        self._access(frame)
        self._settings(frame.filter(pl.col("kind") == "config"))
        self._skip(frame.filter(pl.col("kind") == "prompt"), requests.CONTENT)
        self._skip(frame.filter(pl.col("kind") == "other"), NO_MEASUREMENT)

    def close(self) -> None:
        """Write the legs and what is known of the servers."""
        self._legs()
        self._state_calls()
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

    def _alarms(self, lines: pl.DataFrame) -> None:
        found = []
        for record, index, time_ns, resolution_ns, message in lines.select(
            "record", "run", "time_ns", "resolution_ns", "message"
        ).iter_rows():
            if alarms.is_stop(message):
                self.stopped.add(index)
            if alarms.is_stop(message) or (index in self.stopped and alarms.only_ended(message)):
                self.out.skip(record, STOPPED)
                continue
            row = alarms.read_line(message)
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
            total = alarms.preemptions(message)
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
        last, self.last_alarm = self.last_alarm, alarm
        before, self.last_alarm_ns = self.last_alarm_ns, time_ns or self.last_alarm_ns
        if last != alarm or row["kind"] == "preemption":
            return False
        return time_ns is None or before is None or time_ns - before <= REPEAT_NS

    def _access(self, frame: pl.DataFrame) -> None:
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
        self._skip(lines.filter(~pl.col("record").is_in(errors["record"].implode())), ACCESS)
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
                    "kind": "http_error",
                    "severity": "warning",
                    "count": 1,
                    "detail": f"{status} {method} {path}"[:200],
                }
            )
            if method == "POST" and re.search(requests.GENERATION_PATH, path):
                self.answers.append((record, index, time_ns, int(status)))
        self.http_errors += found

    def _count_calls(self, lines: pl.DataFrame, failed: pl.Expr) -> None:
        path = pl.col("path").str.replace(r"\?.*$", "")
        asked = (pl.col("method") == "POST") & path.str.contains(requests.GENERATION_PATH)
        counted = lines.filter(asked).group_by("run").agg(pl.len(), failed.sum().alias("failed"))
        for run, answered, wrong in counted.iter_rows():
            calls = self.calls.setdefault(run, [0, 0])
            calls[0], calls[1] = calls[0] + answered, calls[1] + wrong

    def _state_calls(self) -> None:
        """What access lines count; a log without request lines tells of single calls only where they failed."""
        for run, counts in self.calls.items():
            worker = self.runs.worker(self.runs.all[run])
            for key, value in zip(("http_calls", "http_calls_failed"), counts, strict=True):
                self.out.fact(worker, key, value)

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

    def _told_http_errors(self, taken: dict[int, requests.Answer], legs: pl.DataFrame) -> None:
        """The HTTP errors, those that answered a request that the log tells of with its id."""
        names = dict(legs.select("record", "request_id").iter_rows())
        answered = {answer[0]: names.get(leg) for leg, answer in taken.items()}
        self.out.add(
            "events",
            [row | {"request_id": answered.get(row["record"])} for row in self.http_errors],
        )

    def _legs(self) -> None:
        frame = requests.with_request_ids(pl.concat(self.requests)) if self.requests else None
        refused = self.answers
        answered: dict[int, requests.Answer] = {}
        legs = pl.DataFrame(schema={"record": pl.Int64, "request_id": pl.String})
        if frame is not None and frame.height:
            legs = requests.legs(frame, self.path, self.runs.all)
            cache = requests.with_legs(self._cache_lines(), frame, legs)
            legs = legs.join(lmcache.found(cache), on="leg", how="left", maintain_order="left")
            answered, refused = requests.pair_answers(legs, self.answers)
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
        if self.http_errors:
            self._told_http_errors(answered, legs)
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


def _counter(row: dict[str, Any], total: int) -> dict[str, Any]:
    return {key: row[key] for key in ("record", "worker", "time_ns", "resolution_ns")} | {
        "metric": "vllm:num_preemptions_total",
        "labels": "{}",
        "value": float(total),
        "kind": "counter",
    }
