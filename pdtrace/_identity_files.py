"""Joins files of requests without instants on a shared clock: bench rows by index, tables by id."""

from __future__ import annotations

import polars as pl

from pdtrace._graph import Ints
from pdtrace._identity_edges import EDGE, no_edges
from pdtrace._identity_legs import CLIENT, weak

SLACK_NS = 120 * 10**9  # what a bench file's own date may be off
HOUR_NS = 3600 * 10**9
AGREE = 0.9  # share of rows whose lengths must agree
COVER = 0.8  # share of rows that must find a partner
STEADY_NS = 1_500_000_000  # log lines tell seconds: so far apart two offsets of one clock may be
STEADY_ROWS = (
    20  # rows, and times that long a run, whose arrivals can only be the same by being the same run
)
# A bench tool's id is prefix + row index; vLLM puts cmpl- before and -0 behind. Behind an id as it was sent,
# -0 may also be the first row's own: then both readings stand until the other rows tell.
_INDEXED = r"^(?:cmpl-|chatcmpl-)?(.*?)(\d{1,9})(?:-0)?$"
_AS_SENT = r"^(.*-)(0)$"
_WRAPPED = r"^(?:cmpl-|chatcmpl-)"


def server_side(legs: pl.DataFrame, label: Ints, community: Ints) -> pl.DataFrame:
    """Requests as the servers saw them, one row per (request, id): candidates for rows of files."""
    seen = legs.with_columns(pl.Series("label", label), pl.Series("community", community)).filter(
        (pl.col("label") >= 0)
        & ~pl.col("container")
        & pl.col("lo").is_not_null()
        & (pl.col("obs") > CLIENT)
    )
    if seen.height == 0:
        return seen
    lengths = seen.group_by("label").agg(
        pl.col("prompt_tokens").max(), pl.col("output_tokens").max(), pl.col("lo").min(),
        all_output=pl.col("output_tokens").sum(),  # of several streams a client counts all tokens
    )  # fmt: skip
    named = pl.concat(
        [
            seen.filter(pl.col(c).is_not_null()).select(
                "label", "community", "n", "obs", "leg", id=c
            )
            for c in ("external_id", "request_id")
        ]
    )
    outermost = named.sort("obs", "leg").unique(["label", "id"], keep="first", maintain_order=True)
    return outermost.join(lengths, on="label")


def bench_rows(legs: pl.DataFrame, servers: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    """prefix_index: rows of a bench file by their index under an id prefix found in the data.

    `windows` (worker, window_start_ns, window_end_ns) says when a file's run was. Lengths (arrivals, where
    a log tells no lengths) must agree and the window must fit: another run with the same seed and prefix
    has the same lengths.
    """
    rows = legs.filter(
        pl.col("row_index").is_not_null() & pl.col("lo").is_null() & (pl.col("obs") == CLIENT)
    )
    if rows.height == 0 or servers.height == 0:
        return no_edges()
    indexed = _indexed(servers)
    found = []
    for (source, worker), file in rows.group_by(["source", "worker"], maintain_order=True):
        mine = windows.filter(pl.col("worker") == worker)
        span = (
            mine.select("window_start_ns", "window_end_ns").row(0) if mine.height else (None, None)
        )
        found.append(_one_bench(file, indexed, span))
        del source
    return pl.concat(found) if found else no_edges()


def _indexed(servers: pl.DataFrame) -> pl.DataFrame:
    """Candidates with the prefix and row index that their ids may be made of; two rows where both readings may be."""
    sent = servers.filter(pl.col("id").str.contains(_WRAPPED).not_())
    readings = []
    for rows, pattern in ((servers, _INDEXED), (sent, _AS_SENT)):
        parts = pl.col("id").str.extract_groups(pattern).struct
        readings.append(
            rows.with_columns(
                parts.field("1").alias("prefix"), parts.field("2").cast(pl.Int64).alias("index")
            ).filter(pl.col("index").is_not_null())
        )
    return pl.concat(readings).unique(
        ["label", "prefix", "index"], keep="first", maintain_order=True
    )


def _one_bench(
    file: pl.DataFrame, indexed: pl.DataFrame, span: tuple[int | None, int | None]
) -> pl.DataFrame:
    prefix = file["id_prefix"].drop_nulls()
    able = indexed.filter(pl.col("prefix") == prefix[0]) if prefix.len() else indexed
    pairs = file.select(
        "row_index",
        "clock_start_ns",
        "leg",
        row="n",
        rows=pl.len(),
        p="prompt_tokens",
        o="output_tokens",
    ).join(able, left_on="row_index", right_on="index", suffix="_server")
    if pairs.height == 0:
        return no_edges()
    start, end = span
    if start is None or end is None:
        return _best(pairs)
    zones = [0, *(sign * hours for hours in range(1, 15) for sign in (1, -1))]
    for zone in zones:
        inside = pairs.filter(
            pl.col("lo").is_between(
                start + zone * HOUR_NS - SLACK_NS, end + zone * HOUR_NS + SLACK_NS
            )
        )
        match = _best(inside, zone) if inside.height else no_edges()
        if match.height:
            return match
    return no_edges()


def _best(pairs: pl.DataFrame, zone: int = 0) -> pl.DataFrame:
    """The pairs of the one (deployment, prefix) that fits, or of the one prefix whose rows servers share out; else none."""
    runs = _one_run(pairs, ["community", "prefix"]).with_columns(_agreement())
    fitting = _fitting(runs, ["community", "prefix"])
    if fitting.height == 0:
        runs = _one_server_a_row(runs)
        fitting = _fitting(runs, ["prefix"])
    if fitting.height != 1:
        return no_edges()
    note = f" (file's clock taken {zone:+d} h from UTC)" if zone else ""
    chosen = runs.join(fitting, on=fitting.columns).sort(
        "row", pl.col("known").not_(), "lo", nulls_last=True
    )
    # Further servers that saw the same row were attempts of it.
    first = pl.int_range(pl.len()).over("row") == 0
    return chosen.select(
        a=pl.when(first).then("row").otherwise("n"),
        b=pl.when(first).then("n").otherwise("row"),
        rule=pl.lit("prefix_index"),
        key=pl.col("id") + note,
    ).cast(pl.Schema(EDGE))


def _agreement() -> list[pl.Expr]:
    """Of each pair: whether lengths on both sides are known, whether they agree, how far the clocks are apart."""
    same = pl.lit(value=True)
    known = pl.lit(value=False)
    for mine, theirs, other in (
        ("p", "prompt_tokens", "prompt_tokens"), ("o", "output_tokens", "all_output"),
    ):  # fmt: skip
        near = pl.any_horizontal((pl.col(mine) - pl.col(c)).abs() <= 1 for c in (theirs, other))
        same = same & near.fill_null(value=True)
        known = known | (pl.col(mine).is_not_null() & pl.col(theirs).is_not_null())
    apart = pl.col("lo") - pl.col("clock_start_ns")
    return [known.alias("known"), (same & known).alias("agree"), apart.alias("apart")]


def _fitting(runs: pl.DataFrame, family: list[str]) -> pl.DataFrame:
    """Families that have most rows of the file, with equal lengths or, where no length is known, with equal arrivals."""
    off = (pl.col("apart") - pl.col("apart").median().over(family)).abs()
    steady = (off <= STEADY_NS).fill_null(value=False)
    judged = (
        runs.with_columns(steady.alias("steady"))
        .group_by(family)
        .agg(
            pl.col("agree", "known", "steady").sum(),
            pl.len().alias("pairs"),
            pl.col("row_index").n_unique().alias("found"),
            (pl.col("clock_start_ns").max() - pl.col("clock_start_ns").min()).alias("lasts"),
            pl.col("rows").first(),
        )
    )
    lengths = (pl.col("known") > 0) & (pl.col("agree") >= AGREE * pl.col("pairs"))
    arrivals = (
        (pl.col("known") == 0)
        & (pl.col("steady") >= AGREE * pl.col("pairs"))
        & (pl.col("pairs") >= STEADY_ROWS)
        & (pl.col("lasts") >= STEADY_ROWS * STEADY_NS)
    )
    enough = pl.col("found") >= COVER * pl.col("rows")
    fitting = judged.filter(enough & (lengths | arrivals)).select(family)
    # Two readings of the same ids (a file of one row) are one family.
    members = runs.join(fitting, on=family).sort("row", "label").group_by(family)
    return members.agg("row", "label").sort(family).unique(
        ["row", "label"], keep="first", maintain_order=True
    ).select(family)  # fmt: skip


def _one_server_a_row(runs: pl.DataFrame) -> pl.DataFrame:
    """Prefixes whose rows several deployments share out: hardly a row was seen by two of them.

    One run has one address; a balancer behind it that leaves no record of its own hands each request to one server.
    """
    shared = pl.col("community").n_unique().over("prefix", "row_index") > 1
    return runs.filter(shared.mean().over("prefix") <= 1 - AGREE)


def _one_run(pairs: pl.DataFrame, family: list[str]) -> pl.DataFrame:
    """Where ids repeat (a bench run twice), the run whose clock offset most rows agree on."""
    repeated = pl.len().over([*family, "row_index"]) > 1
    if not pairs.select(repeated.any()).item():
        return pairs
    offset = pairs.with_columns((pl.col("lo") - pl.col("clock_start_ns")).alias("offset"))
    step = (pl.col("offset") - pl.col("offset").shift().over(family) > 10**9).fill_null(value=False)
    runs = offset.sort(*family, "offset", "n").with_columns(
        step.cum_sum().over(family).alias("run")
    )
    size = pl.len().over([*family, "run"])
    largest = runs.filter(size == size.max().over(family))
    # Two runs of equal size cannot be told apart by their clock: nothing is joined then.
    alone = pl.col("run").n_unique().over(family) == 1
    return largest.filter(alone).unique(["row", *family], keep="first", maintain_order=True)


def sharing(legs: pl.DataFrame, found: pl.DataFrame) -> list[tuple[str, str]]:
    """Workers that share out the rows of one bench file: links between them."""
    rows = found.filter(pl.col("rule") == "prefix_index")
    place = legs.select("n", "source", "worker", weak().alias("weak"), "obs")
    seen = (
        rows.join(place.select(a="n", source="source"), on="a")
        .join(
            place.filter((pl.col("obs") > CLIENT) & ~pl.col("weak")).drop("source"),
            left_on="b",
            right_on="n",
        )
        .select("source", "worker")
        .unique()
        .sort("source", "worker")
        .with_columns(before=pl.col("worker").shift().over("source"))
        .drop_nulls()
    )
    return list(seen.select("before", "worker").iter_rows())


def rows_by_id(legs: pl.DataFrame, servers: pl.DataFrame) -> pl.DataFrame:
    """http_request_id: rows without instants whose id one deployment knows; else nothing."""
    rows = legs.filter(
        pl.col("lo").is_null() & pl.col("row_index").is_null() & ~pl.col("container")
    ).select(
        "source",
        row="n",
        id=pl.coalesce("external_id", "request_id"),
        p="prompt_tokens",
        o="output_tokens",
    )
    rows = rows.filter(pl.col("id").is_not_null())
    rows = rows.filter(pl.len().over("source", "id") == 1)
    if rows.height == 0 or servers.height == 0:
        return no_edges()
    known = servers.filter(pl.len().over("community", "id") == 1)
    pairs = rows.join(known, on="id")
    same = ((pl.col("p") - pl.col("prompt_tokens")).abs() <= 1).fill_null(value=True)
    counted = pairs.group_by("source", "community").agg(
        pl.len().alias("pairs"), same.mean().alias("agree")
    )
    rival = pl.col("pairs").sort(descending=True).slice(1).first().over("source").fill_null(0)
    best = counted.filter(
        (pl.col("pairs") == pl.col("pairs").max().over("source"))
        & (pl.col("pairs") > 2 * rival)
        & (pl.col("agree") >= AGREE)
    )
    return (
        pairs.join(best.select("source", "community"), on=["source", "community"])
        .select(a="row", b="n", rule=pl.lit("http_request_id"), key="id")
        .cast(pl.Schema(EDGE))
    )
