"""Kinds: what an interval hands to the phase that it wins (detail, worker, basis, ...), numbered.

The numbers follow the sorted names, so that ties between intervals do not depend on reading order.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from pdtrace._phases_sweep import Ints
from pdtrace.model import PHASE_DETAILS

KIND = ("detail", "worker", "basis", "semantics")

_RANKS = pl.DataFrame(
    {
        "detail": list(PHASE_DETAILS),
        "phase": list(PHASE_DETAILS.values()),
        "rank": range(len(PHASE_DETAILS)),
    },
    schema_overrides={"rank": pl.Int64},
)
# Within one detail the better known interval keeps the time.
_BASES = ("measured", "reported", "placed", "inferred", "upper_bound")
WEAKNESS = {name: rank for rank, name in enumerate(_BASES)}
_MANY = 1_000_000  # codes are counted in an array of this size at most, where kinds are few
_UNATTRIBUTED = {"detail": "unattributed", "worker": None, "basis": "inferred", "semantics": None}


def number_kinds(intervals: pl.DataFrame) -> tuple[pl.DataFrame, Ints]:
    """The distinct kinds (phase, detail, worker, basis, semantics, rank) and each interval's index.

    One more row stands at the end: the kind of time that no interval covers.
    """
    kinds, number = numbered(intervals.select(KIND))
    kinds = kinds.with_columns(
        pl.col(KIND).cast(pl.String), pl.Series("code", np.arange(kinds.height))
    )
    kinds = kinds.sort(KIND, nulls_last=True)
    place = np.empty(kinds.height, dtype=np.int64)
    place[kinds["code"].to_numpy()] = np.arange(kinds.height)
    nobody = pl.DataFrame([_UNATTRIBUTED], schema=dict.fromkeys(KIND, pl.String))
    named = pl.concat([kinds.select(KIND), nobody])
    ranked = named.join(_RANKS, on="detail", how="left", maintain_order="left")
    basis = pl.col("basis").replace_strict(
        _BASES, range(len(_BASES)), default=len(_BASES), return_dtype=pl.Int64
    )
    rank = pl.col("rank") * (len(_BASES) + 1) + basis
    return ranked.select("phase", *KIND, rank.alias("rank")), place[number]


def numbered(rows: pl.DataFrame) -> tuple[pl.DataFrame, Ints]:
    """The distinct rows of columns of names or truths, and which of them each row is."""
    codes = np.zeros(rows.height, dtype=np.int64)
    for names in rows.iter_columns():
        if names.dtype == pl.String:
            names = names.cast(pl.Categorical)
        column = names.to_physical().cast(pl.Int64) + 1
        codes = _combined(codes, column.fill_null(0).to_numpy())
    counts = np.bincount(codes)
    distinct = np.flatnonzero(counts)
    number = (np.cumsum(counts > 0) - 1)[codes]
    sample = np.empty(len(distinct), dtype=np.int64)
    sample[number] = np.arange(len(number))  # any row of a kind shows its names
    return rows[sample], number


def _combined(codes: Ints, column: Ints) -> Ints:
    """One small code for the pair."""
    wide = int(column.max(initial=0)) + 1
    if (int(codes.max(initial=0)) + 1) * wide > _MANY:
        codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
        column = np.unique(column, return_inverse=True)[1].astype(np.int64)
        wide = int(column.max(initial=0)) + 1
    return codes * wide + column
