"""Lines of vLLM that tell of an event: KV alarms, preemption, out of memory, a dead engine."""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class Alarm(NamedTuple):
    """A line to look for, and what it means."""

    pattern: re.Pattern[str]
    kind: str
    severity: str
    detail: str  # without anything that users wrote


DIED = "engine died"
_ALARMS = (
    Alarm(
        re.compile(
            r"Releasing expired KV blocks for request (?P<id>\S+) "
            r"which were retrieved by (?P<n>\d+)"
        ),
        "kv_expired",
        "warning",
        "KV blocks released before all readers had fetched them",
    ),
    Alarm(
        re.compile(r"Potentially invalid KV blocks for unrecognized request (?P<id>\S+)"),
        "kv_invalid",
        "critical",
        "a decode worker read KV blocks that may have been released",
    ),
    Alarm(
        re.compile(
            r"pulling kv_caches for \[?'?(?P<id>[^\]',\s]+)[^\]]*\]? failed"
            r"(?:: (?P<why>Timeout[^.]*))?"
        ),
        "kv_failure",
        "critical",
        "pulling KV failed",
    ),
    Alarm(
        re.compile(r"Recovered from KV load failure: (?P<count>\d+) request"),
        "kv_failure",
        "warning",
        "KV load failed, requests rescheduled",
    ),
    Alarm(
        re.compile(
            r"(?:NIXL transfer (?:setup )?fail\w*|Transfer failed|KV load fail\w*|"
            r"Failed to (?:load|transfer) KV)"
            r"(?:.*?request (?P<id>[\w.-]+))?",
            re.I,
        ),
        "kv_failure",
        "critical",
        "KV transfer failed",
    ),
    Alarm(
        re.compile(r"Handshake failed for request (?P<id>[\w.-]+)|NIXL agent engine ID mismatch"),
        "kv_failure",
        "critical",
        "handshake with the prefill worker failed, KV not fetched",
    ),
    Alarm(
        re.compile(r"Got kv_transfer_params, but no KVConnector found"),
        "warning",
        "warning",
        "KV transfer asked for, but the engine has no KV connector: decode computes the prompt again",
    ),
    Alarm(
        re.compile(
            r"Sequence group (?P<id>\S+) is preempted by (?:PreemptionMode\.)?(?P<why>\w+) mode"
        ),
        "preemption",
        "warning",
        "preempted for lack of KV cache",
    ),
    Alarm(
        # PyNccl's pipe: also when nothing was asked of it for its timeout (vllm-project/vllm issue 14193)
        re.compile(r"Encountering exception in KV (?:receiving|sending) thread"),
        "warning",
        "warning",
        "a KV thread gave up: the other side is gone, or nothing came for its timeout",
    ),
    Alarm(
        re.compile(r"kernel JIT compilation during inference: "),
        "warning",
        "info",
        "a kernel was compiled while serving: by vLLM's own words a latency spike",
    ),
    Alarm(
        # by the engine's core once a minute while a worker takes nothing from it
        re.compile(
            r"No available (?:shared memory broadcast )?block found in (?P<seconds>\d+) second"
        ),
        "stall",
        "warning",
        "a worker took no work from the engine",
    ),
    Alarm(
        re.compile(
            r"(?:torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory|"
            r"CUDA error: out of memory|HIP out of memory|"
            r"No available memory for the cache blocks|oom-kill|Out of memory: Killed process)",
            re.I,
        ),
        "oom",
        "critical",
        "out of memory",
    ),
    Alarm(
        re.compile(
            r"(?:EngineDeadError|EngineCore hit an exception|Engine core initialization failed|"
            r"EngineCore (?:encountered a fatal error|died unexpectedly|failed to start)|"
            r"Engine (?:core proc|process) (?:\S+ )?(?:died unexpectedly|failed to start)|"
            r"Engine loop (?:has died|is dead)|AsyncLLM output_handler failed|"
            # V0
            r"Engine background task failed|Background loop (?:has errored|is stopped)|"
            r"Engine iteration timed out|MQLLMEngine .*(?:dead|died|errored)|"
            r"Worker proc \S+ died unexpectedly)"
        ),
        "failure",
        "critical",
        DIED,
    ),
    Alarm(
        re.compile(r"CUDA error: (?!out of memory)|CUBLAS_STATUS_\w*(?:FAILED|ERROR)|NCCL error"),
        "failure",
        "critical",
        "GPU or communication error",
    ),
)

# what marks a line as one for this room (searched in whole columns)
MARKERS = (
    "Releasing expired KV blocks",
    "Potentially invalid KV blocks",
    "pulling kv_caches",
    "Recovered from KV load failure",
    "NIXL transfer",
    "Transfer failed",
    "transfer failed",
    "KV load fail",
    "KV transfer failed",
    "Failed to load KV",
    "Failed to transfer KV",
    "Handshake failed for request",
    "NIXL agent engine ID mismatch",
    "is preempted by",
    "no KVConnector found",
    "block found in ",
    "exception in KV ",
    "JIT compilation during inference",
    "OutOfMemoryError",
    "out of memory",
    "Out of memory: Killed",
    "oom-kill",
    "No available memory for the cache",
    "EngineDeadError",
    "encountered a fatal error",
    "died unexpectedly",
    "failed to start",
    "initialization failed",
    "CUDA error: ",
    "CUBLAS_STATUS_",
    "NCCL error",
    "EngineCore hit an exception",
    "Engine loop ",
    "Engine background task failed",
    "Background loop ",
    "Engine iteration timed out",
    "MQLLMEngine",
    "output_handler failed",
    "Error: ",
    "Exception: ",
    "shutdown triggered",
    "trigger received signal",
    "Shutting down FastAPI HTTP server",
    "Gracefully stopping http server",
)
# Told to stop (a signal, Ctrl-C): what ends after it did not fail. A crash is logged before these lines.
_STOPS = re.compile(
    r"\[shutdown\] (?:API server: shutdown triggered|EngineCore: trigger received signal)|"
    r"Shutting down FastAPI HTTP server|Gracefully stopping http server"
)
_ENDED = re.compile(
    r"EngineDeadError|output_handler failed|died unexpectedly|Background loop is stopped|"
    r"Engine loop (?:has died|is dead)"
)
# The last line of a traceback: its class says what kind, its message may quote what users wrote.
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?P<name>[A-Z]\w*(?:Error|Exception)): ")
_PREEMPTIONS = re.compile(r"total_num_cumulative_preemption=(\d+)")


def read_line(message: str) -> dict[str, Any] | None:
    """Columns of an `events` row (kind, severity, request_id, count, detail), or None."""
    for alarm in _ALARMS:
        match = alarm.pattern.search(message)
        if match is None:
            continue
        groups = match.groupdict()
        detail = alarm.detail
        if alarm.kind == "kv_expired" and groups.get("n") is not None:
            detail += f" ({groups['n']} had)"
        if groups.get("why"):
            detail += f" ({groups['why']})"
        if total := _PREEMPTIONS.search(message):
            detail += f" (total so far {total[1]})"
        return {
            # what is told of the seconds before is known to these seconds
            **(
                {"width_ns": int(groups["seconds"]) * 1_000_000_000}
                if groups.get("seconds")
                else {}
            ),
            "kind": alarm.kind,
            "severity": alarm.severity,
            "request_id": (groups.get("id") or "").rstrip(".,:") or None,
            "count": int(groups["count"]) if groups.get("count") else 1,
            "detail": detail,
        }
    return None


def is_stop(message: str) -> bool:
    """Whether the line says that the server was told to stop."""
    return _STOPS.search(message) is not None


def only_ended(message: str) -> bool:
    """Whether the line says no more than that the engine is gone, as it does after every stop, too."""
    return _ENDED.search(message) is not None


def exception(message: str) -> str | None:
    """The class of the exception that this last line of a traceback names; never that the engine is gone."""
    match = _EXCEPTION.search(message)
    return match["name"] if match and not match["name"].endswith("DeadError") else None


def preemptions(message: str) -> int | None:
    """The cumulative preemption counter that V0 prints; only every 50th preemption is logged."""
    match = _PREEMPTIONS.search(message)
    return int(match[1]) if match else None


class Causes:
    """Which exception stands beside the line that says that an engine died: class and line, no message."""

    NEAR_NS = 5_000_000_000

    def __init__(self) -> None:
        self.first: dict[int, tuple[str, int, int | None]] = {}  # run -> first exception of a burst
        self.last_ns: dict[int, int | None] = {}
        self.open: dict[
            int, tuple[int | None, dict[str, Any]]
        ] = {}  # deaths without a cause so far

    def see(self, run: int, record: int, time_ns: int | None, message: str) -> None:
        """A line of the log: kept where it ends a traceback; tells the cause of a death before it."""
        name = exception(message)
        if name is None:
            return
        if not (run in self.first and self._near(self.last_ns.get(run), time_ns)):
            self.first[run] = (name, record, time_ns)
        self.last_ns[run] = time_ns
        died_ns, row = self.open.pop(run, (None, {}))
        if row and self._near(died_ns, time_ns):
            self._tell(row, *self.first[run][:2])

    def name(self, run: int, time_ns: int | None, row: dict[str, Any]) -> None:
        """A death: told by the exception before it, else by the next one."""
        if row["detail"] != DIED:
            return
        if run in self.first and self._near(self.last_ns[run], time_ns):
            self._tell(row, *self.first[run][:2])
        else:
            self.open[run] = (time_ns, row)

    def _near(self, one: int | None, other: int | None) -> bool:
        return one is None or other is None or abs(one - other) <= self.NEAR_NS

    @staticmethod
    def _tell(row: dict[str, Any], name: str, record: int) -> None:
        row["detail"] = f"{DIED}: {name} in line {record + 1}"
