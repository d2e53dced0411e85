"""Tables whose rows are whole runs (means and percentiles over requests): told from their headers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import polars as pl

from ._table_headers import meaning_of, understand_all, words_of

RUNS = "a table of runs (means or percentiles over requests), not of requests"
_WORDS = re.compile(
    r"(?:^|_)(?:mean|avg|average|median|std|stdev|stddev|var|variance|min|max|p\d{1,4}|percentile|quantiles?)(?=_|$)"
)


def is_table_of_runs(names: Sequence[str]) -> bool:
    """Whether only statistics of first tokens or totals are there: one request has no percentile of them.

    Statistics of token gaps may well be one request's: they count only where nothing else tells of one.
    """
    if any(_PERCENTILES.fullmatch(words_of(name)[0]) for name in names):
        return True
    plain = {column.meaning for column in understand_all(names)}
    statistics = Counter(meaning for name in names if (meaning := _statistic_of(name)))
    if plain & {"ttft", "first_at", "chunk_times"}:
        return False
    if statistics["ttft"]:
        return True
    told = plain & {"e2e", "end", "start", "request_id"}
    return (statistics["e2e"] > 1 or statistics["tpot"] > 1) and not told


def is_sweep(frame: pl.DataFrame) -> bool:
    """Whether each row is a run at its own load: such a column rises or falls from row to row.

    Rows that name or date a request are requests, whatever the load beside them.
    """
    if {c.meaning for c in understand_all(frame.columns)} & _OF_A_REQUEST or frame.height < 3:
        return False
    for name in frame.columns:
        if not _LOAD.fullmatch(words_of(name)[0]):
            continue
        steps = frame[name].cast(pl.Float64, strict=False).diff().slice(1)
        if not steps.null_count() and ((steps > 0).all() or (steps < 0).all()):
            return True
    return False


_LOAD = re.compile(
    r"(?:max_|num_|n_|number_of_)?(?:concurren(?:cy|t)(?:_(?:users|requests|level|streams))?|parallel(?:ism)?|conc|"
    r"(?:virtual_)?users|vus|clients|qps|rps|(?:request_|req_)?rate|batch_size|bs|num_prompts)"
)
_PERCENTILES = re.compile(r"percentiles?|quantiles?|백분위수?|百分位数?")
_OF_A_REQUEST = {
    "request_id",
    "external_id",
    "start",
    "end",
    "first_at",
    "status",
    "http_status",
    "session",
    "trace_id",
    "note",
}


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
