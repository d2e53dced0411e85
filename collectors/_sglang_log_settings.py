"""What SGLang's start-up lines say of a server: its arguments, its role, the size of its KV cache."""

from __future__ import annotations

import re
from typing import Any

from ._python_repr import python_repr

_ARGS = re.compile(r"\bserver_args=(ServerArgs\(.*\))")
_PID = re.compile(r"Started server process \[(\d+)\]")
_FIGURES = {
    "kv_cache_tokens": re.compile(r"\bmax_total_num_tokens=(\d+)"),
    "chunked_prefill_size": re.compile(r"\bchunked_prefill_size=(-?\d+)"),
    "max_num_seqs": re.compile(r"\bmax_running_requests=(\d+)"),
    "max_model_len": re.compile(r"\bcontext_len=(\d+)"),
}
_SECRET = re.compile(r"(?:api_?key|hf_token|password|secret|auth_token|access_token|credential)", re.IGNORECASE)  # fmt: skip
_FACTS = {
    "model_path": "model", "served_model_name": "served_model_name", "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size", "dp_size": "data_parallel_size", "max_running_requests": "max_num_seqs",
    "context_length": "max_model_len", "disaggregation_transfer_backend": "kv_connector", "quantization": "quantization",
    "dtype": "dtype", "kv_cache_dtype": "kv_cache_dtype", "decode_log_interval": "decode_log_interval",
    "enable_mixed_chunk": "mixed_chunk", "enable_dp_attention": "dp_attention",
}  # fmt: skip
_MODES = {"prefill": "prefill", "decode": "decode", "null": "aggregated", "None": "aggregated"}


def is_start(message: str) -> bool:
    """The line opens a server run."""
    return _ARGS.search(message) is not None


def read_line(message: str) -> dict[str, str]:
    """Facts of one start-up line; `role` and `address` among them; empty when it states none."""
    facts: dict[str, str] = {}
    if match := _ARGS.search(message):
        values = python_repr(match[1])
        facts |= _arguments(values) if isinstance(values, dict) else {"args_unreadable": "True"}
    elif match := _PID.search(message):
        facts["pid"] = match[1]
    else:
        facts |= {key: match[1] for key, pattern in _FIGURES.items() if (match := pattern.search(message))}  # fmt: skip
    return facts


def _arguments(values: dict[str, Any]) -> dict[str, str]:
    facts = {}
    for name, value in values.items():
        if name == "_call" or value is None:
            continue
        facts[f"arg_{name}"] = "set" if _SECRET.search(name) else re.sub(r"//[^/@\s']+@", "//", str(value))[:1024]  # fmt: skip
        if name in _FACTS and not isinstance(value, (dict, list)):
            facts[_FACTS[name]] = str(value)
    chunk = values.get("chunked_prefill_size")
    if isinstance(chunk, int):
        facts["chunked_prefill_size"] = str(chunk)
        facts["chunked_prefill"] = str(chunk > 0)
    if "disable_radix_cache" in values:
        facts["prefix_caching"] = str(not values["disable_radix_cache"])
    mode = str(values.get("disaggregation_mode", "null"))
    if mode in _MODES:
        facts["role"] = _MODES[mode]
    if facts.get("role") == "aggregated":
        facts.pop("kv_connector", None)  # the default of a mode that is off
    host, port = values.get("host"), values.get("port")
    if port and host and str(host) not in ("0.0.0.0", "::"):  # noqa: S104 compared, not bound
        facts["address"] = f"{host}:{port}"
    return facts
