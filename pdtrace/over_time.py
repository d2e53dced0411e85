"""Load and latency of each deployment over its time, for charts beside the diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from pdtrace.store import Store

Series = Mapping[str | None, Sequence[Mapping[str, Any]]]
LEAST = 2  # requests a stretch, in the mean: below, the lines would show chance


def asked(parts: int) -> tuple[str, dict[str, object]]:
    """The question that over_time() asks."""
    return "time_series", {"bins": parts}


def over_time(store: Store, parts: int) -> Series:
    """Rows of time_series by deployment: one a stretch, so many of them; none where parts is 0.

    Deployments with too few requests for that many stretches, or in no time, are left out.
    """
    if not parts:
        return {}
    name, given = asked(parts)
    rows = store.query(name, **given).filter(pl.col("worker").is_null())
    found = rows.sort("bin").partition_by("deployment", as_dict=True, maintain_order=True)
    return {
        None if key[0] is None else str(key[0]): part.to_dicts()
        for key, part in found.items()
        if part["arrivals"].sum() >= LEAST * parts and part["end_ns"].max() > part["start_ns"].min()  # type: ignore[operator]
    }
