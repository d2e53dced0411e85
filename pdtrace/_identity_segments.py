"""Names that several processes may bear: how long such a name is one process."""

from __future__ import annotations

import polars as pl

from pdtrace._graph import Ints
from pdtrace._identity_legs import NEAR_NS

Segments = (
    pl.DataFrame
)  # group (request), chain (name in a part), segment (number from 0, in order of time)


def segments(rows: pl.DataFrame) -> Segments:
    """Legs of such a name in one part (a source; the pieces of a recording), cut at pauses."""
    if rows.height == 0:
        return pl.DataFrame(schema={"group": pl.Int64, "chain": pl.Int64, "segment": pl.Int64})
    ordered = rows.sort("worker", "part", "lo", "leg").with_columns(
        pl.col("hi").cum_max().shift().over("worker", "part").alias("until"),
        pl.int_range(pl.len()).over("worker", "part").alias("place"),
    )
    first = pl.col("place") == 0
    pause = (pl.col("lo") > pl.col("until") + NEAR_NS).fill_null(value=False)
    return ordered.select(
        "group",
        chain=first.cum_sum().cast(pl.Int64) - 1,
        segment=(first | pause).cum_sum().cast(pl.Int64) - 1,
    )


def resumed(cut: Segments, label: Ints, served: Ints) -> pl.DataFrame:
    """Pauses that end nothing, as pairs (before, after) of segments.

    A name goes on behind a pause unless other processes serve there: those of a second run. `label` of every
    segment: what it is joined with so far; `served`: the labels that hold workers known by a name of their own.
    """
    found = (
        cut.select("chain", "segment")
        .unique()
        .sort("segment")
        .with_columns(pl.Series("label", label))
        .with_columns(
            pl.when(pl.col("label").is_in(served)).then("label").alias("known"),
            pl.col("segment").shift().over("chain").alias("before"),
        )
    )
    last = pl.col("known").forward_fill().shift().over("chain")
    same = pl.col("known").is_null() | last.is_null() | (pl.col("known") == last)
    return found.filter(pl.col("before").is_not_null() & same).select("before", after="segment")
