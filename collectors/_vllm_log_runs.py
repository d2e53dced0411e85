"""Server runs in a vLLM log: one per start of a server in one stream, each a worker of its own.

A run ends where a banner follows work, where the API server's pid changes or where the iteration
count steps back. EngineCore and Worker processes belong to the run in which their lines stand.
"""

from __future__ import annotations

import re
from dataclasses import field

import polars as pl

from pdtrace.model import Sink, Source
from pdtrace.records import dataclass

from ._log_wrappers import POD
from ._vllm_log_config import is_banner, read_line

ENGINE = "vLLM"
# A small pid comes from a container's own pid space, where every server has the same: it
# identifies nobody.
SMALLEST_HOST_PID = 1000
_API_SERVER = r"^(?:APIServer|ApiServer|MainProcess)"
_POD_FOLDER = re.compile(r"/pods/[^/_]+_([^/_]+)_[0-9a-f-]{32,36}/")
_POD_FILE = re.compile(r"(?:^|/)([a-z0-9][a-z0-9.-]*)_[a-z0-9-]+_[a-z0-9.-]+-[0-9a-f]{64}\.log")
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}
_STARTED = ("kv_cache_tokens", "kv_cache_blocks", "pid")  # facts that only a started server has


@dataclass
class Run:
    """One run of one server."""

    stream: str
    number: int
    first_record: int = 0
    pids: dict[str, str] = field(default_factory=dict)  # of its API servers
    processes: set[str] = field(default_factory=set)  # pids of all its processes
    facts: dict[str, str] = field(default_factory=dict)
    engine_ids: list[str] = field(default_factory=list)
    banner: bool = False
    busy: bool = False  # steps or requests were seen
    iterations: bool = False
    worker: str = ""
    start_ns: int | None = None
    end_ns: int | None = None
    shares_pid: bool = False  # started anew inside the process of the run before
    last_stats_ns: dict[str, int] = field(
        default_factory=dict
    )  # engine -> time of its last periodic line

    @property
    def pid(self) -> str | None:
        """The API server's process id."""
        return next(iter(self.pids.values()), None) or self.facts.get("pid")

    @property
    def transfer_role(self) -> str | None:
        """kv_role; 'unknown' with a connector of unknown role, 'none' without one, None unknown."""
        if "kv_connector" in self.facts:
            return self.facts.get("kv_role", "unknown")
        return "none" if "args_seen" in self.facts else None

    @property
    def role(self) -> str | None:
        """prefill or decode where the configuration says so."""
        return _ROLES.get(self.facts.get("kv_role", ""))

    @property
    def model(self) -> str | None:
        """The model under the name that clients use."""
        return self.facts.get("served_model_name") or self.facts.get("model")

    def seen(self, first_ns: object, last_ns: object) -> None:
        """Widen the time in which this run was seen."""
        if isinstance(first_ns, int) and isinstance(last_ns, int):
            self.start_ns = min(self.start_ns or first_ns, first_ns)
            self.end_ns = max(self.end_ns or last_ns, last_ns)


def _identifies(pid: str) -> bool:
    return pid.isdecimal() and int(pid) >= SMALLEST_HOST_PID


class Runs:
    """The runs of one source, found as its batches pass."""

    def __init__(self, source: Source, out: Sink) -> None:
        self._path = source.path
        self._out = out
        self.all: list[Run] = []
        self._current: dict[str, int] = {}
        self._last_steps: dict[
            tuple[str, str], tuple[int, int]
        ] = {}  # (stream, rank) -> seq, record

    def assign(self, frame: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
        """The frame with `run`, the index into `all`; configuration lines are read on the way."""
        starts = {stream: self._index(stream) for stream in frame["stream"].unique().to_list()}
        changes: list[tuple[int, str, int]] = []
        for record, stream, kind, value in self._candidates(frame, steps):
            before = self._current[stream]
            self._handle(record, stream, kind, value)
            if self._current[stream] != before:
                changes.append((record, stream, self._current[stream]))
        run = pl.col("stream").replace_strict(starts, return_dtype=pl.Int32)
        for record, stream, index in changes:
            later = (pl.col("stream") == stream) & (pl.col("record") >= record)
            run = pl.when(later).then(pl.lit(index, dtype=pl.Int32)).otherwise(run)
        frame = frame.with_columns(run.alias("run"))
        for index, pid in (
            frame.select("run", "pid").drop_nulls().unique().sort("run", "pid").iter_rows()
        ):
            self.all[index].processes.add(pid)
        return frame

    def worker(self, run: Run) -> str:
        """The worker id of a run; declared when it is first asked for."""
        if not run.worker:
            run.worker = self._out.worker(self._aliases(run), engine=ENGINE)
        return run.worker

    def close(self) -> None:
        """Declare what the whole log said of each run: role, version, time, engine ids, facts."""
        for run in self.all:
            if not (run.worker or run.facts):
                continue
            worker = self.worker(run)
            self._out.worker(
                self._aliases(run),
                role=run.role,
                role_basis="config" if run.role else None,
                engine=ENGINE,
                version=run.facts.get("version"),
                start_ns=run.start_ns,
                end_ns=run.end_ns,
            )
            others = sorted(p for p in run.processes if p != run.pid and _identifies(p))
            if others and not run.shares_pid:
                rows = [{"worker": worker, "kind": "pid", "value": pid} for pid in others]
                self._out.add("worker_aliases", rows)
            if run.iterations:
                run.facts["iteration_logging"] = "on"
            if run.pid:
                run.facts["pid"] = run.pid
            for key, value in run.facts.items():
                if key != "args_seen":
                    self._out.fact(worker, key, value)

    def _aliases(self, run: Run) -> dict[str, str | None]:
        pid = run.pid
        known = pid is not None and _identifies(pid) and not run.shares_pid
        label = run.stream if run.number == 1 else f"{run.stream}:{run.number}"
        return {
            "engine_id": run.engine_ids[0] if run.engine_ids else None,
            "pod": self._pod(run),
            "pid": pid if known else None,
            "file": f"{self._path}#{label}" if label else self._path,
        }

    def _pod(self, run: Run) -> str | None:
        """The pod's name: of the first run only, since a restarted container keeps it."""
        if run.number > 1:
            return None
        if run.stream.startswith(POD):
            return run.stream.split("/")[1]
        path = self._path.replace("\\", "/")
        match = _POD_FOLDER.search(path) or _POD_FILE.search(path)
        return match[1] if match else None

    def _index(self, stream: str) -> int:
        if stream not in self._current:
            self._current[stream] = len(self.all)
            self.all.append(Run(stream, 1))
        return self._current[stream]

    def _begin(self, record: int, stream: str) -> Run:
        old = self.all[self._current[stream]]
        self._current[stream] = len(self.all)
        self.all.append(Run(stream, old.number + 1, record))
        return self.all[-1]

    def _candidates(
        self, frame: pl.DataFrame, steps: pl.DataFrame
    ) -> list[tuple[int, str, str, str]]:
        """Rows that may open a run or describe one, in order: (record, stream, kind, value)."""
        found = self._pid_changes(frame) + self._steps_back(steps)
        lines = frame.filter(pl.col("kind") == "config").select("record", "stream", "message")
        found += [(record, stream, "line", text) for record, stream, text in lines.iter_rows()]
        order = {"pid": 0, "line": 1, "seq": 2, "busy": 3}
        busy = frame.filter(pl.col("kind").is_in(["step", "request"]))
        first = busy.group_by("stream").agg(pl.col("record").min())
        found += [(record, stream, "busy", "") for stream, record in first.iter_rows()]
        return sorted(found, key=lambda row: (row[0], order[row[2]]))

    def _pid_changes(self, frame: pl.DataFrame) -> list[tuple[int, str, str, str]]:
        servers = frame.filter(pl.col("process").str.contains(_API_SERVER))
        changes = servers.with_columns(
            pl.col("pid").shift().over("stream", "process").alias("before")
        ).filter(pl.col("before").is_null() | (pl.col("before") != pl.col("pid")))
        return [
            (record, stream, "pid", f"{process} {pid}")
            for record, stream, process, pid in changes.select(
                "record", "stream", "process", "pid"
            ).iter_rows()
        ]

    def _steps_back(self, steps: pl.DataFrame) -> list[tuple[int, str, str, str]]:
        """Rows at which an engine's iteration count is lower than before."""
        found = []
        for (stream, rank), part in steps.group_by(["stream", "rank"], maintain_order=True):
            key = (str(stream), str(rank))
            seq, record = part["seq"], part["record"]
            before_seq, before_record = seq.shift(1), record.shift(1)
            if key in self._last_steps:
                before_seq = before_seq.scatter(0, self._last_steps[key][0])
                before_record = before_record.scatter(0, self._last_steps[key][1])
            self._last_steps[key] = (int(seq[-1]), int(record[-1]))
            fell = (seq < before_seq).fill_null(False).arg_true().to_list()
            found += [(int(record[n]), str(stream), "seq", str(before_record[n])) for n in fell]
        return found

    def _handle(self, record: int, stream: str, kind: str, value: str) -> None:
        run = self.all[self._current[stream]]
        if kind == "busy":
            run.busy = True
        elif kind == "pid":
            process, pid = value.rsplit(" ", 1)
            if run.pids.get(process, pid) != pid:
                run = self._begin(record, stream)
            run.pids[process] = pid
        elif kind == "seq" and run.first_record <= int(value):
            again = self._begin(record, stream)
            again.pids, again.facts, again.busy, again.shares_pid = (
                dict(run.pids),
                dict(run.facts),
                True,
                True,
            )
        elif kind == "line":
            self._read(record, stream, value)

    def _read(self, record: int, stream: str, message: str) -> None:
        """A start-up line: the banner may open a run, the others describe the current one."""
        run = self.all[self._current[stream]]
        facts = read_line(message)
        if is_banner(message):
            worked = run.busy or any(key in run.facts for key in _STARTED)
            if worked and (run.banner or run.busy):
                run = self._begin(record, stream)
            run.banner = True
        if "pid" in facts and run.busy and run.pid not in (None, facts["pid"]):
            run = self._begin(record, stream)
        for key in ("kv_engine_id", "nixl_agent"):
            if key in facts and facts[key] not in run.engine_ids:
                run.engine_ids.append(facts[key])
                alias = {"worker": self.worker(run), "kind": "engine_id", "value": facts[key]}
                self._out.add("worker_aliases", [alias])
        # the connector class that was created says more than the argument; the first word stays
        # for all others
        replaced = {k: v for k, v in facts.items() if k in ("kv_connector", "version")}
        run.facts = facts | run.facts | replaced
