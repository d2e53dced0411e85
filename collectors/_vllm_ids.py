"""vLLM request ids: the part that travels between components, and what the decoration says.

Source: vllm-project/vllm, vllm/entrypoints/openai (prefixes), vllm/v1/engine/parallel_sampling.py
(n > 1). Spans carry external ids; the internal ones (8 more hex digits, since 0.14) are in logs.
"""

from __future__ import annotations

import polars as pl

# The API server puts one of these before the X-Request-Id (or uuid) of a call.
_PREFIXES = (
    "cmpl-", "chatcmpl-", "embd-", "score-", "classify-", "pooling-", "pool-", "rerank-",
    "generate-tokens-", "resp_", "vllm-batch-",
)  # fmt: skip
_PREFIX = "(?:" + "|".join(_PREFIXES) + ")"
_CHILD = rf"^(\d+)_{_PREFIX}"
_ADDRESSES = r"___prefill_addr_(?<prefill>.+?)___decode_addr_(?<decode>.+?)_[0-9a-f]{32}"


def external_id(request_id: pl.Expr) -> pl.Expr:
    """The id without one server's prefix, the stream's number, and the `-0` of a single prompt.

    `cmpl-<base>-<i>` is prompt i of a call: prompt 0 keeps `<base>`, the others `<base>-<i>`, since
    each prompt of a batch is a request of its own.
    """
    base = request_id.str.replace(rf"^(?:\d+_)?{_PREFIX}", "")
    is_completion = request_id.str.starts_with("cmpl-") | request_id.str.contains(
        "_cmpl-", literal=True
    )
    return pl.when(is_completion).then(base.str.strip_suffix("-0")).otherwise(base)


def external_ids(request_ids: pl.Series) -> pl.Series:
    """The same of a column. All ids of most runs have one prefix: then nothing is searched with a pattern."""
    first = request_ids.first()
    prefix = next((p for p in _PREFIXES if isinstance(first, str) and first.startswith(p)), None)
    if prefix is None or not request_ids.str.starts_with(prefix).all():
        return request_ids.to_frame("id").select(external_id(pl.col("id"))).to_series()
    base = request_ids.str.strip_prefix(prefix)
    if prefix == "cmpl-":
        return base.str.strip_suffix("-0")
    if not (inside := request_ids.str.contains("_cmpl-", literal=True)).any():
        return base
    return (
        base.to_frame("id")
        .select(pl.when(inside).then(pl.col("id").str.strip_suffix("-0")).otherwise("id"))
        .to_series()
    )


def stream_index(request_id: pl.Expr) -> pl.Expr:
    """The stream's number in ids of the form `<index>_<parent>` (n > 1, before 0.14)."""
    return request_id.str.extract(_CHILD, 1).cast(pl.Int64, strict=False)


def addresses(request_id: pl.Expr) -> pl.Expr:
    """Struct (prefill, decode): the addresses that P2pNccl and vllm-router write into ids."""
    return request_id.str.extract_groups(_ADDRESSES)
