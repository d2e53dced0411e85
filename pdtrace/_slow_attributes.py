"""The attributes by which `slow` compares requests: columns as values and bands."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, date, datetime

import numpy as np
import polars as pl

from pdtrace.methods.contrast import Levels, by_band, by_value
from pdtrace.methods.statistics import Floats
from pdtrace.records import dataclass

_FEW = 6  # numbers of so few different values are told value by value
_SHARES = (0.25, 0.5, 0.75, 0.95)  # where bands of numbers begin, as shares of the requests
_TIMES = 6  # bands of time


@dataclass(frozen=True)
class Source:
    """Where an attribute comes from: its column, how people call it, how values are told."""

    column: str
    title: str
    kind: str  # value, number, ratio, time or symptom
    also: tuple[str, ...] = ()  # further columns that say the same


SOURCES = (
    Source("model", "model", "value"),
    Source("prompt_tokens", "prompt tokens", "number"),
    Source("output_tokens", "output tokens", "number"),
    Source("cached_ratio", "cached part of the prompt", "ratio", ("cached_tokens",)),
    Source("worker", "worker", "value", ("prefill_worker", "decode_worker")),
    Source("prefill_worker", "prefill worker", "value"),
    Source("decode_worker", "decode worker", "value"),
    Source("mode", "mode", "value"),
    Source("router", "router", "value"),
    Source("policy", "router policy", "value"),
    Source("route", "route", "value"),
    Source("tenant", "tenant", "value"),
    Source("turn", "turn in session", "number"),
    Source("streaming", "streamed", "value"),
    Source("streams", "answers asked for (n)", "number"),
    Source("attempts", "attempts", "number"),
    Source("start_ns", "time of arrival (UTC)", "time"),
    Source("waiting_at_arrival", "waiting for a first token at arrival", "number"),
    Source("in_flight_at_arrival", "in flight at arrival", "number"),
    Source("ttft_phase", "phase that took most of TTFT", "symptom"),
    Source("main_phase", "phase that took most of the time", "symptom"),
)
COLUMNS = sorted({s.column for s in SOURCES} - {"worker"})
TITLES = {source.column: source.title for source in SOURCES}


def gather(
    rows: pl.DataFrame, condition: Collection[str], symptom: str
) -> tuple[dict[str, Levels], dict[str, str]]:
    """Attributes to be tried by column, and why the others are not.

    `condition`: columns that made the groups; `symptom`: the one column of phases that is asked.
    """
    rows = _workers(rows)
    tried: dict[str, Levels] = {}
    left: dict[str, str] = {}
    for source in SOURCES:
        column = source.column
        if column not in rows.columns or (source.kind == "symptom" and column != symptom):
            continue
        if {column, *source.also} & set(condition):
            left[column] = "it is part of the condition"
        elif column == "output_tokens" and set(condition) == {"ttft_ms"}:
            left[column] = "it comes after the first token"
        elif rows[column].null_count() == rows.height:
            left[column] = "unknown"
        else:
            levels = _levels(rows[column], source)
            if len(set(levels.codes[levels.codes >= 0].tolist())) > 1:
                tried[column] = levels
            else:
                left[column] = "the same for all"
    return tried, left


def _workers(rows: pl.DataFrame) -> pl.DataFrame:
    """One attribute `worker` where prompts and answers were always computed by the same."""
    known = rows.filter(
        pl.col("prefill_worker").is_not_null() | pl.col("decode_worker").is_not_null()
    )
    if (
        known.height
        and known.select(pl.col("prefill_worker").eq_missing(pl.col("decode_worker")).all()).item()
    ):
        return rows.rename({"prefill_worker": "worker"}).drop("decode_worker")
    return rows


def _levels(values: pl.Series, source: Source) -> Levels:
    if source.kind == "time":
        return _times(values)
    if source.kind in ("value", "symptom") or values.dtype == pl.Boolean:
        texts = values
        if values.dtype == pl.Boolean:
            texts = pl.select(
                pl.when(values).then(pl.lit("yes")).when(~values).then(pl.lit("no"))
            ).to_series()
        return by_value(texts.alias("value"), symptom=source.kind == "symptom")
    return _bands(values.cast(pl.Float64), ratio=source.kind == "ratio")


def _bands(values: pl.Series, *, ratio: bool) -> Levels:
    numbers: Floats = values.fill_null(float("nan")).to_numpy()
    known = numbers[~np.isnan(numbers)]
    different = np.unique(known)
    if len(different) <= _FEW:
        cuts = different
    else:
        cuts = np.unique(
            np.concatenate([[known.min()], np.quantile(known, _SHARES, method="higher")])
        )
    fine = np.unique(np.quantile(known, [*np.linspace(0.05, 0.95, 19), 0.99]))
    return by_band(numbers, cuts, fine, _band_names(known, cuts, ratio=ratio))


def _band_names(known: Floats, cuts: Floats, *, ratio: bool) -> list[str]:
    """Bands by the least and greatest value in them."""
    names = []
    for low, high in zip(cuts, [*cuts[1:], np.inf], strict=True):
        inside = known[(known >= low) & (known < high)]
        ends = (float(inside.min()), float(inside.max()))
        texts = [f"{100 * end:.0f} %" if ratio else f"{end:,.0f}" for end in ends]
        names.append(texts[0] if texts[0] == texts[1] else f"{texts[0]} – {texts[1]}")
    return names


def _times(values: pl.Series) -> Levels:
    seconds: Floats = (values / 1e9).fill_null(float("nan")).to_numpy()
    known = seconds[~np.isnan(seconds)]
    first, last = float(known.min()), float(known.max())
    cuts = np.unique(np.linspace(first, last, _TIMES + 1)[:-1])
    fine = np.unique(np.linspace(first, last, 2 * _TIMES + 1)[1:-1])
    style = "%H:%M:%S" if _day(first) == _day(last) else "%m-%d %H:%M:%S"
    names = [
        f"{_at(a):{style}} – {_at(b):{style}}"
        for a, b in zip(cuts.tolist(), [*cuts[1:].tolist(), last], strict=True)
    ]
    return by_band(seconds, cuts, fine, names)


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _day(seconds: float) -> date:
    return _at(seconds).date()
