"""Lines of SGLang that tell of an event: KV transfers that failed, retractions, memory, a dead scheduler.

Source: sgl-project/sglang srt/disaggregation/{prefill,decode}.py, srt/managers/scheduler.py, 0.4.6 to
0.5.23. Every rank of a server tells of the same failure: one event a room or request.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import polars as pl

_FAILED = re.compile(
    r"^(?P<what>Prefill bootstrap|Prefill transfer|Decode handshake|Decode transfer) failed for request rank=\d+"
    r".*?req\.rid='(?P<rid>[^']*)'.*?req\.bootstrap_room=(?P<room>\d+|None)(?: with exception (?P<why>.*))?$"
)
# Reasons by words that only the writer uses; what is not known stays out.
_REASONS = (
    (re.compile(r"timed out after ([\d.]+)s in KVPoll\.(\w+)"), "timed out after {0} s in {1}"),
    (re.compile(r"Aborted by AbortReq"), "aborted by the other side or the client"),
    (re.compile(r"Failed to get kvcache from prefill instance"), "the prefill instance did not answer, it may be dead"),
    (re.compile(r"unknown reason from another rank"), "failed on another rank"),
)  # fmt: skip


class _Alarm(NamedTuple):
    pattern: re.Pattern[str]
    kind: str
    severity: str
    detail: str


_ALARMS = (
    _Alarm(re.compile(r"KV cache pool is full\. Retract requests\..*?#retracted_reqs: (?P<count>\d{1,9})"), "preemption", "warning", "retracted: KV cache full"),
    _Alarm(re.compile(r"(?:Decode out of memory happened|Testing retraction)\..*?#retracted_reqs: (?P<count>\d{1,9})"), "preemption", "warning", "retracted: KV cache full"),
    _Alarm(re.compile(r"Some requests timed out when bootstrapping"), "warning", "warning", "requests timed out while P and D shook hands"),
    _Alarm(re.compile(r"Some requests fail to receive KV Cache transfer done signal"), "warning", "warning", "requests timed out while they waited for their KV"),
    _Alarm(re.compile(r"Error fetching prefill (?:parallel|server) info from bootstrap"), "warning", "warning", "a decode server did not reach the bootstrap server of its prefill server"),
    _Alarm(re.compile(r"Health check failed\. Server couldn't get a response from detokenizer"), "warning", "warning", "a health check got no answer from the engine"),
    _Alarm(re.compile(r"Streaming backlog: rid=(?P<rid>\S+?), coalescing \d+ queued chunks"), "warning", "info", "the API server sent queued chunks of a stream as one: gaps between chunks grew"),
    _Alarm(re.compile(r"OutOfMemoryError|CUDA out of memory|HIP out of memory|out of memory\. Please|Out of memory: Killed process|oom-kill", re.IGNORECASE), "oom", "critical", "out of memory"),
    _Alarm(re.compile(r"(?:Scheduler|DataParallelController|TokenizerManager|DetokenizerManager) hit an exception"), "failure", "critical", "engine died"),
    _Alarm(re.compile(r"Received sigquit from a child process|SIGQUIT received\. signum="), "failure", "critical", "engine died"),
    _Alarm(re.compile(r"watchdog timeout", re.IGNORECASE), "failure", "critical", "a forward pass took longer than the watchdog allows"),
    _Alarm(re.compile(r"CUDA error: (?!out of memory)|NCCL error|CUBLAS_STATUS_\w*(?:FAILED|ERROR)"), "failure", "critical", "GPU or communication error"),
)  # fmt: skip
MARKERS = (
    "failed for request rank=", "Retract requests", "out of memory happened", "Testing retraction", "Some requests timed out",
    "Some requests fail to receive", "Error fetching prefill", "Health check failed", "Streaming backlog: ", "OutOfMemoryError", "out of memory", "Out of memory", "oom-kill",
    "hit an exception", "igquit from a child", "SIGQUIT received", "atchdog timeout", "CUDA error", "NCCL error", "CUBLAS_STATUS",
)  # fmt: skip


_BY_RANK = ("Retract requests", "out of memory happened", "Testing retraction", "Some requests timed out", "Some requests fail to receive")  # fmt: skip


def by_rank() -> pl.Expr:
    """Alarms that every rank of the same batches tells, again and again: of one rank they are counted."""
    return (pl.col("kind") == "other") & pl.col("message").str.contains_any(list(_BY_RANK))


def read_line(message: str) -> dict[str, Any] | None:
    """kind, severity, detail, request_id, count, and what makes it the same event on every rank; None: none."""
    if match := _FAILED.search(message):
        why = _reason(match["why"] or "")
        aborted = why == _REASONS[1][1]
        return {
            # SGLang ends such a request with an error: no answer is made of wrong KV.
            "kind": "abort" if aborted else "failure",
            "severity": "warning",
            "detail": f"{match['what'].lower()} failed" + (f": {why}" if why else ""),
            "request_id": match["rid"],
            "count": 1,
            "same": (match["what"], match["room"], match["rid"]),
            "failed": None
            if aborted or match["room"] == "None"
            else (match["what"], match["room"]),
        }
    for alarm in _ALARMS:
        if match := alarm.pattern.search(message):
            found = match.groupdict()
            return {
                "kind": alarm.kind,
                "severity": alarm.severity,
                "detail": alarm.detail,
                "request_id": found.get("rid"),
                "count": int(found.get("count") or 1),
                "same": None if alarm.kind in ("preemption", "warning") else (alarm.detail,),
            }
    return None


def _reason(text: str) -> str:
    for pattern, words in _REASONS:
        if match := pattern.search(text):
            return words.format(*match.groups())
    return ""
