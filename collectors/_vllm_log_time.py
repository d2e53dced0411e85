"""When a vLLM log line was written: its stamp has no year, no zone and whole seconds.

The year comes from the carrier's stamp where there is one, else from a line of another library
that prints the full date (NIXL), else from a date in the file name, else from the file's last
change: the latest year that is not after it. It rolls over where the months jump. The zone is
taken as UTC unless the carrier shows it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import field
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath

import polars as pl

from pdtrace.model import Source
from pdtrace.records import dataclass

SECOND_NS = 1_000_000_000
CARRIER_RESOLUTION_NS = (
    1_000_000  # the carrier stamps when it reads the line, shortly after it was written
)
HALF_YEAR_S = 183 * 86_400
NEARBY = timedelta(days=2)

_FULL_DATE = r"^(?:\([^()]*\) +)*(?:[A-Z][a-z]{2} |\[)?(20\d\d)-(\d\d)-(\d\d)[ T]\d\d:\d\d:\d\d"
_NAME_DATE = re.compile(r"(?<!\d)(20\d\d)[-_.]?(0[1-9]|1[0-2])[-_.]?(0[1-9]|[12]\d|3[01])(?!\d)")


@dataclass
class LogClock:
    """The years of one file's stamps; kept from batch to batch."""

    path: str
    limit_s: float  # no line is written later than this
    year: int | None = None
    year_basis: str = ""
    zone: str = ""
    last_s: float | None = None  # the last stamp of the batch before, in the base year
    turns: int = 0  # years turned since the first line
    offsets: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, source: Source) -> LogClock:
        """The clock of a source; a stream without a file time cannot be from the future either."""
        written = source.mtime_ns / 1e9 if source.mtime_ns else time.time()
        return cls(source.path, written + 86_400)

    def stamp(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The frame with time_ns and resolution_ns: the carrier's, the JSON's or the line's own."""
        has_stamp = frame["stamp"].is_not_null()
        if self.year is None and has_stamp.any():
            self._find_year(frame)
        own = self._own(frame["stamp"]) if self.year is not None else None
        own_ns = (
            own * SECOND_NS if own is not None else pl.Series([None] * frame.height, dtype=pl.Int64)
        )
        frame = frame.with_columns(own_ns.alias("own_ns"))
        self._find_zone(frame)
        return frame.with_columns(
            pl.coalesce("prefix_time_ns", "json_time_ns", "own_ns").alias("time_ns"),
            pl.when(pl.col("prefix_time_ns").is_not_null() | pl.col("json_time_ns").is_not_null())
            .then(pl.lit(CARRIER_RESOLUTION_NS, dtype=pl.Int64))
            .when(pl.col("own_ns").is_not_null())
            .then(pl.lit(SECOND_NS, dtype=pl.Int64))
            .alias("resolution_ns"),
        )

    def _own(self, stamps: pl.Series) -> pl.Series:
        """Epoch seconds of the stamps; the year turns where the months jump."""
        base = _seconds(stamps, pl.lit(str(self.year)))
        steps = base.drop_nulls()
        if not len(steps):
            return base
        jumps = steps.diff()
        if self.last_s is not None:
            jumps = jumps.scatter(0, steps[0] - self.last_s)
        turned = (
            (jumps < -HALF_YEAR_S).cast(pl.Int64) - (jumps > HALF_YEAR_S).cast(pl.Int64)
        ).fill_null(0)
        self.last_s = steps[-1]
        if not self.turns and not (turned != 0).any():
            return self._not_later(
                stamps, base, pl.repeat(self.year, len(base), dtype=pl.Int64, eager=True)
            )
        turns = turned.cum_sum() + self.turns
        self.turns = int(turns[-1])
        rows = base.is_not_null().arg_true()
        every = (
            pl.Series([None] * len(base), dtype=pl.Int64)
            .scatter(rows, turns)
            .forward_fill()
            .fill_null(0)
        )
        years = every + self.year
        return self._not_later(stamps, _seconds(stamps, years.cast(pl.String)), years)

    def _not_later(self, stamps: pl.Series, seconds: pl.Series, years: pl.Series) -> pl.Series:
        late = (seconds > self.limit_s).fill_null(False)
        if not late.any():
            return seconds
        earlier = _seconds(stamps, (years - 1).cast(pl.String))
        return pl.select(pl.when(late).then(earlier).otherwise(seconds)).to_series()

    def _find_year(self, frame: pl.DataFrame) -> None:
        """The year of the first stamp."""
        stamps = frame["stamp"]
        first = stamps.drop_nulls()[0]
        carried = frame.filter(
            pl.col("stamp").is_not_null() & pl.col("prefix_time_ns").is_not_null()
        )
        if carried.height:
            at = _instant(carried["prefix_time_ns"][0])
            self.year, self.year_basis = _nearest(carried["stamp"][0], at), "stamps of the carrier"
            return
        said = frame.select(
            pl.col("text").str.extract_groups(_FULL_DATE).alias("date"),
            pl.col("stamp").forward_fill().fill_null(strategy="backward"),
        ).filter(pl.col("date").struct.field("1").is_not_null())
        for date, stamp in said.head(20).iter_rows():
            day = _date(date["1"], date["2"], date["3"])
            year = _nearest(stamp, day) if day and stamp else None
            if year is not None and day is not None and _close(stamp, year, day):
                self.year, self.year_basis = (
                    year - _turned(first, stamp),
                    "a line with the full date",
                )
                return
        for match in _NAME_DATE.finditer("/".join(PurePosixPath(self.path).parts[-2:])):
            day = _date(*match.groups())
            year = _nearest(first, day) if day else None
            if year is not None and day is not None and _close(first, year, day):
                self.year, self.year_basis = year, "a date in the file name"
                return
        self.year, self.year_basis = self._latest(first), "the file's last change"

    def _latest(self, stamp: str) -> int:
        limit = datetime.fromtimestamp(self.limit_s, UTC)
        for year in range(limit.year, limit.year - 9, -1):
            moment = _moment(stamp, year)
            if moment is not None and moment <= limit:
                return year
        return limit.year

    def _find_zone(self, frame: pl.DataFrame) -> None:
        """How far the log's stamps are from the carrier's, in quarters of an hour."""
        if self.zone or frame["prefix_time_ns"].null_count() == frame.height:
            return
        apart = (frame["own_ns"] - frame["prefix_time_ns"]).drop_nulls().median()
        if isinstance(apart, (int, float)):
            minutes = round(apart / 9e11) * 15
            hours, rest = divmod(abs(minutes), 60)
            sign = "-" if minutes < 0 else "+"
            self.zone = f"UTC{sign}{hours:02d}:{rest:02d}" if minutes else "UTC"

    def facts(self, carried: bool) -> Sequence[tuple[str, str]]:
        """What was taken for the year and the zone."""
        zone = self.zone or ("as stamped" if carried else "assumed UTC")
        found = [("log_time_zone", zone)]
        if self.year_basis:
            found.append(("log_year_basis", self.year_basis))
        return found


def _seconds(stamps: pl.Series, year: pl.Expr | pl.Series) -> pl.Series:
    texts = pl.DataFrame({"stamp": stamps}).select(
        pl.concat_str([year, pl.lit("-"), pl.col("stamp")]).alias("stamp")
    )
    moments = texts["stamp"].str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False)
    return moments.dt.epoch("s")


def _instant(time_ns: int) -> datetime:
    return datetime.fromtimestamp(time_ns / 1e9, UTC)


def _date(year: str, month: str, day: str) -> datetime | None:
    try:
        return datetime(int(year), int(month), int(day), 12, tzinfo=UTC)
    except ValueError:
        return None


def _moment(stamp: str, year: int) -> datetime | None:
    try:
        return datetime.strptime(f"{year}-{stamp}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        return None


def _nearest(stamp: str, to: datetime) -> int:
    """The year that puts a stamp closest to an instant."""
    options = [(year, _moment(stamp, year)) for year in (to.year - 1, to.year, to.year + 1)]
    return min((abs(moment - to), year) for year, moment in options if moment is not None)[1]


def _close(stamp: str, year: int, day: datetime) -> bool:
    moment = _moment(stamp, year)
    return moment is not None and abs(moment - day) <= NEARBY


def _turned(first: str, later: str) -> int:
    """1 when the new year lies between two stamps of one file."""
    return int(first[:5] > later[:5] and first[:2] == "12" and later[:2] == "01")
