"""Rows for intervals that overlap: those of one row never do, and there are no more rows than open at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def lanes(group: Ints, start: Ints, end: Ints) -> Ints:
    """The row of each interval within its group, from 0; a row is used again as soon as it is free.

    Whoever starts takes the row that was freed last: starts and ends are then closing and opening
    brackets, and each start's predecessor in its row is the end that it closes. An interval of no
    length takes its instant.
    """
    n = len(start)
    if n == 0:
        return np.zeros(0, dtype=np.int64)
    until = np.maximum(end, start + 1)
    time = np.concatenate([until, start])
    opens = np.concatenate([np.ones(n, dtype=np.int64), np.zeros(n, dtype=np.int64)])
    groups = np.concatenate([group, group])
    owner = np.concatenate([np.arange(n), np.arange(n)])
    order = np.lexsort((owner, 1 - opens, time, groups))  # ends before the starts of their instant
    opens, groups, owner = opens[order], groups[order], owner[order]
    before = _matched(opens, groups, owner, n)
    first = _roots(before)
    return _numbered(group, start, before, first)


def _matched(opens: Ints, groups: Ints, owner: Ints, n: int) -> Ints:
    """The interval before each one in its row; -1 for the first of a row.

    A bracket that closes at some depth belongs to the last one that opened there; where none is left
    the depth falls below all before it.
    """
    step = np.where(opens == 1, 1, -1)
    depth = np.cumsum(step)
    fresh = np.concatenate([[True], groups[1:] != groups[:-1]])
    base = np.where(fresh, depth - step, 0)
    base = base[np.maximum.accumulate(np.where(fresh, np.arange(len(step)), 0))]
    level = np.where(opens == 1, depth - base, depth - base + 1)  # of the bracket itself
    order = np.lexsort((np.arange(len(step)), level, groups))
    kind, which, lvl, grp = opens[order], owner[order], level[order], groups[order]
    same = (lvl[1:] == lvl[:-1]) & (grp[1:] == grp[:-1]) & (kind[1:] == 0) & (kind[:-1] == 1)
    before = np.full(n, -1, dtype=np.int64)
    before[which[1:][same]] = which[:-1][same]
    return before


def _roots(before: Ints) -> Ints:
    """The first interval of each one's row: links are doubled until they end."""
    root = np.where(before < 0, np.arange(len(before)), before)
    while True:
        further = root[root]
        if np.array_equal(further, root):
            return root
        root = further


def _numbered(group: Ints, start: Ints, before: Ints, root: Ints) -> Ints:
    """Rows counted within each group, by the start of their first interval."""
    heads = np.flatnonzero(before < 0)
    heads = heads[np.lexsort((heads, start[heads], group[heads]))]
    fresh = np.concatenate([[True], group[heads][1:] != group[heads][:-1]])
    place = np.arange(len(heads))
    number = np.empty(len(before), dtype=np.int64)
    number[heads] = place - np.maximum.accumulate(np.where(fresh, place, 0))
    return number[root]
