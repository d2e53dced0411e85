"""Tables whose rows are whole runs (means and percentiles over requests): told from their headers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ._table_headers import meaning_of, understand_all, words_of

RUNS = "a table of runs (means or percentiles over requests), not of requests"
_WORDS = re.compile(
    r"(?:^|_)(?:mean|avg|average|median|std|stdev|stddev|var|variance|min|max|p\d{1,4}|percentile|quantiles?)(?=_|$)"
)


def is_table_of_runs(names: Sequence[str]) -> bool:
    """Whether only statistics of first tokens or totals are there: one request has no percentile of them.

    Statistics of token gaps may well be one request's: they count only where nothing else tells of one.
    """
    plain = {column.meaning for column in understand_all(names)}
    statistics = Counter(meaning for name in names if (meaning := _statistic_of(name)))
    if plain & {"ttft", "first_at", "chunk_times"}:
        return False
    if statistics["ttft"]:
        return True
    told = plain & {"e2e", "end", "start", "request_id"}
    return (statistics["e2e"] > 1 or statistics["tpot"] > 1) and not told


def _statistic_of(name: str) -> str | None:
    """The quantity (ttft, e2e, tpot) whose mean, percentile, ... a column holds."""
    parents, _, last = name.rpartition(".")
    for header in (last, f"{parents.rpartition('.')[2]} {last}"):
        key, brackets = words_of(header)
        whole = "_".join([key, *brackets])
        if not _WORDS.search(whole):
            continue
        meaning = meaning_of(_WORDS.sub("", whole).strip("_"))
        if meaning is not None:
            return "tpot" if meaning == "itl" else meaning if meaning in _TIMED else None
    return None


_TIMED = ("ttft", "e2e", "tpot")
