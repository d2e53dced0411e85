"""Cells of a request table as numbers and instants: units, decimal commas, dates, epochs."""

from __future__ import annotations

import polars as pl

from pdtrace.records import dataclass

from ._table_headers import DURATION_UNITS, UNIT_MS

MISSING = (
    "",
    "-",
    "--",
    "—",
    "–",
    "n/a",
    "na",
    "#n/a",
    "nan",
    "null",
    "none",
    "nil",
    "\\n",
    "?",
    "undefined",
    "missing",
    "unknown",
    "inf",
    "-inf",
    "<na>",
    "nat",
    "없음",
    "无",
)
_NUMBER = (
    r"^([+-]?[\d.,'’_ \x{a0}\x{202f}]*\d[.,]?(?:[eE][+-]?\d+)?)[ \x{a0}]*([^\d\s.,][^\d.,]*)?$"
)
# Nobody groups the digits of 0,247: a leading zero makes the comma a decimal one.
_THOUSANDS_COMMA = r"^[+-]?[1-9]\d{0,2}(,\d{3})+$"
_THOUSANDS_POINT = r"^[+-]?[1-9]\d{0,2}(\.\d{3})+$"
_SCALES = {"k": 1e3, "m": 1e6}

# Epoch units by magnitude of the number: instants between 1980 and 2100.
_EPOCHS = (
    ("s", 3.2e8, 4.2e9),
    ("ms", 3.2e11, 4.2e12),
    ("us", 3.2e14, 4.2e15),
    ("ns", 3.2e17, 4.2e18),
)
_UNIT_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_DATE = (
    r"^(?:(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})|(\d{1,2})[-/.](\d{1,2})[-/.](\d{4})|(\d{4})(\d{2})(\d{2}))"
    r"(?:[T ,]+(\d{1,2}):(\d{2})(?::(\d{2})(?:[.,](\d{1,9})\d*)?)?)?"
    r"\s*([AaPp]\.?[Mm]\.?)?\s*(Z|z|UTC|GMT|[+-]\d{2}:?\d{2})?$"
)
_EXCEL_EPOCH_DAYS = 25569  # Excel's day number of 1970-01-01


def text(series: pl.Series) -> pl.Series:
    """The cells as stripped text; spellings of "nothing" become NULL."""
    cells = series.cast(pl.String, strict=False).str.strip_chars(" \t\r\n\"'\u00a0\u200b`*")
    return cells.set(cells.str.to_lowercase().is_in(MISSING).fill_null(value=False), None)


def comma_is_decimal(series: pl.Series) -> bool | None:
    """Whether this column writes 1,5 for one and a half; None when its cells do not tell."""
    if series.dtype != pl.String or not series.str.contains(",", literal=True).any():
        return None
    body = text(series).str.extract(_NUMBER, 1).str.replace_all(r"[ '’_\x{a0}\x{202f}]", "")
    comma, point = body.str.contains(",", literal=True), body.str.contains(".", literal=True)
    last_is_comma = body.str.contains(r"\.\d*,\d+$")
    if (comma & point & last_is_comma).any() or (
        comma & ~point & ~body.str.contains(_THOUSANDS_COMMA)
    ).any():
        return True
    if (point & ~comma & ~body.str.contains(_THOUSANDS_POINT)).any() or (comma & point).any():
        return False
    return None


def numbers(
    series: pl.Series, *, decimal_comma: bool | None = None, whole: bool = False
) -> tuple[pl.Series, pl.Series]:
    """The cells as (number, unit word); `whole` reads 1.234 of a decimal-comma file as 1234."""
    if series.dtype.is_numeric():
        value = series.cast(pl.Float64, strict=False)
        return value.set(~value.is_finite().fill_null(value=False), None), _no_units(series)
    if series.dtype == pl.Duration:
        return series.dt.total_nanoseconds() / 1e6, pl.repeat("ms", len(series), eager=True)
    if series.dtype != pl.String:
        empty = pl.repeat(None, len(series), dtype=pl.Float64, eager=True)
        return empty, _no_units(series)
    cells = text(series)
    if not (decimal_comma and whole):  # most columns are plain numbers: no need of the slow pattern
        plain = cells.cast(pl.Float64, strict=False)
        if plain.null_count() == cells.null_count():
            return plain.set(~plain.is_finite().fill_null(value=False), None), _no_units(series)
    body = cells.str.extract(_NUMBER, 1).str.replace_all(r"[ '’_\x{a0}\x{202f}]", "")
    unit = cells.str.extract(_NUMBER, 2).str.to_lowercase().str.strip_chars(" .")
    unit = unit.str.replace_all("[µμ]", "u")
    if decimal_comma:
        if whole:
            grouped = body.str.contains(_THOUSANDS_COMMA)
            if body.str.ends_with(",000").all():  # three decimals, all of them zero
                grouped = grouped & False
            body = pl.select(
                pl.when(grouped).then(body.str.replace_all(",", "", literal=True)).otherwise(body)
            ).to_series()
            grouped = body.str.contains(_THOUSANDS_POINT)
            body = pl.select(
                pl.when(grouped).then(body.str.replace_all(".", "", literal=True)).otherwise(body)
            ).to_series()
        swapped = body.str.replace_all(".", "", literal=True).str.replace(",", ".", literal=True)
        body = pl.select(
            pl.when(body.str.contains(",", literal=True)).then(swapped).otherwise(body)
        ).to_series()
    else:
        body = body.str.replace_all(",", "", literal=True)
    value = body.cast(pl.Float64, strict=False)
    value = value.set(~value.is_finite().fill_null(value=False), None)
    scale = unit.replace_strict(_SCALES, default=1.0, return_dtype=pl.Float64) if whole else 1.0
    return value * scale, unit


def _no_units(series: pl.Series) -> pl.Series:
    return pl.repeat(None, len(series), dtype=pl.String, eager=True)


def durations_ms(series: pl.Series, unit: str, *, decimal_comma: bool | None = None) -> pl.Series:
    """A duration column in milliseconds; a unit inside a cell counts more than the column's."""
    value, cell_unit = numbers(series, decimal_comma=decimal_comma)
    factor = cell_unit.replace_strict(
        {word: UNIT_MS[u] for word, u in DURATION_UNITS.items()},
        default=None,
        return_dtype=pl.Float64,
    ).fill_null(UNIT_MS[unit])
    return value * factor


def cell_units(series: pl.Series) -> str | None:
    """The unit that the cells themselves carry, when most do."""
    _, unit = numbers(series)
    known = unit.replace_strict(DURATION_UNITS, default=None, return_dtype=pl.String).drop_nulls()
    filled = series.len() - text(series).null_count() if series.dtype == pl.String else series.len()
    return str(known.mode().sort()[0]) if len(known) and len(known) * 2 > filled else None


@dataclass(frozen=True)
class InstantRule:
    """How an instant column is read; `wall` false: numbers of a clock without epoch."""

    kind: str  # datetime, epoch, excel, relative
    unit: str = "s"
    day_first: bool = False
    resolution_ns: int = 1
    zone_missing: bool = False

    @property
    def wall(self) -> bool:
        """Whether the instants are times of day."""
        return self.kind != "relative"


def instant_rule(series: pl.Series, header_unit: str | None) -> InstantRule | None:
    """How to read this column as instants, from its own values; None when it holds no instants."""
    if series.dtype == pl.Datetime:
        step = {"ms": 1_000_000, "us": 1_000, "ns": 1}[getattr(series.dtype, "time_unit", "us")]
        zone = getattr(series.dtype, "time_zone", None)
        return InstantRule("datetime", resolution_ns=step, zone_missing=zone is None)
    if series.dtype == pl.Date:
        return InstantRule("datetime", resolution_ns=86_400_000_000_000, zone_missing=True)
    cells = series.drop_nulls() if series.dtype != pl.String else text(series).drop_nulls()
    if not len(cells):
        return None
    value, _ = numbers(cells)
    if value.null_count() * 2 <= len(cells):
        return _number_rule(value.drop_nulls(), cells, header_unit)
    return _date_rule(cells) if series.dtype == pl.String else None


def _number_rule(value: pl.Series, cells: pl.Series, header_unit: str | None) -> InstantRule | None:
    if not len(value):
        return None
    middle, low, high = float(value.median() or 0), float(value.min() or 0), float(value.max() or 0)  # type: ignore[arg-type]
    for unit, at_least, at_most in _EPOCHS:
        if at_least <= middle <= at_most:
            digits = _fraction_digits(cells)
            step = max(1, _UNIT_NS[unit] // 10 ** min(digits, 9))
            return InstantRule("epoch", unit, resolution_ns=step)
    fractional = (value % 1 != 0).any()
    if header_unit is None and low >= 40_000 and high <= 60_000 and high - low < 366 and fractional:
        return InstantRule("excel", resolution_ns=1_000_000_000)
    unit = header_unit if header_unit in _UNIT_NS else "s"
    return InstantRule("relative", unit or "s", resolution_ns=1_000)


def _fraction_digits(cells: pl.Series) -> int:
    found = cells.cast(pl.String).str.extract(r"\.(\d+)$", 1).str.len_chars().max()
    return int(found) if isinstance(found, int) else 0


def _date_rule(cells: pl.Series) -> InstantRule | None:
    parts = _date_parts(cells)
    if parts["matched"].sum() * 2 < len(cells):
        return None
    first, second = parts["a"].max(), parts["b"].max()
    dotted = cells.str.contains(r"^\d{1,2}\.").any()
    day_first = bool(dotted) or (isinstance(first, int) and first > 12 and not _above(second))
    digits = parts["fraction"].str.len_chars().max()
    step = 10 ** (9 - int(digits)) if isinstance(digits, int) else 1_000_000_000
    if parts["minute"].null_count() == len(cells):
        step = 86_400_000_000_000
    elif parts["second"].null_count() == len(cells):
        step = 60_000_000_000
    return InstantRule(
        "datetime",
        day_first=day_first,
        resolution_ns=step,
        zone_missing=parts["zone"].null_count() == len(cells),
    )


def _above(value: object) -> bool:
    return isinstance(value, int) and value > 12


def _date_parts(cells: pl.Series) -> pl.DataFrame:
    names = [
        "y1",
        "m1",
        "d1",
        "a",
        "b",
        "y2",
        "y3",
        "m3",
        "d3",
        "hour",
        "minute",
        "second",
        "fraction",
        "half",
        "zone",
    ]
    groups = cells.str.extract_groups(_DATE).struct.unnest()
    groups.columns = names
    return groups.with_columns(
        pl.exclude("fraction", "half", "zone").cast(pl.Int32),
        matched=pl.any_horizontal(pl.col("y1", "y2", "y3").is_not_null()),
    )


def instants_ns(series: pl.Series, rule: InstantRule) -> pl.Series:
    """The column in nanoseconds since the epoch, or in the clock's own time (relative rule)."""
    if series.dtype in (pl.Datetime, pl.Date):
        return series.cast(pl.Datetime("ns")).cast(pl.Int64)
    if rule.kind == "datetime":
        return _dates_ns(text(series), rule.day_first)
    scale = 86_400 * _UNIT_NS["s"] if rule.kind == "excel" else _UNIT_NS[rule.unit]
    if series.dtype.is_integer():
        return series.cast(pl.Int64, strict=False) * scale
    whole = text(series).cast(pl.Int64, strict=False) if series.dtype == pl.String else None
    value, _ = numbers(series)
    if rule.kind == "excel":
        value = value - _EXCEL_EPOCH_DAYS
    # Seconds and fraction apart: their product with 1e9 would not fit a double exactly.
    floor = value.floor()
    ns = floor.cast(pl.Int64, strict=False) * scale
    ns = ns + ((value - floor) * scale).round().cast(pl.Int64, strict=False)
    if whole is None or rule.kind == "excel":
        return ns
    return pl.select(pl.coalesce(whole * scale, ns)).to_series()


_ISO = r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(\.\d{1,9})?(Z|\+00:?00)?$"


def _dates_ns(cells: pl.Series, day_first: bool) -> pl.Series:
    """Dates in nanoseconds; ISO in UTC, the usual case, without taking the text apart."""
    if cells.str.contains(_ISO).fill_null(value=True).all():
        second = cells.str.slice(0, 19).str.replace("T", " ", literal=True)
        moment = second.str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False, time_unit="us")
        fraction = cells.str.extract(r"\.(\d+)", 1).str.pad_end(9, "0").cast(pl.Int64, strict=False)
        return moment.cast(pl.Int64) * 1000 + fraction.fill_null(0)
    return _odd_dates_ns(cells, day_first)


def _odd_dates_ns(cells: pl.Series, day_first: bool) -> pl.Series:
    month, day = ("b", "a") if day_first else ("a", "b")
    hour = pl.col("hour").fill_null(0)
    late = pl.col("half").str.to_lowercase().str.starts_with("p")
    hour = (
        pl.when(late & (hour < 12))
        .then(hour + 12)
        .when(~late & (hour == 12))
        .then(0)
        .otherwise(hour)
    )
    zone = pl.col("zone").str.replace(":", "", literal=True)
    sign = pl.when(zone.str.starts_with("-")).then(-1).otherwise(1)
    minutes = zone.str.slice(1, 2).cast(pl.Int64, strict=False) * 60 + zone.str.slice(3, 2).cast(
        pl.Int64, strict=False
    )
    parts = _date_parts(cells).with_columns(
        year=pl.coalesce("y1", "y2", "y3"),
        month=pl.coalesce("m1", month, "m3"),
        day=pl.coalesce("d1", day, "d3"),
        offset_ns=(sign * minutes).fill_null(0) * 60_000_000_000,
        fraction_ns=pl.col("fraction")
        .str.pad_end(9, "0")
        .cast(pl.Int64, strict=False)
        .fill_null(0),
        hour=hour,
    )
    valid = (
        pl.col("month").is_between(1, 12) & pl.col("day").is_between(1, 31) & (pl.col("hour") < 24)
    )
    date = pl.format(
        "{}-{}-{} {}:{}:{}",
        pl.col("year"),
        pl.col("month").cast(pl.String).str.zfill(2),
        pl.col("day").cast(pl.String).str.zfill(2),
        pl.col("hour").cast(pl.String).str.zfill(2),
        pl.col("minute").fill_null(0).cast(pl.String).str.zfill(2),
        pl.col("second").fill_null(0).cast(pl.String).str.zfill(2),
    )
    moment = (
        pl.when(valid).then(date).str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False, time_unit="us")
    )
    return parts.select(
        moment.cast(pl.Int64) * 1000 + pl.col("fraction_ns") - pl.col("offset_ns")
    ).to_series()
