"""KV bytes per token of each deployment and model: as configured, by the published model's shape, or unknown.

Grouped-query attention: 2 x layers x KV heads x head size x bytes per element (Shazeer 2019, arXiv
1911.02150; Ainslie et al. 2023, arXiv 2305.13245), times R = max(1, TP / KV heads): with more ranks
than heads each head is kept, and sent, by several ranks. Latent attention: layers x (latent + rope
size) x bytes per element (DeepSeek-V2, arXiv 2405.04434), one copy counted. Models whose layers do
not all keep the whole context follow neither: unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import polars as pl

MODELS = """
SELECT DISTINCT r.deployment, r.model FROM requests AS r
WHERE r.deployment IS NOT NULL
ORDER BY ALL
"""
FACTS = """
SELECT DISTINCT w.deployment, w.role, f.key, f.value
FROM facts AS f
JOIN workers AS w ON w.worker = f.worker
WHERE f.key IN ('model', 'served_model_name', 'dtype', 'kv_cache_dtype', 'tensor_parallel_size', 'tp_size',
                'block_size', 'kv_block_size', 'kv_bytes_per_token')
  AND w.deployment IS NOT NULL AND f.value IS NOT NULL
ORDER BY ALL
"""
SCHEMA = {
    "deployment": pl.String, "model": pl.String, "bytes_per_token": pl.Int64, "block_tokens": pl.Int64,
    "tensor_parallel": pl.Int64, "copies": pl.Float64, "basis": pl.String, "note": pl.String,
}  # fmt: skip

_WEIGHT_ONLY = re.compile(r"-(awq|gptq|gguf|int4|int8|w4a16|w8a16|4bit|8bit|bnb)(-.*)?$")
_ELEMENTS = {
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "int8": 1,
    "bfloat16": 2, "float16": 2, "half": 2, "bf16": 2, "fp16": 2, "float32": 4, "float": 4,
}  # fmt: skip


def sizes(models: pl.DataFrame, facts: pl.DataFrame) -> pl.DataFrame:
    """A row of `kv_sizes` for each deployment and model; bytes_per_token NULL where unknown, with why."""
    rows = []
    alone = dict(models.group_by("deployment").len().iter_rows())
    for deployment, model in models.select("deployment", "model").iter_rows():
        mine = facts.filter(pl.col("deployment") == deployment)
        rows.append(_size(deployment, model, mine, only=alone[deployment] == 1))
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _size(deployment: str, model: str | None, facts: pl.DataFrame, *, only: bool) -> dict[str, Any]:
    """What the facts say, else the formula."""
    block = _only(_values(facts, "block_size", "kv_block_size"))
    ranks = _only(
        _values(facts.filter(pl.col("role") == "prefill"), "tensor_parallel_size", "tp_size")
        or _values(facts, "tensor_parallel_size", "tp_size")
    )
    row: dict[str, Any] = {
        "deployment": deployment, "model": model, "bytes_per_token": None, "block_tokens": _whole(block),
        "tensor_parallel": _whole(ranks), "copies": None, "basis": "unknown", "note": None,
    }  # fmt: skip
    stated = _values(facts, "kv_bytes_per_token")
    if only and stated and _whole(_only(stated)):
        return row | {"bytes_per_token": _whole(_only(stated)), "basis": "config"}
    names = [model] if model else []
    if only:  # the engine's own path says more than an alias that it is served under
        names = [*_values(facts, "model"), *names, *_values(facts, "served_model_name")]
    shape = next((found for name in names if (found := shape_of(name)) is not None), None)
    if shape is None:
        return row | {"note": "the shape of this model's KV cache is not known"}
    if "unknown" in shape:
        return row | {"note": f"no formula for this model: {shape['unknown']}"}
    width, note = element_bytes(
        _values(facts, "kv_cache_dtype"), _values(facts, "dtype"), names, shape
    )
    if width is None:
        return row | {"note": note}
    per_token, copies = bytes_per_token(shape, width, row["tensor_parallel"])
    notes = [f"shape as published by {shape['source']}", note]
    if row["tensor_parallel"] is None:
        notes.append("tensor parallel size unknown: heads are counted once")
    return row | {
        "bytes_per_token": per_token, "copies": copies, "basis": "formula",
        "note": "; ".join(n for n in notes if n),
    }  # fmt: skip


def bytes_per_token(shape: Mapping[str, Any], element: int, ranks: int | None) -> tuple[int, float]:
    """KV bytes of one token over all layers and ranks that hold it, and the copies of each head."""
    if "latent" in shape:
        return shape["layers"] * shape["latent"] * element, 1.0
    copies = max(1.0, (ranks or 1) / shape["kv_heads"])
    once = 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * element
    return round(once * copies), copies


def shape_of(name: str) -> Mapping[str, Any] | None:
    """The published shape behind a model name or path; None when it is not in the list."""
    base = _WEIGHT_ONLY.sub("", _base(name).removesuffix("-fp8"))
    return next((m for m in _shapes() if re.fullmatch(m["pattern"], base)), None)


def element_bytes(
    cache_types: Sequence[str],
    model_types: Sequence[str],
    names: Sequence[str],
    shape: Mapping[str, Any],
) -> tuple[int | None, str | None]:
    """Bytes of a number in the KV cache, and what was assumed; None and why where it cannot be told."""
    given = sorted({_type(t) for t in cache_types} - {"auto"})
    if len(given) > 1:
        return None, "workers keep KV in different number formats"
    if given:
        width = _ELEMENTS.get(given[0])
        return width, None if width else f"unknown number format of the KV cache: {given[0]}"
    if any(_base(name).endswith("-fp8") for name in names):
        return None, "a checkpoint in FP8 may set the KV cache's number format; no fact says which"
    kinds = sorted({_type(t) for t in model_types} - {"auto"})
    if len(kinds) == 1 and kinds[0] in _ELEMENTS:
        return _ELEMENTS[kinds[0]], None
    return shape["element_bytes"], "number format as published: no fact states it"


@cache
def _shapes() -> list[dict[str, Any]]:
    text = (files("pdtrace.schemas") / "kv_models.json").read_text("utf-8")
    found: list[dict[str, Any]] = json.loads(text)["models"]
    return found


def _base(name: str) -> str:
    return re.split(r"[/\\]", name.strip().rstrip("/\\").lower())[-1]


def _type(text: str) -> str:
    return text.strip().lower().removeprefix("torch.")


def _values(facts: pl.DataFrame, *keys: str) -> list[str]:
    return facts.filter(pl.col("key").is_in(keys))["value"].unique().sort().to_list()


def _only(values: Sequence[str]) -> str | None:
    return values[0] if len(values) == 1 else None


def _whole(text: str | None) -> int | None:
    try:
        number = int(float(text)) if text is not None else 0
    except (ValueError, OverflowError):
        return None
    return number if number > 0 else None
