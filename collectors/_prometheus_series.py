"""What is carried from scrape to scrape of one dump: types, series of a scrape, last values."""

from __future__ import annotations

from dataclasses import field

import polars as pl

from pdtrace.records import dataclass

SAMPLE_COLUMNS = (
    "record",
    "worker",
    "time_ns",
    "metric",
    "labels",
    "value",
    "kind",
    "resolution_ns",
)
PROCESS_START = "process_start_time_seconds"
OWN_RESOLUTION_NS = 1_000_000
_TYPE = r"^# TYPE (?P<name>\S+) (?P<type>\w+)"
_PARTS = ("_bucket", "_sum", "_count", "_gsum", "_gcount")
_KINDS = {
    "counter": "counter",
    "gauge": "gauge",
    "histogram": "histogram",
    "gaugehistogram": "histogram",
    "info": "gauge",
    "stateset": "gauge",
}


@dataclass
class History:
    """The state of one file's scrapes."""

    scrape: int | None = None  # stamp of the scrape that is being read
    types: dict[str, str] = field(default_factory=dict)
    histograms: set[str] = field(default_factory=set)  # names that had a _bucket series
    seen: pl.DataFrame | None = None  # series of the stamped scrape that goes on in the next batch
    last: pl.DataFrame | None = None  # last value of every counter

    def timed(self, samples: pl.DataFrame) -> pl.DataFrame:
        """The samples with time_ns and resolution_ns.

        A series that comes again under one stamp belongs to a later scrape, whose time is not
        known.
        """
        keys = ["metric", "labels_text"]
        again = ~pl.struct("block", *keys).is_first_distinct()
        samples = samples.with_columns(again.alias("again"))
        first_block = samples["block"] == 0
        if self.seen is not None and first_block.any():
            carried = samples.join(
                self.seen.with_columns(pl.lit(True).alias("known")),
                on=keys,
                how="left",
                nulls_equal=True,
                maintain_order="left",
            )
            samples = samples.with_columns(
                (pl.col("again") | (first_block & carried["known"].fill_null(False))).alias("again")
            )
        # from the first repetition on, nothing under that stamp is of its scrape
        late = pl.col("again").cum_max().over("block")
        time_ns = pl.coalesce("own_ns", pl.when(~late).then("scrape_ns"))
        resolution = (
            pl.when(pl.col("own_ns").is_not_null())
            .then(OWN_RESOLUTION_NS)
            .otherwise("scrape_resolution_ns")
        )
        samples = samples.with_columns(
            time_ns.alias("time_ns"),
            pl.when(time_ns.is_not_null()).then(resolution).cast(pl.Int64).alias("resolution_ns"),
        )
        if samples.height:
            part = samples.filter(pl.col("block") == samples["block"][-1]).select(keys).unique()
            going_on = self.seen is not None and samples["block"][-1] == 0
            self.seen = (
                pl.concat([self.seen, part]).unique()
                if going_on and self.seen is not None
                else part
            )
            expired = samples.select(late.last().alias("late"))["late"][0]
            if expired and samples["scrape_ns"][-1] == self.scrape:
                self.scrape = None
        return samples

    def learn_types(self, lines: pl.DataFrame) -> None:
        """Take up TYPE comments and names with buckets."""
        typed = lines.filter(pl.col("text").str.starts_with("# TYPE ")).select("text").unique()
        for name, kind in typed["text"].str.extract_groups(_TYPE).struct.unnest().iter_rows():
            self.types[name] = kind
        names = lines["metric"].drop_nulls().unique()
        buckets = names.filter(names.str.ends_with("_bucket"))
        self.histograms.update(buckets.str.strip_suffix("_bucket").to_list())

    def kinds(self, metrics: pl.Series) -> pl.Series:
        """counter, gauge or histogram: by TYPE, else by the naming convention."""
        names = metrics.unique().to_list()
        kinds = {name: self._kind(name) for name in names}
        return metrics.replace_strict(kinds, return_dtype=pl.String).alias("kind")

    def _kind(self, name: str) -> str:
        base = next((name.removesuffix(part) for part in _PARTS if name.endswith(part)), "")
        if base and (
            self.types.get(base) in ("histogram", "gaugehistogram") or base in self.histograms
        ):
            return "histogram"
        if base and self.types.get(base) == "summary":
            return "counter"
        said = self.types.get(name) or self.types.get(name.removesuffix("_total"))
        if said in _KINDS:
            return _KINDS[said]
        return "counter" if name.endswith("_total") else "gauge"

    def restarts(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Events where a process start time moved on, or counters fell while it did not."""
        keys = ["worker", "metric", "labels"]
        rising = (pl.col("kind") == "counter") | (pl.col("metric") == PROCESS_START)
        values = rows.filter(rising & pl.col("value").is_not_null()).select(
            "record", *keys, "value", "time_ns", "resolution_ns", "kind"
        )
        if self.last is not None:
            values = pl.concat([self.last, values])
        ordered = values.sort("record").with_columns(
            pl.col("value").shift().over(keys).alias("before")
        )
        self.last = ordered.group_by(keys).last().select(values.columns)
        change = pl.col("value") - pl.col("before")
        moved = ordered.filter((pl.col("metric") == PROCESS_START) & (change > 1))
        fell = ordered.filter((pl.col("kind") == "counter") & (change < 0))
        return pl.concat(
            [
                _events(moved, "process start time moved on"),
                _events(
                    fell.join(
                        moved.select("worker", "time_ns").unique(),
                        on=["worker", "time_ns"],
                        how="anti",
                        nulls_equal=True,
                    ),
                    "counters fell",
                ),
            ]
        )


def _events(rows: pl.DataFrame, detail: str) -> pl.DataFrame:
    """One restart per worker and scrape."""
    return (
        rows.group_by("worker", "time_ns", "resolution_ns", maintain_order=True)
        .agg(pl.col("record").first(), pl.col("metric").first())
        .select(
            "record",
            "worker",
            "time_ns",
            "resolution_ns",
            pl.lit("restart").alias("kind"),
            pl.lit("warning").alias("severity"),
            pl.lit(1, dtype=pl.Int64).alias("count"),
            pl.format(detail + " ({})", "metric").alias("detail"),
        )
    )
