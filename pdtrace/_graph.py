"""Connected components over integer nodes, vectorised."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def components(nodes: int, a: npt.ArrayLike, b: npt.ArrayLike) -> Ints:
    """The label of every node: the smallest node that the edges a-b connect it with."""
    label = np.arange(nodes, dtype=np.int64)
    left = np.asarray(a, dtype=np.int64)
    right = np.asarray(b, dtype=np.int64)
    while left.size:
        low = np.minimum(label[left], label[right])
        high = np.maximum(label[left], label[right])
        open_edges = low != high
        if not open_edges.any():
            break
        left, right = low[open_edges], high[open_edges]
        np.minimum.at(label, right, left)
        label = _to_roots(label)
    return label


def _to_roots(label: Ints) -> Ints:
    """Follow the labels until every node points at its root."""
    while True:
        further = label[label]
        if np.array_equal(further, label):
            return label
        label = further


def climb(parent: Ints, stop: npt.NDArray[np.bool_]) -> Ints:
    """The nearest ancestor of every node where `stop` holds, -1 where none.

    `parent` is -1 for roots. Circles (broken parent ids) end as -1.
    """
    up = parent.copy()
    for _ in range(64):
        moving = (up >= 0) & ~stop[np.maximum(up, 0)]
        if not moving.any():
            return up
        up[moving] = parent[up[moving]]
    up[(up >= 0) & ~stop[np.maximum(up, 0)]] = -1
    return up
