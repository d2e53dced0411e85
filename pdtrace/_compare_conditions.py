"""Under which conditions each side ran, and whether they are the same: asked before any number is compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pdtrace import _compare_workload as workload
from pdtrace import numbers
from pdtrace._compare_model import METRICS, Condition, Status, condition
from pdtrace._compare_side import Side
from pdtrace.coverage import ENOUGH
from pdtrace.model import SloClass, SloPolicy


def conditions(
    a: Side, b: Side, policy: SloPolicy | None, stated: Iterable[str] = ()
) -> list[Condition]:
    """Every condition, in the order in which people ask for them."""
    found = [
        _slo(a, b, policy), _goodput(policy), _kv_cost(a, b), _observer(a, b), _streaming(a, b),
        *workload.conditions(a, b),
        _layout(a, b), _accelerators(a, b),
        _setting("model", "model", [_models(a), _models(b)]),
        _setting("precision", "precision", [_precision(a), _precision(b)]),
        _setting("hardware", "hardware and host", [_hardware(a), _hardware(b)]),
        _setting("engine", "engine", [_engine(a), _engine(b)]),
        _setting("version", "engine version", [_version(a), _version(b)]),
        _setting("tensor_parallel", "tensor parallelism", [_tensor_parallel(a), _tensor_parallel(b)]),
        _setting("speculative_decoding", "speculative decoding", [_speculative(a), _speculative(b)], ("itl",)),
        _flags(a, b),
    ]  # fmt: skip
    if same_data(a, b):
        return [
            replace(c, status="same", note=c.note if c.status == "same" else "the same data", changes=())
            for c in found
        ]  # fmt: skip
    vouched = set(stated)
    return [_vouched(c, vouched) for c in found]


def same_data(a: Side, b: Side) -> bool:
    """Whether both sides are one deployment of the same files."""
    return bool(a.digests) and a.digests == b.digests and a.deployment.id == b.deployment.id \
        and a.requests.height == b.requests.height  # fmt: skip


def _vouched(one: Condition, vouched: set[str]) -> Condition:
    """What nothing in the data says may be stated by the user; what the data say may not."""
    words = {one.id} if one.blocks == ("goodput",) else {one.id, "unknown"}
    if one.status == "unknown" and vouched & words:
        return replace(one, status="same", stated=True, note="stated by the user")
    return one


def _slo(a: Side, b: Side, policy: SloPolicy | None) -> Condition:
    limits = (
        "; ".join(_class_text(c, alone=len(policy.classes) == 1) for c in policy.classes)
        if policy
        else ""
    )
    note = "given for both" if limits else "none given; --slo judges both by one"
    values = [limits or _recorded_slo(side) for side in (a, b)]
    return condition("slo", "SLO", "measure", values, note=note, blocks=("goodput",))


def _class_text(one: SloClass, *, alone: bool) -> str:
    limits = ", ".join(
        f"{key.removesuffix('_ms').upper()} ≤ {numbers.duration(value)}"
        for key, value in one.limits.limits().items()
    )
    return limits if alone else f"{one.name}: {limits}"


def _recorded_slo(side: Side) -> str | None:
    """Limits that the run itself was judged by."""
    said = sorted(
        f"{f['key']} {f['value']}"
        for f in side.facts
        if str(f["key"]).startswith(("slo", "goodput")) and f["value"] is not None
    )
    return ", ".join(said) or None


def _goodput(policy: SloPolicy | None) -> Condition:
    given = policy is not None
    text = "requests that met all limits / all arrivals, failed ones among them (G2); per second of the window (G1)"
    return condition(
        "goodput", "goodput and its denominator", "measure", [text if given else None] * 2,
        note="computed here in one way" if given else "not compared without limits", blocks=("goodput",),
    )  # fmt: skip


NO_TRANSFER = "no transfer: one worker does both"
_KV_COST = {
    "decode": "in TTFT: the first delivered token comes from the decode worker",
    "prefill": "in the gap after the first token: the prefill worker delivers that",
}


def _kv_cost(a: Side, b: Side) -> Condition:
    values = [_kv_side(side) for side in (a, b)]
    note = ""
    blocks: tuple[str, ...] = ("ttft", "tpot", "itl", "goodput")
    if values[0] != values[1] and set(values) <= {NO_TRANSFER, _KV_COST["decode"]}:
        blocks = ()
        note = "TTFT with the transfer in it stands against TTFT without a transfer: all that the user waited on both sides"
    return condition(
        "kv_cost", "where KV cost is counted", "measure", values, note=note, blocks=blocks
    )


def _kv_side(side: Side) -> str | None:
    """Where the transfer lies in the requests that TTFT is made of; nine tenths must say so, and agree."""
    rows = side.counted().filter(side.counted()["ttft_ms"].is_not_null())
    modes = set(rows["mode"].to_list())
    if modes == {"aggregated"}:
        return NO_TRANSFER
    if not modes or not modes <= {"aggregated", "disaggregated"}:
        return None
    split = rows.filter(rows["mode"] == "disaggregated")["first_token_origin"]
    origins = set(split.drop_nulls().to_list())
    if split.null_count() > (1 - ENOUGH) * len(split) or len(origins) != 1:
        return None
    place = _KV_COST[origins.pop()]
    return f"{place}; some requests had no transfer" if "aggregated" in modes else place


def _observer(a: Side, b: Side) -> Condition:
    values = []
    for side in (a, b):
        rows = [r for r in side.deployment.latency if r["metric"] == "ttft_ms" and r["headline"]]
        values.append(f"{rows[0]['observer']}: {rows[0]['definition']}" if rows else None)
    return condition("ttft_observer", "observer of the headline TTFT", "measure", values)


def _streaming(a: Side, b: Side) -> Condition:
    values = []
    for side in (a, b):
        seen = side.streaming or ({True} if side.gaps.height else set())
        values.append("; ".join(sorted("yes" if s else "no" for s in seen)) or None)
    return condition(
        "streaming", "streaming", "measure", values, blocks=("ttft", "tpot", "itl", "goodput")
    )


def _layout(a: Side, b: Side) -> Condition:
    values = []
    for side in (a, b):
        roles = sorted(Counter(side.roles()).items(), reverse=True)
        values.append(" : ".join(f"{n} {role}" for role, n in roles) or None)
    return _setting("layout", "P:D and worker counts", values)


def _setting(
    key: str, name: str, values: Sequence[str | None], blocks: tuple[str, ...] = METRICS
) -> Condition:
    a, b = values
    changes = ((name, a, b),) if a is not None and b is not None and a != b else ()
    return condition(key, name, "setting", values, blocks=blocks, changes=changes)


def _accelerators(a: Side, b: Side) -> Condition:
    values = []
    for side in (a, b):
        sizes = [_of_worker(side, w["id"]) for w in side.engines()]
        known = [size for size in sizes if size is not None]
        values.append(str(sum(known)) if sizes and len(known) == len(sizes) else None)
    # Other worker counts need other devices: that is the layout, not a setting of its own.
    return condition("accelerators", "devices used (workers x parallel ranks)", "setting", values)


def _of_worker(side: Side, worker: str) -> int | None:
    """Devices of a worker: tensor x pipeline x data parallel ranks; the first must be known."""
    said = {f["key"]: str(f["value"]) for f in side.facts if f["worker"] == worker}
    if not said.get("tensor_parallel_size", "").isdecimal():
        return None
    size = 1
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        size *= int(said[key]) if said.get(key, "").isdecimal() else 1
    return size


def _models(side: Side) -> str | None:
    named = side.requests["model"].drop_nulls().unique().sort().to_list()
    return " / ".join(side.fact("model") or side.fact("served_model_name") or named
                      or side.fact("model", client=True)) or None  # fmt: skip


def _precision(side: Side) -> str | None:
    parts = [f"{key} {'/'.join(values)}" for key in ("dtype", "quantization", "kv_cache_dtype") if (values := side.fact(key))]  # fmt: skip
    return ", ".join(parts) if side.fact("dtype") or side.fact("quantization") else None


def _hardware(side: Side) -> str | None:
    said = side.fact("device_name", "gpu_name", "gpu", "hardware", "accelerator")
    if said:
        return " / ".join(said)
    hosts = {w["host"] for w in side.engines()}
    return "host " + ", ".join(sorted(hosts)) if hosts and None not in hosts else None


def _engine(side: Side) -> str | None:
    names = {w["engine"] for w in side.engines()}
    return " / ".join(sorted(names)) if names and None not in names else None


def _version(side: Side) -> str | None:
    own = {w["version"] for w in side.engines() if w["version"]}
    return " / ".join(sorted(own)) or " / ".join(side.fact("version")) or None


def _tensor_parallel(side: Side) -> str | None:
    return " / ".join(side.fact("tensor_parallel_size")) or None


def _speculative(side: Side) -> str | None:
    said = side.fact(
        "speculative_config",
        "arg_speculative_config",
        "num_speculative_tokens",
        "speculative_model",
    )
    if said:
        return " / ".join(said)
    # A command line that is known and does not ask for it: off.
    return "off" if any(str(f["key"]).startswith("arg_") for f in side.facts) else None


# Facts that say who ran, what was shown and what came out, not how it was set.
_NO_SETTING = {
    "host", "port", "pid", "model", "model_tag", "served_model_name", "tokenizer", "dtype", "version", "name", "label",
    "title", "api_key", "uds", "device_name", "gpu_name", "http_calls", "http_calls_failed",
    "http_calls_whole_log",
}  # fmt: skip
_NO_SETTING_PARTS = (
    "endpoint", "engine_id", "worker_id", "instance", "agent", "process_start", "address", "time_zone", "year_basis", "window_",
    "columns_", "concurrency_full_length", "stats_interval", "status_basis", "content_withheld", "misaligned",
)  # fmt: skip
_OWN_CONDITION = {"tensor_parallel_size", "quantization", "kv_cache_dtype"}
_OF_LAYOUT = ("kv_role", "kv_connector", "kv_transfer", "kv_load", "disaggregation")


def _flags(a: Side, b: Side) -> Condition:
    """Settings of the servers that differ, one by one."""
    known = [_settings(side) for side in (a, b)]
    layouts = [Counter(side.roles()) for side in (a, b)]
    changes, missing = [], 0
    for key in sorted(known[0].keys() | known[1].keys()):
        values = [side.get(key) for side in known]
        if values[0] == values[1]:
            continue
        if layouts[0] != layouts[1] and any(part in key for part in _OF_LAYOUT):
            continue  # goes with the layout, which is a condition of its own
        if key.startswith("arg_"):  # said on one command line, not on the other: its default there
            if key.removeprefix("arg_") in known[0].keys() & known[1].keys():
                continue
            if all(any(k.startswith("arg_") for k in side) for side in known):
                values = [v or "not given" for v in values]
        if None in values:
            missing += 1
        else:
            changes.append((key, str(values[0]), str(values[1])))
    texts = ["; ".join(f"{key} {change[n]}" for key, *change in changes) or
             (f"{len(known[n])} known" if known[n] else None) for n in (0, 1)]  # fmt: skip
    status: Status = "different" if changes else "unknown" if not all(known) or missing else "same"
    note = f"{numbers.plural(missing, 'setting')} known on one side only" if missing else ""
    return condition(
        "flags", "flags", "setting", texts, status=status, note=note, blocks=(), changes=tuple(changes)
    )  # fmt: skip


def _settings(side: Side) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for fact in side.facts:
        key = str(fact["key"])
        plain = key.removeprefix("arg_")
        if (
            fact["role"] == "client" or key.startswith(("_", "slo")) or fact["value"] is None
            or plain in _NO_SETTING | _OWN_CONDITION or any(part in plain for part in _NO_SETTING_PARTS)
        ):  # fmt: skip
            continue
        found.setdefault(key, set()).add(str(fact["value"]))
    return {key: " / ".join(sorted(values)) for key, values in found.items()}


def blocked(found: Iterable[Condition]) -> dict[str, list[str]]:
    """By metric: why it may not be ranked, as `name (why)`; empty where it may."""
    found = list(found)
    reasons: dict[str, list[str]] = {metric: [] for metric in METRICS}
    changed = [c for c in found if c.id in _ONE_MAY_CHANGE and c.status == "different"]
    for one in found:
        alone = one in changed and len(changed) == 1
        for metric in () if alone or one.status == "same" else one.blocks:
            reasons[metric].append(f"{one.name} ({one.status})")
    return reasons


# Of these one may differ: it is then what the comparison is about.
_ONE_MAY_CHANGE = {
    "layout",
    "precision",
    "engine",
    "version",
    "tensor_parallel",
    "speculative_decoding",
}


def changed_settings(found: Iterable[Condition]) -> tuple[list[tuple[str, str, str]], bool]:
    """Settings that differ, and whether all settings are known."""
    settings = [c for c in found if c.kind == "setting"]
    unknown = [
        c
        for c in settings
        if c.status == "unknown" or (c.id == "flags" and c.note and not c.stated)
    ]
    return [change for c in settings for change in c.changes], not unknown
