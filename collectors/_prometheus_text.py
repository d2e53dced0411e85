"""Lines of the Prometheus text format as columns: name, labels, value, stamps."""

from __future__ import annotations

import polars as pl

from ._log_wrappers import rfc3339_ns

_VALUE = r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|[Ii]nf(?:inity)?|[Nn]a[Nn])"
SAMPLE = (
    r"^(?P<metric>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?"
    rf"[ \t]+(?P<value_text>{_VALUE})(?:[ \t]+(?P<stamp>-?\d+(?:\.\d+)?))?[ \t]*$"
)
# nearly all samples are of this form: five times as fast
_USUAL = (
    r"^(?P<metric>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?P<labels>[^}]*)\})?"
    r"[ \t]+(?P<value_text>[^ \t]+)(?:[ \t]+(?P<stamp>-?[0-9]+(?:\.[0-9]+)?))?$"
)
_EXEMPLAR = r" # \{.*$"
# what curl -v, curl -i and shells print around a scrape
_CHATTER = (
    r"^(?:[<>*{}] ?|HTTP/\d|[A-Za-z][A-Za-z-]*: |[=*-]{3,}|"
    r"\s*\d+\s+\d+\s+\d+\s|\s*% Total|\s*Dload)"
)

_EPOCH = r"^#?\W*(?:[A-Za-z_ ]*\W+)?(1\d{9}(?:\.\d+)?)\W*$"
_EPOCH_MS = r"^#?\W*(?:[A-Za-z_ ]*\W+)?(1\d{12})\W*$"
_ISO = r"(20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
_HTTP_DATE = r"^(?:< )?[Dd]ate: \w{3}, (\d\d \w{3} \d{4} \d\d:\d\d:\d\d) GMT"
_SHELL_DATE = r"^\W*\w{3} (\w{3}) +(\d{1,2}) (\d\d:\d\d:\d\d)(?: ([AP]M))? (?:UTC|GMT) (20\d\d)\W*$"
MARKER = rf"{_ISO}|{_EPOCH}|{_SHELL_DATE}"  # lines that say when a scrape was made
SECOND_NS = 1_000_000_000
_MOST_SECONDS = 9_200_000_000  # nanoseconds of more do not fit into 64 bits: such a stamp is none


def parse(lines: pl.DataFrame) -> pl.DataFrame:
    """The lines with metric, labels_text, value_text, own_ns; `odd`: neither sample nor comment."""
    text = lines["text"].str.strip_chars()
    exemplars = text.str.contains(" # {", literal=True)
    bare = pl.select(
        pl.when(exemplars).then(text.str.replace(_EXEMPLAR, "")).otherwise(text)
    ).to_series()
    frame = _samples(bare)
    # Prometheus stamps are milliseconds, OpenMetrics' are seconds
    millis = pl.col("stamp").cast(pl.Int64, strict=False)
    own = (
        pl.when(millis.abs() >= 100_000_000_000)
        .then(pl.when(millis.abs() < _MOST_SECONDS * 1000).then(millis * 1_000_000))
        .otherwise(_seconds_ns("stamp"))
    )
    is_comment = text.str.starts_with("#") | (text == "")
    unread = pl.select(pl.when(frame["value_text"].is_null() & ~is_comment).then(text)).to_series()
    marker = unread.str.contains(rf"{_CHATTER}|{MARKER}").fill_null(False)
    return frame.select(
        text.alias("text"),
        "metric",
        pl.col("labels").alias("labels_text"),
        "value_text",
        own.alias("own_ns"),
        (~is_comment & ~marker & pl.col("value_text").is_null()).alias("odd"),
        (marker | text.str.starts_with("#")).alias("comment"),
    )


def _samples(text: pl.Series) -> pl.DataFrame:
    """metric, labels, value_text and stamp of the lines that are samples."""
    frame = text.str.extract_groups(_USUAL).struct.unnest()
    good = frame["value_text"].str.contains(rf"^{_VALUE}$").fill_null(False)
    rest = ~good & ~text.str.starts_with("#") & (text != "")
    if not rest.any() and good.all():
        return frame
    unusual = (
        pl.select(pl.when(rest).then(text)).to_series().str.extract_groups(SAMPLE).struct.unnest()
    )
    return pl.DataFrame(
        [
            pl.select(pl.when(good).then(frame[c]).otherwise(unusual[c])).to_series().alias(c)
            for c in frame.columns
        ]
    )


def stamps(lines: pl.DataFrame, before: int | None) -> pl.DataFrame:
    """The lines with scrape_ns (the last stamp above them) and its resolution; `before` goes on."""
    candidates = pl.when("comment").then("text")
    is_meta = pl.col("text").str.contains(r"^# (?:HELP|TYPE|UNIT|EOF)\b")
    text = pl.when(~is_meta).then(candidates)
    found = lines.select(
        text.str.extract(_EPOCH).alias("epoch"),
        text.str.extract(_EPOCH_MS).cast(pl.Int64).alias("millis"),
        text.str.extract(_ISO).alias("iso"),
        text.str.extract(_HTTP_DATE)
        .str.to_datetime("%d %b %Y %H:%M:%S", strict=False)
        .dt.epoch("s")
        .alias("http"),
        text.str.extract_groups(_SHELL_DATE).alias("shell"),
    )
    parts = [pl.col("shell").struct.field(part) for part in ("5", "1", "2", "3", "4")]
    date = pl.concat_str(parts, separator=" ", ignore_nulls=True)
    shell = pl.coalesce(
        date.str.to_datetime("%Y %b %d %I:%M:%S %p", strict=False),
        date.str.to_datetime("%Y %b %d %H:%M:%S", strict=False),
    )
    at = pl.coalesce(
        _seconds_ns("epoch"),
        pl.col("millis") * 1_000_000,
        rfc3339_ns("iso"),
        pl.col("http") * SECOND_NS,
        shell.dt.epoch("s") * SECOND_NS,
    )
    fine = (
        pl.col("epoch").str.contains(".", literal=True)
        | pl.col("millis").is_not_null()
        | pl.col("iso").str.contains(".", literal=True)
    )
    stamped = found.select(
        at.alias("scrape_ns"),
        pl.when(fine.fill_null(False))
        .then(1_000_000)
        .otherwise(SECOND_NS)
        .alias("scrape_resolution_ns"),
    )
    resolution = pl.when(pl.col("scrape_ns").is_not_null()).then("scrape_resolution_ns")
    return pl.concat([lines, stamped], how="horizontal").with_columns(
        pl.col("scrape_ns").is_not_null().cum_sum().alias("block"),
        pl.col("scrape_ns").forward_fill().fill_null(pl.lit(before, dtype=pl.Int64)),
        resolution.forward_fill().fill_null(1_000_000).cast(pl.Int64).alias("scrape_resolution_ns"),
    )


def _seconds_ns(column: str) -> pl.Expr:
    """Decimal seconds as nanoseconds without going through a float."""
    whole = pl.col(column).str.extract(r"^(\d+)").cast(pl.Int64, strict=False)
    whole = pl.when(whole < _MOST_SECONDS).then(whole)
    fraction = (
        pl.col(column).str.extract(r"\.(\d{1,9})").str.pad_end(9, "0").cast(pl.Int64).fill_null(0)
    )
    return whole * SECOND_NS + fraction
