"""Pieces of one rotated log are one server: `vllm.log`, `vllm.log.1`, `vllm.log.2.gz`, `0.log.20250601-120000.gz`."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise

from pdtrace.store import Store

_ROTATED = re.compile(
    r"^(?P<base>.+?)(?:\.(?P<number>\d{1,3})|(?P<date>[-._]20\d{2}-?\d{2}-?\d{2}(?:[-T_]?\d[\d:.-]*)?))?(?:\.(?:gz|zst|bz2|xz))?$"
)
_RUN = re.compile(r":\d+$")


def join_pieces(store: Store) -> None:
    """Give the pieces of a rotated log one name more, where their times follow each other as rotation leaves them.

    Logs of ranks may be numbered alike (`vllm.log.0`, `vllm.log.1`): they go on at the same time, and stay apart.
    """
    pieces: dict[str, list[tuple[int, int, int | None, str]]] = defaultdict(list)
    for worker, first, last in store.rows(
        """SELECT DISTINCT w.worker, w.start_ns, w.end_ns FROM workers w
           JOIN worker_aliases a ON a.worker = w.worker JOIN sources s ON s.source = a.source
           WHERE w.worker LIKE 'file:%' AND s.record_unit = 'line' AND w.start_ns IS NOT NULL AND w.end_ns IS NOT NULL"""
    ):
        path, _, label = worker.removeprefix("file:").partition("#")
        found = _ROTATED.match(path)
        if found is not None:
            # what has neither number nor date is being written still: none is newer
            number = int(found["number"] or 0) if found["date"] is None else None
            pieces[f"{found['base']}#{_RUN.sub('', label)}"].append((first, last, number, worker))
    rows = [
        {"worker": piece[3], "kind": "process", "value": f"rotated log {name}"}
        for name, found in pieces.items()
        if _follow(sorted(found))
        for piece in found
    ]
    if rows:
        store.append("worker_aliases", rows)


def _follow(pieces: list[tuple[int, int, int | None, str]]) -> bool:
    """Whether the pieces are several, one after the other, and their numbers fall with time."""
    if len({piece[3].partition("#")[0] for piece in pieces}) < 2:
        return False
    numbers = [piece[2] for piece in pieces if piece[2] is not None]
    in_turn = all(a[1] <= b[0] for a, b in pairwise(pieces))
    return in_turn and all(a >= b for a, b in pairwise(numbers))
