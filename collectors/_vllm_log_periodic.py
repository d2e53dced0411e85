"""Periodic lines of vLLM as samples: engine stats, KV transfer and speculative decoding.

Values that are the same quantity as a Prometheus metric of vLLM carry its name; the others are
`log:<key>`. Items are read as `key: value` wherever they stand, since each release adds some.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ._common import number
from ._python_repr import python_repr
from ._vllm_log_runs import Run

SECOND_NS = 1_000_000_000
V0_INTERVAL_NS = 5 * SECOND_NS
V1_INTERVAL_NS = 10 * SECOND_NS
LONGEST = 6  # times the usual interval: a longer gap is idle time, not a setting
PROMPT_RATE = "vllm:avg_prompt_throughput_toks_per_s"  # names of V0's own gauges
GENERATION_RATE = "vllm:avg_generation_throughput_toks_per_s"

MARKERS = (
    "Avg prompt throughput: ",
    "KV Transfer metrics: ",
    "SpecDecoding metrics: ",
    "DiffusionDecoding metrics: ",
    "Speculative metrics: ",
    "Prefix cache hit rate: GPU: ",
)

_ENGINE = re.compile(r"(?:Engine (\d+): |(\d+) Engines Aggregated: )?Avg prompt throughput: (.*)$")
_ITEM = re.compile(
    r"^(?P<key>[^:=]+): (?P<value>-?\d+(?:\.\d+)?|nan|inf)\s*(?P<unit>%|reqs?|tokens/s|tokens)?\.?$"
)
_STAGE = re.compile(r"(\d+) (waiting to start|in progress|completed waiting)")
_EQUALS = re.compile(
    r"(?P<key>[A-Za-z][A-Za-z0-9 :()/_%.',-]*?)="
    r"(?P<value>-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|-?inf)(?:, |$)"
)
_DICTIONARY = re.compile(r"([A-Za-z]\w*)=(\{[^{}]*\})")

# key in the line -> (metric, extra label)
_NAMES: dict[str, tuple[str, tuple[str, str] | None]] = {
    "Avg prompt throughput": (PROMPT_RATE, None),
    "Avg generation throughput": (GENERATION_RATE, None),
    "Running": ("vllm:num_requests_running", None),
    "Waiting": ("vllm:num_requests_waiting", None),
    "Pending": ("vllm:num_requests_waiting", None),
    "Swapped": ("vllm:num_requests_swapped", None),
    "Deferred": ("vllm:num_requests_waiting_by_reason", ("reason", "deferred")),
}
_DEVICE_USAGE = re.compile(r"^([A-Z]\w*) KV cache usage$")
# KV transfer items that count something bad -> (event kind, severity)
ALARMS = {
    "num_failed_transfers": ("kv_failure", "critical"),
    "num_failed_recvs": ("kv_failure", "critical"),
    "num_failed_notifications": ("kv_failure", "warning"),
    "num_kv_expired_reqs": ("kv_expired", "warning"),
    "num_notifs_after_expiry": ("kv_expired", "warning"),
}


_FINISHED = re.compile(r"(?:%\.?|\}|Waiting: \d+ reqs)\s*$")


def is_finished(message: str) -> bool:
    """Whether a line without a newline was written to its end: by its last item.

    That is a percentage, a group in braces, or (early V1) how many wait. A number that just ends may go on in what
    was not written yet.
    """
    return _FINISHED.search(message) is not None


def slug(key: str) -> str:
    """A key of a log line as lower_snake name with its unit."""
    key = (
        key.replace("MB/s", "mb_per_s").replace("tokens/s", "tokens_per_s").replace("%", "percent")
    )
    return re.sub(r"[^a-z0-9:]+", "_", key.lower()).strip("_")


def samples(
    message: str, record: int, time_ns: int | None, resolution_ns: int | None, run: Run
) -> list[dict[str, Any]]:
    """Rows of `samples` of one periodic line, without worker; empty when it cannot be read."""
    rows = []
    for metric, labels, value, interval_ns in _values(message, time_ns, run):
        rows.append(
            {
                "record": record,
                "time_ns": time_ns,
                "resolution_ns": resolution_ns,
                "metric": metric,
                "labels": json.dumps(labels, sort_keys=True),
                "value": value,
                "interval_ns": interval_ns,
                "kind": "gauge",
            }
        )
    return rows


Value = tuple[str, dict[str, str], float | None, int | None]


def _values(message: str, time_ns: int | None, run: Run) -> Iterator[Value]:
    if match := _ENGINE.search(message):
        yield from _stats(match, time_ns, run)
    elif "KV Transfer metrics: " in message:
        yield from _transfers(message.partition("KV Transfer metrics: ")[2], _last_interval(run))
    elif "Prefix cache hit rate: GPU: " in message:  # V0, on a line of its own
        for device, percent in re.findall(
            r"([A-Z]+): ([\d.]+)%", message.partition("hit rate: ")[2]
        ):
            yield "log:prefix_cache_hit_rate", {"device": device}, float(percent) / 100, None
    else:
        yield from _decoding(message, _last_interval(run))


def _stats(match: re.Match[str], time_ns: int | None, run: Run) -> Iterator[Value]:
    labels = {"engine": str(int(match[1]))} if match[1] else {}
    if match[2]:
        labels = {"engines_aggregated": match[2]}
    items = ("Avg prompt throughput: " + match[3]).split(", ")
    swaps = any(item.startswith(("Swapped: ", "Pending: ")) for item in items)
    interval_ns = _interval(
        time_ns, json.dumps(labels), V0_INTERVAL_NS if swaps else V1_INTERVAL_NS, run
    )
    devices = [found[1] for item in items if (found := _DEVICE_USAGE.match(item.partition(":")[0]))]
    for item in items:
        if stage := _STAGE.search(item):
            name = stage[2].replace(" ", "_")
            yield (
                "vllm:num_requests_kv_fetch_by_stage",
                labels | {"stage": name},
                float(stage[1]),
                None,
            )
            continue
        if not (found := _ITEM.match(item.strip())):
            continue
        value = number(found["value"])
        if value is not None and found["unit"] == "%":
            value /= 100
        metric, extra = _metric(found["key"], devices)
        rate = found["unit"] == "tokens/s"
        yield (
            metric,
            labels | (dict([extra]) if extra else {}),
            value,
            interval_ns if rate else None,
        )


def _metric(key: str, devices: list[str]) -> tuple[str, tuple[str, str] | None]:
    if known := _NAMES.get(key):
        return known
    if usage := _DEVICE_USAGE.match(key):
        # V0 prints the GPU's cache and the CPU's swap space; on a CPU backend the CPU's cache is
        # the cache
        swap = usage[1] == "CPU" and len(devices) > 1
        return ("vllm:cpu_cache_usage_perc" if swap else "vllm:kv_cache_usage_perc"), None
    return f"log:{slug(key)}", None


def _interval(time_ns: int | None, key: str, usual_ns: int, run: Run) -> int:
    """Time that a rate is a mean over: since the last line, unless lines in between were not shown.

    Idle intervals are not logged, so a gap of more than the shortest one so far is no interval;
    stamps of whole seconds make it uncertain by one second.
    """
    before = run.last_stats_ns.get(key)
    if time_ns is None:
        return usual_ns
    run.last_stats_ns[key] = time_ns
    gap = time_ns - before if before is not None else 0
    if not SECOND_NS <= gap <= LONGEST * usual_ns:
        return run.last_stats_ns.get("shortest", usual_ns)
    shortest = min(gap, run.last_stats_ns.get("shortest", gap))
    run.last_stats_ns["shortest"] = shortest
    return gap if gap <= 1.5 * shortest + SECOND_NS else shortest


def _last_interval(run: Run) -> int:
    """The usual interval: lines beside the stats line are over the same time."""
    return max(run.last_stats_ns.get("shortest", V1_INTERVAL_NS), SECOND_NS)


def _transfers(text: str, interval_ns: int) -> Iterator[Value]:
    """Items of a KV Transfer line: `key=number, ...`, or `Connector={...}` for each of several."""
    nested = _DICTIONARY.findall(text)
    for connector, body in nested:
        values = python_repr(body)
        for key, value in (values or {}).items() if isinstance(values, dict) else ():
            yield _transfer_metric(key), {"connector": connector}, number(value), interval_ns
    for key, value in _EQUALS.findall(_DICTIONARY.sub("", text) if nested else text):
        name, labels = key.strip(" ,"), {}
        if labelled := re.match(r"^(vllm:\w+):\('([^']*)'", name):
            name, labels = labelled[1], {"label": labelled[2]}
        yield _transfer_metric(name), labels, number(value), interval_ns


def _transfer_metric(key: str) -> str:
    return key if key.startswith("vllm:") else f"log:kv_{slug(key).removeprefix('kv_')}"


def _decoding(message: str, interval_ns: int) -> Iterator[Value]:
    kind = slug(message.partition(" metrics: ")[0].rpartition(" ")[2] or "decoding")
    text = message.partition(" metrics: ")[2]
    positions = re.search(r"Per-position acceptance rate: ([\d., ]+?)(?:, [A-Z]|$)", text)
    if positions:
        for index, value in enumerate(re.findall(r"\d+(?:\.\d+)?", positions[1])):
            yield (
                f"log:{kind}_position_acceptance_rate",
                {"position": str(index)},
                float(value),
                interval_ns,
            )
    for key, value, unit in re.findall(
        r"([A-Z][A-Za-z -]*?): (-?\d+(?:\.\d+)?|nan)( tokens/s| tokens|%)?", text
    ):
        if key == "Per-position acceptance rate":
            continue
        figure = number(value)
        if figure is not None and unit == "%":
            figure /= 100
        suffix = "_tokens_per_s" if unit == " tokens/s" else "_tokens" if unit == " tokens" else ""
        yield f"log:{kind}_{slug(key)}{suffix}", {}, figure, interval_ns
