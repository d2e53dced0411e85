"""SGLang server logs, batch by batch: what is carried from line to line, and the rows that come of it."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import polars as pl

from pdtrace.model import Sink, Source
from pdtrace.records import dataclass

from . import _sglang_log_events as alarms
from . import _sglang_log_requests as requests
from . import _sglang_log_settings as settings
from . import _sglang_meta as meta
from ._common import CUT_OFF
from ._log_wrappers import POD, SPLIT_LINE
from ._loglines import PROBE
from ._sglang_log_batches import READ, Batches
from ._sglang_log_frame import ACCESS, QUARTER_NS, with_fields, zone_ns

ENGINE = "SGLang"
NO_MEASUREMENT = "line without a measurement"
SETTINGS = "configuration, kept as facts"
REPEATED = "tells what another rank told"
ACCESS_LINE = "access line"
CONTENT = "request of the OpenAI API with its text: its other lines are read"
SAME_NS = 60_000_000_000
_GENERATION = r"/(?:generate|v1/(?:chat/)?completions|v1/responses|v1/messages)\b"
_BUSY = ("batch", "stats", "finish", "receive", "json")


@dataclass
class Run:
    """One run of one server: from its arguments to the next ones in the same stream."""

    stream: str
    number: int
    facts: dict[str, str] = field(default_factory=dict)
    busy: bool = False
    worker: str = ""
    start_ns: int | None = None
    end_ns: int | None = None
    calls: int = 0
    failed: int = 0


class Reader:
    """What is carried from batch to batch of one log."""

    def __init__(self, source: Source, out: Sink) -> None:
        self.path = source.path
        self.out = out
        self.zone = zone_ns(source)
        self.runs: list[Run] = []
        self.current: dict[str, int] = {}
        self.batches = Batches()
        self.requests: list[pl.DataFrame] = []
        self.seen_alarms: dict[tuple[Any, ...], int] = {}
        self.places: dict[tuple[int, str | None, str], str] = {}  # whose lines of a kind count
        self.carried = False

    def batch(self, lines: pl.DataFrame) -> None:
        """Take one batch of lines apart by kind."""
        lines = lines.filter(pl.col("text").str.strip_chars() != "")
        if not lines.height:
            return
        total = int(lines["parts"].sum())
        self.out.read(total)
        self.out.skip_many(total - lines.height, SPLIT_LINE)
        frame = with_fields(lines, self.zone or 0)
        self.carried = self.carried or frame["prefix_time_ns"].null_count() < frame.height
        half = ~pl.col("whole") & pl.col("kind").is_in(_BUSY)  # a number that just ends may go on
        self._skip(frame.filter(half), CUT_OFF)
        frame = self._once(self._assign(frame.filter(~half)))
        self._widen(frame)
        self._samples(frame.filter(pl.col("kind") == "batch"))
        self._requests(frame.filter(pl.col("kind").is_in(["stats", "finish", "receive", "json"])))
        self._access(frame.filter(pl.col("kind") == "access"))
        self._skip(frame.filter(pl.col("kind") == "settings"), SETTINGS)
        self._skip(frame.filter(pl.col("kind") == "prompt"), CONTENT)
        self._others(frame.filter(pl.col("kind") == "other"))

    def close(self) -> None:
        """Write the legs and what is known of the servers."""
        if self.requests:
            self._legs(pl.concat(self.requests, how="diagonal_relaxed"))
        zone = "assumed UTC" if self.zone is None and not self.carried else _zone(self.zone or 0)
        for run in self.runs:
            if not (run.worker or run.facts):
                continue
            worker = self._worker(run)
            role = run.facts.get("role")
            self.out.worker(
                self._aliases(run), role=role, role_basis="config" if role else None, engine=ENGINE,
                start_ns=run.start_ns, end_ns=run.end_ns,
            )  # fmt: skip
            facts = {k: v for k, v in run.facts.items() if k not in ("role", "address")}
            if run.calls:
                facts |= {"http_calls": str(run.calls), "http_calls_failed": str(run.failed)}
            # Its request lines hold nothing that the spans of the same requests lack.
            noted = {"_log_of_spanned_requests": "true"} if self.requests else {}
            for key, value in (facts | noted | {"log_time_zone": zone}).items():
                self.out.fact(worker, key, value)

    def _assign(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The frame with `run`, the index into `runs`; start-up lines are read on the way."""
        starts = {stream: self._index(stream) for stream in frame["stream"].unique().to_list()}
        busy = (
            frame.filter(pl.col("kind").is_in(_BUSY)).group_by("stream").agg(pl.col("record").min())
        )
        first = dict(busy.iter_rows())
        changes = []
        told = frame.filter(pl.col("kind") == "settings").select("record", "stream", "message")
        for record, stream, message in told.iter_rows():
            run = self.runs[self.current[stream]]
            run.busy = run.busy or first.get(stream, record) < record
            if settings.is_start(message) and run.facts and run.busy:
                run = self._begin(stream)
                changes.append((record, stream, self.current[stream]))
            run.facts |= settings.read_line(message)
        for stream in first:
            self.runs[self.current[stream]].busy = True
        number = pl.col("stream").replace_strict(starts, return_dtype=pl.Int32)
        for record, stream, index in changes:
            later = (pl.col("stream") == stream) & (pl.col("record") >= record)
            number = pl.when(later).then(pl.lit(index, dtype=pl.Int32)).otherwise(number)
        return frame.with_columns(number.alias("run"))

    def _once(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Without what a rank tells that works on the same batches as another one (pipeline, tensor, expert ranks).

        Pipeline stages all print their batch lines and time stats, every rank prints retractions: the rank that told first counts.
        """
        what = (
            pl.when(pl.col("kind").is_in(["batch", "stats"]))
            .then("kind")
            .when(alarms.by_rank())
            .then(pl.lit("alarm"))
        )
        ranked = frame.select("record", "run", "dp", "place", what=what).filter(
            pl.col("what").is_not_null() & (pl.col("place") != "")
        )
        if not ranked.height:
            return frame
        first = ranked.unique(["run", "dp", "what"], keep="first", maintain_order=True)
        for run, dp, kind, place in first.select("run", "dp", "what", "place").iter_rows():
            self.places.setdefault((run, dp, kind), place)
        told = pl.DataFrame(
            [(*key, place) for key, place in self.places.items()],
            schema={"run": pl.Int32, "dp": pl.String, "what": pl.String, "counts": pl.String}, orient="row",
        )  # fmt: skip
        again = ranked.join(told, on=["run", "dp", "what"], nulls_equal=True).filter(
            pl.col("place") != pl.col("counts")
        )
        copies = pl.col("record").is_in(again["record"].implode())
        self._skip(frame.filter(copies), REPEATED)
        return frame.filter(~copies)

    def _index(self, stream: str) -> int:
        if stream not in self.current:
            self.current[stream] = len(self.runs)
            self.runs.append(Run(stream, 1))
        return self.current[stream]

    def _begin(self, stream: str) -> Run:
        before = self.runs[self.current[stream]]
        self.current[stream] = len(self.runs)
        self.runs.append(Run(stream, before.number + 1))
        return self.runs[-1]

    def _aliases(self, run: Run) -> dict[str, str | None]:
        label = run.stream if run.number == 1 else f"{run.stream}:{run.number}"
        pod = run.stream.split("/")[1] if run.stream.startswith(POD) and run.number == 1 else None
        pid = run.facts.get("pid", "")
        return {
            "pod": pod,
            # a small one is of a container's own count, where every server has the same
            "pid": pid if pid.isdecimal() and int(pid) >= 1000 else None,
            "address": run.facts.get("address"),
            "file": f"{self.path}#{label}" if label else self.path,
        }

    def _worker(self, run: Run) -> str:
        if not run.worker:
            run.worker = self.out.worker({"file": self._aliases(run)["file"]}, engine=ENGINE)
        return run.worker

    def _workers(self, frame: pl.DataFrame) -> pl.Expr:
        names = {i: self._worker(self.runs[i]) for i in frame["run"].unique().to_list()}
        return pl.col("run").replace_strict(names, return_dtype=pl.String).alias("worker")

    def _skip(self, frame: pl.DataFrame, reason: str) -> None:
        if frame.height:
            self.out.skip_many(frame.height, reason, int(frame["record"][0]))

    def _widen(self, frame: pl.DataFrame) -> None:
        spans = frame.group_by("run").agg(
            pl.col("time_ns").min().alias("a"), pl.col("time_ns").max().alias("b")
        )
        for index, first, last in spans.drop_nulls().iter_rows():
            run = self.runs[index]
            run.start_ns = min(run.start_ns or first, first)
            run.end_ns = max(run.end_ns or last, last)

    def _samples(self, lines: pl.DataFrame) -> None:
        if not lines.height:
            return
        rows = self.batches.samples(lines)
        if rows.height:
            self.out.add("samples", rows.with_columns(self._workers(rows)).drop("run"))
        self._skip(lines.filter(~pl.col("record").is_in(rows["record"].implode())), READ)

    def _requests(self, lines: pl.DataFrame) -> None:
        if not lines.height:
            return
        parsed = requests.parse(lines)
        named = parsed.filter(pl.col("rid").is_not_null() & (pl.col("rid") != ""))
        self._skip(lines.filter(~pl.col("record").is_in(named["record"].implode())), requests.NO_ID)
        self._skip(named.filter(requests.is_health()), requests.HEALTH)
        self.requests.append(named.filter(~requests.is_health()))

    def _legs(self, lines: pl.DataFrame) -> None:
        if not lines.height:
            return
        found = requests.together(lines)
        roles = {i: run.facts.get("role") for i, run in enumerate(self.runs)}
        models = {i: run.facts.get("served_model_name") or run.facts.get("model") for i, run in enumerate(self.runs)}  # fmt: skip
        label = {i: self._aliases(run)["file"] for i, run in enumerate(self.runs)}

        def of_run(names: dict[int, Any]) -> pl.Expr:
            return pl.col("run").replace_strict(names, return_dtype=pl.String)

        again = pl.when(pl.col("turn") > 0).then(pl.format("#{}", "turn")).otherwise(pl.lit(""))
        found = found.with_columns(
            self._workers(found),
            role=pl.coalesce("stats_role", of_run(roles)),
            role_basis=pl.when(pl.col("stats_role").is_not_null())
            .then(pl.lit("log"))
            .when(of_run(roles).is_not_null())
            .then(pl.lit("config")),
            model=of_run(models),
            leg=pl.concat_str(of_run(label), pl.lit("/"), "rid", again),
        )
        self.out.add("legs", meta.legs(found))
        moved = requests.transfers(found)
        for table, frame in (
            (
                "intervals",
                pl.concat([requests.intervals(found), meta.intervals(found)], how="diagonal"),
            ),
            ("reported", pl.concat([requests.reported(found), meta.reported(found)])),
            ("transfers", moved),
            ("events", self._aborts(found)),
        ):
            if frame.height:
                self.out.add(table, frame)
        kept = pl.concat([found["record"], moved["record"]])
        self._skip(lines.filter(~pl.col("record").is_in(kept.implode())), requests.FOLDED)

    def _aborts(self, found: pl.DataFrame) -> pl.DataFrame:
        ended = found.filter(pl.col("status").is_in(["aborted", "failed"]))
        return ended.select(
            "record", "worker", "resolution_ns",
            pl.col("end_ns").alias("time_ns"),
            pl.when(pl.col("status") == "failed").then(pl.lit("failure")).otherwise(pl.lit("abort")).alias("kind"),
            pl.lit("warning").alias("severity"),
            pl.col("rid").alias("request_id"),
            pl.lit(1, dtype=pl.Int64).alias("count"),
            pl.coalesce("error", pl.lit("aborted (as a rule the client went away)")).alias("detail"),
        )  # fmt: skip

    def _access(self, lines: pl.DataFrame) -> None:
        if not lines.height:
            return
        groups = lines["message"].str.extract_groups(ACCESS).struct.unnest()
        lines = pl.concat([lines.select("record", "run", "time_ns", "resolution_ns"), groups], how="horizontal")  # fmt: skip
        path = pl.col("path").str.replace(r"\?.*$", "")
        lines = lines.with_columns(path, code=pl.col("status").cast(pl.Int64))
        asked = lines.filter(
            (pl.col("method") == "POST") & pl.col("path").str.contains(_GENERATION)
        )
        for index, calls, failed in asked.group_by("run").agg(pl.len(), (pl.col("code") >= 400).sum()).iter_rows():  # fmt: skip
            self._worker(self.runs[index])
            self.runs[index].calls += calls
            self.runs[index].failed += failed
        errors = lines.filter(pl.col("code") >= 400)
        probe = (pl.col("method") == "GET") & pl.col("path").str.contains(PROBE)
        self._skip(lines.filter(pl.col("code") < 400), ACCESS_LINE)
        if errors.height:
            self.out.add(
                "events",
                errors.select(
                    "record", "time_ns", "resolution_ns", self._workers(errors),
                    pl.when(probe).then(pl.lit("warning")).otherwise(pl.lit("http_error")).alias("kind"),
                    pl.when(probe).then(pl.lit("info")).otherwise(pl.lit("warning")).alias("severity"),
                    pl.lit(1, dtype=pl.Int64).alias("count"),
                    pl.format("{} {} {}", "status", "method", "path").str.slice(0, 200).alias("detail"),
                ),
            )  # fmt: skip

    def _others(self, lines: pl.DataFrame) -> None:
        marked = lines["message"].str.contains_any(list(alarms.MARKERS))
        self._skip(lines.filter(~marked), NO_MEASUREMENT)
        found, moved = [], []
        for record, index, time_ns, resolution_ns, message in (
            lines.filter(marked).select("record", "run", "time_ns", "resolution_ns", "message").iter_rows()
        ):  # fmt: skip
            row = alarms.read_line(message)
            if row is None:
                self.out.skip(record, NO_MEASUREMENT)
                continue
            if self._told_before(index, row.pop("same"), time_ns):
                self.out.skip(record, REPEATED)
                continue
            worker = self._worker(self.runs[index])
            if failed := row.pop("failed", None):
                moved.append(_failed_movement(record, worker, *failed))
            found.append(row | {"record": record, "worker": worker, "time_ns": time_ns, "resolution_ns": resolution_ns})  # fmt: skip
        if found:
            self.out.add("events", found)
        if moved:
            self.out.add("transfers", moved)

    def _told_before(self, index: int, same: tuple[Any, ...] | None, time_ns: int | None) -> bool:
        """Every rank, and each line of a traceback, tells of the same event."""
        if same is None:
            return False
        key = (index, *same)
        before, now = self.seen_alarms.get(key), time_ns or 0
        self.seen_alarms[key] = max(now, before or 0)
        return before is not None and (not now or not before or now - before <= SAME_NS)


def _failed_movement(record: int, worker: str, what: str, room: str) -> dict[str, Any]:
    side = "source_worker" if what.startswith("Prefill") else "destination_worker"
    return {
        "record": record, side: worker, "request_id": f"bootstrap_room={room}", "direction": "prefill_to_decode",
        "outcome": "failed",
    }  # fmt: skip


def _zone(ahead_ns: int) -> str:
    minutes = ahead_ns // QUARTER_NS * 15
    hours, rest = divmod(abs(minutes), 60)
    return f"UTC{'-' if minutes < 0 else '+'}{hours:02d}:{rest:02d} (stamps against the epochs that lines state)" if minutes else "UTC"  # fmt: skip
