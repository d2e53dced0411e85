"""Where names stand in a list of names: by their hashes, each match compared as text; which of them repeat."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
_Hashes: TypeAlias = NDArray[np.uint64]

NOWHERE = -1
_MIX = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio (Knuth 1998, TAOCP 3, 6.4)


def repeated(numbers: pl.Series) -> pl.Series:
    """Which of these numbers stand there more than once; in most inputs none of them does, which is asked first."""
    ordered = np.sort(numbers.to_numpy())
    if not (ordered[1:] == ordered[:-1]).any():
        return pl.repeat(value=False, n=len(numbers), eager=True)
    return numbers.is_duplicated()


def places(names: pl.Series, among: pl.Series) -> Ints:
    """For each name its place among distinct others, NOWHERE where it is none of them.

    Long ids are found by 64-bit hashes (measured on a million among 400,000: a third of the CPU of a join by
    these hashes, which takes half of that of a join of texts).
    """
    if not len(among) or not len(names):
        return np.full(len(names), NOWHERE, dtype=np.int64)
    if not names.null_count() and names.equals(among):  # as where every request has one leg
        return np.arange(len(names))
    place = _by_hash(names.hash().to_numpy(), among.hash().to_numpy())
    if place is None:
        return _by_text(names, among)
    same = (among.gather(np.maximum(place, 0)) == names).fill_null(value=False).to_numpy()
    place[~same] = NOWHERE
    return place


def _by_hash(wanted: _Hashes, among: _Hashes) -> Ints | None:
    """For each hash its place among distinct others; None where two of these are equal (as good as never).

    A table holds one of them in each slot; those that find theirs taken go to another table, and so do the hashes that
    find another one in theirs.
    """
    place = np.full(len(wanted), NOWHERE, dtype=np.int64)
    waiting: Ints | None = None  # rows of `wanted`, all at first
    left = np.arange(len(among), dtype=np.int32 if len(among) < 2**31 else np.int64)
    sought, keys, mix = wanted, among, 1
    while True:
        shift = np.uint64(64 - (2 * len(left)).bit_length())
        table = np.full(1 << (64 - int(shift)), NOWHERE, dtype=left.dtype)
        slot = (keys >> shift).view(np.int64)
        table[slot] = left
        taken = np.flatnonzero(table[slot] != left)
        if (among[table[slot[taken]]] == among[left[taken]]).any():
            return None
        found = table[(sought >> shift).view(np.int64)]
        hit = among[found] == (wanted if waiting is None else wanted[waiting])
        missed = np.flatnonzero(~hit & (found != NOWHERE))
        if waiting is None:
            np.copyto(place, found, where=hit)
            waiting = missed
        else:
            place[waiting[hit]] = found[hit]
            waiting = waiting[missed]
        left = left[taken]
        if not len(left) or not len(waiting):
            return place
        mix = mix * _MIX % 2**64
        sought, keys = wanted[waiting] * np.uint64(mix), among[left] * np.uint64(mix)


def _by_text(names: pl.Series, among: pl.Series) -> Ints:
    known = pl.DataFrame({"name": among, "place": np.arange(len(among))}).unique("name")
    found = pl.DataFrame({"name": names}).join(
        known, on="name", how="left", maintain_order="left", nulls_equal=False
    )
    return found["place"].fill_null(NOWHERE).to_numpy().astype(np.int64)
