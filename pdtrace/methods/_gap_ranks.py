"""Level B rank by rank: the data-parallel ranks of a worker have schedulers of their own.

A prompt on one rank does not stand in the steps of another; laid over its tokens it would be taken for
a culprit. Unless ranks wait for each other in every step (attention in parallel over data, experts over
all ranks: SGLang's and vLLM's documentation of data parallel attention): then a prompt on any slows all.
So each rank's gaps are first laid over what only the others computed. Where that shows interference, the
ranks are judged together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from pdtrace.methods import _gap_series as series
from pdtrace.methods.interference_gaps import Judgement, interference

AROUND = 3  # steps around a rank's own prefills in which its gaps may hold part of these
COUPLED = (
    "prompts on one data-parallel rank slow the streams of others too: its ranks wait for each other"
    " and are judged together"
)
PARTED = "judged for itself: the requests name their data-parallel rank"


def judged(
    streams: pl.DataFrame, prefills: pl.DataFrame, ranks: pl.DataFrame | None = None, **given: Any
) -> list[Judgement]:
    """A worker's judgement, or one for each of its ranks.

    `ranks`: request, rank, decoded; empty where they cannot be told apart. The rest as
    `interference` takes it.
    """
    if ranks is None or ranks.is_empty():
        return [interference(streams, prefills, **given)]
    parts = list(_parts(streams, prefills, ranks))
    if any(_slowed_by_others(*part[1:], **given) for part in parts):
        return [_noted(interference(streams, prefills, **given), COUPLED)]
    left_out = streams.height - sum(mine.height for _, mine, _, _ in parts)
    note = PARTED
    if left_out:
        note += f"; the rank of {left_out:,} of {streams.height:,} token streams is not known: they are left out"
    decoded = dict(ranks.filter("decoded").group_by("rank").len().iter_rows())
    found = []
    for rank, mine, own, _ in parts:
        told = given | {"decoded": decoded.get(rank)}
        found.append(_noted(interference(mine, own, **told), note, rank))
    return found


def _parts(
    streams: pl.DataFrame, prefills: pl.DataFrame, ranks: pl.DataFrame
) -> Iterator[tuple[str, pl.DataFrame, pl.DataFrame, pl.DataFrame]]:
    """(rank, its streams, the prefills on it, those on other ranks)."""
    of = ranks.select("request", "rank")
    told = streams.join(of, on="request", how="left", maintain_order="left")
    computed = prefills.join(of, on="request", how="left", maintain_order="left")
    for rank in of["rank"].unique().sort():
        yield (
            rank, told.filter(pl.col("rank") == rank).drop("rank"),
            computed.filter(pl.col("rank") == rank).drop("rank"),
            computed.filter(pl.col("rank") != rank).drop("rank"),
        )  # fmt: skip


def _slowed_by_others(
    streams: pl.DataFrame, own: pl.DataFrame, others: pl.DataFrame, **given: Any
) -> bool:
    """Whether a rank's streams stall while only other ranks compute prompts."""
    seen = streams.filter(pl.col("emissions") > 1)
    if not seen.height or not others.height:
        return False
    length = (seen["last_ns"] - seen["first_ns"]).to_numpy() / 1e9
    pace = series.pace(length, seen["emissions"].to_numpy() - 1.0)
    alone = _outside(others, own, int(AROUND * pace * 1e9))
    return bool(interference(streams, alone, **given | {"decoded": None}).row["flagged"])


def _outside(prefills: pl.DataFrame, own: pl.DataFrame, around_ns: int) -> pl.DataFrame:
    """The prefills cut to the first part of each that no own prefill, widened, covers."""
    if not own.height:
        return prefills
    begin = np.sort(own["start_ns"].to_numpy()) - around_ns
    end = np.maximum.accumulate(own.sort("start_ns")["end_ns"].to_numpy()) + around_ns
    start, stop = prefills["start_ns"].to_numpy(), prefills["end_ns"].to_numpy()
    # what begins before a prefill ends, and reaches into it, cuts it at the end; what reaches past its
    # start cuts it there
    before = np.searchsorted(begin, start, side="right") - 1
    low = np.where(before >= 0, np.maximum(start, end[np.maximum(before, 0)]), start)
    after = np.searchsorted(begin, low, side="right")
    high = np.where(
        after < len(begin), np.minimum(stop, begin[np.minimum(after, len(begin) - 1)]), stop
    )
    return prefills.with_columns(
        start_ns=pl.Series(low), end_ns=pl.Series(high),
        tokens=pl.col("tokens") * pl.Series((high - low) / np.maximum(stop - start, 1)),
    ).filter(pl.col("end_ns") > pl.col("start_ns"))  # fmt: skip


def _noted(found: Judgement, note: str, rank: str | None = None) -> Judgement:
    """The same with its rank and a further note."""
    told = "; ".join(n for n in (found.row["note"], note) if n)
    return Judgement(found.row | {"note": told, "rank": rank}, found.losses, found.events)
