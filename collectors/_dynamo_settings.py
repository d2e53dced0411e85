"""Settings in Dynamo's log: engine configuration, CONFIG_DUMP, router. No host names, no paths."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from ._dynamo_names import FACT_BLOCK_SIZE

_MOCKER = re.compile(
    r"\b(num_gpu_blocks|block_size|max_num_seqs|max_num_batched_tokens|enable_prefix_caching"
    r"|enable_chunked_prefill|tensor_parallel_size|dp_size|worker_type|speedup_ratio"
    r"|kv_transfer_bandwidth|kv_transfer_bytes_per_token): (?:Some\()?([\w.]+)"
)

# setting as Dynamo spells it -> fact
_SETTINGS = {
    "num_gpu_blocks": "kv_blocks", "num_gpu_blocks_override": "kv_blocks",
    "total_kv_blocks": "kv_blocks",
    "block_size": FACT_BLOCK_SIZE, "kv_cache_block_size": FACT_BLOCK_SIZE,
    "page_size": FACT_BLOCK_SIZE,
    "max_num_seqs": "max_num_seqs", "max_running_requests": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "chunked_prefill_size": "max_num_batched_tokens",
    "max_model_len": "max_model_len", "context_length": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size", "dp_size": "data_parallel_size",
    "data_parallel_size": "data_parallel_size", "enable_prefix_caching": "enable_prefix_caching",
    "enable_chunked_prefill": "enable_chunked_prefill", "worker_type": "engine_role",
    "disaggregation_mode": "engine_role", "router_mode": "router_mode",
    "speedup_ratio": "speedup_ratio",
    "kv_transfer_bandwidth": "kv_transfer_bandwidth_gb_s",
    "kv_transfer_bytes_per_token": "kv_bytes_per_token", "served_model_name": "model",
    "migration_limit": "migration_limit", "queue_policy": "router_queue_policy",
    "decode_router_mode": "router_mode",
}  # fmt: skip


def settings(message: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(fact, value) of a record: engine configuration, CONFIG_DUMP, single fields."""
    if message.startswith("CONFIG_DUMP"):
        yield from _dumped(message)
    elif "MockerConfig" in message:
        for name, value in _MOCKER.findall(message):
            if value != "None":
                yield _SETTINGS[name], value.lower() if name == "worker_type" else value
    elif message.startswith("Request migration disabled"):
        yield "migration_limit", "0"
    elif message in ("Activating prefill router", "Router policy class configured"):
        for name in ("block_size", "decode_router_mode", "queue_policy"):
            if name in fields:
                yield _SETTINGS[name], str(fields[name]).lower()


def _dumped(message: str) -> Iterator[tuple[str, str]]:
    start = message.find("{")
    try:
        dump = orjson.loads(message[start:]) if start > 0 else {}
    except orjson.JSONDecodeError:
        return
    packages = dump.get("installed_packages") or {}
    if isinstance(packages, dict) and isinstance(packages.get("ai-dynamo"), str):
        yield "dynamo_version", packages["ai-dynamo"]
    config = dump.get("config")
    for name, value in config.items() if isinstance(config, dict) else ():
        if name in _SETTINGS and isinstance(value, str | int | float) and "/" not in str(value):
            yield _SETTINGS[name], str(value)
