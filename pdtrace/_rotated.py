"""Files that an exporter rotated: parts of one stream, told by their names and by time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import PurePosixPath

_COMPRESSED = re.compile(r"\.(?:gz|zst|bz2|xz)$")
_NUMBERS = re.compile(r"\d(?:[\dTZ:_.+-]*\d)?Z?")  # dates, times and counters in a file's name
LATEST_NS = 10 * 10**9  # exporters send in batches: neighbours overlap by no more
OVERLAP = 0.1  # and by no more than this part of the shorter one


def family(path: str) -> str:
    """What the names of the parts of one rotated file have in common."""
    place = PurePosixPath(path)
    letters = _NUMBERS.sub("", _COMPRESSED.sub("", place.name))
    return f"{place.parent}|{re.sub(r'[^A-Za-z]', '', letters)}"


def parts(paths: Mapping[int, str], ends: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """source -> the first source of its rotated file; only those that follow an earlier part.

    `ends`: when the first and the last record of each source ended.
    """
    families: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for source, (first, last) in ends.items():
        if source in paths:
            families[family(paths[source])].append((first, last, source))
    found: dict[int, int] = {}
    for members in families.values():
        for before, after in zip(sorted(members), sorted(members)[1:], strict=False):
            if _follows(before, after):
                found[after[2]] = found.get(before[2], before[2])
    return found


def _follows(before: tuple[int, int, int], after: tuple[int, int, int]) -> bool:
    overlap = before[1] - after[0]
    shorter = min(before[1] - before[0], after[1] - after[0])
    return overlap <= min(LATEST_NS, OVERLAP * shorter)
