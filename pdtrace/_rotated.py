"""Files that are pieces of one recording: rotated by an exporter, or one trace a file."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import PurePosixPath

from pdtrace._worker_names import folder

_COMPRESSED = re.compile(r"\.(?:gz|zst|bz2|xz)$")
_NUMBERS = re.compile(r"\d(?:[\dTZ:_.+-]*\d)?Z?")  # dates, times and counters in a file's name
LATEST_NS = 10 * 10**9  # exporters send in batches: neighbours overlap by no more
OVERLAP = 0.1  # and by no more than this part of the shorter one
MOST = 0.9  # share of a folder's files that hold one trace each, so that the others go with them


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


def one_trace_a_file(paths: Mapping[int, str], traces: Mapping[int, int]) -> dict[int, int]:
    """source -> the first source of its folder, of files that hold one trace each (`traces`: how many in each source).

    Viewers and trace stores give traces out so. Where nearly all files of a folder are such, the few that hold
    more (an id used again, a batch) go with them.
    """
    folders: dict[str, list[int]] = defaultdict(list)
    for source in sorted(traces):
        if source in paths:
            folders[folder(paths[source])].append(source)
    found: dict[int, int] = {}
    for members in folders.values():
        single = [source for source in members if traces[source] == 1]
        pieces = members if len(single) >= MOST * len(members) else single
        found |= dict.fromkeys(pieces[1:], min(pieces, default=0))
    return found
