"""What vLLM's start-up lines say of a server: version, arguments, connector, budget, KV cache.

Arguments are printed as Python reprs (`non-default args: {...}`, `args: Namespace(...)`) whose
values may be objects: they are read as syntax, never evaluated.
"""

from __future__ import annotations

import re
from typing import Any

from ._python_repr import python_repr

SECRET = re.compile(
    r"(?:api_?key|hf_token|password|secret|auth_token|access_token|credential)", re.I
)

_BANNER = re.compile(r"vLLM API server version v?(\d\S*)|[█▄▀]\s+version\s+v?(\d\S*)")
_BANNER_MODEL = re.compile(r"[█▄▀]\s+model\s+(\S.*)$")
_ARGS = re.compile(r"(?:non-default args: |args: )(\{.*\}|Namespace\(.*\))\s*$", re.S)
_ENGINE = re.compile(
    r"Initializing an? (?:V\d )?LLM engine (?:\(v?(\d[^)\s]*)\) )?with config: (.*)$", re.S
)
_CONNECTOR = re.compile(
    r"Creating (?:v1|V1|\w+) connector with name: (\S+)(?: and engine_id: (\S+))?"
)
_KV_TOKENS = re.compile(r"[A-Z]{2,} KV cache size: ([\d,]+) tokens")
_KV_BLOCKS = re.compile(r"# (?:GPU|TPU|XPU|HPU|cuda|cpu) blocks: (\d+)")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
_CHUNKED = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
_MODEL_LEN = re.compile(r"Using max model len (\d+)")
_AGENT = re.compile(r"Initialized NIXL agent: (\S+)")
_UVICORN_PID = re.compile(r"Started server process \[(\d+)\]")
_ASYNC = re.compile(r"Asynchronous scheduling is (enabled|disabled)")

# what marks a line as one for this room (searched in whole columns)
MARKERS = (
    "vLLM API server version",
    "non-default args: ",
    "args: Namespace(",
    " version ",
    "█  model ",
    "LLM engine (v",
    "connector with name: ",
    "KV cache size: ",
    " blocks: ",
    "Chunked prefill is enabled",
    "Using max model len",
    "Maximum concurrency for ",
    "Initialized NIXL agent: ",
    "Started server process [",
    "Asynchronous scheduling is",
)

# engine config line: name there -> fact
_ENGINE_KEYS = {
    "model": "model",
    "served_model_name": "served_model_name",
    "max_seq_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "enable_prefix_caching": "prefix_caching",
    "chunked_prefill_enabled": "chunked_prefill",
    "enable_chunked_prefill": "chunked_prefill",
    "kv_cache_dtype": "kv_cache_dtype",
    "quantization": "quantization",
    "dtype": "dtype",
    "kv_connector": "kv_connector",
    "kv_role": "kv_role",
}
# arguments that are facts under their own name too
_ARGUMENT_FACTS = {
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_model_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "enable_chunked_prefill": "chunked_prefill",
    "enable_prefix_caching": "prefix_caching",
    "block_size": "block_size",
    "long_prefill_token_threshold": "long_prefill_token_threshold",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "model": "model",
    "model_tag": "model",
    "enable_log_requests": "request_logging",
    "async_scheduling": "async_scheduling",
}


def read_line(message: str) -> dict[str, str]:
    """Facts that one start-up line states; empty when it states none."""
    facts: dict[str, str] = {}
    if match := _BANNER.search(message):
        facts["version"] = (match[1] or match[2]).rstrip(",")
    if match := _BANNER_MODEL.search(message):
        facts["model"] = match[1].strip()
    if match := _ARGS.search(message):
        facts |= _arguments(match[1])
    if match := _ENGINE.search(message):
        facts |= ({"version": match[1]} if match[1] else {}) | _engine_config(match[2])
    if match := _CONNECTOR.search(message):
        facts["kv_connector"] = match[1]
        if match[2]:
            facts["kv_engine_id"] = match[2].rstrip(".,")
    for key, pattern in (
        ("kv_cache_tokens", _KV_TOKENS),
        ("kv_cache_blocks", _KV_BLOCKS),
        ("max_num_batched_tokens", _CHUNKED),
        ("max_model_len", _MODEL_LEN),
        ("nixl_agent", _AGENT),
        ("pid", _UVICORN_PID),
    ):
        if match := pattern.search(message):
            facts[key] = match[1].replace(",", "")
    if "max_num_batched_tokens" in facts and _CHUNKED.search(message):
        facts["chunked_prefill"] = "True"
    if match := _CONCURRENCY.search(message):
        facts["max_concurrency_full_length"] = match[2]
    if match := _ASYNC.search(message):
        facts["async_scheduling"] = str(match[1] == "enabled")
    return facts


def is_banner(message: str) -> bool:
    """The line opens a server run."""
    return _BANNER.search(message) is not None


def _engine_config(text: str) -> dict[str, str]:
    facts: dict[str, str] = {}
    for name, key in _ENGINE_KEYS.items():
        if match := re.search(rf"\b{name}=(?:'([^']*)'|\"([^\"]*)\"|([^,\s()]+))", text):
            value = next(group for group in match.groups() if group is not None)
            if value not in ("None", ""):
                facts.setdefault(key, value)
    return facts


def _arguments(text: str) -> dict[str, str]:
    """arg_<name> for every argument, and the facts that are known by their own names."""
    values = python_repr(text)
    if not isinstance(values, dict):
        return {"args_unreadable": "True"}
    facts = {"args_seen": "True"}
    for name, value in values.items():
        if name == "_call" or value is None:
            continue
        facts[f"arg_{name}"] = "set" if SECRET.search(str(name)) else _masked(value)
        if name in _ARGUMENT_FACTS and not isinstance(value, (dict, list)):
            facts[_ARGUMENT_FACTS[name]] = str(value)
    if isinstance(served := values.get("served_model_name"), list) and served:
        facts["served_model_name"] = str(served[0])
    elif isinstance(served, str):
        facts["served_model_name"] = served
    return facts | _transfer(values.get("kv_transfer_config")) | _switches(values)


def _switches(values: dict[str, Any]) -> dict[str, str]:
    on = values.get("enable_logging_iteration_details")
    stats = not values.get("disable_log_stats")
    return {
        "iteration_logging": "on" if on and stats else "off",
        "stats_logging": "on" if stats else "off",
    }


def _transfer(value: Any) -> dict[str, str]:
    """Connector, role and engine id of a kv_transfer_config (object, dict or JSON text)."""
    if isinstance(value, str):
        value = python_repr(
            value.replace("null", "None").replace("true", "True").replace("false", "False")
        )
    if not isinstance(value, dict):
        return {}
    names = {
        "kv_connector": "kv_connector",
        "kv_role": "kv_role",
        "engine_id": "kv_engine_id",
        "kv_load_failure_policy": "kv_load_failure_policy",
    }
    return {key: str(value[name]) for name, key in names.items() if value.get(name)}


def _masked(value: Any) -> str:
    """A value as text; secrets inside nested arguments and URLs are left out."""
    if isinstance(value, dict):
        value = {k: "set" if SECRET.search(str(k)) else v for k, v in value.items()}
    return re.sub(r"//[^/@\s']+@", "//", str(value))[:1024]
